"""The `plaudit` command: a thin layer over the Python interface. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from plaudit.paths import at_home, error_number, unwritable

METHODS = {
    "sft": "Supervised fine-tuning on demonstrations.",
    "reward": "Reward model from preference pairs.",
    "dpo": "Direct preference optimisation (sigmoid, IPO, hinge, robust).",
    "ppo": "Proximal policy optimisation with a critic.",
    "grpo": "Group-relative policy optimisation (Dr.GRPO, DAPO, GSPO by settings).",
    "rloo": "REINFORCE leave-one-out.",
    "remax": "REINFORCE with the greedy answer's reward as baseline.",
    "reinforce": "REINFORCE++ and its baseline variant.",
    "online-dpo": "DPO on the policy's own best and worst answers.",
    "best-of-k": "SFT on the policy's own best answers.",
}
USAGE_ERROR = 2
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""The system's words for what it does not read or write at a place."""


@contextmanager
def plain_errors(target: str | Path | None = None) -> Iterator[None]:
    """What a person can mend is one line on stderr and exit status 2, a stop by signal one with a status of its own
    (143 after SIGTERM, 130 after Ctrl-C); everything else keeps its traceback. `target`, which is written at the end,
    is refused before the work where nothing can be written."""
    try:
        if target is not None:
            _check_writable(at_home(target))
        yield
    except (ValueError, FileNotFoundError, ImportError) as error:
        if "--traceback" in sys.argv:
            raise
        _tell(f"error: {error}")
        raise SystemExit(USAGE_ERROR) from error
    except RuntimeError as error:
        if "--traceback" in sys.argv or not type(error).__module__.startswith("plaudit."):
            raise
        _tell(f"the run ended: {error}")
        raise SystemExit(1) from error
    except KeyboardInterrupt as error:
        _tell("stopped by SIGINT")
        raise SystemExit(128 + signal.SIGINT) from error
    except Exception as error:
        from plaudit.stopping import Stopped

        if isinstance(error, Stopped):
            _tell(str(error))
            raise SystemExit(error.code) from error
        told = _of_storage(error, target)
        if "--traceback" in sys.argv or told is None:
            raise
        _tell(f"error: {told}")
        raise SystemExit(USAGE_ERROR) from error


def _tell(text: str) -> None:
    """On stderr, where anybody is there to read it."""
    with suppress(OSError):
        click.echo(text, err=True)


def _check_writable(target: Path) -> None:
    """Raise OSError where neither `target` nor what is to be made above it can be written."""
    there = next(path for path in (target, *target.parents, Path.cwd()) if path.exists())
    if there != target and not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder", str(target))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, f"nothing can be written to {there}", str(target))


def _of_storage(error: Exception, target: str | Path | None) -> str | None:
    """The place and what the system said of it. None for other errors."""
    place = getattr(error, "filename", None) or target
    if why := unwritable(error):
        return f"{place or 'what is written'} cannot be written: {why}"
    forbidden = place and error_number(error) in FORBIDDEN
    return f"{place}: {getattr(error, 'strerror', None) or error}" if forbidden else None


class HomePath(click.Path):
    """A path with the home folder in the place of `~`, which shells leave as it is in --out=~/answers.jsonl."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(at_home(value)), param, ctx)


class Commands(click.Group):
    """Commands in the order of the list, and the nearest one for a misspelt word."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            from plaudit.recipes import nearest

            raise click.UsageError(f"there is no command {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="plaudit")
def main() -> None:
    """Reinforcement learning from human feedback: one command a method, one recipe a run.

    \b
    plaudit ppo RECIPE.yaml key=value ...      train by a method
    plaudit pipeline RECIPE.yaml               several stages, each from what the ones before made
    plaudit demo                               the whole job on a generated task, in minutes on a CPU

    Settings are those of the recipe and the command line (Hydra's grammar; null is None); `plaudit settings METHOD`
    lists them all.
    """
    from plaudit.runtime.memory import keep_freed_memory

    keep_freed_memory()


def traceback_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--traceback", is_flag=True, help="Show the whole traceback of an error.")(command)


def plugin_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "A Python file that registers what is named, such as a dialect; repeat for several."
    return click.option("--plugin", "plugins", multiple=True, help=text)(command)


def train_by(method: str | None, recipe: str, overrides: Sequence[str]) -> None:
    """Do one run."""
    with plain_errors():
        from plaudit.assemble import run
        from plaudit.monitor.console import Reporter
        from plaudit.recipes import load_settings
        from plaudit.settings import unused

        # A recipe is optional: `plaudit sft model.path=... data.train=...` says it all.
        if "=" in recipe and not Path(recipe).exists():
            settings = load_settings(None, [recipe, *overrides], method=method)
        else:
            settings = load_settings(recipe, overrides, method=method)
        reporter = Reporter(quiet=settings.log.quiet)
        if idle := unused(settings):
            reporter.say(f"warning: {settings.method} does not use {', '.join(idle)}")
        run(settings, reporter=reporter)


def add_method(name: str, text: str) -> None:
    @main.command(name, help=f"{text}\n\nRECIPE is a YAML file of settings; key=value overrides come after it.")
    @click.argument("recipe")
    @click.argument("overrides", nargs=-1)
    @traceback_option
    def command(recipe: str, overrides: tuple[str, ...], traceback: bool) -> None:
        train_by(name, recipe, overrides)


for _name, _text in METHODS.items():
    add_method(_name, _text)


@main.command("train")
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@traceback_option
def train_command(recipe: str, overrides: tuple[str, ...], traceback: bool) -> None:
    """Train by the method that the recipe names (`method: ...`), a plugin's own too."""
    train_by(None, recipe, overrides)


@main.command()
@click.argument("recipe", type=HomePath(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1)
@traceback_option
def pipeline(recipe: str, overrides: tuple[str, ...], traceback: bool) -> None:
    """Run the stages of a recipe in order; overrides begin with the stage's name (ppo.train.steps=50)."""
    with plain_errors():
        from plaudit.monitor.console import Reporter
        from plaudit.pipeline import load_pipeline, run_pipeline

        reporter = Reporter()
        done = run_pipeline(load_pipeline(recipe, overrides), reporter=reporter)
        if done.evaluation is not None:
            reporter.show(done.evaluation.table())


@main.command()
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True, help="Repeat for several.")
@click.option("--seeds", "count", type=click.IntRange(1), help="Run this many seeds, from 0 on.")
@click.option("--output", type=HomePath(), default="runs/demo", show_default=True, help="Where everything is written.")
@click.option(
    "--data-only",
    type=HomePath(path_type=Path, file_okay=False),
    help="Only write the task's files into this folder.",
)
@click.argument("overrides", nargs=-1)
@traceback_option
def demo(
    seeds: tuple[int, ...],
    count: int | None,
    output: str,
    data_only: Path | None,
    overrides: tuple[str, ...],
    traceback: bool,
) -> None:
    """The main job on a generated task: SFT, reward model, PPO, and a table of before and after.

    What is in the folder is replaced; `plaudit demo resume=latest` goes on with a demo that was stopped.
    """
    with plain_errors(data_only or output):
        from plaudit.demo import demo_data, run_demo
        from plaudit.monitor.console import Reporter

        if data_only is not None:
            demo_data(data_only, seeds[0], Reporter())
            return
        run_demo(Path(output), seeds=tuple(range(count)) if count else seeds, overrides=overrides)


@main.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@traceback_option
def evaluate(recipe: str | None, overrides: tuple[str, ...], traceback: bool) -> None:
    """Perplexity, generations, preference accuracy, comparison of two models, KL to a reference.

    \b
    plaudit evaluate model=runs/ppo/checkpoints/policy/... prompts=test.jsonl kinds=[generation,kl] reference=...
    """
    with plain_errors():
        from plaudit.evaluate.evaluation import evaluate as evaluate_settings
        from plaudit.evaluate.settings import EvaluationSettings
        from plaudit.monitor.console import Reporter
        from plaudit.recipes import load_tree, read_yaml

        words = [word for word in (recipe, *overrides) if word is not None]
        given = {} if not words or "=" in words[0] else read_yaml(words.pop(0))
        reporter = Reporter()
        settings = load_tree(EvaluationSettings, given, words)
        with plain_errors(settings.out):
            reporter.show(evaluate_settings(settings, reporter=reporter).table())


@main.command()
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeat for several.")
@click.option("--file", "files", multiple=True, help="A file of prompts, in any dialect.")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="Completions a prompt.")
@click.option("--temperature", default=1.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True)
@click.option(
    "--out", type=HomePath(path_type=Path, dir_okay=False), help="Write JSON lines here instead of the terminal."
)
@plugin_option
@traceback_option
def generate(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    plugins: tuple[str, ...],
    traceback: bool,
    **options: Any,
) -> None:
    """Answer prompts with a model (a checkpoint's folder)."""
    with plain_errors(options["out"]):
        from plaudit.generate import generate as answer
        from plaudit.plugins import load_plugins

        load_plugins(plugins)
        answer(model, prompts=prompts, files=files, **options)


@main.command("serve-reward")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need --token-env.")
@click.option("--port", type=click.IntRange(0, 65535), default=8008, show_default=True, help="0 takes a free one.")
@click.option("--token-env", default="", help="Environment variable with the token that clients must send.")
@click.option(
    "--allow-host", "allow_hosts", multiple=True, help="A name by which clients call this server; repeatable."
)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0, show_default=True, help="CPU threads; 0 takes all cores.")
@plugin_option
@traceback_option
def serve_reward_command(model: str, plugins: tuple[str, ...], traceback: bool, **options: Any) -> None:
    """Serve a judge (a checkpoint's folder) over HTTP to runs with rewards of kind http (docs/rewards.md)."""
    with plain_errors():
        from plaudit.plugins import load_plugins
        from plaudit.serve import ServeSettings, serve_reward

        load_plugins(plugins)
        serve_reward(model, ServeSettings(**options), say=lambda line: click.echo(line))


@main.command()
@click.argument("log_dir", type=HomePath(exists=True, path_type=Path))
@click.option(
    "--plot", "plot_type", default="all", show_default=True, help="loss, accuracy, reward, kl, entropy or all."
)
@click.option("--out", type=HomePath(path_type=Path, file_okay=False), help="Folder; default: plots/ in LOG_DIR.")
@traceback_option
def monitor(log_dir: Path, plot_type: str, out: Path | None, traceback: bool) -> None:
    """Draw loss, reward, KL and entropy of the runs in a folder as PNG."""
    with plain_errors(out or log_dir / "plots"):
        from plaudit.monitor.plots import draw

        for path in draw(log_dir, plot_type, out):
            click.echo(path)


@main.command()
@click.argument("source")
@click.argument("target")
@click.option("--to", required=True, help="Dialect of the target, such as prompt/chosen/rejected.")
@click.option("--from", "dialect", default="auto", show_default=True, help="Dialect of the source.")
@click.option("--column", "columns", multiple=True, metavar="OURS=THEIRS", help="Another name of a column; repeatable.")
@click.option("--split", default="train", show_default=True, help="Split of a source that tells splits.")
@click.option("--bad-rows", default=0, show_default=True, help="How many unreadable rows may be skipped.")
@click.option("--overwrite", is_flag=True)
@plugin_option
@traceback_option
def convert(
    source: str, target: str, columns: tuple[str, ...], plugins: tuple[str, ...], traceback: bool, **options: Any
) -> None:
    """Rewrite a data file in another dialect; the ending of TARGET (.jsonl, .json, .parquet) is its format."""
    with plain_errors(target):
        from plaudit.data.convert import convert as convert_data
        from plaudit.plugins import load_plugins

        load_plugins(plugins)
        pairs = [column.partition("=") for column in columns]
        if lone := [ours for ours, _, theirs in pairs if not theirs]:
            raise click.UsageError(f"--column {lone[0]}: write OURS=THEIRS, such as prompt=question_text")
        names = {ours: theirs for ours, _, theirs in pairs}
        click.echo(convert_data(source, target, columns=names, **options).summary())


@main.command("settings")
@click.argument("method")
@plugin_option
@traceback_option
def settings_command(method: str, plugins: tuple[str, ...], traceback: bool) -> None:
    """Print every setting of a method with its default, as a recipe."""
    with plain_errors():
        from plaudit.plugins import load_plugins
        from plaudit.recipes import defaults
        from plaudit.settings import resolved

        load_plugins(plugins)
        click.echo(resolved(replace(defaults(method), plugins=list(plugins))))


if __name__ == "__main__":
    main()
