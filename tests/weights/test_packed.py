"""Weights in flat runs of bytes: nothing changes on the way, whatever the dtypes, shapes and bucket size."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.compute.digest import digest
from plaudit.weights.collective import index_of, of_index
from plaudit.weights.packed import ALIGNMENT, PackedWeights, pack, pieces_of, unpack
from plaudit.weights.pieces import Piece, WeightsError, digest_of_pieces

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8),
    st.integers(1, 500),
)
def test_unpack_undoes_pack(shapes: list[tuple[torch.dtype, list[int]]], bucket_bytes: int) -> None:
    weights = {f"w{i}": (torch.rand(shape) * 100).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    packed = pack(weights, 7, bucket_bytes=bucket_bytes)
    received = unpack(packed)
    assert list(received) == list(weights)
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert all(received[name].dtype == weights[name].dtype for name in weights)
    assert (packed.version, packed.digest) == (7, digest(weights))
    assert all(len(b) <= bucket_bytes + ALIGNMENT or _alone(packed, i) for i, b in enumerate(packed.buckets))


def _alone(packed: object, bucket: int) -> bool:
    return sum(entry.bucket == bucket and entry.size > 0 for entry in packed.entries) <= 1  # type: ignore[attr-defined]


def test_six_floats_and_two_bytes_by_hand() -> None:
    """24 bytes, then the next multiple of 64."""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7, 8], dtype=torch.uint8)}
    packed = pack(weights, 1)
    assert [(e.name, e.bucket, e.start, e.size) for e in packed.entries] == [("a", 0, 0, 24), ("b", 0, 64, 2)]
    assert packed.bytes == 128
    assert packed.buckets[0][:24].view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert packed.buckets[0][64:66].tolist() == [7, 8]


def test_packed_weights_are_a_copy_and_a_changed_byte_changes_the_digest() -> None:
    weights = {"a": torch.ones(4), "b": torch.zeros(3)}
    packed = pack(weights, 1)
    weights["a"].zero_()
    assert unpack(packed)["a"].tolist() == [1, 1, 1, 1]
    bucket = packed.buckets[0].clone()
    bucket[5] ^= 1
    assert digest(unpack(replace(packed, buckets=(bucket,)))) != packed.digest


def test_another_process_reads_the_buckets_where_they_are(recwarn: pytest.WarningsRecorder) -> None:
    """Pickled apart from the rest, as shared memory has them, which is handed over read-only."""
    packed = pack({"a": torch.ones(4), "b": torch.arange(3)}, 1, beneath="base")
    apart: list[pickle.PickleBuffer] = []
    words = pickle.dumps(packed, protocol=5, buffer_callback=apart.append)
    arrived = pickle.loads(words, buffers=[memoryview(one).toreadonly() for one in apart])
    assert len(apart) == 1
    assert arrived.buckets[0].data_ptr() == packed.buckets[0].data_ptr()
    assert unpack(arrived)["a"].sum() == 4
    assert replace(arrived, buckets=()) == replace(packed, buckets=())
    assert not list(recwarn)


SPLIT = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5).bfloat16()}


def halves(*, version: int = 1) -> list[PackedWeights]:
    """Two ranks' packed weights: columns of one tensor, and parts of another, the second in a lower precision."""
    one, other = SPLIT["a"], SPLIT["b"]
    pieces = [Piece("a", (3, 4), (0, 0), one[:, :3], one.dtype), Piece("b", (5,), (0,), other[:2], other.dtype)]
    rest = [Piece("b", (5,), (2,), other[2:].float(), other.dtype), Piece("a", (3, 4), (0, 3), one[:, 3:], one.dtype)]
    return [pack(some, version, digest=digest(SPLIT)) for some in (pieces, rest)]


def test_boxes_of_several_are_put_where_they_belong() -> None:
    received = unpack(*halves())
    assert set(received) == set(SPLIT)
    assert all(torch.equal(received[name], SPLIT[name]) for name in SPLIT)
    assert digest(received) == digest_of_pieces(pieces_of(received)) == digest(SPLIT)
    assert all(torch.equal(one, SPLIT[name]) for name, one in unpack(pack(received, 2)).items())


def test_what_is_lost_or_of_another_version_is_refused() -> None:
    first, second = halves()
    with pytest.raises(WeightsError, match=r"The packed weights have 9 numbers of a, whose shape is \(3, 4\)"):
        unpack(first)
    with pytest.raises(WeightsError, match="not of one version"):
        unpack(first, halves(version=2)[1])
    bucket = second.buckets[0].clone()
    bucket[0] ^= 1
    assert digest_of_pieces(pieces_of(unpack(first, replace(second, buckets=(bucket,))))) != second.digest


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 400))
def test_a_piece_is_cut_into_rows(rows: int, columns: int, most: int) -> None:
    values = torch.randn(rows, columns)
    piece = Piece("a", (rows + 3, columns), (2, 0), values, torch.bfloat16)
    parts = list(piece.cut(most))
    assert torch.equal(torch.cat([part.values for part in parts]), values)
    assert [part.at[0] for part in parts] == [2 + sum(len(p.values) for p in parts[:n]) for n in range(len(parts))]
    assert all(part.bytes <= max(most, 2 * columns) for part in parts)
    assert sum(int(part.sum()) for part in parts) % 2**64 == int(piece.sum()) % 2**64


def test_an_index_tells_all_but_the_content() -> None:
    packed = pack({"a": torch.ones(2, 3), "none": torch.ones(0, 2), "one": torch.tensor(7)}, 3, beneath="base")
    empty = of_index(index_of(packed))
    assert replace(empty, buckets=()) == replace(packed, buckets=())
    for mine, theirs in zip(empty.buckets, packed.buckets, strict=True):
        mine.copy_(theirs)
    assert digest(unpack(empty)) == packed.digest
