"""Settings of rewards and of their shaping. What they do is in `rules.py`, `weighted.py`, `judge.py`, `shaping.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = ("score", "penalty", "mask")


@dataclass
class RewardSettings:
    """One reward of a run. A run has a list of them; their weighted sum is the raw score."""

    kind: str = "judge"
    """"judge" (a reward model), "function" (your Python function) or the name of a rule, such as "gsm8k"."""
    name: str = ""
    """What its part is called in metrics and samples; empty: the rule's or function's own name, or "judge"."""
    weight: float = 1.0
    """Factor in the sum. With a weight of 0 it is computed and shown, and counts for nothing."""
    path: str = ""
    """Checkpoint of the judge; empty in a pipeline: the judge trained there."""
    function: str = ""
    """The function, for kind "function": "file.py:name" or "package.module:name"."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments passed to the rule or function at every call."""
    deadline: float = 60.0
    """Seconds that one call may take where it can be interrupted: async functions, and sync ones with thread=true."""
    thread: bool = False
    """Call a sync function in a thread, for functions that wait (a network, a subprocess). It must be thread-safe."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight={self.weight} of reward {self.name or self.kind!r} must be a finite number.")
        if not self.deadline > 0:
            raise ValueError(f"deadline={self.deadline} of reward {self.name or self.kind!r} must be above 0 seconds.")
        if self.kind == "function" and not self.function:
            raise ValueError("A reward of kind 'function' needs function='file.py:name' or 'package.module:name'.")
        if self.kind != "function" and self.function:
            raise ValueError(f"function={self.function!r} is read for kind 'function' only, not for {self.kind!r}.")
        if self.kind != "judge" and self.path:
            raise ValueError(f"path={self.path!r} is read for kind 'judge' only, not for {self.kind!r}.")


@dataclass
class ShapingSettings:
    """From the raw score to the reward: min(max((score + shift) * scale, -clip), clip)."""

    scale: float = 1.0
    """Factor, after the shift."""
    shift: float = 0.0
    """Added first. Minus the judge's mean makes rewards centred."""
    clip: float | None = None
    """Largest size of the reward, on both sides; null: no limit."""
    unfinished: str = "score"
    """Answers cut off by length: "score" as they are, "penalty" (a fixed reward) or "mask" (out of the loss)."""
    unfinished_penalty: float = -1.0
    """The reward of an unfinished answer with unfinished="penalty", as it stands: not shifted, scaled or clipped."""

    def __post_init__(self) -> None:
        if self.unfinished not in UNFINISHED:
            raise ValueError(f"unfinished={self.unfinished!r} is not one of {', '.join(UNFINISHED)}.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0. For no limit set clip=null.")
        for name in ("scale", "shift", "unfinished_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number.")
