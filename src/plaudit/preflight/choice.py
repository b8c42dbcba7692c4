"""Choose a run's placement (which processes do what, on which devices) by its plan.

Settings with runtime.placement=auto -> profile -> Outcome -> the same settings with a placement of their own
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from plaudit.preflight.cost import Costs
from plaudit.preflight.profile import read_profile
from plaudit.preflight.report import UNRANKED, Outcome
from plaudit.runs.planned import beside, keep
from plaudit.settings.checks import wrong
from plaudit.settings.tree import Settings, SettingsError

MARGIN = 1.2
"""How many times as fast as the recipe's placement another must be planned to be taken. Of two plans in docs/plan.md,
the one that was planned to be faster was, if they differ by more than 1.14."""


def chosen(settings: Settings, say: Callable[[str], None] = print) -> Settings:
    """Return settings with the placement that `runtime.placement` asks for: the fastest that can run,
    if it is `MARGIN` times as fast as the recipe's own (auto), or a usual one by hand (symmetric, heuristic). Other
    settings are returned unchanged. It needs the file of `plaudit profile`, writes the plan, to which the run later
    compares its steps, and calls `say` with the choice and its reason.

        plaudit.run(chosen(plaudit.load_settings("ppo.yaml", ["runtime.placement=auto"])))

    Raises SettingsError if there is no profile, or no such placement fits.
    """
    name, path = settings.runtime.placement, beside(settings, "profile")
    if not isinstance(name, str):
        return settings
    manual = replace(settings, runtime=replace(settings.runtime, placement={}))
    found = read_profile(path)
    if name == "auto" and found.busy:
        raise SettingsError(f"runtime.placement=auto: by {path} {UNRANKED}, or name symmetric or heuristic")
    outcome = Outcome(Costs(manual, found, found.devices), 0.0)
    sooner = MARGIN * outcome.fastest[0].step < outcome.now.step or not outcome.fits(outcome.now)
    fastest = outcome.fastest if sooner else [outcome.now, *outcome.fastest]
    tried = fastest if name == "auto" else [outcome.named[name]] if name in outcome.named else []
    now = outcome.now
    ready = ((one, manual if one is now else one.placement.placed(manual)) for one in tried)
    one, placed = next(((one, placed) for one, placed in ready if not wrong(placed)), (now, None))
    if placed is None or not outcome.fits(one):
        raise SettingsError(f"runtime.placement={name}: by {path} no such placement fits on {found.devices} devices")
    keep(settings, "plan", json.dumps(outcome.plain(), indent=1))
    call, share = outcome.bottleneck
    beside_it = "as without it" if one is now else f"without it {now.step:.3g} s, {share:.0%} of the work in {call}"
    words = " ".join(one.placement.words())
    say(f"runtime.placement={name}: {one.placement}: {one.step:.3g} s a step planned, {beside_it}: {words}")
    return placed
