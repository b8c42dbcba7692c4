"""The differences between dense decoders: sizes, positions, norms, biases. Plain values, no tensors.

Hugging Face's own keys for the same things are `families.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

HeadKind = Literal["lm", "scalar"]
SCALAR_HEAD = "score.weight"
"""Stored name of the scalar head, as in transformers' classifiers."""
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of the low rotary frequencies (https://arxiv.org/abs/2407.21783, section 3.4)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything in which dense models differ. Sizes are numbers of channels, heads, layers or tokens."""

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    positions: Literal["learned", "rotary"]
    norm: Literal["layer", "rms"]
    norm_eps: float
    mlp: Literal["plain", "gated"]
    activation: Activation
    qkv_bias: bool
    output_bias: bool
    """True if attention's output projection has a bias."""
    mlp_bias: bool
    tied: bool
    """True if the LM head's weight is the token embedding."""
    qk_norm: bool = False
    """True for an RMSNorm over each head's query and key (Qwen3)."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """Sliding attention window in tokens (Mistral), None for full attention."""
    init_std: float = 0.02

    @property
    def parameters(self) -> int:
        """Number of weights with an LM head; a tied head is counted once."""
        heads, width = self.head_dim * self.heads, self.width
        qkv, up = heads + 2 * self.head_dim * self.kv_heads, self.mlp_width * (2 if self.mlp == "gated" else 1)
        norm = width * (2 if self.norm == "layer" else 1)
        matrices = width * (qkv + heads + up + self.mlp_width)
        biases = qkv * self.qkv_bias + width * self.output_bias + (up + width) * self.mlp_bias
        layer = matrices + biases + 2 * norm + 2 * self.head_dim * self.qk_norm
        embedded = self.vocab_size * (1 if self.tied else 2) + self.max_positions * (self.positions == "learned")
        return self.layers * layer + width * embedded + norm

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "max_positions"):
            if values[name] < 1:
                raise ValueError(f"{self.family}: {name}={values[name]} must be at least 1.")
        if not self.rope_theta > 0:
            raise ValueError(f"{self.family}: rope_theta={self.rope_theta} must be above 0.")
        if not self.init_std >= 0:
            raise ValueError(f"{self.family}: initializer_range={self.init_std} must be 0 or more.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.family}: {self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly. "
                "Set the number of key-value heads to a divisor of the number of heads."
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"{self.family}: a head of {self.head_dim} channels cannot be rotated. Make head_dim even."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"{self.family}: a sliding window of {self.window} tokens sees nothing. Use 1 or more.")
