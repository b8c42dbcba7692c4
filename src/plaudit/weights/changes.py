"""Packed weights of only the bfloat16 numbers that changed since the last version; a small step changes few of them.

    PackedWeights of two versions -> changes -> PackedWeights with a base -> completed, with what a worker holds

A changed number takes two bytes: the gap to the last sent number, and the difference of the bit patterns as integers,
which is 1 or -1 for most. If a gap does not fit into a byte, unchanged numbers are sent in between. If a difference
does not fit, the number itself is sent. A bucket whose changes are no smaller is sent whole. The digest is that of all
weights, so a worker refuses weights that it assembled wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plaudit.weights.packed import PackedWeights
from plaudit.weights.pieces import WeightsError

REACH = 256
"""Largest gap (in numbers) between two sent numbers, so that it fits into a byte."""
FAR = -128
"""Marks a difference that does not fit into a byte: the number itself is sent, before all differences."""
HEAD = 8
"""Bytes at the start of a bucket of changes, which hold their number."""


class OtherBaseError(WeightsError):
    """The worker does not hold the version that the changes are based on, and needs whole weights."""


@torch.no_grad()
def changes(base: PackedWeights, whole: PackedWeights) -> PackedWeights:
    """Return the packed changes from `base` to `whole`, which must have the same entries."""
    assert base.entries == whole.entries, (base.version, whole.version)
    return replace(whole, entries=(), buckets=tuple(map(_changes, base.buckets, whole.buckets)), base=base.name)


@torch.no_grad()
def completed(held: Sequence[PackedWeights], sent: Sequence[PackedWeights]) -> list[PackedWeights]:
    """Return the sent weights whole. Changes are applied in CPU memory; a bucket without any is that of `held`, not a
    copy. Raises OtherBaseError if the changes are based on others than `held`."""
    if not any(packed.base for packed in sent):
        return list(sent)
    if [packed.base for packed in sent] != [packed.name for packed in held]:
        raise OtherBaseError(
            f"Version {sent[0].version} came as changes of {sent[0].base}, but this worker holds "
            f"{held[0].name if held else 'no weights yet'}: it needs all of them."
        )
    return [
        replace(packed, entries=own.entries, buckets=tuple(map(_changed, own.buckets, packed.buckets)), base="")
        for own, packed in zip(held, sent, strict=True)
    ]


def _changes(base: Tensor, whole: Tensor) -> Tensor:
    old, new = base.view(torch.int16), whole.view(torch.int16)
    differ = old != new
    if not (count := int(differ.sum())):
        return whole[:0]
    if HEAD + 2 * count >= len(whole):
        return whole
    at = differ.nonzero().flatten()
    between = torch.diff(at, prepend=at.new_tensor([-1])) - 1
    ends = torch.cumsum(between // REACH + 1, 0)
    skipped = torch.full((int(ends[-1]),), REACH - 1, dtype=torch.uint8, device=whole.device)
    skipped[ends - 1] = (between % REACH).to(torch.uint8)
    places = _places(skipped)
    moved = new[places].to(torch.int32) - old[places]
    far = moved.abs() > -FAR - 1
    moved = moved.masked_fill_(far, FAR).to(torch.int8)
    head = torch.tensor([len(skipped)], dtype=torch.int64, device=whole.device)
    sent = torch.cat([one.view(torch.uint8) for one in (head, new[places[far]], skipped, moved)])
    return sent if len(sent) < len(whole) else whole


def _changed(base: Tensor, sent: Tensor) -> Tensor:
    sent = sent.cpu()
    if len(sent) in (0, len(base)):
        return sent if len(sent) else base
    count = int(sent[:HEAD].view(torch.int64))
    numbers, skipped, moved = torch.split(sent[HEAD:], [len(sent) - HEAD - 2 * count, count, count])
    places, moved, whole = _places(skipped), moved.view(torch.int8), base.clone()
    new = whole.view(torch.int16)
    new[places] += moved.to(torch.int16)
    new[places[moved == FAR]] = numbers.view(torch.int16)
    return whole


def _places(skipped: Tensor) -> Tensor:
    return torch.cumsum(skipped.to(torch.int64) + 1, 0) - 1
