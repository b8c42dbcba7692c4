"""Settings of learning: optimizer, schedule, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

PRECISIONS = ("float32", "bfloat16")


@dataclass
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices only, never on norms and biases."""
    schedule: str = "linear"
    """constant, linear (to min_ratio) or cosine (to min_ratio)."""
    warmup: float = 0.0
    """Share of all steps over which the rate rises from 0."""
    min_ratio: float = 0.0
    """The rate at the end, as a share of learning_rate."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 turns it off."""

    def __post_init__(self) -> None:
        self.betas = cast(Any, tuple(self.betas))  # a list, where it comes from a file; `check` counts them


@dataclass
class LearnSettings:
    """How a batch becomes gradients. None but the precision changes the gradient."""

    precision: str = "float32"
    """Of weights and activations: float32, or bfloat16 with float32 masters and moments in the optimizer, which is
    faster where the device multiplies bfloat16: GPUs, and x86 processors with AVX-512."""
    micro_tokens: int = 8192
    """Tokens in one forward and backward pass; a step is cut to fit and accumulated. A prompt that a pass computes once
    counts once on the CPU, where its answers read it in place."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone for the backward pass, and compute the layer again there: less memory, a third more
    work, the same gradient."""
    score_tokens: int = 16384
    """Tokens in one forward pass without gradients."""
    share_prefixes: bool = True
    """Rows that begin alike, such as the answers to one prompt and both of a pair, compute that part once in a pass."""
    max_skipped: int = 3
    """This many steps in a row with a non-finite loss or gradient end the run."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision} is not one of {', '.join(PRECISIONS)}")


@dataclass
class ReferenceSettings:
    """The frozen model that the policy is kept close to."""

    path: str | None = None
    """Where it is loaded from, a model with the policy's tokenizer; null takes the policy as it starts."""
    ema: float = 0.0
    """After every step, move the reference this far towards the policy (0.001 is usual); 0 keeps it frozen."""
    once: bool = False
    """Offline methods: compute its columns once before training, not in every epoch."""
    offload: bool = False
    """On GPUs: it waits in host memory, and takes the device's only while a step's log-probs are taken."""


@dataclass
class CriticSettings:
    """The value model."""

    path: str | None = None
    """Where it is loaded from, a model with the policy's tokenizer; null takes the checkpoint of a judge with it if
    there is one, else the policy's."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(learning_rate=1e-5))
