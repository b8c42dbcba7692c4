"""Functions that `vllm.py` runs in vLLM's workers: exchange weights, digest them, clear the cache, free memory.

Each gets vLLM's worker as its first argument. Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from plaudit.compute.digest import digest
from plaudit.weights.pieces import WeightsError

Lent = tuple[torch.UntypedStorage, int]
"""(a storage whose memory was freed, its size in bytes before)."""


def reload(worker: Any, weights: Mapping[str, Tensor] | str) -> None:
    """Replace the worker's weights in place by `weights`: tensors, or the path of a safetensors file. Raises
    WeightsError if a parameter of the model got no new value."""
    if isinstance(weights, str):
        with safe_open(weights, framework="pt") as stored:
            _reload(worker, [(name, stored.get_tensor(name)) for name in stored.keys()])  # noqa: SIM118
    else:
        _reload(worker, list(weights.items()))


def _reload(worker: Any, weights: Sequence[tuple[str, Tensor]]) -> None:
    model, loaded = worker.model_runner.get_model(), set()
    load = model.load_weights

    def noting(arriving: Any) -> Any:
        loaded.update(found := load(arriving))
        return found

    model.load_weights = noting
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    if missing:
        raise WeightsError(f"vLLM's {', '.join(missing[:5])} got no weights from the {len(weights)} tensors sent.")
    for _, layer in _packed(model):
        # Without this, a CPU kernel silently keeps its old copy of an LM head that is tied to the embedding.
        if layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def _packed(model: Any) -> list[tuple[str, Any]]:
    """Return (name, layer) of the layers whose weights a CPU kernel packed: vLLM gives each its own `cpu_linear`."""
    return [(name, layer) for name, layer in model.named_modules() if "cpu_linear" in vars(layer)]


@torch.no_grad()
def held(worker: Any) -> str:
    """Return a digest of the worker's parameters and of the output of each layer in `_packed` for a fixed input."""
    model = worker.model_runner.get_model()
    found = dict(model.named_parameters())
    for name, layer in _packed(model):
        here = vars(layer).get("input_size_per_partition")  # layers whose columns several processes share
        size = layer.weight.shape[1] if layer.weight.numel() else here or layer.input_size
        probe = torch.linspace(-1.0, 1.0, size, dtype=layer.weight.dtype, device=layer.weight.device)
        found[f"{name} applied"] = layer.cpu_linear(probe[None], layer.weight, None)
    return digest(found)


def blank(worker: Any) -> None:
    """Zero the whole KV cache: NaN or infinity in free blocks would spoil later answers, whatever the weights."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def give_up(worker: Any) -> list[Lent]:
    """Free the KV cache, the weights and their packed copies on a CPU, where vLLM's own sleep does nothing. Return each
    freed storage with its size in bytes, for `take_back`."""
    model = worker.model_runner.get_model()
    tensors = [*worker.model_runner.kv_caches, *(parameter.data for parameter in model.parameters())]
    for _, layer in _packed(model):  # `cpu_linear` holds the packed copy; the next `reload` makes another
        layer.cpu_linear = torch.nn.functional.linear
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    lent = [(storage, storage.nbytes()) for storage in storages.values() if storage.resizable()]
    for storage, _ in lent:
        storage.resize_(0)
    return lent


def take_back(worker: Any, lent: Sequence[Lent]) -> None:
    """Allocate again the storages that `give_up` freed, and zero the KV cache. Weights have lost their values."""
    for storage, size in lent:
        storage.resize_(size)
    blank(worker)
