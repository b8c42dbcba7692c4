"""Settings of rollout: what is sampled, and how much of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RolloutSettings:
    """How answers are drawn from the policy."""

    prompts_per_step: int = 32
    """Prompts of one training step (each has the method's number of samples)."""
    max_tokens: int = 64
    """Longest answer, in tokens."""
    min_tokens: int = 0
    """The answer may not end before; biases ratios unless algorithm.recompute_old is set."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer."""
    slots: int = 64
    """Sequences decoded side by side."""
    max_lag: int = 0
    """Policy versions that a sample may be old; 0 is synchronous."""
    max_redraw: float = 3.0
    """Prompts drawn for a step, at most, as a multiple of prompts_per_step, to replace groups without a signal."""
    max_failed: float = 0.1
    """Share of a step's rewards that may fail before the run stops."""
