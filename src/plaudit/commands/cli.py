"""The `plaudit` command, a thin layer over the Python interface. Heavy modules are imported when a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from plaudit.commands import ahead, files, speaking, training
from plaudit.commands.errors import plain_errors as plain_errors
from plaudit.commands.options import (
    METHODS,
    NO_PICTURES,
    HomePath,
    TakesOptions,
    TakesSettings,
    address_options,
    compute_options,
    deepspeed_option,
    plugin_option,
    traceback_option,
)
from plaudit.monitor.folders import PORT
from plaudit.support.rooms import optional
from plaudit.support.visible import visible

Tree = TypeVar("Tree")


class Commands(click.Group):
    """Commands in the order of their definition. For a misspelt command the nearest one is suggested."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            from plaudit.support.fields import nearest

            raise click.UsageError(f"there is no command {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="plaudit")
def main() -> None:
    """Reinforcement learning from human feedback, with one command per method and one recipe per run.

    \b
    plaudit ppo RECIPE.yaml key=value ...  train with a method
    plaudit pipeline RECIPE.yaml           several stages, one after the other
    plaudit demo                           all of it on generated data, in minutes

    Settings come from the recipe, then from the command line (Hydra's grammar; null is None). `plaudit settings METHOD`
    lists them all.
    """
    from plaudit.runtime.memory import keep_freed_memory

    keep_freed_memory()


def _say(line: str) -> None:
    click.echo(visible(line))


def train_by(method: str | None, words: Sequence[str], deepspeed: str | None) -> None:
    """Train from a recipe, overrides, or both."""
    with plain_errors():
        from plaudit.monitor.console import Reporter
        from plaudit.runs.start import run
        from plaudit.runtime.settings import PLANNED
        from plaudit.settings.checks import left_over
        from plaudit.settings.recipes import as_ours, load_settings, recipe_of
        from plaudit.settings.tree import unused

        recipe, overrides = recipe_of(words)
        imported = as_ours(recipe, method, deepspeed)
        settings = load_settings(imported.recipe, overrides, method=method)
        reporter = Reporter(quiet=settings.log.quiet)
        if settings.runtime.placement in PLANNED:
            asked = f"runtime.placement={settings.runtime.placement}"
            settings = optional("preflight", asked_by=asked).chosen(settings, reporter.say)
        if imported.system:
            reporter.say(
                f"{recipe} has settings of {imported.system}. As a recipe of Plaudit:\n{imported.text(settings.method)}"
            )
        for doubt in left_over(imported.recipe, overrides):
            reporter.say(f"warning: {doubt}")
        if idle := unused(settings):
            reporter.say(f"warning: {settings.method} does not use {', '.join(idle)}")
        run(settings, reporter=reporter)


def measured_by(template: type[Tree], recipe: str | None, overrides: Sequence[str]) -> Tree:
    """Read the settings of an evaluation from an optional recipe and overrides."""
    from plaudit.settings.recipes import load_tree, read_yaml, recipe_of

    recipe, words = recipe_of([recipe, *overrides])
    if recipe is not None and Path(recipe).is_dir():  # `plaudit evaluate runs/grpo prompts=...`
        return load_tree(template, {"model": recipe}, words)
    return load_tree(template, {} if recipe is None else read_yaml(recipe), words)


def add_method(name: str, method: str | None, text: str) -> None:
    text += (
        "\n\nRECIPE is a YAML file of settings, or a settings file of another system (docs/switching.md). Overrides "
        "(key=value) come after it."
    )

    @main.command(name, cls=TakesSettings, help=text)
    @click.argument("recipe", type=click.Path())
    @click.argument("overrides", nargs=-1)
    @deepspeed_option
    @traceback_option
    def command(recipe: str, overrides: tuple[str, ...], deepspeed: str | None) -> None:
        train_by(method, [recipe, *overrides], deepspeed)


for _name, _text in METHODS.items():
    add_method(_name, _name, _text)
add_method("train", None, "Train with the method that the recipe names (`method: ...`), built in or from a plugin.")


@main.command(cls=TakesSettings)
@click.argument("recipe", type=HomePath(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1)
@traceback_option
def pipeline(recipe: str, overrides: tuple[str, ...]) -> None:
    """Run the stages of a recipe in order. An override begins with its stage's name (ppo.train.steps=50)."""
    with plain_errors():
        from plaudit.monitor.console import Reporter
        from plaudit.runs.pipeline import load_pipeline, run_pipeline

        reporter = Reporter()
        done = run_pipeline(load_pipeline(recipe, overrides), reporter=reporter)
        if done.evaluation is not None:
            reporter.show(done.evaluation.table())


@main.command(cls=TakesSettings)
@click.argument("method", type=click.Choice(list(METHODS)))
@click.argument("overrides", nargs=-1)
@click.option("--output", type=HomePath(path_type=Path, dir_okay=False), help="The recipe; default: METHOD.yaml.")
@traceback_option
def init(method: str, overrides: tuple[str, ...], output: Path | None) -> None:
    """Write a recipe for your own data into METHOD.yaml. It suits the model's size and the number of rows.

    \b
    plaudit init sft my/sft.jsonl          a small model, from nothing
    plaudit init sft my/sft.jsonl model.path=Qwen/Qwen2.5-0.5B
    plaudit init dpo my/pairs.jsonl model.path=runs/sft
    """
    target = output or Path(f"{method}.yaml")
    with plain_errors(target):
        from plaudit.commands.init import init as write_recipe

        for line in write_recipe(method, overrides, target):
            _say(line)


@main.command()
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True, help="Seed; repeatable.")
@click.option("--seeds", "count", type=click.IntRange(1), help="Run this many seeds, from 0 on.")
@click.option("--output", type=HomePath(), help="Folder to write to; default: runs/demo or runs/pretrained.")
@click.option("--pretrained", is_flag=True, help="Run GRPO on a real model of 135 M parameters instead.")
@click.option("--data-only", type=HomePath(path_type=Path, file_okay=False), help="Only write the demo's data here.")
@click.argument("overrides", nargs=-1)
@traceback_option
def demo(
    seeds: tuple[int, ...],
    count: int | None,
    output: str | None,
    pretrained: bool,
    data_only: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Run SFT, a reward model and PPO on generated data, and print figures from before and after PPO.

    With --pretrained, fetch SmolLM2-135M-Instruct (93 MB) and run GRPO on sums told in words.

    Replaces the content of --output. `plaudit demo resume=latest` continues a stopped demo instead.
    """
    with plain_errors(data_only or output):
        from plaudit.commands.demo import DEMOS, run_task
        from plaudit.monitor.console import Reporter

        recipe, make, folder = DEMOS["pretrained" if pretrained else "demo"]
        if data_only is not None:
            make(data_only, seeds[0], Reporter())
            return
        several = tuple(range(count)) if count else seeds
        run_task(recipe, make, Path(output or folder), seeds=several, overrides=overrides)


@main.command(cls=TakesSettings)
@click.argument("recipe", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1)
@click.option("--follow", is_flag=True, help="Evaluate all checkpoints of the run `model` until it ends.")
@traceback_option
def evaluate(recipe: str | None, overrides: tuple[str, ...], follow: bool) -> None:
    """Measure perplexity, generations, preference accuracy and KL to a reference, or compare two models.

    \b
    plaudit evaluate runs/ppo prompts=a.jsonl reference=runs/sft judge=runs/reward
    """
    with plain_errors():
        from plaudit.evaluate.evaluation import evaluate as evaluate_settings
        from plaudit.evaluate.settings import EvaluationSettings
        from plaudit.monitor.console import Reporter

        settings, reporter = measured_by(EvaluationSettings, recipe, overrides), Reporter()
        with plain_errors(settings.output):
            if follow:
                from plaudit.commands.follow import follow as follow_run

                follow_run(settings, reporter)
            else:
                reporter.show(evaluate_settings(settings, reporter=reporter).table())


@main.command()
@click.argument("words", nargs=-1, type=click.Path(), metavar="RUN RUN ... [KEY=VALUE ...]")
@traceback_option
def compare(words: tuple[str, ...]) -> None:
    """Show what differs between runs: settings, figures, curves, and answers to the same prompts.

    \b
    plaudit compare runs/ppo runs/grpo
    plaudit compare runs/ppo runs/grpo prompts=a.jsonl judge=runs/reward limit=128
    """
    with plain_errors():
        from plaudit.commands.compare import compare as compare_runs
        from plaudit.monitor.console import Reporter

        folders = [word for word in words if "=" not in word or Path(word).is_dir()]
        reporter = Reporter()
        found = compare_runs(folders, [word for word in words if word not in folders], reporter=reporter)
        for table in found.tables():
            reporter.show(table)
        reporter.say(visible(f"comparison: {found.folder}", line=True))


@main.command()
@click.argument("recipe", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1)
@traceback_option
def relabel(recipe: str | None, overrides: tuple[str, ...]) -> None:
    """Order preferences, or sampled answers, by a stronger measure, and write pairs to train on.

    \b
    plaudit relabel preferences=pairs.jsonl judge=runs/gold output=gold.jsonl
    plaudit relabel answers=answers.jsonl gold=rules.py:score output=gold.jsonl
    """
    with plain_errors():
        from plaudit.evaluate.settings import RelabelSettings
        from plaudit.monitor.console import Reporter
        from plaudit.relabel import relabel as relabel_by

        settings, reporter = measured_by(RelabelSettings, recipe, overrides), Reporter()
        with plain_errors(settings.output):
            reporter.show(relabel_by(settings, reporter=reporter).table())


@main.command(cls=TakesSettings)
@click.argument("model", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeatable.")
@traceback_option
def generate(model: str, overrides: tuple[str, ...], prompts: tuple[str, ...]) -> None:
    """Answer prompts with a model: the folder of a run or of a checkpoint, or a hub id.

    \b
    plaudit generate runs/sft --prompt "Two and two?" sampling.temperature=0
    plaudit generate runs/sft prompts=a.jsonl sampling.samples=4 output=b.jsonl
    """
    with plain_errors():
        from plaudit.commands.generate import generate as answer
        from plaudit.evaluate.settings import GenerateSettings
        from plaudit.settings.recipes import load_tree

        if texts := [word for word in overrides if "=" not in word]:
            raise click.UsageError(f"{texts[0]!r} is no setting: a prompt is given as --prompt TEXT")
        settings = load_tree(GenerateSettings, {"model": model}, overrides)
        with plain_errors(settings.output):
            answer(settings, prompts)


@main.command("serve-reward", cls=TakesOptions)
@click.argument("model", type=click.Path())
@address_options(8008)
@compute_options
@plugin_option
@traceback_option
def serve_reward_command(model: str, plugins: tuple[str, ...], **options: Any) -> None:
    """Serve a judge (a checkpoint's folder) over HTTP to runs with rewards of kind http (docs/rewards.md)."""
    with plain_errors(plugins=plugins):
        from plaudit.commands.serve import serve_reward

        serve_reward(model, **options, say=_say)


@main.command(cls=TakesOptions)
@click.argument("log_dir", type=HomePath(exists=True, path_type=Path), default="runs")
@click.option("--serve", is_flag=True, help="Show the runs in a browser instead: curves, answers, workers, settings.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address for --serve; public ones use a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free port.")
@click.option("--allow-host", "allow_hosts", multiple=True, help="Name by which browsers call the page; repeatable.")
@click.option(
    "--plot", "plot_type", default="all", show_default=True, help="loss, accuracy, reward, kl, entropy or all."
)
@click.option("--output", type=HomePath(path_type=Path, file_okay=False), help="Folder; default: plots/ in LOG_DIR.")
@traceback_option
def monitor(log_dir: Path, serve: bool, plot_type: str, output: Path | None, **address: Any) -> None:
    """Draw loss, reward, KL and entropy of the runs in a folder as PNG, or show them in a browser (--serve)."""
    if serve:
        with plain_errors():
            from plaudit.commands.listening import serve_page

            serve_page(log_dir, **address, say=_say)
        return
    with plain_errors(output or log_dir / "plots"):
        from plaudit.monitor.plots import draw

        if NO_PICTURES:
            raise ImportError(NO_PICTURES)
        for path in draw(log_dir, plot_type, output, say=_say):
            _say(visible(str(path), line=True))


for _command in (
    speaking.serve,
    speaking.chat,
    training.serve_training,
    files.convert,
    files.export,
    ahead.check,
    ahead.profile,
    ahead.plan,
    ahead.layout,
    ahead.settings_command,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
