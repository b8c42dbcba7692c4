"""Commands to use before a run: `check`, `profile`, `plan`, `layout` and `settings`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from plaudit.commands.errors import plain_errors
from plaudit.commands.options import METHODS, HomePath, TakesSettings, deepspeed_option, plugin_option, traceback_option
from plaudit.support.visible import visible

OPTIONS = ("serve-reward", "serve", "chat", "monitor")
"""Commands that have options and no recipe."""


@click.command(cls=TakesSettings)
@click.argument("words", nargs=-1, required=True, metavar="[METHOD] RECIPE [key=value]...")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@traceback_option
def check(words: tuple[str, ...], as_json: bool) -> None:
    """Report everything that is wrong or doubtful about a run or a pipeline; exit with status 1 if there are problems.

    It checks settings, paths, sizes, devices, disk, servers, the cluster, and the first rows as the model would read
    them. It loads no model, and writes nothing but the folder that a GGUF file is read as.
    """
    began = time.time() - time.process_time()
    with plain_errors():
        from plaudit.preflight.checking import check as check_words

        raise SystemExit(min(check_words(*of_method(words), as_json=as_json, began=began), 1))


def of_method(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Split words into a method (None if the first word is no method, or a file of that name) and the rest."""
    method = words[0] if words[0] in METHODS and not Path(words[0]).is_file() else None
    return method, words[1:] if method else words


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--mesh", help='Axes, such as "data=8 tensor=2"; default: those of the section `runtime`.')
@click.option("--ranks", type=click.IntRange(1), help="Number of ranks; default: that of the section `runtime`.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Print the boxes of this rank.")
@click.option("--to", help="Another mesh: print how much data must be sent to move the models there.")
@traceback_option
def layout(
    recipe: str, overrides: tuple[str, ...], mesh: str | None, ranks: int | None, rank: int, to: str | None
) -> None:
    """Print which part of a recipe's models each rank would hold, with sizes. Nothing is loaded or started."""
    with plain_errors():
        from plaudit.preflight.held import models_of
        from plaudit.preflight.layout import publish, read_mesh, report, sends
        from plaudit.settings.recipes import read_settings, recipe_of

        settings = read_settings(*recipe_of([recipe, *overrides]))
        models = models_of(settings, read_mesh(mesh) if mesh else None, ranks)
        publishing = publish(models) if settings.samples else ()
        for line in (*report(models, rank), *publishing, *(sends(models, read_mesh(to)) if to else ())):
            click.echo(visible(line))


@click.command(cls=TakesSettings)
@click.argument("words", nargs=-1, required=True, metavar="[METHOD] RECIPE [key=value]...")
@traceback_option
def profile(words: tuple[str, ...]) -> None:
    """Measure for a minute how long a recipe's passes, decoding, rewards and sums between processes take here.

    The profile is written beside the run's folder; `plaudit plan` reads it.
    """
    with plain_errors():
        from plaudit.preflight.planning import profile as profile_words

        profile_words(*of_method(words))


@click.command(cls=TakesSettings)
@click.argument("words", nargs=-1, required=True, metavar="[METHOD] RECIPE [key=value]...")
@click.option(
    "--profile", "profiles", multiple=True, type=HomePath(path_type=Path), help="File of another machine; repeatable."
)
@click.option("--devices", type=click.IntRange(1), help="Cores or GPUs; default: those of the profile's machine.")
@click.option("--price", type=click.FloatRange(0), default=0.0, help="Of a device an hour.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--check", "checked", is_flag=True, help="Run four steps of each, and compare the last three.")
@traceback_option
def plan(words: tuple[str, ...], profiles: tuple[Path, ...], **options: Any) -> None:
    """Print what a recipe would take: memory, seconds of each call and of a step, total time and cost, the bottleneck,
    what would help most, and other placements. Run `plaudit profile` first: it measures the machine.
    """
    with plain_errors():
        from plaudit.preflight.planning import plan as plan_words

        plan_words(*of_method(words), profiles, **options)


@click.command("settings")
@click.argument("method")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--recipe", type=HomePath(exists=True, dir_okay=False), help="Recipe to compare with the defaults.")
@deepspeed_option
@plugin_option
@traceback_option
@click.pass_context
def settings_command(
    context: click.Context,
    method: str,
    keys: tuple[str, ...],
    recipe: str | None,
    deepspeed: str | None,
    plugins: tuple[str, ...],
) -> None:
    """Print the settings of a METHOD or command as a recipe: defaults, meaning and allowed values.

    KEY is a setting, a section or the last word of a setting. A file of another system (docs/switching.md) is printed
    as a recipe of Plaudit.
    """
    group = context.find_root().command
    assert isinstance(group, click.Group)
    with plain_errors(plugins=plugins):
        from plaudit.commands.explain import explained, foreign, options

        if method in OPTIONS:
            click.echo(options(group.commands[method], keys))
        elif (found := foreign(method, recipe, deepspeed)) is not None:
            click.echo(visible(found), nl=False)
        else:
            click.echo(explained(method, keys, recipe=recipe, plugins=plugins))
