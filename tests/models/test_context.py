from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assent.models import context as context_module
from assent.models.context import BUCKET_WASTE, Packed, sliding_mask


def _attention(lengths: tuple[int, ...], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention of each sequence by itself, written out."""
    rows = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        n, heads, dim = q.shape
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, heads * dim))
    return torch.cat(rows)


def test_positions_and_ends_by_hand() -> None:
    context = Packed([3, 1, 2])
    assert context.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert context.ends.tolist() == [2, 3, 5]


def test_equal_lengths_need_no_gather() -> None:
    context = Packed([4, 4, 4])
    assert context.pad is None
    assert context.unpad is None
    assert context.shapes == [(3, 4)]


def test_window_by_hand() -> None:
    mask = sliding_mask(4, 2, device="cpu")
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_attention_equals_that_of_each_sequence_alone(lengths: list[int], recurring: bool) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    query = torch.randn(total, 4, 8, generator=generator)
    key, value = (torch.randn(total, 2, 8, generator=generator) for _ in range(2))
    context = Packed(lengths, recurring=recurring)
    expected = _attention(tuple(lengths), query, key, value)
    torch.testing.assert_close(context.attend(0, query, key, value), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("most", [0, 256], ids=["in float32", "by products"])
def test_attention_in_bfloat16_is_float32s_rounded(
    most: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "PRODUCTS_LENGTH", most)
    lengths = (3, 30, 17, 30)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2)]
    found, gradients = [], []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in states]
        out = Packed(lengths, window=window).attend(0, *leaves)
        assert out.dtype == dtype
        gradients.append([g.float() for g in torch.autograd.grad(out.float().square().sum(), leaves)])
        found.append(out.detach().float())
    torch.testing.assert_close(found[0], found[1], atol=0.03, rtol=0.03)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=0.15, rtol=0.05)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_padding_stays_below_the_promised_waste(lengths: list[int]) -> None:
    area = sum(rows * longest for rows, longest in Packed(lengths).shapes)
    assert sum(lengths) <= area <= BUCKET_WASTE * sum(lengths) + 1e-6


def test_shapes_that_recur() -> None:
    """Lengths are filled up to sixteens, rows to numbers of two binary digits; long rows are not."""
    assert Packed([9, 16, 3, 30, 31], recurring=True).shapes == [(2, 32), (3, 16)]
    assert Packed([16] * 5, recurring=True).shapes == [(6, 16)]
    assert Packed([300] * 5, recurring=True).shapes == [(5, 304)]
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(17, 87, (32,), generator=generator).tolist() for _ in range(60)]
    assert len({shape for lengths in draws for shape in Packed(lengths, recurring=True).shapes}) <= 40
    assert len({shape for lengths in draws for shape in Packed(lengths).shapes}) > 100


@pytest.mark.parametrize("recurring", [False, True])
def test_gradients_equal_those_of_each_sequence_alone(recurring: bool) -> None:
    lengths = (5, 2, 9)
    inputs = [torch.randn(16, 2, 8, requires_grad=True) for _ in range(3)]
    weight = torch.randn(16, 16)
    (Packed(lengths, recurring=recurring).attend(0, *inputs) * weight).sum().backward()
    packed = [x.grad for x in inputs]
    alone = torch.autograd.grad((_attention(lengths, *inputs) * weight).sum(), inputs)
    for ours, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recurring", [False, True])
def test_sequences_that_share_tokens_attend_as_if_they_did_not(recurring: bool) -> None:
    lengths, index = (5, 3, 4), [0, 1, 2, 3, 4, 0, 1, 5, 0, 6, 7, 8]
    inputs = [torch.randn(9, 2, 8, requires_grad=True) for _ in range(3)]
    context = Packed(lengths, recurring=recurring, index=index)
    assert context.positions.tolist() == [0, 1, 2, 3, 4, 2, 1, 2, 3]
    assert context.ends.tolist() == [4, 5, 8]
    weight = torch.randn(9, 16)
    ours = context.attend(0, *inputs)
    whole = _attention(lengths, *(x[index] for x in inputs))
    theirs = torch.stack([whole[index.index(token)] for token in range(9)])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, expected in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Packed(lengths)
