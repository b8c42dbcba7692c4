"""One decoder for the dense families: GPT-2, Llama, Mistral, Qwen2, Qwen3 and similar ones, by configuration.

    tokens (n,) + context -> embed -> layers x [norm, attention, norm, MLP] -> norm -> hidden (n, width) -> head

The tokens of all sequences are laid end to end; the context (`compute/context.py`) decides which tokens see each other.
Training and generation run this same code on the same parameters, so sampler and learner agree. Hugging Face names and
files are in `families.py` and `load.py`. Left out: dropout (RLHF recipes train without it), experts, cross-attention,
encoders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from plaudit.compute.axis import ALONE, Axis
from plaudit.compute.context import Context
from plaudit.compute.fused import activate, embed, rms_norm, rotate, swiglu
from plaudit.compute.gather import Reading, gathered
from plaudit.compute.invariant import Linear, filled
from plaudit.models.base import LanguageModel, SpecialTokens
from plaudit.models.config import DecoderConfig, HeadKind, RopeScaling
from plaudit.models.families import write_config
from plaudit.models.layout import Layout
from plaudit.models.lowrank import merged_parameters
from plaudit.models.mesh import WHOLE, Mesh, Stage, check_mesh, cut
from plaudit.models.parts import stored_tensors
from plaudit.models.settings import LoraSettings
from plaudit.models.share import Share, begin_weights, draw_weights, write_weights

__all__ = ["Decoder", "DecoderConfig", "HeadKind", "RopeScaling", "rotary_frequencies"]


Module = TypeVar("Module", bound=nn.Module)


def _norm(config: DecoderConfig, width: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, eps=config.norm_eps)


class Embedding(nn.Embedding):
    """Torch's embedding, without random values on the meta device: torch would load its compiler for them."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.RMSNorm):
    """Torch's RMSNorm, by our kernel on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """Inverse frequencies of the rotary embedding (Su et al. 2021), scaled as Llama 3.1 does. Shape (head_dim / 2,)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelength = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = ((scaling.original_positions / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class Attention(nn.Module):
    """Grouped-query attention with one fused projection for query, key and value."""

    def __init__(self, config: DecoderConfig, layer: int, axis: Axis = ALONE):
        super().__init__()
        self.layer, self.axis = layer, axis
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        out = self.heads * self.dim
        self.qkv = Linear(config.width, out + 2 * self.kv_heads * self.dim, bias=config.qkv_bias)
        self.output = Linear(out, config.width, bias=config.output_bias)
        self.query_norm = RMSNorm(self.dim, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, context: Context, rotary: tuple[Tensor, Tensor] | None, read: Reading | None
    ) -> Tensor:
        whole, dim = self.axis.enter(x), self.dim
        sizes, n = [self.heads * dim, self.kv_heads * dim, self.kv_heads * dim], whole.shape[0]
        with self.axis.forgetting(whole, x):
            projected = self.qkv(whole)
        query, key, value = (part.view(n, -1, dim) for part in projected.split(sizes, dim=-1))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        attended = context.attend(self.layer, query, key, value)
        attended = attended if read is None else gathered(attended, read)
        return _back(self.output, attended, self.axis, len(attended))


class MLP(nn.Module):
    """Plain (up, activation, down) or gated (activation(gate) * up, down) with gate and up in one projection."""

    def __init__(self, config: DecoderConfig, axis: Axis = ALONE):
        super().__init__()
        self.axis = axis
        self.gated, self.activation = config.mlp == "gated", config.activation
        self.up = Linear(config.width, config.mlp_width * (2 if self.gated else 1), bias=config.mlp_bias)
        self.down = Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.axis.enter(x)
        with self.axis.forgetting(whole, x):
            hidden = self.up(filled(whole))
        if not self.gated:
            hidden = activate(hidden, self.activation)
        elif self.activation == "silu":
            hidden = swiglu(hidden)
        else:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = activate(gate, self.activation) * up
        return _back(self.down, hidden, self.axis, len(whole))


def _back(layer: Linear, x: Tensor, axis: Axis, rows: int) -> Tensor:
    """Project the first `rows` rows back into the residual stream. On a tensor axis, the ranks' products are summed,
    and then the bias is added once."""
    out: Tensor = layer(x) if axis.size == 1 else layer.product(x)
    out = out if out.shape[0] == rows else out[:rows]
    if axis.size == 1:
        return out
    out = axis.leave(out)
    bias: Tensor | None = layer.bias
    return out if bias is None else out + bias


class Layer(nn.Module):
    """Pre-norm residual block. With `read`, only the tokens to be read continue after attention."""

    def __init__(self, config: DecoderConfig, layer: int, axis: Axis = ALONE):
        super().__init__()
        self.attention_norm = _norm(config, config.width)
        self.attention = Attention(config, layer, axis)
        self.mlp_norm = _norm(config, config.width)
        self.mlp = MLP(config, axis)

    def forward(
        self,
        x: Tensor,
        context: Context,
        rotary: tuple[Tensor, Tensor] | None,
        read: tuple[Reading, Reading] | None = None,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(x), context, rotary, read and read[0])
        x = (x if read is None else gathered(x, read[1])) + attended
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def _if(there: bool, make: Callable[[], Module]) -> Module:
    """Return make() if `there`: this pipeline stage has the module. Else return None, which the stage never uses."""
    return make() if there else cast(Any, None)


class Decoder(LanguageModel):
    """The trunk and one head: token logits (`lm`) or one number a token (`scalar`, for judges and critics). On a tensor
    axis it has this rank's heads, channels of the MLP and tokens of the vocabulary; all else is a copy. On a stage of a
    pipeline it has that stage's layers; the first stage has the embeddings, the last one the norm and the head."""

    caches: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, *, head: HeadKind = "lm", axis: Axis = ALONE, stage: Stage = WHOLE):
        super().__init__()
        check_mesh(config, stage.mesh)
        self.config, self.axis, self.stage = config, axis, stage
        self.spans = stage.layers(config.layers)
        self.sizes = sizes = cut(config, axis.size)
        self.head_kind: HeadKind = head
        self.special = SpecialTokens()
        self.lora: LoraSettings | None = None  # set by add_lora
        first, tied = stage.number == 0, stage.last and head == "lm" and config.tied
        self.embedding = _if(first or tied, lambda: Embedding(sizes.vocab_size, config.width))
        learned = first and config.positions == "learned"
        self.position_embedding = Embedding(config.max_positions, config.width) if learned else None
        self.layers = nn.ModuleList()
        for index in itertools.chain(*self.spans):
            self.layers.add_module(str(index), Layer(sizes, index, axis))
        self.norm = _if(stage.last, lambda: _norm(config, config.width))
        self.head: nn.Linear = _if(
            stage.last, lambda: Linear(config.width, sizes.vocab_size if head == "lm" else 1, bias=False)
        )
        self._frequencies: Tensor | None = None
        self.tie()

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        *,
        head: HeadKind,
        dtype: torch.dtype,
        device: torch.device | str | None,
        axis: Axis = ALONE,
        stage: Stage = WHOLE,
    ) -> Decoder:
        """Make a decoder with uninitialised parameters, for weights that will be read. With `device=None` it has no
        memory until its placement allocates it, and `fill` is deferred until then."""
        with torch.device("meta"):
            model = cls(config, head=head, axis=axis, stage=stage).to(dtype)
        if device is None:
            model.pending = []
            return model
        model.to_empty(device=device)
        model.tie()  # to_empty gives the head storage of its own
        return model

    def tie(self) -> None:
        """Make the LM head the token embedding if the config says so."""
        if self.head_kind == "lm" and self.config.tied and self.stage.last:
            self.head.weight = self.embedding.weight

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return tuple(self.layers)

    @property
    def window(self) -> int | None:
        return self.config.window

    def forward(self, tokens: Tensor, context: Context, read: Tensor | None = None, span: int = 0) -> Tensor:
        """Compute one `span` of the stage. If it lacks the first layer, `tokens` are hidden states of the layer before.
        If it lacks the last layer, return hidden states of its own last one, without norm and `read`."""
        if context.window != self.config.window:
            raise ValueError(
                f"The context has window={context.window}, the model window={self.config.window}. "
                "Make the context with model.packed(lengths) or pass window=model.window."
            )
        numbers = self.spans[span]
        x = self._embedded(tokens, context) if numbers[0] == 0 else tokens
        rotary = None if self.config.positions == "learned" else self.rotary(context.positions, x.dtype)
        *lower, last = (self.layers.get_submodule(str(number)) for number in numbers)
        for layer in lower:
            x = layer(x, context, rotary)
        if numbers[-1] < self.config.layers - 1:
            return last(x, context, rotary)  # type: ignore[no-any-return]
        x = last(x, context, rotary, None if read is None else self.axis.readings(read, len(x) * self.axis.runs))
        return self.axis.together(self.norm(x))

    def _embedded(self, tokens: Tensor, context: Context) -> Tensor:
        x = self.axis.embed(tokens, self.embedding.weight)
        if self.position_embedding is None:
            return x
        return x + embed(self.axis.run(context.positions), self.position_embedding.weight)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotation at these positions, each (tokens, 1, dim / 2)."""
        # Not part of a checkpoint, and kept in float32 whatever the model's precision: bf16 angles lose far positions.
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = rotary_frequencies(self.config).to(positions.device)
        angles = positions.to(torch.float32)[:, None] * self._frequencies  # (tokens, dim / 2)
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]

    def hf_config(self) -> dict[str, Any]:
        return write_config(self.config, head=self.head_kind)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return stored_tensors(self.config, self.head_kind, merged_parameters(self))

    def save_weights(self, folder: Path, *, max_shard_bytes: float) -> None:
        share, own = self.held(), dict(self.named_parameters())
        begin_weights(share, folder, most=max_shard_bytes)
        write_weights(share, folder, most=max_shard_bytes, adapters=own)

    def held(self) -> Share:
        """Return this rank's share along the tensor and pipeline axes, with all of the model's own parameters."""
        return self.share(*self.among(1, 0), dict(self.named_parameters()))

    def initialise(self, seed: int) -> None:
        """Draw fresh weights."""
        self.fill(partial(draw_weights, dtype=self.dtype, seed=seed))

    def share(self, mesh: Mesh, rank: int, tensors: Mapping[str, Tensor]) -> Share:
        return Share(Layout(self.config, self.head_kind, mesh, self.lora), rank, tensors, self.dtype)

    def fill(self, values: Callable[[Share], None]) -> None:
        """Let `values` fill the model's share: now, or if memory is pending, once its placement has allocated it."""
        if self.pending is None:
            values(self.held())
        else:
            self.pending.append(values)
