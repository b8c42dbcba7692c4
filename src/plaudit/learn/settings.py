"""Settings of learning: optimizer, schedule, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from plaudit.support.fields import setting

PRECISIONS = ("float32", "bfloat16")
SCORED = 2
"""A pass without gradients keeps no layer's input for a backward pass, and takes this many times the tokens."""


@dataclass
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    learning_rate: float = setting(1e-5, above=0)
    """The highest rate of the schedule."""
    betas: tuple[float, float] = setting((0.9, 0.95), count=2, least=0, below=1)
    """Decay of the running means of gradients and of their squares."""
    eps: float = setting(1e-8, above=0)
    """Added to the divisor; at 0 a weight without a gradient would be divided by it."""
    weight_decay: float = setting(0.0, least=0)
    """On matrices only, never on norms and biases."""
    schedule: str = setting("linear", choices=("constant", "linear", "cosine"))
    """How the rate falls to min_ratio."""
    warmup: float = setting(0.0, least=0, below=1)
    """Share of all steps over which the rate rises from 0."""
    min_ratio: float = setting(0.0, least=0)
    """The rate at the end, as a share of learning_rate."""
    max_gradient_norm: float = setting(1.0, least=0)
    """Gradients are scaled down to this norm; 0 turns it off."""

    def __post_init__(self) -> None:
        self.betas = cast(Any, tuple(self.betas))  # a list, where it comes from a file


@dataclass
class LearnSettings:
    """How a batch becomes gradients. Only the precision changes the gradient."""

    precision: str = setting("float32", choices=PRECISIONS)
    """Of weights and activations: float32, or bfloat16 with float32 masters and moments in the optimizer, which is
    faster where the device multiplies bfloat16: GPUs, and x86 processors with AVX-512."""
    micro_tokens: int = setting(8192, least=1, unit="tokens")
    """Tokens in one forward and backward pass; a step is cut to fit and accumulated. A prompt that a pass computes once
    counts once on the CPU, where its answers read it in place. A pass without gradients takes twice as many."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, and compute the layer again there: less memory, a third more
    work, the same gradient."""
    rollback_rate: float | None = setting(0.5, above=0, most=1)
    """Factor of all learning rates after the run went back to its last sound checkpoint, which it does once, after
    three steps in a row with a loss or gradient that is not finite, or after weights that are not; null: it ends."""

    @property
    def score_tokens(self) -> int:
        """Tokens of a pass without gradients."""
        return SCORED * self.micro_tokens


@dataclass
class ReferenceSettings:
    """The frozen model that the policy is kept close to."""

    path: str | None = None
    """Where it is loaded from, a model with the policy's tokenizer; null takes the policy as it starts."""
    ema: float = setting(0.0, least=0, most=1)
    """After every step, move the reference this far towards the policy (0.001 is usual); 0 keeps it frozen, as TRL
    and InstructGPT do: KL is then measured from one model."""
    offload: bool = False
    """On GPUs: it waits in host memory, and takes the device's only while a step's log-probs are taken."""


@dataclass
class CriticSettings:
    """The value model."""

    path: str | None = None
    """Where it is loaded from, a model with the policy's tokenizer; null takes the checkpoint of a judge with it if
    there is one, else the policy's."""
    lora_rank: int = setting(0, least=0)
    """Rank of its adapters, which are trained with its scalar head; 0 trains it whole. Their alpha and targets are
    `model.lora`'s."""
    learning_rate: float = setting(1e-5, above=0)
    """The highest rate of its schedule, usually above the policy's; all else of the optimizer is as in `optimizer`."""
