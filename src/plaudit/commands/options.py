"""Common options of commands, and command classes that answer another system's options with our settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import yaml

from plaudit.support.paths import at_home
from plaudit.support.visible import visible

Decorator = Callable[[Any], Any]
METHODS: dict[str, str] = yaml.safe_load(
    (Path(__file__).parents[1] / "algorithms" / "methods.yaml").read_text(encoding="utf-8")
)
"""Methods, each with its line in `plaudit --help`."""
NO_PICTURES = "" if find_spec("matplotlib") else "PNG files need matplotlib: pip install -e '.[plots]'"
"""What to install before runs can be drawn as PNG files."""


class TakesSettings(click.Command):
    """A command whose settings are `key=value`. It refuses `--learning_rate 1e-5` and says what to write instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            others = getattr(ctx.find_root().command, "commands", {})
            whose = [name for name, one in others.items() if any(error.option_name in p.opts for p in one.params)]
            raise click.UsageError(_as_setting(error.option_name, words, str(self.name), whose), ctx) from error
        except click.MissingParameter as error:
            if self.name not in METHODS:
                raise
            advice = f"give a recipe, settings, or both; `plaudit init {self.name}` writes a recipe"
            raise click.UsageError(advice, ctx) from error


class TakesOptions(click.Command):
    """A command whose options may also be given as `key=value`, as the settings of other commands are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes = {
            name.lstrip("-").replace("-", "_"): max(one.opts, key=len)
            for one in self.params
            if isinstance(one, click.Option) and not one.is_flag
            for name in (*one.opts, one.name or "")
        }
        pairs = [word.partition("=") for word in args]
        words = [f"{takes[key]}={value}" if key in takes and sep else key + sep + value for key, sep, value in pairs]
        try:
            return super().parse_args(ctx, words)
        except click.UsageError as error:
            from plaudit.support.fields import nearest

            if lost := next((key for key, sep, _ in pairs if sep and key.isidentifier() and key not in takes), None):
                message = f"there is no option {lost}{nearest(lost, takes)}"
                raise click.UsageError(visible(message), ctx) from error
            raise


def tree_of(command: str) -> type:
    """Return the class of a command's settings."""
    from plaudit.evaluate import settings as measured
    from plaudit.settings.tree import Settings

    return {
        "evaluate": measured.EvaluationSettings,
        "compare": measured.CompareSettings,
        "relabel": measured.RelabelSettings,
        "generate": measured.GenerateSettings,
    }.get(command, Settings)


def _as_setting(option: str, args: list[str], command: str, others: list[str]) -> str:
    """Return what to write instead of an unknown option. `others`: commands that do have this option."""
    from plaudit.settings.recipes import defaults, unknown_keys
    from plaudit.settings.spellings import meant_in
    from plaudit.support.fields import leaves

    place = next((i for i, word in enumerate(args) if word.partition("=")[0] == option), len(args))
    _, _, value = args[place].partition("=") if place < len(args) else ("", "", "")
    following = args[place + 1] if place + 1 < len(args) and not args[place + 1].startswith("-") else ""
    value = value or following or "VALUE"
    name = option.lstrip("-").replace("-", "_")
    ours = meant_in(tree_of(command), name).removeprefix(": here it is ")
    if not ours and command in METHODS:
        ours = next((leaf.key for leaf in leaves(defaults(command)) if leaf.key.rpartition(".")[2] == name), "")
    unknown = list(unknown_keys({name: value}, tree_of(command)))
    if unknown and not ours and others:
        return visible(f"there is no option {option}: it is one of `plaudit {others[0]}`")
    for _, problem in unknown:
        near = re.search(r"did you mean ([\w.]+)\?", problem)
        ours = ours or (near[1] if near and "." not in name else "")
    key, _, more = ours.partition(" ")
    written = key if "=" in key else f"{key.rstrip(',')}={value}"
    hint = f"{written}{f' ({ours})' if more else ''}" if ours else f"{name}={value}"
    return visible(f"there is no option {option}: settings are given as key=value, here {hint}")


class HomePath(click.Path):
    """A path in which `~` is the home folder, since shells do not expand it in --out=~/answers.jsonl."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(at_home(value)), param, ctx)


traceback_option = click.option(
    "--traceback", is_flag=True, expose_value=False, help="Show the whole traceback of an error."
)
plugin_option = click.option(
    "--plugin", "plugins", multiple=True, help="A Python file that registers names, such as a dialect; repeatable."
)


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds these options to a command, in their order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def address_options(port: int) -> Decorator:
    """Return a decorator that adds the options of a server's address, and of the token that its clients need."""
    return with_options(
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen on; public ones need --token-env."
        ),
        click.option(
            "--port", type=click.IntRange(0, 65535), default=port, show_default=True, help="0: any free port."
        ),
        click.option("--token-env", default="", help="Environment variable with the token that clients must send."),
        click.option(
            "--allow-host", "allow_hosts", multiple=True, help="A name by which clients call this server; repeatable."
        ),
    )


compute_options = with_options(
    click.option("--device", default="cpu", show_default=True),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True),
    click.option("--threads", type=click.IntRange(0), default=0, show_default=True, help="CPU threads; 0: all cores."),
    click.option(
        "--chat/--text", "as_chat", default=None, help="Read prompts as chats or plain text; default: as trained."
    ),
)
deepspeed_option = click.option(
    "--deepspeed",
    type=HomePath(exists=True, dir_okay=False),
    help="A configuration of DeepSpeed, which overrides the recipe.",
)
