"""What changed of bfloat16 weights: applied to what was held, the bits of the whole; refused where others are held."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.weights.changes import OtherBaseError, changes, completed
from plaudit.weights.collective import index_of, of_index
from plaudit.weights.packed import PackedWeights, pack, unpack


def bits(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int16).view(torch.bfloat16)


def of(tensor: torch.Tensor, version: int) -> PackedWeights:
    return pack({"w": tensor}, version)


def test_three_changes_by_hand() -> None:
    """At 0, 1 and 299: by a step, by 201 steps (too many for a byte), and 297 numbers later. So number 257 is sent as
    it was: 255 lie between."""
    old = bits(*range(300))
    new = old.clone()
    new[[0, 1, 299]] = bits(-1, -200, 301)
    sent = changes(of(old, 1), of(new, 2))
    (bucket,) = sent.buckets
    assert bucket[:8].view(torch.int64).tolist() == [4]
    assert bucket[8:10].view(torch.int16).tolist() == [-200]
    assert bucket[10:14].tolist() == [0, 0, 255, 41]
    assert bucket[14:].view(torch.int8).tolist() == [-1, -128, 0, 2]
    assert (sent.version, sent.entries) == (2, ())
    (found,) = completed([of(old, 1)], [sent])
    assert torch.equal(unpack(found)["w"].view(torch.int16), new.view(torch.int16))


@given(st.integers(1, 3000), st.sampled_from([0.0, 0.0005, 0.01, 0.3, 0.34, 1.0]), st.integers(0, 99))
def test_any_changes_are_undone_bit_for_bit_and_never_take_more(size: int, share: float, seed: int) -> None:
    """NaNs, infinities and zeros of both signs are bits like any other."""
    draw = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (2, size), generator=draw, dtype=torch.int16)
    some = torch.rand(2, size, generator=draw) < share
    new = torch.where(some, torch.randint(-(2**15), 2**15, (2, size), generator=draw, dtype=torch.int16), old)
    base, whole = (
        pack({"a": one[0].view(torch.bfloat16), "b": one[1].view(torch.bfloat16)}, n, bucket_bytes=2 * size)
        for n, one in enumerate((old, new))
    )
    sent = pickle.loads(pickle.dumps(changes(base, whole)))
    assert all(len(one) <= len(other) for one, other in zip(sent.buckets, whole.buckets, strict=True))
    if share == 0.0:
        assert sent.bytes == 0
    index = of_index(index_of(sent))
    assert (index.base, [len(one) for one in index.buckets]) == (base.name, [len(one) for one in sent.buckets])
    (found,) = completed([base], [sent])
    assert all(torch.equal(one, other) for one, other in zip(found.buckets, whole.buckets, strict=True))
    assert (found.name, found.entries, found.base) == (whole.name, whole.entries, "")


def test_a_hundredth_of_the_numbers_takes_a_hundredth_of_the_bytes() -> None:
    old = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    some = torch.randperm(100_000, generator=torch.Generator().manual_seed(1))[:1000]
    new[some] *= 1.02  # a step or a few of bfloat16
    whole = of(new, 2)
    assert 0.01 < changes(of(old, 1), whole).bytes / whole.bytes < 0.012


@given(st.integers(0, 99), st.integers(1, 300))
def test_moves_of_all_sizes_and_between_the_signs_are_exact(seed: int, most: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (5000,), generator=draw, dtype=torch.int32)
    some = (torch.rand(5000, generator=draw) < 0.05) * torch.randint(-most, most + 1, (5000,), generator=draw)
    base, whole = (of(one.to(torch.int16).view(torch.bfloat16), n) for n, one in enumerate((old, old + some)))
    (found,) = completed([base], [changes(base, whole)])
    assert torch.equal(found.buckets[0], whole.buckets[0])


def test_changes_of_weights_that_are_not_held_are_refused() -> None:
    one, two, other = (of(torch.full((64,), value).bfloat16(), n) for n, value in ((1, 1.0), (2, 2.0), (1, 3.0)))
    sent = changes(one, two)
    for held in ([], [other], [two], [one, one]):
        with pytest.raises(OtherBaseError, match="version 1 with digest"):
            completed(held, [sent])
    assert completed([other], [two]) == [two], "whole ones need nothing"
