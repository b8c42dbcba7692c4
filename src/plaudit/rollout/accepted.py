"""Check the weights that an engine with its own copy receives: version, model and digest; then that it holds them.

    weights, version, digest as sent -> check -> take -> copied into the engine -> check_held

It knows neither engines nor transports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from plaudit.models.decoder import Decoder
from plaudit.models.layout import Slice
from plaudit.models.share import narrowed
from plaudit.weights.packed import pieces_of
from plaudit.weights.pieces import WeightsError, digest_of_pieces


@runtime_checkable
class Ordered(Protocol):
    """An engine, or the check of its weights, that refuses a version older than its own."""

    def go_back(self) -> None:
        """Take the next weights whatever their version: the run went back to a checkpoint."""
        ...


class Accepted:
    """The version, names and shapes of the weights that an engine took last; `version` is None before the first."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, weights: Mapping[str, Tensor], version: int, *, sent: str | None) -> None:
        """Raise WeightsError for an older version, other names or shapes, or a digest that is not `sent` (if given)."""
        pieces = pieces_of(weights)
        shapes = {piece.name: piece.shape for piece in pieces}
        if self.version is not None and version < self.version:
            raise WeightsError(f"These weights are version {version}, but the engine already has {self.version}.")
        if self._shapes and shapes != self._shapes:
            odd = sorted(f"{name} {shape}" for name, shape in shapes.items() ^ self._shapes.items())
            raise WeightsError(f"These are not the model's weights: only one side has {', '.join(odd[:6])}.")
        if sent is not None and (found := digest_of_pieces(pieces)) != sent:
            raise WeightsError(
                f"The weights of version {version} have digest {found}, but were sent with {sent}: they changed in "
                f"transit. The engine keeps version {self.version}."
            )

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.version, self._shapes = version, {piece.name: piece.shape for piece in pieces_of(weights)}

    def go_back(self) -> None:
        """Take the next weights of the same model, whatever their version."""
        self.version = None


@torch.no_grad()
def take_weights(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy published weights (by their names in files) into a decoder, only the boxes that this process holds. A LoRA
    model takes only adapters, by our names. Raises ValueError for other names, WeightsError if a copied box differs."""
    share = model.held()
    if model.lora is not None:
        if set(weights) != set(share.layout.adapters):
            raise ValueError("Published weights include adapters, but this model has its own: call merge_lora(model).")
        for name, adapter in weights.items():
            share.put(name, adapter)
        return
    check_names(weights, share.layout.stored)
    shapes = {piece.name: tuple(piece.shape) for piece in pieces_of(weights)}
    if odd := [name for name, shape in share.layout.stored.items() if shapes[name] != tuple(shape)]:
        fault = f"{odd[0]} has shape {shapes[odd[0]]}, the model's {share.layout.stored[odd[0]]}"
        raise ValueError(f"These are not the model's weights: {fault}.")
    for one, tensor in share.slices():  # one by one: a tensor that came in pieces takes memory while it is whole
        own = tensor.t() if one.transposed else tensor
        own.copy_(box_of(weights, one))
        check_held({one.name: own}, {one.name: box_of(weights, one)})


def box_of(weights: Mapping[str, Tensor], one: Slice) -> Tensor:
    """Return a view of the part of a stored tensor that the slice `one` covers."""
    return narrowed(weights[one.name], [start for start, _ in one.box], [stop - start for start, stop in one.box])


def check_names(weights: Mapping[str, Tensor], own: Collection[str]) -> None:
    """Raise ValueError unless the weights have the model's own names."""
    if set(weights) != set(own):
        unknown, missing = sorted(set(weights) - set(own)), sorted(set(own) - set(weights))
        raise ValueError(f"These are not the model's weights: unknown {unknown[:5]}, missing {missing[:5]}.")


def check_held(held: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if a held tensor differs from the weight of its name, converted to the tensor's dtype."""
    odd = [name for name, tensor in held.items() if not _same(tensor.detach(), weights[name])]
    if odd:
        raise WeightsError(
            f"The engine's {', '.join(odd[:3])} ({len(odd)} of {len(held)} tensors) differ from the weights that were "
            "copied into them: the engine's memory or the sent weights have changed."
        )


def _same(tensor: Tensor, other: Tensor) -> bool:
    """True if both have the same bits, or, if their dtypes differ, the same values after conversion to `tensor`'s."""
    if tensor.dtype == other.dtype:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return torch.equal(tensor.view(bits), other.detach().to(tensor.device).view(bits))
    return bool(torch.isclose(tensor, other.detach().to(tensor), rtol=0.0, atol=0.0, equal_nan=True).all())
