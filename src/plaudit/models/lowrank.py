"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on linear layers: y = W x + b + (alpha / rank) B A x.

A projection that is fused here may carry one adapter for each of its stored parts: an adapter of the query alone
changes the query's rows alone. Which layers get one, and peft's files, are `lora.py`. Left out: dropout, DoRA,
quantised weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plaudit.maths.invariant import Linear, linear
from plaudit.models.fresh import draw_uniform


class LoraLinear(nn.Linear):
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

    @torch.no_grad()
    def initialise(self, source: torch.Generator) -> None:
        """A uniform in +-1/sqrt(in), B zero: as peft does."""
        bound = 1.0 / math.sqrt(self.in_features)
        for name in self.rows:
            draw_uniform(self.lora_a[name], bound, source)
            self.lora_b[name].zero_()

    def forward(self, input: Tensor) -> Tensor:
        output = linear(input, self.weight, self.bias)
        if not self.active:
            return output
        pieces, done = [], 0
        for name, (start, size) in self.rows.items():
            if start > done:
                pieces.append(output.new_zeros(*output.shape[:-1], start - done))
            low = linear(input, self.lora_a[name])  # (tokens, rank)
            pieces.append(linear(low, self.lora_b[name]) * self.scaling)  # (tokens, size)
            done = start + size
        if done < self.out_features:
            pieces.append(output.new_zeros(*output.shape[:-1], self.out_features - done))
        return output + (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1))

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (alpha / rank) B A, a new tensor."""
        weight = self.weight.detach().clone()
        for name, (start, size) in self.rows.items():
            weight.narrow(0, start, size).addmm_(self.lora_b[name], self.lora_a[name], alpha=self.scaling)
        return weight

    def adapters(self, layer: str) -> Iterator[str]:
        """The parameters' names, where this layer has that name."""
        return (f"{layer}.{half}.{name}" for name in self.rows for half in ("lora_a", "lora_b"))

    def merged(self) -> nn.Linear:
        """A plain layer that computes the same."""
        with torch.device("meta"):
            plain = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        plain.weight, plain.bias = nn.Parameter(self.merged_weight(), requires_grad=False), self.bias
        return plain


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def merged_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the plain model that computes the same, by name; without adapters, the model's own."""
    merged: dict[str, Tensor] = dict(model.named_parameters())
    for layer, module in adapted_layers(model):
        merged[f"{layer}.weight"] = module.merged_weight()
        for name in module.adapters(layer):
            del merged[name]
    return merged


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model computes what it did before it got adapters. Not to be awaited in: samplers share the model."""
    layers = [module for _, module in adapted_layers(model)]
    before = [module.active for module in layers]
    try:
        for module in layers:
            module.active = False
        yield
    finally:
        for module, active in zip(layers, before, strict=True):
            module.active = active
