"""Inference is the same to the last bit whatever is computed beside it: in scoring, in prompts and in decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny_models import CONFIGS, ROTARY, VOCAB, Letters, prompts

from plaudit.batch import Batch
from plaudit.compute.fused import PLAIN, activate, swiglu
from plaudit.compute.invariant import filled, linear
from plaudit.compute.products import matrices_present
from plaudit.learn.scorer import Scorer
from plaudit.models.base import LanguageModel
from plaudit.models.load import fresh_model
from plaudit.rollout.native import NativeEngine
from plaudit.types import Completion, Role, Row, Sampling

pytestmark = pytest.mark.slow

WIDTHS = ((48, 96), (256, 1024), (1376, 512))
SEQUENCES = prompts(3, 17, 16, 40, 29, 61, 5, 33, 48, 2)


def model(kind: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    keys = CONFIGS[kind] if kind == "gpt2" else ROTARY | CONFIGS[kind]
    found = fresh_model({"model_type": kind, "vocab_size": VOCAB, "initializer_range": 0.2, **keys}, seed=1)
    return found.to(dtype)


def flat(sequences: list[list[int]]) -> torch.Tensor:
    return torch.tensor([token for sequence in sequences for token in sequence])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", WIDTHS)
def test_a_row_of_a_product_does_not_depend_on_the_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() and not matrices_present():
        pytest.skip("oneDNN orders additions by the number of rows here: install g++")
    width, out = shape
    x, weight, bias = (torch.randn(size, dtype=dtype) for size in ((300, width), (out, width), (out,)))
    with torch.no_grad():
        whole = linear(x, weight, bias)
        for count in (*range(1, 40), 64, 100, 257):
            assert torch.equal(linear(x[:count], weight, bias), whole[:count]), count
            assert torch.equal(linear(x[7 : 7 + count], weight, bias), whole[7 : 7 + count]), count


def test_nor_when_threads_share_them() -> None:
    width, out = 256, 1024
    x, weight, bias = (torch.randn(size) for size in ((300, width), (out, width), (out,)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            whole = linear(x, weight, bias)
            for count in (1, 2, 3, 5, 8, 9, 31, 257):
                assert torch.equal(linear(x[7 : 7 + count], weight, bias), whole[7 : 7 + count]), count
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_rows_are_filled_up_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """17 rows there; any other device stands for a GPU."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert filled(torch.zeros(17, 3)).shape == (24, 3)  # kernels of 4 rows, for each of 2 threads
    elsewhere = torch.zeros(17, 3, device="meta")
    assert filled(elsewhere) is elsewhere


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("function", [swiglu, *(partial(activate, name=name) for name in PLAIN)])
@pytest.mark.parametrize(("threads", "width"), [(1, 100), (2, 36), (2, 352), (3, 80), (3, 352), (4, 1024), (4, 3072)])
def test_nor_does_an_entry_of_an_activation(
    function: Callable[[torch.Tensor], torch.Tensor], threads: int, width: int
) -> None:
    """Widths and numbers of rows at which shares of threads, or blocks, end within a row or a register."""
    rows = min(3600, 1_500_000 // width)
    x, before = torch.randn(rows + 3, width), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            whole = function(x)
            for first, count in ((0, 1), (7, 333), (11, 93), (2, 368), (5, rows // 3), (1, rows - 100)):
                found = function(x[first : first + count])
                assert torch.equal(found, whole[first : first + count]), count
        assert torch.allclose(whole, function(x.clone().requires_grad_()), atol=1e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", CONFIGS)
def test_hidden_states_of_a_sequence_do_not_depend_on_the_others(kind: str) -> None:
    found = model(kind)
    with torch.no_grad():
        whole = found(flat(SEQUENCES), found.packed([len(s) for s in SEQUENCES]))
        parts = whole.split([len(s) for s in SEQUENCES])
        for chosen in ([0], [3], [9, 4], [1, 2, 7], [5, 0, 8, 6]):
            tokens = flat([SEQUENCES[i] for i in chosen])
            hidden = found(tokens, found.packed([len(SEQUENCES[i]) for i in chosen]))
            expected = torch.cat([parts[i] for i in chosen])
            assert torch.equal(hidden, expected), chosen


@pytest.mark.usefixtures("kernels")
def test_log_probs_and_scores_do_not_depend_on_the_others() -> None:
    rows = [Row(tokens=tuple(s), trainable=(False,) + (True,) * (len(s) - 1)) for s in SEQUENCES]
    policy, judge = (
        model("llama"),
        fresh_model({"model_type": "gpt2", **CONFIGS["gpt2"], "vocab_size": VOCAB}, head="scalar"),
    )
    whole = Scorer(policy, Role.REFERENCE).annotate(Batch.of(rows)).reference
    assert whole is not None
    for row, expected in zip(rows, whole.split([len(row.tokens) for row in rows]), strict=True):
        assert torch.equal(Scorer(policy, Role.REFERENCE).annotate(Batch.of([row])).reference, expected)  # type: ignore[arg-type]
    (together,) = Scorer(judge, Role.JUDGE).outputs(Batch.of(rows))
    alone = [Scorer(judge, Role.JUDGE).outputs(Batch.of([row]))[0].scores for row in rows]
    assert torch.equal(torch.cat(alone), together.scores)  # type: ignore[arg-type]


def answers(engine: NativeEngine, order: list[int]) -> dict[int, list[Completion]]:
    async def all_of_them() -> list[list[Completion]]:
        plans = {i: [Sampling(max_tokens=3 + 5 * (i % 4), seed=100 * i + k) for k in range(1 + i % 3)] for i in order}
        return await asyncio.gather(*(engine.generate(SEQUENCES[i], plans[i]) for i in order))

    return dict(zip(order, asyncio.run(all_of_them()), strict=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", CONFIGS)
def test_completions_do_not_depend_on_slots_order_or_company(kind: str) -> None:
    """Tokens and log-probs, bit for bit: one slot at a time, many, in another order, and spread over two engines."""
    found = model(kind)
    everything = list(range(len(SEQUENCES)))
    whole = answers(NativeEngine(found, Letters(), slots=64), everything)
    assert max(len(c.tokens) for group in whole.values() for c in group) > 16
    for slots, order in ((1, everything), (3, everything), (7, everything[::-1]), (64, everything[::2]), (64, [4])):
        some = answers(NativeEngine(found, Letters(), slots=slots), order)
        assert all(some[i] == whole[i] for i in order), (slots, order)
