"""Settings of learning: optimizer, schedule, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from plaudit.support.fields import setting

PRECISIONS = ("float32", "bfloat16")
SCORED = 2
"""A pass without gradients takes this many times micro_tokens, since it keeps nothing for a backward pass."""


@dataclass
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    learning_rate: float = setting(1e-5, above=0)
    """Highest rate of the schedule."""
    betas: tuple[float, float] = setting((0.9, 0.95), count=2, least=0, below=1)
    """Decay of the running means of gradients and of their squares."""
    eps: float = setting(1e-8, above=0)
    """Added to the divisor of an update, so that a weight without a gradient is not divided by 0."""
    weight_decay: float = setting(0.0, least=0)
    """Weight decay of matrices; norms and biases have none."""
    schedule: str = setting("linear", choices=("constant", "linear", "cosine"))
    """How the rate falls to min_ratio."""
    warmup: int | float | str = setting(0.0, least=0, below=1, form="NUMBER steps")
    """Steps over which the rate rises from 0: a share of all steps, or `NUMBER steps`."""
    min_ratio: float = setting(0.0, least=0)
    """Rate at the end, as a share of learning_rate."""
    max_gradient_norm: float = setting(1.0, least=0)
    """Largest norm of the gradient, which is scaled down to it; 0 sets no limit."""

    def __post_init__(self) -> None:
        self.betas = cast(Any, tuple(self.betas))  # a list if it was read from a file


@dataclass
class LearnSettings:
    """How a batch becomes gradients. Only the precision changes the gradient."""

    precision: str = setting("float32", choices=PRECISIONS)
    """Precision of weights and activations. With bfloat16 the optimizer keeps float32 masters and moments. It is faster
    on devices that multiply bfloat16: GPUs, and x86 processors with AVX-512."""
    micro_tokens: int = setting(8192, least=1, unit="tokens")
    """Most tokens of one forward and backward pass (micro-batch); gradients of a step's passes add up. On the CPU, a
    prompt that several answers share counts once. A pass without gradients takes twice as many tokens."""
    activation_checkpointing: bool = False
    """Keep only each layer's input, and compute the layer again in the backward pass: less memory, a third more work,
    the same gradient."""
    rollback_rate: float | None = setting(0.5, above=0, most=1)
    """Factor of all learning rates once the run has gone back to its last sound checkpoint. It goes back once: after
    three steps in a row without a finite loss or gradient, or if weights are not finite. Null ends the run instead."""

    @property
    def score_tokens(self) -> int:
        """Tokens of a pass without gradients."""
        return SCORED * self.micro_tokens


@dataclass
class ReferenceSettings:
    """The frozen model that the policy is kept close to, or the teacher of `distill`."""

    path: str | None = None
    """Checkpoint of the reference or teacher, of any size, with the policy's tokenizer. Null takes the policy as it
    starts; `distill` needs a path."""
    ema: float = setting(0.0, least=0, most=1)
    """After every step, move the reference by this share of the way towards the policy (0.001 is usual). 0 keeps it
    frozen, as TRL and InstructGPT do."""


@dataclass
class CriticSettings:
    """The value model."""

    path: str | None = None
    """Checkpoint of the critic, with the policy's tokenizer. Null takes the first judge that has this tokenizer, or
    else the policy."""
    lora_rank: int = setting(0, least=0)
    """Rank of the critic's adapters, which are trained with its scalar head; 0 trains the whole critic. Alpha and
    targets are those of `model.lora`."""
    learning_rate: float = setting(1e-5, above=0)
    """Highest rate of the critic's schedule, usually above the policy's. The rest is as in `optimizer`."""
