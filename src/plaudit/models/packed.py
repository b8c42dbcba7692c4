"""A decoder for generation on the CPU where `steps.py` has no kernel, with weights stored as oneDNN multiplies fastest.

    decoder -> PackedDecoder: the same code over copies of the linear layers' weights, made again when weights changed

PyTorch sends float32 products to MKL, which uses half of the registers' width on AMD processors, and both libraries
rearrange a weight at every call, which at a few rows costs as much as the product. Packed weights take their memory
once more, and twice more in bfloat16 where the processor cannot multiply it and they become float32. Left out:
gradients, layers that are not plain (adapters compute as they are), other devices.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.maths.invariant import few
from plaudit.maths.products import (
    matrices_present,
    onednn_present,
    packed_for_matrices,
    product_by_matrices,
    slow_halves,
)
from plaudit.models.decoder import MLP, Decoder
from plaudit.models.lowrank import LoraLinear

ROWS = 64
"""The number of rows that the packed form is chosen for; it serves 4 to 2,000 well."""


FILL = 4
"""Rows are filled up to a multiple of this many for each thread."""
EPILOGUES = {"gelu_tanh": ("gelu", "tanh"), "gelu": ("gelu", "none"), "silu": ("swish", ""), "relu": ("relu", "")}
"""Our activations as oneDNN applies them to a product before it is stored."""


def _pack(weight: Tensor) -> Tensor:
    weight = _multiplied(weight.detach()).contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)  # type: ignore[no-any-return]


def _multiplied(x: Tensor) -> Tensor:
    """x in the precision of the products."""
    return x.float() if slow_halves() else x


def kernel_rows() -> int:
    """Rows of which every kernel is a whole one, whatever thread has it."""
    return FILL * torch.get_num_threads()


def _whole(x: Tensor) -> Tensor:
    """x with rows filled up to whole kernels, so that none depends on how many there are, and to one of few numbers of
    them (see `maths/invariant.py`)."""
    rows, kernel = x.shape[0], kernel_rows()
    missing = few(-(-rows // kernel)) * kernel - rows
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class PackedLinear(nn.Module):
    """y = f(W x + b) with a packed copy of W; f is an activation or nothing."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None):
        super().__init__()
        self.weight, self.bias = _pack(weight), None if bias is None else _multiplied(bias.detach())
        self.epilogue = ("none", "") if activation is None else EPILOGUES[activation]

    def forward(self, x: Tensor) -> Tensor:
        kind, variant = self.epilogue
        whole = _multiplied(_whole(x))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(whole, self.weight, self.bias, kind, [], variant)
        return (out if out.shape[0] == x.shape[0] else out[: x.shape[0]]).to(x.dtype)


class PanelLinear(nn.Module):
    """y = W x + b in bfloat16 with a packed copy of W, by our own kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.columns = packed_for_matrices(weight), weight.shape[0]
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return product_by_matrices(x, self.weight, self.bias, packed_columns=self.columns)


class PackedMLP(nn.Module):
    """`MLP` with the activation, and the gate's multiplication, done as the products are stored."""

    def __init__(self, mlp: MLP):
        super().__init__()
        weight, bias = mlp.up.weight, cast(Tensor | None, mlp.up.bias)
        self.gated = mlp.gated
        half = weight.shape[0] // 2 if mlp.gated else weight.shape[0]
        self.first = PackedLinear(weight[:half], None if bias is None else bias[:half], mlp.activation)
        if self.gated:
            self.up, self.bias = _pack(weight[half:]), None if bias is None else _multiplied(bias[half:].detach())
        self.down = PackedLinear(mlp.down.weight, mlp.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        whole = _multiplied(_whole(x))
        hidden = self.first(whole)
        if self.gated:
            hidden = torch.ops.mkldnn._linear_pointwise.binary(whole, hidden, self.up, self.bias, "mul")
        out: Tensor = self.down(hidden)
        return (out if out.shape[0] == x.shape[0] else out[: x.shape[0]]).to(x.dtype)


def can_pack(model: Decoder) -> bool:
    """Whether packed weights are any use: x86 with oneDNN, in the two precisions it multiplies."""
    return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16) and onednn_present()


def packed(model: Decoder) -> Decoder:
    """A decoder that shares everything with `model` but its linear layers' weights, as they are now."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, shared).eval()
    _pack_children(twin)
    return twin


def _pack_children(owner: nn.Module) -> None:
    for name, module in owner.named_children():
        if (other := _packed(module)) is not None:
            setattr(owner, name, other)
        else:
            _pack_children(module)


def _packed(module: nn.Module) -> nn.Module | None:
    """The packed form of a module that has one: of plain linear layers, and of an MLP of such."""
    if plain(module) and _by_panels(module):
        return PanelLinear(module.weight, module.bias)
    if plain(module):
        return PackedLinear(module.weight, module.bias)
    if isinstance(module, MLP) and plain(module.up) and plain(module.down) and not _by_panels(module.up):
        return PackedMLP(module)
    return None


def _by_panels(linear: nn.Linear) -> bool:
    """Whether oneDNN's order of additions in this layer would go by the number of rows."""
    return linear.weight.dtype is torch.bfloat16 and matrices_present()


def plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is a linear layer and no more."""
    return isinstance(module, nn.Linear) and not isinstance(module, LoraLinear)


def stamp(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Differs once any of these was written to, or others took their place."""
    return tuple(number for parameter in parameters for number in (parameter.data_ptr(), parameter._version))
