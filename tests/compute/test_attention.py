"""Attention by kernels: torch's numbers in float64, and bits that depend on the keys before a query alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plaudit.compute.attention import Sequences, attention
from plaudit.models.config import DecoderConfig
from plaudit.models.load import fresh_model
from plaudit.rollout.decode.pages import PageCache

pytestmark = pytest.mark.usefixtures("kernels")

LENGTHS = (5, 70, 1, 24, 33)
SHAPES = {"plain": (3, 3, 32), "grouped": (6, 2, 16), "one key head": (4, 1, 64), "odd": (2, 2, 20), "1": (1, 1, 1)}


def states(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value side by side in one tensor, as a projection leaves them."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    parts = whole.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return [part.view(tokens, -1, dim).detach().requires_grad_() for part in parts]


def expected(parts: Sequence[Tensor], lengths: Sequence[int], window: int | None, index: list[int] | None) -> Tensor:
    """Softmax attention of each sequence by itself in float64, written out, for the first reader of each token."""
    places = list(range(sum(lengths))) if index is None else index
    outs: dict[int, Tensor] = {}
    start = 0
    for n in lengths:
        here = places[start : start + n]
        start += n
        q, k, v = (x[here].double() for x in parts)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        age = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (age < 0) | (age >= (window or n))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)
        for place, row in zip(here, out, strict=True):
            outs.setdefault(place, row)
    return torch.stack([outs[place] for place in sorted(outs)])


def test_two_tokens_by_hand() -> None:
    # Scores 2 and 4 over sqrt(2): the second token gets the values' mean by e^s
    query, key = torch.tensor([[[7.0, 7.0]], [[2.0, 5.0]]]), torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]]])
    value = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    first = 1 / (1 + math.exp(2 / math.sqrt(2)))
    out = attention(query, key, value, Sequences([2], None), None)
    torch.testing.assert_close(out, torch.tensor([[1.0, 0.0], [first, 10 * (1 - first)]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: str, window: int | None, dtype: torch.dtype) -> None:
    parts = states(sum(LENGTHS), *SHAPES[shape], dtype)
    out, truth = attention(*parts, Sequences(LENGTHS, None), window), expected(parts, LENGTHS, window, None)
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = torch.autograd.grad(out, parts, above)
    others = torch.autograd.grad(truth, parts, above.double())
    close = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-5}
    torch.testing.assert_close(out.double(), truth, **close)
    for mine, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), **close)


@pytest.mark.parametrize("window", [None, 3])
def test_prefixes_that_are_computed_once(window: int | None) -> None:
    """A tree of them, in another order than the tokens', and a sequence that shares nothing."""
    lengths, index = (3, 5, 4, 3, 3), [8, 9, 10, 0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 7, 0, 1, 5]
    parts = states(11, 4, 2, 8)
    out = attention(*parts, Sequences(lengths, torch.tensor(index)), window)
    truth = expected(parts, lengths, window, index)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    above = torch.randn(out.shape)
    for mine, other in zip(
        torch.autograd.grad(out, parts, above), torch.autograd.grad(truth, parts, above.double()), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_rows_that_share_their_first_token_alone_gradients_in_bfloat16() -> None:
    """What many rows send to a token is added up in float32: 600 ones stay 600."""
    rows = 600
    value = torch.zeros(rows + 1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    query = torch.zeros_like(value)
    index = torch.tensor([place for row in range(rows) for place in (0, row + 1)])
    out = attention(query, query, value, Sequences([2] * rows, index), None)
    out.sum().backward()
    assert value.grad is not None
    # The first token: its own 1, and half of each row's second one.
    assert value.grad[0, 0].tolist() == [300.0] * 8  # 301, rounded to bfloat16; added up in it, 256 at most
    assert value.grad[1:, 0].unique().tolist() == [0.5]


def test_large_scores_do_not_overflow() -> None:
    query, key = torch.full((2, 1, 8), 1e4), torch.tensor([-1e4, 1e4])[:, None, None].expand(2, 1, 8).contiguous()
    value = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 1, 8).contiguous()
    assert attention(query, key, value, Sequences([2], None), None).tolist() == [[1.0] * 8, [2.0] * 8]


def test_a_window_wider_than_any_sequence() -> None:
    parts, sequences = states(40, 2, 2, 8), Sequences([40], None)
    assert torch.equal(attention(*parts, sequences, 1 << 31), attention(*parts, sequences, None))


def test_heads_that_lie_apart() -> None:
    parts = states(12, 2, 2, 8)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in parts]
    sequences = Sequences([12], None)
    assert torch.equal(attention(*apart, sequences, None), attention(*parts, sequences, None))


def test_what_is_not_a_number_stays_so_and_stays_in_its_row() -> None:
    parts = [x.detach().clone() for x in states(6, 1, 1, 8)]
    parts[1][1] = float("nan")
    out = attention(*parts, Sequences([3, 3], None), None)
    assert out.isnan().any(dim=1).tolist() == [False, True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_a_querys_bits_depend_on_the_keys_before_it_alone(window: int | None, dtype: torch.dtype) -> None:
    """Not on the tokens behind it, the other sequences, the number of threads, or the sharing of a prefix."""
    parts = [x.detach() for x in states(70, 4, 2, 16, dtype)]
    whole = attention(*parts, Sequences([70], None), window)
    for length in (1, 7, 23, 24, 25, 48, 69):
        assert torch.equal(attention(*(x[:length] for x in parts), Sequences([length], None), window), whole[:length])
    tail = [torch.cat((x, x[:30])) for x in parts]
    assert torch.equal(attention(*tail, Sequences([70, 30], None), window)[:70], whole)
    shared = Sequences([41, 70], torch.tensor([*range(41), *range(70)]))
    assert torch.equal(attention(*parts, shared, window), whole)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(attention(*tail, Sequences([70, 30], None), window)[:70], whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", ["one key head", "grouped", "1"])
@pytest.mark.parametrize("window", [None, 150])
def test_one_long_sequence_has_the_same_bits_by_one_thread_and_by_all(shape: str, window: int | None) -> None:
    """All threads share it, where one would have a whole key head of it."""
    lengths, before = (7, 500, 3), torch.get_num_threads()
    parts, results = states(sum(lengths), *SHAPES[shape]), []
    above = torch.randn(sum(lengths), SHAPES[shape][0] * SHAPES[shape][2])
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            out = attention(*parts, Sequences(lengths, None), window)
            results.append((out, *torch.autograd.grad(out, parts, above)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for more in results[1:] for one, other in zip(results[0], more, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_are_the_same_with_any_threads(threads: int) -> None:
    parts, before = states(sum(LENGTHS), 4, 2, 16), torch.get_num_threads()
    index = torch.tensor([*range(9), *range(7), 9, 10, *range(11, 31)])
    results = []
    try:
        for count in (2, threads):
            torch.set_num_threads(count)
            out = attention(*(x[:31] for x in parts), Sequences([9, 9, 20], index), None)
            results.append(torch.autograd.grad(out, parts, torch.ones_like(out)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("shape", ["plain", "grouped", "odd"])
def test_decoding_gives_the_bits_of_a_whole_sequence(shape: str, window: int | None) -> None:
    heads, kv_heads, dim = SHAPES[shape]
    keys = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config: DecoderConfig = fresh_model({**keys, "num_attention_heads": 1}).config  # type: ignore[assignment]
    config = replace(config, heads=heads, kv_heads=kv_heads, head_dim=dim, window=window)
    parts = [x.detach() for x in states(70, heads, kv_heads, dim)]
    whole = attention(*parts, Sequences([70], None), window)
    cache = PageCache(config, 3, 70, dtype=torch.float32)
    cache.write(0, cache.places(torch.full((20,), 1), torch.arange(20)), parts[1][:20], parts[2][:20])
    cache.move([1], [0], 20)
    for position in range(20, 70):
        new = [x[position : position + 1] for x in parts]
        assert torch.equal(cache.past(torch.tensor([position]), 70).attend(0, *new), whole[position : position + 1])
