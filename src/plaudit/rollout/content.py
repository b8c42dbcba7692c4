"""What a parcel holds, and what an engine loads of it: all weights, or adapters on a model that is here already.

Parcel of adapters (their model's digest) -> Adapters, which has the model beneath -> merged weights, or None where
the engine computes on that very model
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plaudit.models.decoder import Decoder
from plaudit.models.digest import digest
from plaudit.models.lora import adapter_names
from plaudit.rollout.accepted import WeightsError


class Content:
    """All weights of the model."""

    def check(self, beneath: str) -> None:
        """Raise WeightsError where a parcel does not belong here. `beneath` is as in `Parcel`."""
        if beneath:
            raise WeightsError("These are adapters alone, and the engine has no model beneath them: set model.lora.")

    def check_model(self) -> None:
        """Raise WeightsError where the model beneath, which nobody writes, is not what it was. Reads all of it."""

    def arrived(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """What `Engine.load` is to be given for these."""
        return weights


class Adapters(Content):
    """Adapters by their parameters' names, for this model; `shared` with the engine, or merged for it."""

    def __init__(self, model: Decoder, *, shared: bool):
        self.model, self.shared = model, shared
        self._adapters = {name: model.get_parameter(name) for name in adapter_names(model)}
        own = model.named_parameters()
        self._base = {name: parameter for name, parameter in own if name not in self._adapters}
        self._beneath = digest(self._base)

    def check(self, beneath: str) -> None:
        if beneath != self._beneath:
            raise WeightsError(
                f"These adapters belong to a model with digest {beneath or 'none'}, the one here has "
                f"{self._beneath}: every node must see the same model.path, and make a model without one on one device."
            )

    def check_model(self) -> None:
        if (found := digest(self._base)) != self._beneath:
            raise WeightsError(
                f"The model beneath the adapters has digest {found} and had {self._beneath}: "
                "this worker's memory changed."
            )

    @torch.no_grad()
    def arrived(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        for name, adapter in self._adapters.items():
            adapter.copy_(weights[name])
        return None if self.shared else dict(self.model.hf_tensors())
