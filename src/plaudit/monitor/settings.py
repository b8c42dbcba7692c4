"""Settings of what a run records beside its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from plaudit.support.fields import Section, nearest, setting

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "ray")
"""Services that a run may also log to."""
SIGNS = (
    *("entropy", "kl", "idle reward", "hacking", "length", "unfinished", "turns", "no calls", "bad calls"),
    *("equal groups", "empty", "clipping", "critic"),
    *("centring", "sampler", "failed rewards", "outage", "skipped", "halted", "starving", "idle rollout", "loss"),
    *("not finite", "memory", "misplanned"),
)
"""All signs that health warnings are about; the last three have no rule in rules.yaml."""


@dataclass
class LogSettings(Section):
    """Records of a run. Metrics are written at every step in any case."""

    samples_megabytes: float = setting(200.0, least=0)
    """Largest size of samples.jsonl in MB (online methods); to keep within it, only some answers are recorded."""
    trackers: dict[str, str] = field(default_factory=dict)
    """Also log to these projects, such as {wandb: chats}; the names are wandb, mlflow (an experiment), trackio,
    tensorboard (a folder in the run's) and ray (to Prometheus: what the figures' names there begin with)."""
    page: bool = True
    """Keep page.html in the run's folder up to date: curves, and what each worker does. Open it in a browser."""
    dismiss: list[str] = field(default_factory=list)
    """Health warnings that are neither shown nor recorded, by sign, such as [clipping]; docs/health.md lists them."""
    quiet: bool = False
    """Print nothing on the terminal; log.txt is still written."""

    def contradictions(self) -> Iterator[str]:
        yield from (f"dismiss has no {name!r}{nearest(name, SIGNS)}" for name in self.dismiss if name not in SIGNS)
        for name, project in self.trackers.items():
            if name not in TRACKERS:
                yield f"trackers has no {name!r}{nearest(name, TRACKERS)}"
            elif not project:
                yield f"trackers gives {name} no project: write {name}: NAME"
