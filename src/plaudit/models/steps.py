"""Steps of decoding on the CPU by one kernel: a new token of every sequence through all layers, the cache and the head.

    tokens, positions (n,) -> embedded -> [norm, projections, cache, attention, MLP] x layers -> norm, head -> logits

The arithmetic is the decoder's (`decoder.py`); what is saved is the calls between operations, which take longer than a
small model's products, and the filling up of rows: each row is as if alone. Weights are laid out once more, as the
kernel reads them. In bfloat16 sums are float32, two entries at once where the processor has products of pairs
(AVX512_BF16), whole blocks at once where it has matrix registers (AMX), and what lies between operations is rounded as
tensors would be. Left out: layers that are not plain (adapters), GELU by the error function, odd widths in pairs; those
decode operation by operation (`packed.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.kernels.library import available, number, run
from plaudit.maths.invariant import filled_up
from plaudit.models.decoder import Decoder, Layer
from plaudit.models.fused import embed
from plaudit.models.packed import can_pack, packed, plain
from plaudit.models.pages import PageCache

ACTIVATIONS = {"relu": 0, "gelu_tanh": 1, "silu": 2}
"""As the kernel numbers them."""


def can_step(model: Decoder) -> bool:
    """Whether the kernel computes this model."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return (
        type(model) is Decoder
        and model.device.type == "cpu"
        and available(model.dtype)
        and all(type(x) is nn.Parameter and x.dtype is model.dtype for x in model.parameters())
        and model.config.activation in ACTIVATIONS
        and all(plain(linear) for linear in linears)
        and not (by_pairs(model.dtype) and any(linear.in_features % 2 for linear in linears))
    )


def by_pairs(dtype: torch.dtype) -> bool:
    """Whether the kernel's sums of products take two entries at once."""
    return dtype is torch.bfloat16 and bool(number("pairs_of_halves"))


def laid_out(model: Decoder) -> tuple[Decoder, Steps | None]:
    """What computes prompts and, where there are no steps by one kernel, new tokens; and those steps. Both hold the
    weights as they are now."""
    if can_step(model):
        return model, Steps(model)
    return (packed(model) if can_pack(model) else model), None


class Steps:
    """The model's weights as they are now, laid out for the kernel."""

    def __init__(self, model: Decoder):
        self.model, config = model, model.config
        self._kept: list[Tensor] = []  # what the kernel reads by address
        self.layers = [self._addresses(layer) for layer in model.blocks]
        eps = self._keep(torch.tensor(config.norm_eps, dtype=torch.float32, device="cpu"))
        centred, gated = config.norm == "layer", config.mlp == "gated"
        norm, head = self._norm(model.norm), self._linear(model.head)
        sizes = (config.layers, config.width, config.mlp_width)
        kinds = (int(centred), ACTIVATIONS[config.activation], int(gated))
        numbers = (*sizes, *kinds, eps, *norm, *head, config.vocab_size)
        self.form = torch.tensor(numbers, device="cpu")  # the kernel's `Model`
        wide = number("page_positions")
        queries = config.heads * config.head_dim
        projected = queries + 2 * config.kv_heads * config.head_dim
        self.width = filled_up(config.width, wide)
        middle = max(filled_up(n, wide) for n in (config.mlp_width, queries))
        self.room = self.width + filled_up(projected, wide) + middle

    @torch.no_grad()
    def logits(self, cache: PageCache, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (n, vocab_size) after a new token of each of the first n slots; its keys and values are written."""
        model, n = self.model, len(tokens)
        assert cache.dtype is model.dtype, (cache.dtype, model.dtype)
        plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        x, room = torch.zeros(n, self.width, **plain), torch.empty(n * self.room, **plain)
        out = torch.empty(n, model.vocab_size, **plain)
        embedded = embed(tokens, model.embedding.weight)
        angles: tuple[Tensor | None, Tensor | None] = None, None
        if model.position_embedding is not None:
            embedded = embedded + embed(positions, model.position_embedding.weight)
        else:
            angles = model.rotary(positions, model.dtype)
        x[:, : embedded.shape[1]] = embedded
        layers = torch.tensor(
            [
                [*addresses, keys.data_ptr(), values.data_ptr()]
                for addresses, keys, values in zip(self.layers, cache.keys, cache.values, strict=True)
            ],
            device="cpu",
        )  # the kernel's `Layer`s
        slots, positions = cache.where[:n], positions.contiguous()
        where = (cache.shape(), cache.form, n, slots, positions)
        run("step", model.dtype, self.form, layers, *where, *angles, x, room, out)
        return out

    def _addresses(self, layer: nn.Module) -> list[int]:
        """The kernel's `Layer`, but for its cache."""
        assert isinstance(layer, Layer)
        attention, mlp = layer.attention, layer.mlp
        return [
            *self._norm(layer.attention_norm),
            *self._linear(attention.qkv),
            *(0 if norm is None else self._keep(norm.weight) for norm in (attention.query_norm, attention.key_norm)),
            *self._linear(attention.output),
            *self._norm(layer.mlp_norm),
            *self._linear(mlp.up, gated=mlp.gated),
            *self._linear(mlp.down),
        ]

    def _norm(self, norm: Any) -> Iterator[int]:
        yield self._keep(norm.weight)
        yield 0 if getattr(norm, "bias", None) is None else self._keep(norm.bias)

    def _linear(self, linear: nn.Linear, *, gated: bool = False) -> Iterator[int]:
        bias: Tensor | None = linear.bias
        yield self._pack(linear.weight, gated, pairs=by_pairs(linear.weight.dtype))
        yield 0 if bias is None else self._pack(bias[:, None], gated)

    def _pack(self, weight: Tensor, gated: bool, *, pairs: bool = False) -> int:
        weight, wide = weight.detach().contiguous(), number("page_positions")
        rows, inner = weight.shape
        room = 2 * filled_up(rows // 2, wide) if gated else filled_up(rows, wide)
        packed = weight.new_empty(room * inner)
        run("pack", weight.dtype, rows, inner, weight, packed, int(gated), int(pairs), torch.get_num_threads())
        return self._keep(packed)

    def _keep(self, x: Tensor) -> int:
        self._kept.append(x.detach())
        return x.data_ptr()
