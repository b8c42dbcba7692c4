"""The RLHF pipeline of a configuration file on your own data, whole or one stage of it.

    --sft_data -> sft -> policy    --preference_data -> reward -> judge    --prompt_data -> rlhf -> policy

    python scripts/train.py --config configs/model_config.yaml --sft_data A --preference_data B --prompt_data C
    python scripts/train.py --config configs/model_config.yaml --stage sft --sft_data A sft.train.epochs=1

A stage starts from what the stages before it left in the output folder: runs lie in OUTPUT_DIR/logs/STAGE. Where the
configuration names no tokenizer for a fresh model, one is trained on the data into OUTPUT_DIR/logs/tokenizer.
The work is `plaudit pipeline`'s; this script only puts data, folders and distributed settings into its recipe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plaudit.commands.cli import HomePath, plain_errors

if TYPE_CHECKING:
    from plaudit.runs.pipeline import PipelineRun, PipelineSettings

STAGES = ("sft", "reward", "rlhf")
"""Those that have a flag for their data; a pipeline may have others, whose recipes name it."""
VOCABULARY = 4096
"""Tokens of a tokenizer that is trained here, where the model's keys name no vocab_size."""

Tree = dict[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])


def train_pipeline(
    config: Path,
    data: Mapping[str, str | None],
    *,
    stage: str = "all",
    dist_config: Path | None = None,
    output: Path = Path("outputs"),
    name: str = "logs",
    overrides: Sequence[str] = (),
) -> PipelineRun:
    """Run `stage` (or all) of the pipeline in `config`; `data` holds each stage's source, where one was given."""
    from plaudit.runs.pipeline import load_plugins, run_pipeline

    settings = prepare(
        config, data, stage=stage, dist_config=dist_config, output=output, name=name, overrides=overrides
    )
    load_plugins(settings)
    prepare_tokenizer(settings)
    return run_pipeline(settings)


def prepare(
    config: Path,
    data: Mapping[str, str | None],
    *,
    stage: str,
    dist_config: Path | None,
    output: Path,
    name: str,
    overrides: Sequence[str],
) -> PipelineSettings:
    """The pipeline's settings: the configuration, over it distributed settings, folders and data, then overrides."""
    from plaudit.runs.pipeline import load_pipeline, merged
    from plaudit.settings.recipes import check_known, read_yaml

    given = read_yaml(config)
    given["stages"] = {key: dict(recipe or {}) for key, recipe in dict(given.get("stages") or {}).items()}
    stages: dict[str, Tree] = given["stages"]
    spread = distributed(dist_config)
    resume = spread.pop("resume", None)
    for key, source in data.items():
        if source is not None:
            check_known(key, stages, what="stage")
            stages[key] = merged(stages[key], {"data": {"train": source}})
    given["stages"] = {key: merged(recipe, spread) for key, recipe in stages.items()}
    given |= {"output": str(output), "name": name}
    given |= {"resume": resume} if resume is not None else {}
    settings = load_pipeline(given, overrides)
    if stage != "all":
        check_known(stage, stages, what="stage")
        settings.only = [stage]
        settings.stages = dict(_needed(settings, stage))
    return settings


def distributed(path: Path | None) -> Tree:
    """What a distributed.yaml sets of every stage's run."""
    from plaudit.importers.distributed import recipe
    from plaudit.settings.recipes import read_yaml

    return {} if path is None else recipe(read_yaml(path))


def _needed(settings: PipelineSettings, stage: str) -> Iterator[tuple[str, Tree]]:
    """The stage, and before it those that have left a run, each with the data that it ran on."""
    from plaudit.runs.pipeline import merged
    from plaudit.settings.recipes import read_yaml

    for key, recipe in settings.stages.items():
        if key == stage:
            yield key, recipe
            return
        saved = Path(settings.output) / settings.name / key / "settings.yaml"
        if saved.exists():
            yield key, merged(recipe, {"data": {"train": read_yaml(saved)["data"]["train"]}})
        else:
            click.echo(f"stage {key} is left out: it has no run in {saved.parent}")


def prepare_tokenizer(settings: PipelineSettings) -> None:
    """Train a tokenizer for the first stage where its fresh model names none, and name it there.

    A stage that goes on, and one that would be refused because its run is there, keep the tokenizer that they have.
    """
    from plaudit.data.byte_pairs import train_tokenizer
    from plaudit.runs.pipeline import merged

    first, recipe = next(iter(settings.stages.items()))
    recipe = merged(settings.shared, recipe)
    model = dict(recipe.get("model") or {})
    if model.get("path") or model.get("tokenizer") or not model.get("config"):
        return
    home = Path(settings.output) / settings.name
    folder = home / "tokenizer"
    keys = dict(model["config"])
    vocabulary = int(keys.pop("vocab_size", VOCABULARY))  # small data may not give so many: the model follows
    started = (home / first).exists() and not settings.overwrite
    runs = not settings.only or first in settings.only
    if runs and not (started and folder.exists()):
        train_tokenizer(texts(settings), folder, vocabulary=vocabulary)
        click.echo(f"tokenizer: trained on the data, in {folder}")
    settings.stages[first] = recipe | {"model": model | {"config": keys, "tokenizer": str(folder)}}


def texts(settings: PipelineSettings) -> Iterator[str]:
    """Every text of the training data of all stages, prompts and answers joined as they will be read."""
    from plaudit.data.fields import DataError
    from plaudit.data.formats import sample
    from plaudit.data.read import scan_rows
    from plaudit.data.settings import sources
    from plaudit.runs.pipeline import merged
    from plaudit.settings.recipes import defaults
    from plaudit.settings.tree import SettingsError

    for key, stage in settings.stages.items():
        recipe = merged(settings.shared, stage)
        method, data = recipe.get("method", key), recipe.get("data") or {}
        try:
            kind = defaults(method).algorithm.data
        except SettingsError:
            continue  # the stage is refused
        for source in sources(data.get("train")):
            for where, row in scan_rows(source, split=data.get("split", "train")):
                try:
                    read, _ = sample(
                        row, kind=kind, where=where, dialect=data.get("dialect", "auto"), columns=data.get("columns")
                    )
                except DataError:
                    continue  # the stage refuses it, or counts it as data.bad_rows allows
                asked = "\n".join([read.prompt, *(turn["content"] for turn in read.messages)]).strip("\n")
                answers = [read.answer or "", *(text for pair in read.pairs for text in (pair.chosen, pair.rejected))]
                yield from (asked + answer for answer in answers if answer or not read.pairs)


def pipeline_options(config: Path | None = None) -> Callable[[Command], Command]:
    """The flags of every script that runs a pipeline; `config` is the recipe where none is given."""
    file = HomePath(path_type=Path)
    which = (
        "The pipeline, such as configs/model_config.yaml."
        if config is None
        else f"A pipeline; default: configs/{config.name}."
    )
    flags = (
        click.option("--config", type=file, required=config is None, default=config, help=which),
        click.option("--dist_config", type=file, help="Distributed settings, such as configs/distributed.yaml."),
        click.option("--output_dir", type=file, default=Path("outputs"), show_default=True),
        click.option("--traceback", is_flag=True, help="Show the whole traceback of an error."),
        click.argument("overrides", nargs=-1),
    )
    return lambda command: functools.reduce(lambda so_far, flag: flag(so_far), reversed(flags), command)


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@pipeline_options()
@click.option("--stage", type=click.Choice([*STAGES, "all"]), default="all", show_default=True)
@click.option("--sft_data", help="Demonstrations: prompt and completion.")
@click.option("--preference_data", help="Preferences: prompt, chosen and rejected.")
@click.option("--prompt_data", help="Prompts to answer.")
def main(
    config: Path,
    stage: str,
    sft_data: str | None,
    preference_data: str | None,
    prompt_data: str | None,
    dist_config: Path | None,
    output_dir: Path,
    traceback: bool,
    overrides: tuple[str, ...],
) -> None:
    data = {"sft": sft_data, "reward": preference_data, "rlhf": prompt_data}
    with plain_errors(output_dir):
        done = train_pipeline(
            config, data, stage=stage, dist_config=dist_config, output=output_dir, overrides=overrides
        )
        click.echo(f"\nplots: python scripts/monitor.py --log_dir {done.folder} --plot_type all")


if __name__ == "__main__":
    main()
