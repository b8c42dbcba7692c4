from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit.compute.axis import Axis
from plaudit.compute.context import Packed
from plaudit.compute.padded import BUCKET_WASTE, sliding_mask


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


def test_each_rank_has_the_positions_of_its_run() -> None:
    found = [Packed([3, 1, 2], axis=Axis(rank, 2)).positions.tolist() for rank in (0, 1)]
    assert found == [[0, 1, 2], [0, 0, 1]]
    assert Packed([3, 1], index=[0, 1, 2, 0], axis=Axis(2, 3)).positions.tolist() == [2], "as computed, not as read"


def test_equal_lengths_need_no_gather() -> None:
    context = Packed([4, 4, 4]).padded
    assert context.pad is None
    assert context.unpad is None
    assert context.shapes == [(3, 4)]


def test_window_by_hand() -> None:
    mask = sliding_mask(4, 2, device="cpu")
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.usefixtures("either_way")
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_attention_equals_that_of_each_sequence_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    query = torch.randn(total, 4, 8, generator=generator)
    key, value = (torch.randn(total, 2, 8, generator=generator) for _ in range(2))
    expected = _attention(tuple(lengths), query, key, value)
    torch.testing.assert_close(Packed(lengths).attend(0, query, key, value), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("window", [None, 9])
def test_attention_in_bfloat16_is_float32s_rounded(window: int | None) -> None:
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
def test_padding_stays_below_the_promised_waste(lengths: list[int]) -> None:
    area = sum(rows * longest for rows, longest in Packed(lengths).padded.shapes)
    assert sum(lengths) <= area <= BUCKET_WASTE * sum(lengths) + 1e-6


@pytest.mark.usefixtures("either_way")
def test_gradients_equal_those_of_each_sequence_alone() -> None:
    lengths = (5, 2, 9)
    inputs = [torch.randn(16, 2, 8, requires_grad=True) for _ in range(3)]
    weight = torch.randn(16, 16)
    (Packed(lengths).attend(0, *inputs) * weight).sum().backward()
    packed = [x.grad for x in inputs]
    alone = torch.autograd.grad((_attention(lengths, *inputs) * weight).sum(), inputs)
    for ours, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either_way")
def test_sequences_that_share_tokens_attend_as_if_they_did_not() -> None:
    lengths, index = (5, 3, 4), [0, 1, 2, 3, 4, 0, 1, 5, 0, 6, 7, 8]
    inputs = [torch.randn(9, 2, 8, requires_grad=True) for _ in range(3)]
    context = Packed(lengths, index=index)
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
    with pytest.raises(ValueError, match="one token"):
        Packed(lengths)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_rows_on_cuda_are_the_cpus_without_plans_of_cudnn(dtype: torch.dtype) -> None:
    """cuDNN prepares for each shape, for a second: SFT of SmolLM2 on an H200 took 0.9 s a step of 13,000 tokens."""
    lengths = (7, 130, 64, 1)
    query, key, value = (torch.randn(sum(lengths), heads, 64) for heads in (4, 2, 2))
    right = _attention(lengths, query, key, value)
    context = Packed(lengths, device="cuda")
    with torch.profiler.profile() as found:
        out = context.attend(0, *(x.to("cuda", dtype) for x in (query, key, value)))
        torch.cuda.synchronize()
    torch.testing.assert_close(out.float().cpu(), right, atol=3e-2 if dtype is torch.bfloat16 else 1e-4, rtol=0)
    assert not [event.key for event in found.key_averages() if "cudnn" in event.key]
