"""Make a service: a learner in this process, or ranks of their own, and the base model to sample from.

checkpoint, settings -> base model, tokenizer, ThreadGroup or Ranks -> Service
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from plaudit.learn.settings import LearnSettings
from plaudit.models.load import load_tokenizer
from plaudit.models.mesh import Mesh, check_mesh
from plaudit.runtime.settings import NO_RAY, RuntimeSettings
from plaudit.settings.recipes import load_tree
from plaudit.support.fields import Section, check, leaves
from plaudit.support.paths import at_home
from plaudit.training_api.adapters import Adapters, base_model
from plaudit.training_api.ranks import Ranks, ThreadGroup
from plaudit.training_api.service import Service

READ = ("kind", "address", "num_training_workers", "mesh", "resources_per_worker", "backend", "max_failures_per_hour")
TIMEOUTS = ("start_timeout", "nodes_timeout", "collective_timeout", "heartbeat_timeout")
KEYS = ("learn.micro_tokens", *(f"runtime.{key}" for key in (*READ, *TIMEOUTS)))
"""Settings of runs that a service reads."""


@dataclass
class ServedSettings(Section):
    """Settings of runs that a service may be given too."""

    learn: LearnSettings = field(default_factory=partial(LearnSettings, micro_tokens=2048))
    """On a CPU as fast as the default of runs, in a third of the memory."""
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)

    def contradictions(self) -> Iterator[str]:
        pairs = zip(leaves(self), leaves(ServedSettings), strict=True)
        unread = [one.key for one, default in pairs if one.value != default.value and one.key not in KEYS]
        unread += [f"runtime.mesh.{axis}" for axis in self.runtime.mesh if axis not in ("data", "tensor")]
        yield from (f"{key} is not read by serve-training; it reads {', '.join(KEYS)}" for key in unread)
        yield from (f"runtime.{problem}" for problem in self.runtime.unread(replays=False))
        if self.runtime.kind == "ray" and find_spec("ray") is None:
            yield NO_RAY


def opened(
    model: str,
    words: Sequence[str],
    *,
    device: str,
    dtype: str,
    name: str,
    say: Callable[[str], None],
    **options: Any,
) -> Service:
    """Return the service: settings as `key=value`, and the options of the command. Raises ValueError."""
    settings = load_tree(ServedSettings, {}, words)
    check(settings)
    base = base_model(model, device=device, dtype=dtype)
    learn, runtime = replace(settings.learn, precision=dtype), settings.runtime
    check_mesh(base.config, Mesh(**runtime.axes))
    local = runtime.kind == "local"
    group = ThreadGroup(Adapters(base, learn)) if local else Ranks(model, device, learn, runtime, say)
    name = name or at_home(model).resolve().name
    return Service(group, base, load_tokenizer(model), name=name, say=say, **options)
