"""Which figures of a run are shown in lines, curves, pictures and tables, and by which labels (`figures.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Labels of one figure by where it is shown; "" where it is not. `figures.yaml` explains the fields."""

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
