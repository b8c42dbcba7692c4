"""The figures of a run that people are shown, and their words (`figures.yaml`): in lines, curves, pictures, tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Where one figure is shown, and its words there; "" where it is not. `figures.yaml` explains the fields."""

    name: str
    title: str = ""
    page: bool = False
    plot: str = ""
    unit: str = ""
    label: str = ""
    form: str = ""
    better: str = ""


FIGURES = tuple(
    Figure(name=name, **words)
    for name, words in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
)
