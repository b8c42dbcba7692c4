"""What `vllm.py` does inside vLLM's worker: exchange weights, tell which it holds, and clean up.

Each function is called there with the worker. Nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from assent.models.digest import digest
from assent.rollout.accepted import WeightsError


def reload(worker: Any, weights: Mapping[str, Tensor]) -> None:
    """Exchange the weights in place. Raises WeightsError if some of its own got no new value."""
    model, loaded = worker.model_runner.get_model(), set()
    load = model.load_weights

    def noting(arriving: Any) -> Any:
        loaded.update(found := load(arriving))
        return found

    model.load_weights = noting
    try:
        worker.reload_weights(weights_iterator=iter(weights.items()))
    finally:
        del model.load_weights
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    if missing:
        raise WeightsError(f"vLLM's {', '.join(missing[:5])} got no weights from {len(weights)} tensors.")
    for layer in model.modules():
        # A CPU kernel's own copy of an LM head that is tied to the embedding stays the old one, and vLLM says nothing.
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


@torch.no_grad()
def held(worker: Any) -> str:
    """Digest of its parameters, and of the answer to a fixed input of layers whose weights a CPU kernel packed."""
    model = worker.model_runner.get_model()
    found = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            size = layer.weight.shape[1] if layer.weight.numel() else layer.input_size  # of one device, as all here
            given = torch.linspace(-1.0, 1.0, size, dtype=layer.weight.dtype, device=layer.weight.device)
            found[f"{name} applied"] = layer.cpu_linear(given[None], layer.weight, None)
    return digest(found)


def blank(worker: Any) -> None:
    """Empty the whole cache: numbers that are none, left in free blocks, spoil later answers of any weights."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
