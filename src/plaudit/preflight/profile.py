"""Seconds a machine takes for each kind of work, measured or by data sheet: coefficients, kept as JSON. No torch.

a pass    = a + b tokens + c sum of squared lengths + d tokens that pass the head
decoding  = alpha steps + beta rows + gamma context, summed over steps
a sum     = latency + bytes / bandwidth
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plaudit.preflight.work import Shape
from plaudit.settings.tree import SettingsError


@dataclass(frozen=True)
class Curve:
    """Seconds as a sum of coefficients times amounts, on one thread and on `threads`. A device counts as one thread."""

    one: tuple[float, ...]
    all: tuple[float, ...]
    threads: int = 1

    def seconds(self, numbers: Sequence[float], threads: int) -> float:
        """Return the seconds that amounts (`numbers`, one for each coefficient) take on `threads` threads. Between one
        and `self.threads` Amdahl's law gives them; threads beyond `self.threads` do not help."""
        alone, together = (sum(map(float.__mul__, map(float, numbers), way)) for way in (self.one, self.all))
        if threads <= 1 or self.threads <= 1:
            return alone
        spread = (alone - together) / (1 - 1 / self.threads)
        return alone - spread + spread / min(threads, self.threads)


@dataclass(frozen=True)
class Link:
    """A link between processes: moving bytes takes latency + bytes / bandwidth."""

    latency: float
    bandwidth: float
    """Bytes per second."""

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Profile:
    """The costs of one machine for the models of one recipe."""

    hardware: str
    devices: int
    """Cores or GPUs of this machine."""
    gpu: bool
    capacity: float
    """Bytes of a GPU's memory, or of the machine's."""
    passes: Mapping[str, Curve]
    """Seconds of passes by role and kind: `policy/train`, `reference/score`, `judge 0/score`."""
    updates: Mapping[str, float]
    """Seconds of an optimizer step, by role."""
    decode: Curve
    rewards: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """{reward: (seconds of a step's calls, seconds per answer)}, for rewards other than judges."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """`all_reduce` and `all_gather` between ranks, `store` to rollout workers."""
    call: float = 0.003
    """Seconds of a call to another process."""
    crowded: float = 1.0
    """Factor by which work takes longer while every core works."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes. `process`: a process without a model. `ray`: what Ray adds to it. `token`: activations per token of a pass
    with gradients of the first trained model. `peak`: all work in one process."""
    items: int = 0
    """Number of prompts, pairs or demonstrations in the data."""
    prompts: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    """Lengths of recorded answers in tokens; () if the run has none yet."""
    rows: tuple[Shape, ...] = ()
    notes: tuple[str, ...] = ()
    """What disturbed the measuring, and what was not measured."""
    busy: bool = False
    """True if other programs took so much of the cores that placements cannot be ranked."""

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)


def read_profile(path: Path) -> Profile:
    """Return the profile in a file. Raises SettingsError for a file that is not a profile."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _of(found)
    except FileNotFoundError:
        raise SettingsError(
            f"there is no profile {path}: `plaudit profile RECIPE` measures one in a minute; or give --profile FILE"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError(f"{path} is not a profile that `plaudit profile` wrote ({error}): measure again") from None


def _of(found: dict[str, Any]) -> Profile:
    def curve(one: dict[str, Any]) -> Curve:
        return Curve(tuple(one["one"]), tuple(one["all"]), one["threads"])

    read = {
        "passes": {name: curve(one) for name, one in found["passes"].items()},
        "decode": curve(found["decode"]),
        "links": {name: Link(**one) for name, one in found["links"].items()},
        "rewards": {name: (one[0], one[1]) for name, one in found["rewards"].items()},
        "rows": tuple((prompt, tuple(answers)) for prompt, answers in found["rows"]),
    }
    read |= {name: tuple(found[name]) for name in ("prompts", "answers", "notes")}
    return Profile(**{**found, **read})
