"""Evaluate what a pipeline trained: the newest policy and judge below a folder, and the policy that RL began with.

    python scripts/evaluate.py --config configs/model_config.yaml --model_dir outputs --test_data T.json

    perplexity   of the test data's answers (of pairs: the chosen ones)
    generation   answers to its prompts, with the judge's reward and the KL from the first policy where there are such
    preference   how often the judge orders its pairs as they are labelled
    comparison   how often the policy's answers beat the first policy's, by the judge
    all          whatever test data and models allow; what they do not is said

The work is `plaudit evaluate`'s; this script finds the models and sees what the rows are good for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from plaudit.commands.cli import HomePath, plain_errors

KINDS = {
    "perplexity": ("perplexity",),
    "generation": ("generation", "reward", "kl"),
    "preference": ("preference",),
    "comparison": ("comparison",),
}
REQUIRED = {name: kinds[0] for name, kinds in KINDS.items()}
"""The kind without which an evaluation type says nothing; the others come where they can."""


@dataclass(frozen=True)
class Found:
    """Checkpoints below a folder; the first policy is of the same pipeline as the newest."""

    policy: Path | None = None
    first: Path | None = None
    judge: Path | None = None


def find_models(folder: Path) -> Found:
    """The newest whole checkpoints, by the time at which they were committed."""
    from plaudit.loop.checkpoint import CheckpointError, Store

    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give the one that holds the trained models")
    made: dict[str, list[tuple[float, Path, Path]]] = {"policy": [], "judge": []}
    for state in folder.rglob("checkpoints/state"):
        if any(part.startswith(".") for part in state.relative_to(folder).parts):
            continue  # a run that another is taking the place of
        store = Store(state.parent)
        try:
            name, _ = store.latest()
        except CheckpointError as error:
            click.echo(f"left out: {error}")
            continue
        for role, runs in made.items():
            if (store.folder / role / name).is_dir():
                runs.append(((state / name).stat().st_mtime, store.folder.parent.parent, store.folder / role / name))
    policies, judges = sorted(made["policy"]), sorted(made["judge"])
    if not policies and not judges:
        raise FileNotFoundError(f"no checkpoint of a policy or a judge lies below {folder}; train first")
    if not policies:
        return Found(judge=judges[-1][2])
    _, pipeline, policy = policies[-1]
    first = next(path for _, home, path in policies if home == pipeline)
    same = [path for _, home, path in judges if home == pipeline] or [path for *_, path in judges]
    return Found(policy=policy, first=first if first != policy else None, judge=same[-1] if same else None)


def served(source: str, data: Any) -> tuple[list[str], dict[str, str]]:
    """Which of demonstrations, preferences and prompts the first row of a file gives, and why not the others."""
    from plaudit.data.fields import DataError
    from plaudit.data.formats import demonstration_of, preference_of, sample
    from plaudit.data.read import read_rows

    where, row = next(read_rows(source, split=data.split))
    records = {"demonstrations": demonstration_of, "preferences": preference_of, "prompts": lambda read: read}
    gives: list[str] = []
    reasons: dict[str, str] = {}
    for kind, record in records.items():
        try:
            record(sample(row, kind=kind, where=where, dialect=data.dialect, columns=data.columns)[0])
            gives.append(kind)
        except DataError as error:
            reasons[kind] = str(error)
    return gives, reasons


def settings_of(config: Path, overrides: Sequence[str]) -> Any:
    """Evaluation settings as the pipeline reads and samples, with its `evaluation` section and overrides over that."""
    from plaudit.evaluate.settings import BeforeAfterSettings, EvaluationSettings
    from plaudit.runs.pipeline import load_pipeline, merged
    from plaudit.settings.recipes import load_tree

    pipeline = load_pipeline(config)
    from plaudit.runs.pipeline import load_plugins

    load_plugins(pipeline)
    recipes = [merged(pipeline.shared, stage) for stage in pipeline.stages.values()]
    given: dict[str, Any] = {"data": _reading(recipes[0].get("data") or {}), "sampling": _sampling(recipes)}
    if pipeline.evaluation is not None:
        given = merged(given, _differing(pipeline.evaluation, BeforeAfterSettings()))
        given.pop("examples", None)
    return load_tree(EvaluationSettings, given, overrides)


def _reading(data: Mapping[str, Any]) -> dict[str, Any]:
    training = ("train", "validation", "limit", "shuffle")
    return {key: value for key, value in data.items() if key not in training}


def _sampling(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As the last stage that samples, which is what it was trained for."""
    rollout = next((r["rollout"] for r in reversed(recipes) if r.get("rollout")), {})
    return {key: rollout[key] for key in ("max_tokens", "temperature", "stop") if key in rollout}


def _differing(settings: Any, plain: Any) -> dict[str, Any]:
    from plaudit.settings.tree import to_plain

    return {key: value for key, value in to_plain(settings).items() if value != to_plain(plain)[key]}


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@click.option("--config", type=HomePath(path_type=Path), required=True, help="The pipeline that trained the models.")
@click.option("--model_dir", type=HomePath(path_type=Path), required=True, help="Folder to look for models in.")
@click.option("--eval_type", type=click.Choice([*KINDS, "all"]), default="all", show_default=True)
@click.option(
    "--test_data", required=True, multiple=True, help="Held-out rows in any dialect; repeat for several files."
)
@click.option("--output", type=HomePath(path_type=Path), help="Folder of the results; default: MODEL_DIR/evaluation.")
@click.option("--traceback", is_flag=True, help="Show the whole traceback of an error.")
@click.argument("overrides", nargs=-1)
def main(
    config: Path,
    model_dir: Path,
    eval_type: str,
    test_data: tuple[str, ...],
    output: Path | None,
    traceback: bool,
    overrides: tuple[str, ...],
) -> None:
    with plain_errors(output or model_dir / "evaluation"):
        from plaudit.evaluate.evaluation import evaluate
        from plaudit.monitor.console import Reporter

        settings = settings_of(config, overrides)
        found = find_models(model_dir)
        for label, path in (("policy", found.policy), ("first policy", found.first), ("judge", found.judge)):
            click.echo(f"{label}: {path or 'none found'}")
        settings.model, settings.judge = _text(found.policy), _text(found.judge)
        settings.reference = settings.other = _text(found.first)
        settings.output = str(output or model_dir / "evaluation")
        reasons: dict[str, str] = {}
        for source in test_data:
            gives, why = served(source, settings.data)
            reasons |= why
            for kind in gives:
                setattr(settings, kind, [*(getattr(settings, kind) or []), source])
        settings.kinds = choose(settings, eval_type, reasons)
        reporter = Reporter()
        reporter.show(evaluate(settings, reporter=reporter).table())
        click.echo(f"results: {settings.output}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def choose(settings: Any, eval_type: str, reasons: Mapping[str, str]) -> list[str]:
    """The kinds that can be done; those that cannot are said, and are an error where they were asked for by name."""
    chosen: list[str] = []
    for name in KINDS if eval_type == "all" else (eval_type,):
        if lacking := settings.lacking(REQUIRED[name]):
            message = f"{name} is not possible: it needs {' and '.join(lacking)}"
            if eval_type != "all":
                raise ValueError("\n  ".join([message, *(reasons[kind] for kind in lacking if kind in reasons)]))
            click.echo(message)
        else:
            chosen += [kind for kind in KINDS[name] if not settings.lacking(kind)]
    if not chosen:
        raise ValueError("\n  ".join(["nothing can be evaluated", *reasons.values()]))
    return chosen


if __name__ == "__main__":
    main()
