"""Import vLLM, start its engine on a model's folder, and make its requests. No other file imports vLLM.

This file knows neither the learner nor waiting callers; `vllm.py` does, and drives the engine that is started here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from plaudit.rollout.decode.graphs import graphs_wanted
from plaudit.rollout.settings import VllmStart
from plaudit.rollout.undisturbed import undisturbed
from plaudit.types import Sampling

SERIES = "0.32"
"""The only supported minor version: others differ in how weights reach a running engine."""
CPU_BLOCK = 32
"""Tokens of a cache block on a CPU, where its kernels take multiples of this; on a GPU vLLM chooses."""
CPU_CACHE, CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE", 0.25
"""vLLM's variable for the size of the KV cache on a CPU, and its value (GiB) if the user sets none: models on a CPU are
small, and the native engine is faster there."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # tensors reach an engine in this process only
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # at every update it warns of layers without weights
}
SPAWN = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable for how it starts processes: forked ones would share this process's locks and connections."""
ENVIRONMENT_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores belong to the learner too
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than small models take to answer
}


def start(
    folder: Path, settings: VllmStart, *, slots: int, dummy: bool, say: Callable[[str], None] = lambda text: None
) -> Any:
    """Start vLLM's engine on the model in a folder, and return it. `dummy`: with random weights."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            "vLLM makes its own process group and would end the present one when it closes: give it its own process"
        )
    say("imports vLLM")
    prepare()
    import vllm
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    cpu = on_cpu()
    check_sleep(settings)
    place = _place(settings, cpu=cpu)
    say(f"starts vLLM {vllm.__version__}")
    # It seeds every generator, replaces torch.set_num_threads and rewrites transformers' classes.
    with undisturbed(), _classes_left_alone():
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy" if dummy else "auto",
            dtype=_dtype(folder) if settings.dtype == "auto" else settings.dtype,
            enforce_eager=cpu or not graphs_wanted(),
            max_model_len=settings.max_length,
            max_num_seqs=slots,
            logprobs_mode="processed_logprobs",  # of what is drawn from; the default ignores temperature
            enable_prefix_caching=True,  # answers to one prompt share its full KV blocks
            enable_sleep_mode=settings.sleeps and not cpu,
            async_scheduling=False,  # a token's version is exact if no step is under way when weights change
            disable_log_stats=True,
            seed=0,
            **place,
        )
        with _refusals(cpu):
            config = arguments.create_engine_config()
        if cpu:
            _check_head_size(config.model_config.get_head_size())
            _check_experts(config.model_config.get_num_experts())
        with _refusals(cpu):
            engine = LLMEngine.from_vllm_config(config)
    engine.input_processor.generation_config_fields = {}  # it would ban the folder's end tokens before min_tokens too
    cache = engine.vllm_config.cache_config
    say(f"has started vLLM, whose cache holds {cache.num_gpu_blocks * cache.block_size:,} tokens")
    return engine


def _place(settings: VllmStart, *, cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments about memory and devices. For several devices, also set how vLLM starts processes."""
    place: dict[str, Any] = {"gpu_memory_utilization": settings.memory}
    if cpu:
        gib = float(os.environ.get(CPU_CACHE, CPU_CACHE_GIB))
        place = {"kv_cache_memory_bytes": int(gib * 2**30), "block_size": CPU_BLOCK}
    if settings.devices > 1:
        os.environ[SPAWN] = "spawn"
        place |= {"tensor_parallel_size": settings.devices, "distributed_executor_backend": "mp"}
    return place


def request(tokens: int, sampling: Sampling, ends: Collection[int], *, max_length: int) -> Any:
    """Return a Sampling as vLLM's SamplingParams, for a prompt of `tokens` tokens."""
    from vllm.sampling_params import RequestOutputKind as Kind
    from vllm.sampling_params import SamplingParams

    limit = min(sampling.max_tokens, max_length - tokens)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=limit,
        min_tokens=min(sampling.min_tokens, limit),
        stop_token_ids=sorted(ends),
        ignore_eos=True,  # config.json's EOS: only `ends` end an answer
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=False,
        output_kind=Kind.DELTA if sampling.stop else Kind.FINAL_ONLY,
    )


def on_cpu() -> bool:
    """True if vLLM computes on a CPU; call `prepare` before."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_sleep(settings: VllmStart) -> None:
    """Raise ValueError if `settings.sleeps` is set and neither vLLM nor `vllm_worker.py` can free memory here."""
    from vllm.platforms import current_platform

    if settings.sleeps and not on_cpu() and not current_platform.is_sleep_mode_available():
        raise ValueError(
            f"runtime.placement={{generate: {{shares: train}}}}: vLLM cannot free memory of "
            f"{type(current_platform).__name__}. Leave it out."
        )


def _dtype(folder: Path) -> str:
    """Return the dtype of config.json: vLLM's own "auto" would reduce float32."""
    config = json.loads((folder / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _check_head_size(size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if size not in allowed:
        raise ValueError(
            f"The model's attention heads have {size} numbers; vLLM's attention on a CPU takes {allowed}. "
            "Change the model's width or number of heads, or set rollout.engine=native."
        )


def _check_experts(count: int) -> None:
    """Raise ValueError for a model with experts: vLLM's CPU kernel keeps the weights that it started with."""
    if count:
        raise ValueError(
            f"The model has {count} experts a layer, which vLLM computes on a CPU with the weights that it started "
            "with: no update would reach them. Set rollout.engine=native."
        )


@contextmanager
def _refusals(cpu: bool) -> Iterator[None]:
    """Raise vLLM's errors about the model or its arguments as a ValueError that names Plaudit's settings."""
    from pydantic import ValidationError

    try:
        yield
    except (ValueError, AssertionError, NotImplementedError) as error:
        reason = "; ".join(one["msg"] for one in error.errors()) if isinstance(error, ValidationError) else str(error)
        cache = ("kv_cache_memory_bytes", CPU_CACHE) if cpu else ("gpu_memory_utilization", "rollout.vllm.memory")
        if "memory" in reason.lower():
            reason += f" Its {cache[0]} is {cache[1]}, its max_model_len data.max_prompt_tokens + rollout.max_tokens."
        raise ValueError(
            f"vLLM does not take this model or its settings: {reason} Or set rollout.engine=native."
        ) from error


@contextmanager
def _classes_left_alone() -> Iterator[None]:
    """While active, keep vLLM from decorating transformers' classes, which would then take only vLLM's calls: learner,
    judge or reference may use them too. Models that vLLM runs through transformers are then not compiled."""
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile
    Base._decorate_cls_for_torch_compile = lambda *arguments, **named: None
    try:
        yield
    finally:
        Base._decorate_cls_for_torch_compile = decorate


def prepare() -> None:
    """Set vLLM's environment variables (the user's stay) and import it. Raises ImportError if missing or unsuitable."""
    for key, value in (ENVIRONMENT if torch.cuda.is_available() else ENVIRONMENT | ENVIRONMENT_CPU).items():
        os.environ.setdefault(key, value)
    _check_transformers()
    try:
        import torch._dynamo.config as compiler
        import vllm
    except ImportError as error:
        raise ImportError(_missing(f"which does not import on {socket.gethostname()} ({error})")) from error
    if not vllm.__version__.startswith(f"{SERIES}."):
        raise ImportError(_missing(f"{socket.gethostname()} has {vllm.__version__}"))
    compiler.disable |= os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # torch has read it at import


def _check_transformers() -> None:
    """Raise ImportError if the installed vLLM does not take the installed transformers."""
    own = version("transformers")
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            for needed in map(Requirement, requires(name) or ()):
                if needed.name == "transformers" and not needed.specifier.contains(own, prereleases=True):
                    raise ImportError(
                        f"vLLM {version(name)} takes transformers{needed.specifier}, and {socket.gethostname()} has "
                        f"{own}. One that fits comes with `make vllm` (a CPU) or pip install -e '.[vllm]' (GPUs) "
                        "in Plaudit's folder. Or set rollout.engine=native."
                    )


def _missing(found: str) -> str:
    return (
        f"rollout.engine=vllm needs vLLM {SERIES}, {found}. For NVIDIA GPUs: pip install -e '.[vllm]' in Plaudit's "
        "folder. For a CPU: `make vllm`, or the commands in docs/vllm.md. Every node that samples needs it. Or set "
        "rollout.engine=native."
    )
