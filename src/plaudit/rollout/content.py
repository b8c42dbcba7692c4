"""What packed weights hold for an engine: all weights, or only the LoRA adapters of a model that is already here.

PackedWeights of adapters, digest of their model -> Adapters, which has that model -> merged weights for the engine,
                                             or the adapters, if the engine computes on that very model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from plaudit.compute.digest import digest
from plaudit.models.decoder import Decoder
from plaudit.models.lora import adapter_names
from plaudit.models.share import Share
from plaudit.rollout.accepted import take_weights
from plaudit.weights.pieces import Piece, WeightsError, digest_of_pieces


def digest_beneath(share: Share, total: Callable[[Tensor], None]) -> str:
    """Return the digest of the frozen base model beneath the adapters (parameters by our names), of which each process
    holds one `share`. `total` is as in `digest_of_pieces`."""
    held = ((one, values) for one, values in share.slices() if one.first)
    shapes = share.layout.parameters
    pieces = [Piece(one.ours, shapes[one.ours], one.start, values, share.dtype) for one, values in held]
    return digest_of_pieces(pieces, {name: (share.dtype, shape) for name, shape in shapes.items()}, total)


class Content:
    """How packed weights of the whole model are checked and given to an engine. It holds no weights itself."""

    def check(self, beneath: str) -> None:
        """Raise WeightsError if these weights cannot be loaded. `beneath`: digest of adapters' base model, or ""."""
        if beneath:
            raise WeightsError("These are only adapters, and the engine has no base model for them: set model.lora.")

    def check_model(self) -> None:
        """Raise WeightsError if the frozen base model's digest has changed. Do nothing if there is no base model."""

    def arrived(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the argument of `Engine.load` for these weights."""
        return weights


class Adapters(Content):
    """Packed adapters for `model`. An engine that computes on it (`shared`) loads them; others, merged weights."""

    def __init__(self, model: Decoder, *, shared: bool, beneath: str = ""):
        """`beneath`: the digest of the whole base model, if other processes hold parts of it."""
        self.model, self.shared = model, shared
        adapters, own = {*adapter_names(model)}, model.named_parameters()
        self._base = {name: parameter for name, parameter in own if name not in adapters}
        self._own = digest(self._base)
        self._beneath = beneath or self._own

    def check(self, beneath: str) -> None:
        if beneath != self._beneath:
            raise WeightsError(
                f"These adapters belong to a model with digest {beneath or 'none'}, but the one here has "
                f"{self._beneath}. Let every node see the same model.path, or run without one on a single device."
            )

    def check_model(self) -> None:
        if (found := digest(self._base)) != self._own:
            raise WeightsError(
                f"The base model of the adapters has digest {found}, but had {self._own}: this worker's memory has "
                "changed."
            )

    def arrived(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.shared:
            return weights
        take_weights(self.model, weights)
        return dict(self.model.hf_tensors())
