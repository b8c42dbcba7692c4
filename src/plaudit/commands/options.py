"""Commands that take settings: an option of another system is answered with our key."""

from __future__ import annotations

import click

from plaudit.support.visible import visible


class TakesSettings(click.Command):
    """A command whose settings are `key=value`: `--learning_rate 1e-5` is refused with what to write instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(_as_setting(error.option_name, given), ctx) from error


def _as_setting(option: str, args: list[str]) -> str:
    """What to write for an option that there is not."""
    from plaudit.settings.spellings import meant

    place = next((i for i, word in enumerate(args) if word.partition("=")[0] == option), len(args))
    _, _, value = args[place].partition("=") if place < len(args) else ("", "", "")
    following = args[place + 1] if place + 1 < len(args) and not args[place + 1].startswith("-") else ""
    value = value or following or "VALUE"
    name = option.lstrip("-").replace("-", "_")
    ours = meant(name).removeprefix(": here it is ")
    key, _, more = ours.partition(" ")
    written = key if "=" in key else f"{key.rstrip(',')}={value}"
    hint = f"{written}{f' ({ours})' if more else ''}" if ours else f"{name}={value}"
    return visible(f"there is no option {option}: settings are given as key=value, here {hint}")
