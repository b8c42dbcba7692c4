"""Run several stages from one recipe. Each stage is a separate run that starts from the results of earlier stages.

    shared + stages.sft    -> policy
           + stages.reward -> judge
           + stages.ppo (policy, judge) -> policy -> evaluation

A stage takes the newest policy as `model.path` and the newest judge as the path of its judge rewards, unless its recipe
names others. Every stage's settings are checked before the first one starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.evaluate.settings import BeforeAfterSettings
from plaudit.settings.recipes import (
    at_length,
    check_known,
    load_settings,
    load_tree,
    nested,
    parse_override,
    read_yaml,
)
from plaudit.settings.tree import Settings, SettingsError, to_plain
from plaudit.support import plugins
from plaudit.support.fields import shown
from plaudit.support.paths import at_home

if TYPE_CHECKING:
    from plaudit.evaluate.before_after import BeforeAfter
    from plaudit.monitor.console import Reporter
    from plaudit.runs.records import Run
    from plaudit.types import Role


@dataclass
class PipelineSettings:
    """A pipeline's recipe."""

    name: str = "pipeline"
    """Name of the pipeline's folder under `output`, which holds a run per stage."""
    output: str = "runs"
    """Folder that holds the pipeline's folder."""
    resume: str | None = None
    """latest: skip finished stages and continue an interrupted one."""
    overwrite: bool = False
    """Replace finished stages."""
    only: list[str] = field(default_factory=list)
    """Run only these stages, with results of earlier runs of the other stages. Empty: run all."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Settings for every stage, unless the stage itself sets them."""
    stages: dict[str, Any] = field(default_factory=dict)
    """{stage: its recipe}, in order; a stage's name is also its method, unless its recipe sets `method`."""
    evaluation: BeforeAfterSettings | None = None
    """Compare the first policy with the last one at the end."""


OF_RUNS = {f.name for f in dataclasses.fields(Settings)} - {f.name for f in dataclasses.fields(PipelineSettings)}
"""Sections and keys of a run's settings; an override of one applies to every stage."""


@dataclass(frozen=True)
class PipelineRun:
    """The results of a pipeline."""

    folder: Path
    stages: Mapping[str, Run]
    evaluation: BeforeAfter | None


def load_pipeline(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> PipelineSettings:
    """Load a pipeline's settings. Overrides begin with a stage's name, `shared`, `evaluation`, a key of the pipeline,
    or a section of a run (`runtime=ray`), which then applies to every stage."""
    tree = dict(recipe) if isinstance(recipe, Mapping) else read_yaml(recipe)
    stages = tree.get("stages")
    if not isinstance(stages, Mapping) or not stages:
        raise SettingsError("a pipeline needs `stages`: a mapping from stage names to recipes, such as {sft: {...}}")
    tree["stages"] = {name: _part(f"stages.{name}", stage) for name, stage in stages.items()}
    tree |= {part: _part(part, tree[part]) for part in ("shared", "evaluation") if tree.get(part)}
    own: list[str] = []
    for text in overrides:
        override = parse_override(text)
        head, _, rest = override.key.partition(".")
        if head in stages and rest:
            tree["stages"][head] = merged(tree["stages"][head], nested(rest, override.value))
        elif head == "shared" and rest:
            tree["shared"] = merged(tree.get("shared") or {}, nested(rest, override.value))
        elif head in OF_RUNS:
            for name, stage in tree["stages"].items():
                tree["stages"][name] = merged(stage, nested(override.key, override.value))
        else:
            own.append(text)
    settings = load_tree(PipelineSettings, tree, own, free=("shared", "stages"))
    for name in settings.only:
        check_known(name, stages, what="stage")
    settings.output = str(at_home(settings.output))
    return settings


def _part(name: str, section: Any) -> dict[str, Any]:
    """Return a part's settings; {} for an empty part. Raises SettingsError if it is not a mapping."""
    if not isinstance(section or {}, Mapping):
        raise SettingsError(f"{name}={shown(section)} must be a mapping of settings")
    return at_length(section or {})


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; `over` wins."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def load_plugins(settings: PipelineSettings) -> None:
    """Load the plugins of all recipes, since the data may be in a dialect that a plugin defines."""
    for recipe in (settings.shared, *settings.stages.values()):
        plugins.load_plugins(recipe.get("plugins") or [])


def run_pipeline(settings: PipelineSettings, *, reporter: Reporter | None = None) -> PipelineRun:
    """Run the stages in order and the evaluation at the end."""
    from plaudit.monitor.console import Reporter
    from plaudit.runs.records import Run
    from plaudit.runs.start import run

    reporter = reporter or Reporter()
    folder = Path(settings.output) / settings.name
    for _ in _stages(settings, folder, made=to_come):
        pass  # every stage's settings are read and checked before the first one starts
    names = list(settings.stages)
    wanted = settings.only or names
    for name, stage in _stages(settings, folder, made=lambda run, role: str(run.checkpoint(role)), wanted=wanted):
        reporter.say(f"\n== {name} ({names.index(name) + 1} of {len(names)})")
        run(stage, reporter=reporter)
    runs = {name: Run(folder / name) for name in names if (folder / name).exists()}
    evaluation = None
    if settings.evaluation is not None and not settings.only:
        evaluation = _evaluate(settings, folder, runs, reporter)
    return PipelineRun(folder, runs, evaluation)


def _stages(
    settings: PipelineSettings, folder: Path, *, made: Any, wanted: Sequence[str] | None = None
) -> Iterator[tuple[str, Settings]]:
    """Yield the checked settings of each wanted stage."""
    for name, recipe in recipes_of(settings, folder, made=made, wanted=wanted):
        yield name, _loaded(settings, folder, name, recipe)


def to_come(run: Run, role: Role) -> str:
    """Return a placeholder for the path of a model that an earlier stage will train."""
    return f"<the {role} of {run.folder.name}>"


def recipes_of(
    settings: PipelineSettings, folder: Path, *, made: Callable[[Run, Role], str], wanted: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the recipe of each wanted stage; `made(run, role)` returns the path of an earlier stage's model."""
    from plaudit.algorithms import ALGORITHMS
    from plaudit.runs.records import Run
    from plaudit.types import Role

    producer: dict[Role, Run] = {}
    for name, stage in settings.stages.items():
        recipe = merged(settings.shared, stage)
        method = str(recipe.setdefault("method", name))
        if wanted is None or name in wanted:
            yield name, _wired(recipe, {r: made(run, r) for r, run in producer.items()})
        trained = ALGORITHMS[method]().losses() if method in ALGORITHMS else {}
        for role in trained:
            producer[Role(role)] = Run(folder / name)


def _loaded(settings: PipelineSettings, folder: Path, name: str, recipe: dict[str, Any]) -> Settings:
    """Return the checked settings of one stage. A SettingsError begins with the stage's name."""
    try:
        return load_settings(placed(settings, folder, name, recipe))
    except SettingsError as error:
        raise SettingsError(f"stage {name}: {error}") from error


def placed(settings: PipelineSettings, folder: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's recipe with name, output, resume and overwrite. SettingsError if it sets another value."""
    where = {"name": name, "output": str(folder), "resume": settings.resume, "overwrite": settings.overwrite}
    default = to_plain(Settings())
    for key, value in where.items():
        if (own := recipe.get(key)) not in (None, default[key], value):
            raise SettingsError(
                f"{key}={own} cannot be set for one stage: set {key} of the whole pipeline, which is {value}"
            )
    return recipe | where


def _wired(recipe: dict[str, Any], paths: Mapping[Any, str]) -> dict[str, Any]:
    """Return a stage's recipe with paths of earlier stages' models filled in, where it names none itself."""
    from plaudit.types import Role

    recipe = merged({}, recipe)
    model = dict(recipe.get("model") or {})
    if Role.POLICY in paths and not model.get("path") and not model.get("config"):
        recipe["model"] = model | {"path": paths[Role.POLICY]}
    rewards = [dict(reward) for reward in recipe.get("rewards") or []]
    for reward in rewards:
        if reward.get("kind", "judge") == "judge" and not reward.get("path") and Role.JUDGE in paths:
            reward["path"] = paths[Role.JUDGE]
    if rewards:
        recipe["rewards"] = rewards
    return recipe


def _evaluate(
    settings: PipelineSettings, folder: Path, runs: Mapping[str, Run], reporter: Reporter
) -> BeforeAfter | None:
    """Compare the first policy with the last one, or a single one with the model that it began from; return None if
    there is no such model."""
    from plaudit.evaluate.before_after import before_after
    from plaudit.runs.records import SETTINGS

    assert settings.evaluation is not None
    policies = [run for run in runs.values() if (run.folder / "checkpoints" / "policy").exists()]
    judges = [run for run in runs.values() if (run.folder / "checkpoints" / "judge").exists()]
    began = read_yaml(policies[0].folder / SETTINGS)["model"]["path"] if len(policies) == 1 else None
    if len(policies) < 2 and began is None:
        reporter.say("evaluation: one policy was trained, so there is nothing to compare it with")
        return None
    judge = str(judges[-1].checkpoint("judge")) if judges else None
    reporter.say("\n== evaluation")
    before, after = began or str(policies[0].checkpoint()), str(policies[-1].checkpoint())
    return before_after(before, after, judge=judge, settings=settings.evaluation, out=folder, reporter=reporter)


__all__ = ["PipelineRun", "PipelineSettings", "Settings", "load_pipeline", "merged", "run_pipeline"]
