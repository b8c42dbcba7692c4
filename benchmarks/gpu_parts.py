"""What `gpu.py` measures, part by part: the device's best, training, decoding, agreement of sampler and learner, GRPO.

    Extent (how large) -> part -> figures (plain values, a row of the table each)

Every part stands alone and gives its memory back. A GPU works behind the host's back, so clocks stop only once it is
done. Left out: several GPUs, Ray.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from floor import Decoding, Peak, Size, training_flops
from task import evenness, read_rows
from torch import Tensor

HERE = Path(__file__).resolve().parent
Figure = dict[str, Any]
"""what, value, unit; `share` of the best possible and `of` what, `mib` at most, `note`."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How large everything is."""

    device: str
    dtype: str
    config: dict[str, Any]
    products: tuple[int, ...]
    """Sides of square matrices."""
    mib: tuple[int, ...]
    """Memory that is read at once."""
    rows: int
    """Of a training step, `length` tokens each."""
    length: int
    micro: tuple[int, ...]
    """Tokens of a micro-batch, each tried."""
    steps: int
    slots: tuple[int, ...]
    """Sequences decoded side by side, each tried, in groups of `samples`."""
    samples: int
    prompt: int
    answer: int
    prompts: int
    """Of a GRPO step."""
    sampled: int
    """Tokens of its answers."""
    updates: int
    """GRPO steps that are measured."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def size(self) -> Size:
        return Size.of(self.config, self.config["vocab_size"])

    @property
    def precision(self) -> str:
        return "bf16" if self.dtype == "bfloat16" else "fp32"


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(act: Callable[[], object], device: str) -> float:
    """That it takes, its work on the device included."""
    wait(device)
    began = time.perf_counter()
    act()
    wait(device)
    return time.perf_counter() - began


def best_rate(work: float, act: Callable[[], object], device: str, *, tries: int = 5, repeats: int = 10) -> float:
    """Work a second at its best."""

    def often() -> None:
        for _ in range(repeats):
            act()

    often()
    return work * repeats / min(seconds(often, device) for _ in range(tries))


@contextmanager
def memory(device: str) -> Iterator[list[float]]:
    """Filled with the MiB that torch held at most within."""
    found: list[float] = []
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield found
    if device == "cuda":
        found.append(torch.cuda.max_memory_allocated() / 2**20)


@cache
def model_of(device: str, dtype: torch.dtype, **config: Any) -> Any:
    """Random weights, made once: drawn by the host, the same for every device."""
    from assent.models.load import fresh_model

    return fresh_model(config, seed=0, dtype=dtype, device=device)


def model(extent: Extent, dtype: torch.dtype | None = None) -> Any:
    return model_of(extent.device, dtype or extent.torch_dtype, **extent.config)


# The device


def peak(extent: Extent) -> Peak:
    """The best matrix product and the best pass over memory."""
    device, dtype, products, passes = extent.device, extent.torch_dtype, [0.0], [0.0]
    for side in extent.products:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        products.append(best_rate(2.0 * side**3, lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device))
        del a, b, out
    for mib in extent.mib:
        source = torch.zeros(mib << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = best_rate(2.0 * (mib << 20), lambda s=source, t=target: t.copy_(s), device)
        whole = source.view(torch.float32)
        read = best_rate(float(mib << 20), lambda w=whole: w.amax(), device)
        passes += [copy, read]
        del source, target, whole
    return Peak(max(products), max(passes))


def the_device(extent: Extent, best: Peak) -> list[Figure]:
    return [
        {"what": f"best matrix product, {extent.precision}", "value": best.flops / 1e12, "unit": "TFLOP/s"},
        {"what": "best pass over memory (a copy counts twice)", "value": best.bandwidth / 1e9, "unit": "GB/s"},
    ]


# Training


def training(extent: Extent, best: Peak) -> list[Figure]:
    """SFT steps of full rows by the learner, as a run makes them, with micro-batches of several sizes."""
    flops = training_flops(extent.size, "sft", attention_length=extent.length)
    figures = []
    for tokens in extent.micro:
        what = f"SFT, {extent.rows} rows of {extent.length} tokens, learn.micro_tokens={tokens}"
        try:
            with memory(extent.device) as held:
                taken, finite = training_step(extent, tokens)
        except torch.OutOfMemoryError:
            figures.append({"what": what, "note": "takes more memory than there is"})
            continue
        rate = extent.rows * extent.length / taken
        note = "" if finite else "a loss is not finite"
        figures.append(rated(what, rate, rate * flops / best.flops, "matrix peak", held) | {"note": note})
    return figures


def training_step(extent: Extent, micro_tokens: int) -> tuple[float, bool]:
    """Seconds of the fastest step, and whether all losses were finite."""
    from assent.algorithms import SFT
    from assent.batch import Batch
    from assent.learn.learner import Learner
    from assent.learn.settings import LearnSettings, OptimizerSettings
    from assent.types import Role, Row

    source = torch.Generator().manual_seed(0)
    table = torch.randint(extent.config["vocab_size"], (extent.rows, extent.length), generator=source).tolist()
    trained = (False, *(True,) * (extent.length - 1))
    batch = SFT().weigh(Batch.of([Row(tokens=tuple(row), trainable=trained) for row in table]))
    learner = Learner(
        model(extent),
        Role.POLICY,
        SFT().losses()[Role.POLICY],
        optimizer=OptimizerSettings(learning_rate=1e-6, schedule="constant"),
        settings=LearnSettings(precision=extent.dtype, micro_tokens=micro_tokens),
        total_steps=100,
    )
    losses = [learner.step(batch, step)["loss/policy"] for step in range(2)]

    def step() -> None:
        losses.append(learner.step(batch, len(losses))["loss/policy"])

    taken = min(seconds(step, extent.device) for _ in range(extent.steps))
    return taken, all(map(math.isfinite, losses))


def rated(what: str, rate: float, share: float, of: str, held: list[float]) -> Figure:
    return {"what": what, "value": rate, "unit": "tok/s", "share": share, "of": of, "mib": held[0] if held else None}


# Decoding


class Silent:
    """A tokenizer for engines whose texts nobody reads."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def asked(extent: Extent, sequences: int) -> tuple[list[list[int]], list[Any]]:
    """Prompts, and a plan of samples for each: so many sequences in all."""
    from assent.types import Sampling

    source = torch.Generator().manual_seed(1)
    shape = (sequences // extent.samples, extent.prompt)
    prompts = torch.randint(extent.config["vocab_size"], shape, generator=source).tolist()
    return prompts, [Sampling(max_tokens=extent.answer, seed=seed) for seed in range(extent.samples)]


def engine(extent: Extent, slots: int, *, graphs: bool, dtype: torch.dtype | None = None) -> Any:
    from assent.models.graphs import CudaGraphs
    from assent.rollout.native import NativeEngine

    recorder = CudaGraphs if graphs else None
    return NativeEngine(model(extent, dtype), Silent(), slots=slots, ends=(), recorder=recorder)


def decoding(extent: Extent, best: Peak) -> list[Figure]:
    """The native engine with and without CUDA graphs, then transformers, all with random answers of one length."""
    figures = []
    for slots in extent.slots:
        for graphs in (False, True) if extent.device == "cuda" else (False,):
            with memory(extent.device) as held:
                taken, note = natively(extent, slots, graphs=graphs)
            how = "native, CUDA graphs" if graphs else "native"
            figures.append(decoded(extent, best, slots, how, taken, held) | {"note": note})
        with memory(extent.device) as held:
            taken = by_transformers(extent, slots)
        figures.append(decoded(extent, best, slots, "transformers generate", taken, held))
    return figures


def natively(extent: Extent, slots: int, *, graphs: bool) -> tuple[float, str]:
    """Seconds of the faster of two calls, and what is to be said of the first."""
    from assent.rollout.engine import generate_all

    one, (prompts, plan) = engine(extent, slots, graphs=graphs), asked(extent, slots)

    def answer() -> None:
        generate_all(one, prompts, plan)

    first = seconds(answer, extent.device)
    taken = min(seconds(answer, extent.device) for _ in range(2))
    refused = graphs and one._recorder is None
    return taken, "no graph could be recorded: see the warning" if refused else f"the first call took {first:.1f} s"


def decoded(extent: Extent, best: Peak, slots: int, how: str, taken: float, held: list[float]) -> Figure:
    floor = Decoding(extent.prompt / extent.samples / extent.answer, extent.prompt + extent.answer / 2, slots)
    least = best.seconds(floor.flops(extent.size), floor.bytes(extent.size, extent.precision))
    rate = slots * extent.answer / taken
    what = f"{slots} sequences, {extent.prompt} + {extent.answer} tokens, {how}"
    return rated(what, rate, rate * least, "bandwidth floor", held)


@torch.inference_mode()
def by_transformers(extent: Extent, slots: int) -> float:
    """Seconds of `generate` with its usual cache; a group's prompt is computed for each of its answers."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**extent.config, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    prompts, plan = asked(extent, slots)
    with torch.device(extent.device):
        theirs = AutoModelForCausalLM.from_config(config, dtype=extent.torch_dtype).eval()
    theirs.generation_config = GenerationConfig(
        max_new_tokens=extent.answer, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0
    )
    tokens = torch.tensor([prompt for prompt in prompts for _ in plan], device=extent.device)
    mask = torch.ones_like(tokens)

    def answer() -> None:
        found = theirs.generate(tokens, attention_mask=mask)
        assert found.shape == (slots, extent.prompt + extent.answer), found.shape

    return min(seconds(answer, extent.device) for _ in range(2))


# Agreement


def agreement(extent: Extent, best: Peak) -> list[Figure]:
    """How far the learner's log-probs are from those of the engine that drew the tokens, before any step."""
    figures = []
    for dtype in dict.fromkeys((extent.torch_dtype, torch.float32)):
        for graphs in (False, True) if extent.device == "cuda" else (False,):
            gap = disagreement(extent, dtype, graphs=graphs)
            what = f"first-step KL(sampler, learner), {str(dtype).removeprefix('torch.')}"
            figures.append(
                {
                    "what": f"{what}, CUDA graphs" if graphs else what,
                    "value": float((gap.exp() - 1 - gap).mean()),
                    "unit": "nats",
                    "note": f"largest difference of a log-prob {float(gap.abs().max()):.2g}",
                }
            )
    return figures


def disagreement(extent: Extent, dtype: torch.dtype, *, graphs: bool) -> Tensor:
    """Learner minus sampler, one number a sampled token."""
    from assent.batch import Batch
    from assent.learn.scorer import Scorer
    from assent.rollout.engine import generate_all
    from assent.types import Role, Row

    slots = min(extent.slots)
    prompts, plan = asked(extent, slots)
    answers = generate_all(engine(extent, slots, graphs=graphs, dtype=dtype), prompts, plan)
    rows = [
        Row(
            tokens=(*prompt, *answer.tokens),
            trainable=(False,) * len(prompt) + (True,) * len(answer.tokens),
            logprobs=(0.0,) * len(prompt) + answer.logprobs,
        )
        for prompt, group in zip(prompts, answers, strict=True)
        for answer in group
    ]
    batch = Scorer(model(extent, dtype), Role.POLICY).annotate(Batch.of(rows))
    assert batch.proximal is not None
    assert batch.behaviour is not None
    return (batch.proximal - batch.behaviour)[batch.trainable].double()


# A model that waits


def offload(extent: Extent, best: Peak) -> list[Figure]:
    """What reference.offload costs each time that the reference is asked: its way to the device."""
    from assent.learn.sharding import Waiting

    one = copy.deepcopy(model(extent))
    size = sum(parameter.numel() * parameter.element_size() for parameter in one.parameters())
    place = Waiting(one, device=torch.device(extent.device))

    def come() -> None:
        with place.present():
            pass

    come()
    taken = min(seconds(come, extent.device) for _ in range(3))
    what = f"a waiting model of {size / 1e9:.2f} GB comes to the device"
    return [{"what": what, "value": taken, "unit": "s", "note": f"{size / taken / 1e9:.1f} GB/s"}]


# GRPO


class Enough(Exception):
    """The run has made the steps that were wanted; its checkpoint is not."""


def grpo(extent: Extent, best: Peak) -> list[Figure]:
    """Steps of a whole run: the demo's prompts, random weights, a reward that tokens decide; a reference in host
    memory."""
    from assent import load_settings, run
    from assent.loop.progress import Moment
    from assent.types import Stats

    history: list[dict[str, float]] = []

    async def count(moment: Moment) -> Stats:
        assert moment.batch is not None
        tokens, answers = int(moment.batch.lengths.sum()), int(moment.batch.trainable.sum())
        history.append(dict(moment.stats) | {"tokens": tokens, "answers": answers})
        if len(history) == extent.updates + 1:
            raise Enough
        return {}

    with tempfile.TemporaryDirectory() as folder, memory(extent.device) as held:
        settings = load_settings(recipe(extent, Path(folder)), method="grpo")
        with suppress(Enough):
            run(settings, hooks=[count])
    return told(extent, history, held)


def recipe(extent: Extent, folder: Path) -> dict[str, Any]:
    """A run's settings, and the data that they name."""
    from assent.data.demo import DemoSize, make_demo

    size = {"sft": 200, "sft_validation": 1, "pairs": 4, "pairs_validation": 1, "prompts_test": 1, "vocabulary": 400}
    files = make_demo(folder / "data", size=DemoSize(**size, prompts=extent.prompts * (extent.updates + 1)))
    return {
        "name": "grpo",
        "output": str(folder),
        "device": extent.device,
        "model": {"config": extent.config, "tokenizer": str(files.tokenizer)},
        "data": {"train": str(files.prompts)},
        "algorithm": {"samples": extent.samples, "kl_in_loss": 0.01},
        "reference": {"offload": True},
        "optimizer": {"learning_rate": 1e-5, "schedule": "constant"},
        "learn": {"precision": extent.dtype, "micro_tokens": max(extent.micro), "score_tokens": max(extent.micro)},
        "rollout": {
            "prompts_per_step": extent.prompts,
            "max_tokens": extent.sampled,
            "slots": extent.prompts * extent.samples,
        },
        "rewards": [{"kind": "function", "function": f"{HERE / 'task.py'}:evenness"}],
        "train": {"steps": extent.updates + 9},
        "log": {"quiet": True},
    }


def told(extent: Extent, history: list[dict[str, float]], held: list[float]) -> list[Figure]:
    """The first step, which sets everything up, counts for the figures of learning alone."""
    steady = history[1:]
    keys = ("loss/policy", "reward/mean", "gradient_norm/policy")
    finite = all(math.isfinite(stats[key]) for stats in history for key in keys)
    total = {
        key: sum(stats[key] for stats in steady)
        for key in ("tokens", "answers", "time/batch", "time/learn", "time/step")
    }
    what = f"GRPO, {extent.prompts} prompts x {extent.samples} answers of up to {extent.sampled} tokens"
    rewards = f"reward {history[0]['reward/mean']:.3f} to {history[-1]['reward/mean']:.3f}"
    note = f"{len(history)} steps, {'losses, rewards and gradients finite' if finite else 'NOT finite'}; {rewards}"
    mib = held[0] if held else None
    return [
        {"what": what, "value": total["time/step"] / len(steady), "unit": "s/step", "mib": mib, "note": note},
        {"what": "its generation", "value": total["answers"] / total["time/batch"], "unit": "tok/s"},
        {"what": "its learning, reference included", "value": total["tokens"] / total["time/learn"], "unit": "tok/s"},
        {"what": "its KL between sampler and learner, first step", "value": history[0]["kl/sampler"], "unit": "nats"},
    ]


def trl_grpo(extent: Extent, best: Peak) -> list[Figure]:
    """The same by TRL's GRPOTrainer, sampling with transformers' `generate`; its bf16 is autocast over float32."""
    if importlib.util.find_spec("trl") is None:
        return [{"what": "GRPO by TRL", "note": "trl is not installed"}]
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wait(extent.device)
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder, memory(extent.device) as held:
        data = Path(recipe(extent, Path(folder))["data"]["train"])
        tokenizer = AutoTokenizer.from_pretrained(data.parent / "tokenizer")
        special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config, start = AutoConfig.for_model(**extent.config, **special), Path(folder) / "start"
        AutoModelForCausalLM.from_config(config, dtype=extent.torch_dtype).save_pretrained(
            start
        )  # its reference is read
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
            reward_funcs=lambda completion_ids, **columns: [evenness(tokens) for tokens in completion_ids],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=extent.updates + 1,
                per_device_train_batch_size=extent.prompts * extent.samples,
                learning_rate=1e-5,
                optim="adamw_torch_fused",
                use_cpu=extent.device == "cpu",
                bf16=extent.dtype == "bfloat16",
                gradient_checkpointing=False,
                num_generations=extent.samples,
                max_completion_length=extent.sampled,
                steps_per_generation=1,
                beta=0.01,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(read_rows(data)),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
        del trainer
    taken = (ends[-1] - ends[0]) / (len(ends) - 1)
    return [{"what": "GRPO by TRL, the same", "value": taken, "unit": "s/step", "mib": held[0] if held else None}]
