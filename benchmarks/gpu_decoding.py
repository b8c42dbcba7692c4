"""Parts of `gpu.py`: decoding by the native engine and by transformers, and agreement of sampler and learner."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from floor import Decoding, Peak
from gpu_extent import Extent, Figure, memory, model, rated, seconds
from torch import Tensor


class Silent:
    """A tokenizer for engines whose texts nobody reads."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def asked(extent: Extent, sequences: int) -> tuple[list[list[int]], list[Any]]:
    """Prompts, and a plan of samples for each: so many sequences in all."""
    from plaudit.types import Sampling

    source = torch.Generator().manual_seed(1)
    shape = (sequences // extent.samples, extent.prompt)
    prompts = torch.randint(extent.config["vocab_size"], shape, generator=source).tolist()
    return prompts, [Sampling(max_tokens=extent.answer, seed=seed) for seed in range(extent.samples)]


def engine(extent: Extent, slots: int, *, graphs: bool, one: Any = None) -> Any:
    from plaudit.rollout.decode.graphs import CudaGraphs
    from plaudit.rollout.native import NativeEngine

    recorder = CudaGraphs if graphs else None
    return NativeEngine(one or model(extent), Silent(), slots=slots, ends=(), recorder=recorder)


def decoding(extent: Extent, best: Peak) -> Iterator[Figure]:
    """The native engine with and without CUDA graphs, then transformers, all with random answers of one length."""
    for slots in extent.slots:
        for graphs in (False, True) if extent.device == "cuda" else (False,):
            with memory(extent.device, model(extent)) as held:
                taken, note = natively(extent, slots, graphs=graphs)
            how = "native, CUDA graphs" if graphs else "native"
            yield decoded(extent, best, slots, how, taken, held) | {"note": note}
        with memory(extent.device) as held:
            taken = by_transformers(extent, slots)
        yield decoded(extent, best, slots, "transformers generate", taken, held)


def natively(extent: Extent, slots: int, *, graphs: bool) -> tuple[float, str]:
    """Seconds of the faster of two calls, and what is to be said of the first."""
    from plaudit.rollout.engine import generate_all

    one, (prompts, plan) = engine(extent, slots, graphs=graphs), asked(extent, slots)

    def answer() -> None:
        generate_all(one, prompts, plan)

    first = seconds(answer, extent.device)
    taken = min(seconds(answer, extent.device) for _ in range(2))
    refused = graphs and one.forward.recorder is None
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


def agreement(extent: Extent, best: Peak) -> Iterator[Figure]:
    """How far the learner's log-probs are from those of the engine that drew the tokens, before any step."""
    for dtype in dict.fromkeys((extent.torch_dtype, torch.float32)):
        one = copy.deepcopy(model(extent)).to(dtype)
        for graphs in (False, True) if extent.device == "cuda" else (False,):
            gap = disagreement(extent, one, graphs=graphs)
            what = f"first-step KL(sampler, learner), {str(dtype).removeprefix('torch.')}"
            yield {
                "what": f"{what}, CUDA graphs" if graphs else what,
                "value": float((gap.exp() - 1 - gap).mean()),
                "unit": "nats",
                "note": f"largest difference of a log-prob {float(gap.abs().max()):.2g}",
            }


def disagreement(extent: Extent, one: Any, *, graphs: bool) -> Tensor:
    """Learner minus sampler, one number a sampled token."""
    from plaudit.batch import Batch
    from plaudit.learn.scorer import Scorer
    from plaudit.rollout.engine import generate_all
    from plaudit.types import Role, Row

    slots = min(extent.slots)
    prompts, plan = asked(extent, slots)
    answers = generate_all(engine(extent, slots, graphs=graphs, one=one), prompts, plan)
    rows = [
        Row(
            tokens=(*prompt, *answer.tokens),
            trainable=(False,) * len(prompt) + (True,) * len(answer.tokens),
            logprobs=(0.0,) * len(prompt) + answer.logprobs,
        )
        for prompt, group in zip(prompts, answers, strict=True)
        for answer in group
    ]
    batch = Scorer(one, Role.POLICY).annotate(Batch.of(rows))
    assert batch.proximal is not None
    assert batch.behaviour is not None
    return (batch.proximal - batch.behaviour)[batch.trainable].double()
