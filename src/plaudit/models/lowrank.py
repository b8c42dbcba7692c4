"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on linear layers: y = W x + b + (alpha / rank) B A x.

A projection that is fused here may carry one adapter for each of its stored parts: an adapter of the query changes only
the query's rows. Which layers get one, and peft's files, are in `lora.py`. Left out: dropout, DoRA, quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.compute.invariant import Linear, linear


class LoraLinear(Linear):
    """A linear layer with frozen weights and trained adapters, each on some of the output rows.

    `rows` maps an adapter's name to its first row and their number. Fresh adapters change nothing: B is zero.
    """

    def __init__(self, base: nn.Linear, rows: Mapping[str, tuple[int, int]], *, rank: int, alpha: float):
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.rows = dict(sorted(rows.items(), key=lambda item: item[1]))
        self.scaling = alpha / rank
        self.active = True
        new = base.weight.new_zeros
        self.lora_a = nn.ParameterDict({name: nn.Parameter(new(rank, base.in_features)) for name in self.rows})
        self.lora_b = nn.ParameterDict({name: nn.Parameter(new(size, rank)) for name, (_, size) in self.rows.items()})

    def forward(self, input: Tensor) -> Tensor:
        return self._adapted(input, linear(input, self.weight, self.bias))

    def product(self, input: Tensor) -> Tensor:
        return self._adapted(input, linear(input, self.weight))

    def _adapted(self, input: Tensor, output: Tensor) -> Tensor:
        if not self.active:
            return output
        low, high = self.joined()
        return output + linear(linear(input, low), high)

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return all adapters as one: A (ranks, in_features), and B (out_features, ranks) times alpha / rank."""
        low = torch.cat([self.lora_a[name] for name in self.rows])
        columns = []
        for name, (start, size) in self.rows.items():
            high = self.lora_b[name] * self.scaling
            columns.append(F.pad(high, (0, 0, start, self.out_features - start - size)))
        return low, torch.cat(columns, dim=1)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return W + (alpha / rank) B A as a new tensor."""
        weight = self.weight.detach().clone()
        for name, (start, size) in self.rows.items():
            weight.narrow(0, start, size).addmm_(self.lora_b[name], self.lora_a[name], alpha=self.scaling)
        return weight

    def adapters(self, layer: str) -> Iterator[str]:
        """Yield the names of this layer's adapter parameters in a model that names the layer `layer`."""
        return (f"{layer}.{half}.{name}" for name in self.rows for half in ("lora_a", "lora_b"))

    def merged(self) -> nn.Linear:
        """Return a plain layer that computes the same, with a new merged weight and this layer's bias."""
        with torch.device("meta"):
            plain = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        plain.weight, plain.bias = nn.Parameter(self.merged_weight(), requires_grad=False), self.bias
        return plain


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def merged_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the plain model that computes the same, by name."""
    merged: dict[str, Tensor] = dict(model.named_parameters())
    for layer, module in adapted_layers(model):
        merged[f"{layer}.weight"] = module.merged_weight()
        for name in module.adapters(layer):
            del merged[name]
    return merged


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While active, the model computes without its adapters. Do not await within: samplers share the model."""
    layers = [module for _, module in adapted_layers(model)]
    before = [module.active for module in layers]
    try:
        for module in layers:
            module.active = False
        yield
    finally:
        for module, active in zip(layers, before, strict=True):
            module.active = active
