"""Parcels of only what changed since the version before, for bfloat16, most of whose numbers a small step leaves alone.

    whole Parcels of two versions -> changes -> a Parcel with a base -> completed, on what a worker holds of the base

A bucket of changes has the new numbers, bit for bit, and a byte for each: how many numbers lie between it and the last
one. Where they are too many for a byte, unchanged numbers are sent between them. A bucket whose changes are no smaller
is sent whole. The digest stays that of all weights, so that whoever completed a parcel wrongly finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plaudit.weights.parcel import Parcel, WeightsError

REACH = 256
"""A number is at most this many behind the last one."""
EACH = 3
"""Bytes of a changed number: itself and its distance."""


class OtherBaseError(WeightsError):
    """The worker does not hold the weights that were changed, and needs all."""


@torch.no_grad()
def changes(base: Parcel, whole: Parcel) -> Parcel:
    """What turns the one parcel into the other, which has its boxes."""
    assert base.entries == whole.entries, (base.version, whole.version)
    return replace(whole, entries=(), buckets=tuple(map(_changes, base.buckets, whole.buckets)), base=base.name)


@torch.no_grad()
def completed(held: Sequence[Parcel], sent: Sequence[Parcel]) -> list[Parcel]:
    """The whole parcels of those that were sent, in the CPU's memory if they are changes of those held there. Raises
    OtherBaseError if they are changes of others."""
    if not any(parcel.base for parcel in sent):
        return list(sent)
    if [parcel.base for parcel in sent] != [parcel.name for parcel in held]:
        raise OtherBaseError(
            f"Version {sent[0].version} came as changes of {sent[0].base}, but this worker holds "
            f"{held[0].name if held else 'no weights yet'}: it needs all of them."
        )
    return [
        replace(parcel, entries=own.entries, buckets=tuple(map(_changed, own.buckets, parcel.buckets)), base="")
        for own, parcel in zip(held, sent, strict=True)
    ]


def _changes(base: Tensor, whole: Tensor) -> Tensor:
    numbers = whole.view(torch.int16)
    differ = base.view(torch.int16) != numbers
    if not (count := int(differ.sum())) or count * EACH >= len(whole):
        return whole if count else whole[:0]
    at = differ.nonzero().flatten()
    between = torch.diff(at, prepend=at.new_tensor([-1])) - 1
    ends = torch.cumsum(between // REACH + 1, 0)
    if (count := int(ends[-1])) * EACH >= len(whole):
        return whole
    skipped = torch.full((count,), REACH - 1, dtype=torch.uint8, device=whole.device)
    skipped[ends - 1] = (between % REACH).to(torch.uint8)
    return torch.cat([numbers[_places(skipped)].view(torch.uint8), skipped])


def _changed(base: Tensor, sent: Tensor) -> Tensor:
    sent = sent.cpu()
    if len(sent) in (0, len(base)):
        return sent if len(sent) else base
    count = len(sent) // EACH
    whole = base.clone()
    whole.view(torch.int16)[_places(sent[2 * count :])] = sent[: 2 * count].view(torch.int16)
    return whole


def _places(skipped: Tensor) -> Tensor:
    return torch.cumsum(skipped.to(torch.int64) + 1, 0) - 1
