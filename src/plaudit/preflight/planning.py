"""`plaudit profile` and `plaudit plan`: measure a recipe's work on a machine, and estimate its placements."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from plaudit.models.mesh import Mesh
from plaudit.monitor.console import Reporter
from plaudit.monitor.sinks import read_jsonl
from plaudit.settings.recipes import load_settings, read_settings, recipe_of
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.later import postponed

with postponed("torch"):
    import plaudit.preflight.check  # noqa: F401  # it imports the methods, so that settings find them without torch
    from plaudit.preflight.cost import Costs
    from plaudit.preflight.held import MIB, models_of
    from plaudit.preflight.profile import Curve, Profile, read_profile
    from plaudit.preflight.report import Outcome
    from plaudit.preflight.trial import trial
    from plaudit.runs.planned import beside, keep
    from plaudit.runs.records import SAMPLES


def profile(method: str | None, words: Sequence[str]) -> Path:
    """Measure this machine for `[RECIPE] key=value ...`, and return the file with what was found."""
    import torch

    from plaudit.preflight.measure import alone, measure
    from plaudit.runs.assemble import Job
    from plaudit.runtime.memory import keep_freed_memory

    recipe, overrides = recipe_of(words)
    settings, reporter = load_settings(recipe, overrides, method=method), Reporter()
    keep_freed_memory()
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    torch.manual_seed(settings.seed)
    on_ray = settings if settings.runtime.kind == "ray" else None
    size = models_of(settings, Mesh())[0].published
    with tempfile.TemporaryDirectory() as folder:
        job = Job.trial(alone(settings), Path(folder))
        found = measure(job, reporter.say, answers=recorded(settings), on_ray=on_ray, size=size)
    path = keep(settings, "profile", found.text())
    for line in summary(found):
        reporter.say(line)
    reporter.say(f"profile: {path}")
    return path


def recorded(settings: Settings) -> list[int]:
    """Return the lengths of the run's last 2000 recorded answers, in tokens; [] if there are none."""
    path = Path(settings.output) / str(settings.name or settings.method) / SAMPLES
    return [one["tokens"] for one in read_jsonl(path)[-2000:]] if path.exists() else []


def summary(found: Profile) -> list[str]:
    """Return a profile's content as lines for people."""
    lines = [f"{found.hardware}: work takes {found.crowded:.2f} times as long while every core works"]
    for name, curve in found.passes.items():
        lines.append(f"  {name:18} {_each(curve, 'pass', 'token', 'squared length', 'token of the head')}")
    if any(found.decode.all):
        lines.append(f"  {'decoding':18} {_each(found.decode, 'step', 'row', 'token of context', 'token of a prompt')}")
    for name, (constant, each) in found.rewards.items():
        lines.append(f"  {name:18} {1e3 * constant:,.3g} ms, and {1e3 * each:,.3g} ms an answer")
    for name, link in found.links.items():
        lines.append(f"  {name:18} {1e3 * link.latency:,.3g} ms, and {link.bandwidth / 1e6:,.0f} MB/s")
    return lines + [f"  {note}" for note in found.notes]


def _each(curve: Curve, *units: str) -> str:
    """Format a curve's coefficients on all threads as microseconds a unit."""
    named = [f"{1e6 * value:,.3g} a {unit}" for value, unit in zip(curve.all, units, strict=True)]
    return f"microseconds: {', '.join(named)}"


def plan(
    method: str | None,
    words: Sequence[str],
    profiles: Sequence[Path],
    *,
    devices: int | None,
    price: float,
    as_json: bool,
    checked: bool,
) -> None:
    """Print what `[RECIPE] key=value ...` would take, by the profile beside its run or by each of `profiles`."""
    recipe, overrides = recipe_of(words)
    settings, reporter = read_settings(recipe, overrides, method=method), Reporter()
    if staged := [call for call, one in settings.runtime.apart.items() if one.pipeline > 1]:
        raise SettingsError(
            f"runtime.placement.{staged[0]} has stages, and plaudit plan knows those of training ranks only: plan "
            "without mesh.pipeline there"
        )
    outcomes = []
    for path in profiles or [beside(settings, "profile")]:
        found = read_profile(path)
        costs = Costs(settings, found, devices or found.devices)
        outcome = Outcome(costs, price)
        outcomes.append(outcome.plain())
        if not as_json:
            for line in outcome.lines():
                reporter.say(line)
        if checked:
            outcomes[-1]["checked"] = compare(outcome, reporter if not as_json else Reporter(quiet=True))
    keep(settings, "plan", json.dumps(outcomes[0], indent=1))
    if as_json:
        click.echo(json.dumps(outcomes[0] if len(outcomes) == 1 else outcomes))


def compare(outcome: Outcome, reporter: Reporter) -> dict[str, dict[str, float | None]]:
    """Run four steps of each distinct named plan; print and return seconds a step (median of 3) and bytes: planned,
    measured."""
    found: dict[str, dict[str, float | None]] = {}
    reporter.say(f"{'checked':12}{'planned':>10}{'measured':>10}  s a step{'planned':>10}{'measured':>10}  MiB")
    for name, one in {o.placement: (n, o) for n, o in outcome.named.items()}.values():
        step, memory = trial(outcome.settings if one is outcome.now else one.placement.placed(outcome.settings))
        found[name] = {"planned": one.step, "measured": step, "planned_memory": one.total, "measured_memory": memory}
        size = f"{'-':>10}" if memory is None else f"{memory / MIB:10,.0f}  {one.total / memory - 1:+.0%}"
        seconds = f"{one.step:10.3f}{step:10.3f}  {one.step / step - 1:+8.0%}"
        reporter.say(f"{name:12}{seconds}{one.total / MIB:10,.0f}{size}")
    return found
