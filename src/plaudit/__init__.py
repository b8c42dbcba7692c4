"""Plaudit: reinforcement learning from human feedback, from one laptop CPU to many GPU nodes.

    from plaudit import load_settings, run
    result = run(load_settings("recipe.yaml", ["train.steps=100"]))
    result.metrics[-1], result.checkpoint("policy"), result.samples

Names are imported when they are first used: `import plaudit` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plaudit.algorithms import ALGORITHMS, Algorithm, Objective, PolicyGradient, register_algorithm
    from plaudit.data.formats import register_dialect
    from plaudit.environments.base import Turn
    from plaudit.models.families import register_family
    from plaudit.rewards.rules import register_reward
    from plaudit.runs.pipeline import load_pipeline, run_pipeline
    from plaudit.runs.records import Run
    from plaudit.runs.start import run
    from plaudit.settings.recipes import load_settings
    from plaudit.settings.tree import Settings, SettingsError

_PLACES = {
    "ALGORITHMS": "algorithms",
    "Algorithm": "algorithms",
    "Objective": "algorithms",
    "PolicyGradient": "algorithms",
    "register_algorithm": "algorithms",
    "run": "runs.start",
    "register_dialect": "data.formats",
    "Turn": "environments.base",
    "register_family": "models.families",
    "load_pipeline": "runs.pipeline",
    "run_pipeline": "runs.pipeline",
    "load_settings": "settings.recipes",
    "register_reward": "rewards.rules",
    "Run": "runs.records",
    "Settings": "settings.tree",
    "SettingsError": "settings.tree",
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Objective",
    "PolicyGradient",
    "Run",
    "Settings",
    "SettingsError",
    "Turn",
    "load_pipeline",
    "load_settings",
    "register_algorithm",
    "register_dialect",
    "register_family",
    "register_reward",
    "run",
    "run_pipeline",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"plaudit.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'plaudit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
