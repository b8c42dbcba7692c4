"""What a parcel holds and an engine loads: all weights, or only adapters on a model that is already here.

Parcel of adapters, digest of their model -> Adapters, which has that model -> merged weights for the engine,
                                             or None if the engine computes on that very model
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plaudit.compute.digest import digest
from plaudit.models.decoder import Decoder
from plaudit.models.lora import adapter_names
from plaudit.weights.parcel import WeightsError


class Content:
    """All weights of the model."""

    def check(self, beneath: str) -> None:
        """Raise WeightsError if a parcel does not belong here. `beneath` is as in `Parcel`."""
        if beneath:
            raise WeightsError("These are only adapters, and the engine has no base model for them: set model.lora.")

    def check_model(self) -> None:
        """Raise WeightsError if the base model has changed: nothing may write to it. Reads all of it."""

    def arrived(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return the argument of `Engine.load` for these weights."""
        return weights


class Adapters(Content):
    """Adapters for this model, by parameter name. The engine shares the model (`shared`) or gets merged weights."""

    def __init__(self, model: Decoder, *, shared: bool):
        self.model, self.shared = model, shared
        self._adapters = {name: model.get_parameter(name) for name in adapter_names(model)}
        own = model.named_parameters()
        self._base = {name: parameter for name, parameter in own if name not in self._adapters}
        self._beneath = digest(self._base)

    def check(self, beneath: str) -> None:
        if beneath != self._beneath:
            raise WeightsError(
                f"These adapters belong to a model with digest {beneath or 'none'}, but the one here has "
                f"{self._beneath}. Let every node see the same model.path, or run without one on a single device."
            )

    def check_model(self) -> None:
        if (found := digest(self._base)) != self._beneath:
            raise WeightsError(
                f"The base model of the adapters has digest {found}, but had {self._beneath}: this worker's memory has "
                "changed."
            )

    @torch.no_grad()
    def arrived(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        for name, adapter in self._adapters.items():
            adapter.copy_(weights[name])
        return None if self.shared else dict(self.model.hf_tensors())
