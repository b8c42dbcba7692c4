"""Fused decode step on the CPU: one kernel call computes the next token's logits of every sequence.

    tokens, positions (n,) -> embedded -> [norm, projections, cache, attention, MLP] x layers -> norm, head -> logits

Same arithmetic as `decoder.py`. One call avoids the overhead of one per operation, which exceeds a small model's
matrix products. The batch is not padded, and each row's result is independent of the others. Weights are copied into
the kernel's packed layout. In bfloat16, sums accumulate in float32, by dot products of pairs if the CPU has
AVX512_BF16, by tiles if it has AMX; each operation's result is rounded to the dtype, as torch would. LoRA adapters are
not merged, as in training: in bfloat16 small updates would round to zero. Not supported, and left to torch: odd input
widths with AVX512_BF16, and models of mixed dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.compute.calls import available, run
from plaudit.compute.fused import ACTIVATIONS, embed
from plaudit.compute.invariant import filled_up
from plaudit.compute.library import number
from plaudit.models.decoder import Decoder, Layer
from plaudit.models.lowrank import LoraLinear
from plaudit.rollout.decode.pages import PageCache


def can_step(model: Decoder) -> bool:
    """True if the kernel can compute this model; otherwise torch computes its steps."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return (
        type(model) is Decoder
        and model.axis.size == 1
        and model.device.type == "cpu"
        and available(model.dtype)
        and all(type(x) is nn.Parameter and x.dtype is model.dtype for x in model.parameters())
        and not (by_pairs(model.dtype) and any(linear.in_features % 2 for linear in linears))
    )


def by_pairs(dtype: torch.dtype) -> bool:
    """True if the kernel multiplies pairs of bfloat16 at once (AVX512_BF16), so that input widths must be even."""
    return dtype is torch.bfloat16 and bool(number("pairs_of_halves"))


def stamp(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Return numbers that change whenever one of these parameters is written to or replaced."""
    return tuple(number for parameter in parameters for number in (parameter.data_ptr(), parameter._version))


class Steps:
    """A model's present weights, copied into the layout of the CPU kernel, and the steps that use them."""

    def __init__(self, model: Decoder):
        self.model, config = model, model.config
        self._kept: list[Tensor] = []  # tensors that the kernel reads by address, kept alive
        self.rank = 0  # largest LoRA rank of a layer
        self.layers = torch.tensor([self._addresses(layer) for layer in model.blocks], device="cpu")  # its `Layer`s
        head = _of_shape(model.head.weight, config.vocab_size, config.width)
        bias = self._bias(model.head, config.vocab_size)
        self.ends = (*self._norm(model.norm, config.width), self._weight(head), bias)
        self.kinds = {
            "rank": self.rank,
            "inner": config.mlp_width,
            "heads": config.heads,
            "layer_norm": int(config.norm == "layer"),
            "activation": ACTIVATIONS[config.activation],
            "gated": int(config.mlp == "gated"),
            "eps": float(config.norm_eps),
        }
        wide, queries = number("page_positions"), config.heads * config.head_dim
        self.width = filled_up(config.width, wide)
        middle = max(filled_up(n, wide) for n in (config.mlp_width, queries))
        self.room = self.width + filled_up(queries + 2 * config.kv_heads * config.head_dim, wide) + middle
        self.room += 2 * filled_up(self.rank, wide)

    @torch.no_grad()
    def logits(self, cache: PageCache, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits (n, vocab_size) after one new token of each of the first n slots; write its keys and values."""
        model, n = self.model, len(tokens)
        plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        x, room = torch.zeros(n, self.width, **plain), torch.empty(n, self.room, **plain)
        out = torch.empty(n, model.vocab_size, **plain)
        embedded = embed(tokens, model.embedding.weight)
        angles: tuple[Tensor | None, Tensor | None] = None, None
        if model.position_embedding is not None:
            embedded = embedded + embed(positions, model.position_embedding.weight)
        else:
            angles = model.rotary(positions, model.dtype)
        x[:, : embedded.shape[1]] = embedded
        where = (cache.where[:n], positions.contiguous(), *angles, cache.tables, cache.keys[0], cache.values[0])
        run("step", self.layers, *self.ends, *where, x, room, out, window=cache.span, **self.kinds)
        return out

    def _addresses(self, layer: nn.Module) -> list[int]:
        """Return the fields of the kernel's `Layer`: addresses of kept tensors (0 if absent), and ranks of LoRA."""
        assert isinstance(layer, Layer)
        attention, mlp, config = layer.attention, layer.mlp, self.model.config
        width, inner, queries = config.width, config.mlp_width, config.heads * config.head_dim
        projected = queries + 2 * config.kv_heads * config.head_dim
        norms = attention.query_norm, attention.key_norm
        return [
            x if isinstance(x, int) else 0 if x is None else x.data_ptr()
            for x in (
                *self._norm(layer.attention_norm, width),
                *self._linear(attention.qkv, projected, width),
                *(None if norm is None else self._keep(_of_shape(norm.weight, config.head_dim)) for norm in norms),
                *self._linear(attention.output, width, queries),
                *self._norm(layer.mlp_norm, width),
                *self._linear(mlp.up, inner * (1 + mlp.gated), width, gated=mlp.gated),
                *self._linear(mlp.down, width, inner),
            )
        ]

    def _norm(self, norm: nn.Module, width: int) -> Iterator[Tensor | None]:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm), type(norm)
        yield self._keep(_of_shape(norm.weight, width))
        yield self._keep(_of_shape(norm.bias, width)) if isinstance(norm, nn.LayerNorm) else None

    def _linear(
        self, linear: nn.Linear, rows: int, inner: int, *, gated: bool = False
    ) -> Iterator[Tensor | int | None]:
        """Yield the fields of the kernel's `Linear`: weight, bias, LoRA's two matrices and rank (or None, None, 0)."""
        yield from (self._weight(_of_shape(linear.weight, rows, inner), gated), self._bias(linear, rows, gated))
        if not isinstance(linear, LoraLinear):
            yield from (None, None, 0)
            return
        low, high = (x.detach() for x in linear.joined())
        odd = len(low) % 2  # pairs need an even rank
        self.rank = max(self.rank, len(low) + odd)
        yield from (self._weight(F.pad(low, (0, 0, 0, odd))), self._weight(F.pad(high, (0, odd)), gated))
        yield len(low) + odd

    def _weight(self, weight: Tensor, gated: bool = False) -> Tensor:
        return self._pack(weight, gated, pairs=by_pairs(weight.dtype))

    def _bias(self, linear: nn.Linear, rows: int, gated: bool = False) -> Tensor | None:
        bias: Tensor | None = linear.bias
        return None if bias is None else self._pack(_of_shape(bias, rows)[:, None], gated)

    def _pack(self, weight: Tensor, gated: bool, *, pairs: bool = False) -> Tensor:
        wide, (rows, inner) = number("page_positions"), weight.shape
        room = 2 * filled_up(rows // 2, wide) if gated else filled_up(rows, wide)
        packed = weight.new_empty(room * inner)
        run("pack", weight, packed, gated=int(gated), pairs=int(pairs))
        return self._keep(packed)

    def _keep(self, x: Tensor) -> Tensor:
        self._kept.append(x)
        return x


def _of_shape(x: Tensor, *shape: int) -> Tensor:
    if x.shape != shape:
        raise ValueError(f"A weight has the shape {tuple(x.shape)}; the model's configuration says {shape}.")
    return x.detach().contiguous()
