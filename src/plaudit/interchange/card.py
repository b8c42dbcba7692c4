"""Write the card of a shared model: what it was made from and how, what was measured, under which licence.

    run -> the runs that it began from, to a model that is no run -> base and its licence
    settings.yaml, data.json, metrics.jsonl, evaluation.json -> README.md with the hub's front matter

What no file says is named as unknown, and never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plaudit.evaluate.evaluation import EVALUATIONS, RESULT
from plaudit.models.files import read_json
from plaudit.models.folders import GGUF_NOTES, local_folder, run_of
from plaudit.monitor.sinks import read_jsonl
from plaudit.settings.recipes import read_yaml
from plaudit.support.paths import at_home, is_here

CARD = "README.md"
FIGURES = ("reward/", "kl", "loss/", "accuracy", "validation/", "entropy", "length")
"""A card shows the run's figures whose names begin with one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of the runs that made the model; a card lists them oldest first."""

    folder: Path
    settings: dict[str, Any]
    data: dict[str, Any]
    figures: dict[str, float]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the files say about a model. `base`: the model from which its first run began; None for fresh weights."""

    name: str
    model_type: str
    judge: bool
    stages: tuple[Stage, ...]
    base: str | None
    base_name: str | None
    license: str | None
    rounding: tuple[str, ...]
    """Quantised types of the base's weights."""
    evaluation: dict[str, Any]

    @property
    def unknown(self) -> list[str]:
        """Names of what no file says, and what a person must add before sharing the model."""
        whose = f"the licence of the base model {self.base_name or self.base}" if self.base else "a licence"
        missing = [] if self.license else [f"{whose}: give it with --license"]
        return missing if self.stages else [*missing, "how it was trained: it is no run of Plaudit"]

    def text(self, *, file: str | None = None, adapter: bool = False) -> str:
        """Return the card in Markdown. `file`: name of the GGUF file that it describes; `adapter`: only adapters."""
        from huggingface_hub import ModelCardData

        methods = [stage.settings["method"] for stage in self.stages]
        base = self.base if self.base is not None and not is_here(self.base) else None
        front = ModelCardData(
            license=self.license,
            base_model=base,
            library_name="gguf" if file else "peft" if adapter else "transformers",
            pipeline_tag="text-classification" if self.judge else "text-generation",
            tags=["plaudit", *dict.fromkeys(methods)],
        )
        lines = [
            "---",
            front.to_yaml(),
            "---",
            "",
            f"# {self.name}",
            "",
            self._summary(),
            "",
            "## Use",
            "",
            *_use(file, adapter, self.judge),
        ]
        for number, stage in enumerate(self.stages, 1):
            lines += ["", f"## Stage {number}: {stage.settings['method']}", "", *_about(stage)]
        if self.evaluation:
            lines += ["", "## Evaluation", "", "| figure | value |", "|---|---:|", *_rows(_measured(self.evaluation))]
        lines += ["", "## Licence", "", self._licence()]
        return "\n".join(lines) + "\n"

    def _summary(self) -> str:
        how = " then ".join(stage.settings["method"] for stage in self.stages)
        base = (
            f"`{self.base_name or self.base}`" if self.base else f"a fresh {self.model_type} without pretrained weights"
        )
        made = f"Trained from {base} by {how}, with Plaudit {version('plaudit')}." if how else f"A copy of {base}."
        if not self.rounding:
            return made
        types = ", ".join(self.rounding)
        return f"{made} The base's weights were quantised ({types}), and carry the rounding."

    def _licence(self) -> str:
        if self.license:
            return f"`{self.license}`{', of the base model' if self.base else ''}. The data may have terms of its own."
        if self.base:
            return f"Not known: the files of the base model `{self.base_name or self.base}` name none. Its terms apply."
        return "None was chosen."


def card_of(model: str, folder: Path, *, license: str | None = None) -> Card:
    """Collect what the files of a model, its runs and its base say."""
    stages: list[Stage] = []
    evaluation: dict[str, Any] = {}
    path: str | None = model
    while path is not None and (run := run_of(path)) is not None and (run / "settings.yaml").exists():
        if not stages:
            evaluation = _evaluation(run)
        stages.insert(0, _stage(run))
        path = _began(stages[0])
        if any(run == stage.folder for stage in stages[1:]):
            raise ValueError(f"{run} began from itself: its settings.yaml was changed")
    config = read_json(folder / "config.json")
    base = local_folder(path) if path is not None and is_here(path) else None
    notes = read_json(base / GGUF_NOTES) if base is not None and (base / GGUF_NOTES).exists() else {}
    return Card(
        name=at_home(model).absolute().name if stages or is_here(model) else model,
        model_type=str(config.get("model_type")),
        judge="Classification" in str(config.get("architectures")),
        stages=tuple(stages),
        base=path,
        base_name=f"{notes.get('name') or 'a GGUF file'} ({notes['file']})" if notes else None,
        license=license or notes.get("license") or _licence_of(base),
        rounding=tuple(notes.get("quantised", ())),
        evaluation=evaluation,
    )


def _licence_of(base: Path | None) -> str | None:
    """Return the licence that a model's own card names."""
    from huggingface_hub import ModelCard

    if base is None or not (base / CARD).exists():
        return None
    found = ModelCard.load(base / CARD, ignore_metadata_errors=True).data.to_dict().get("license")
    return str(found) if found else None


def _began(stage: Stage) -> str | None:
    """Return the model that a run began from: a path as it was written, from the folder where the run was started."""
    path: str | None = stage.settings.get("model", {}).get("path")
    if path is None or is_here(path) or "://" in path:
        return path
    there = Path(stage.data.get("started_in", ".")) / path
    return str(there) if is_here(str(there)) else path


def _stage(run: Path) -> Stage:
    metrics = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    last: dict[str, Any] = {}
    for record in metrics:
        last |= {name: value for name, value in record.items() if name.startswith(FIGURES)}
    return Stage(
        folder=run,
        settings=read_yaml(run / "settings.yaml"),
        data=read_json(run / "data.json") if (run / "data.json").exists() else {},
        figures={name: value for name, value in last.items() if isinstance(value, (int, float))},
        steps=max((record.get("step", 0) for record in metrics), default=0),
    )


def _evaluation(run: Path) -> dict[str, Any]:
    """Return the parts of a run's newest evaluation, or of its pipeline's if it is the last stage; {} if none."""
    own = sorted((run / EVALUATIONS).rglob(RESULT), key=lambda path: path.stat().st_mtime)
    if not own and (run.parent / RESULT).exists():
        stages = sorted(run.parent.glob("*/settings.yaml"), key=lambda path: path.stat().st_mtime)
        own = [run.parent / RESULT] if stages[-1].parent == run else []
    parts = read_json(own[-1]) if own else {}
    return {name: parts[name] for name in ("figures", "before", "after", "change", "judge") if parts.get(name)}


def _use(file: str | None, adapter: bool, judge: bool) -> list[str]:
    if file:
        return ["```", f"llama-cli -m {file} -cnv", "```"]
    kind = "SequenceClassification" if judge else "CausalLM"
    library, model = ("peft", "AutoPeftModelFor") if adapter else ("transformers", "AutoModelFor")
    load = [f"from {library} import {model}{kind}", f"model = {model}{kind}.from_pretrained(FOLDER)"]
    return ["```python", *load, "```"]


def _about(stage: Stage) -> Iterator[str]:
    settings = stage.settings
    yield f"{stage.steps:,} steps. Data:"
    yield ""
    yield "| source | for | rows |"
    yield "|---|---|---:|"
    for source in stage.data.get("sources", ()):
        yield f"| `{source['source']}` | {source['role']} | {source['kept']:,} |"
    if rewards := settings.get("rewards"):
        yield ""
        yield "Rewards: " + ", ".join(f"`{_reward(one)}` (weight {one.get('weight', 1)})" for one in rewards) + "."
    if stage.figures:
        yield ""
        yield "Figures of the last step that has them:"
        yield ""
        yield "| figure | value |"
        yield "|---|---:|"
        yield from _rows(stage.figures.items())
    yield ""
    yield "<details><summary>All settings</summary>"
    yield ""
    yield "```yaml"
    yield (stage.folder / "settings.yaml").read_text(encoding="utf-8").strip()
    yield "```"
    yield ""
    yield "</details>"


def _reward(one: dict[str, Any]) -> str:
    return str(one.get("path") or one.get("function") or one.get("kind"))


def _rows(figures: Any) -> Iterator[str]:
    for name, value in figures:
        yield f"| {name} | {value} |" if isinstance(value, str) else f"| {name} | {value:.4g} |"


def _measured(evaluation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures of an evaluation, or of its parts, with their intervals."""
    for name, value in evaluation.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, f"{value:.4g}"
        elif isinstance(value, dict) and "value" in value:
            low, high = value.get("low"), value.get("high")
            yield (
                name,
                f"{value['value']:.4g}"
                + (f" ({low:.4g} to {high:.4g})" if low is not None and high is not None else ""),
            )
        elif isinstance(value, dict):
            for inner, text in _measured(value):
                yield f"{name}: {inner}" if name != "figures" else inner, text
