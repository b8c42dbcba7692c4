"""The report of `plaudit plan`: the recipe's own placement, others beside it, the bottleneck, and what would help most.

Costs, Placement -> Estimates of all placements -> Outcome -> lines for people, values for JSON
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from plaudit.preflight.cluster import problem_of
from plaudit.preflight.cost import Costs, Estimate
from plaudit.preflight.held import GIB
from plaudit.preflight.placement import Placement, heuristic, placement_of, placements, symmetric
from plaudit.preflight.profile import Profile
from plaudit.preflight.search import Found, best
from plaudit.runs.planned import key_of
from plaudit.settings.tree import Settings

UNRANKED = (
    "placements are not ranked, since other programs held up a part of what the profile timed: profile again when "
    "nothing else has run for two minutes, or let --check measure them"
)
RANGE = (0.9, 1.33)
"""Least and most seconds that a step took, over those planned, of the 37 runs in docs/plan.md. All had two cores."""


@dataclass(frozen=True)
class Outcome:
    """The planner's results for a recipe on one kind of machine: costs, estimates of its placements, price."""

    costs: Costs
    price: float
    """Price of a device per hour."""

    @cached_property
    def steps(self) -> int:
        """Number of steps of the run."""
        s = self.settings
        if s.train.steps is not None:
            return s.train.steps
        each = s.rollout.prompts_per_step if self.costs.work.sampled else s.train.batch_size
        return max(1, math.ceil(s.train.epochs * self.profile.items / each))

    @property
    def settings(self) -> Settings:
        return self.costs.settings

    @property
    def profile(self) -> Profile:
        return self.costs.profile

    @cached_property
    def now(self) -> Estimate:
        return self.costs.estimate(placement_of(self.settings, self.costs.devices, gpu=self.profile.gpu))

    @cached_property
    def others(self) -> list[Estimate]:
        """All other placements that fit, the fastest first. None has more lag than the recipe, which changes what is
        learned."""
        lag = self.now.placement.lag
        lags, gpu = ((0, lag) if lag else (0,)), self.profile.gpu
        found = placements(self.settings, self.costs.policy, self.costs.devices, gpu=gpu, lags=lags)
        priced = [self.costs.estimate(at) for at in found if at != self.now.placement]
        return sorted((one for one in priced if self.fits(one)), key=lambda one: (one.step, one.placement))

    def fits(self, one: Estimate) -> bool:
        """True if memory suffices: each process fits on its GPU, or without GPUs all fit in the machine's memory."""
        return (one.largest if self.profile.gpu else one.total) <= self.profile.capacity

    @cached_property
    def fastest(self) -> list[Estimate]:
        """All placements that fit, the recipe's own too, the fastest first; only the recipe's if none does."""
        mine = [self.now] if self.fits(self.now) else []
        return sorted((*mine, *self.others), key=lambda one: one.step) or [self.now]

    @cached_property
    def named(self) -> dict[str, Estimate]:
        """Estimates by name: "now" (the recipe), "best" (unless the machine was busy), "symmetric", "heuristic"."""
        every = {one.placement: one for one in (self.now, *self.others)}
        found = {"now": self.now} | ({} if self.profile.busy else {"best": self.fastest[0]})
        for name, choose in (("symmetric", symmetric), ("heuristic", heuristic)):
            if (chosen := choose(list(every), self.now.placement)) is not None:
                found[name] = every[chosen]
        return found

    @cached_property
    def free(self) -> Found | None:
        """The fastest plan if each call could use devices and a mesh of its own (cannot run yet), or None."""
        return best(problem_of(self.costs, self.costs.devices, self.profile.capacity if self.profile.gpu else math.inf))

    @cached_property
    def bottleneck(self) -> tuple[str, float]:
        """The call that takes most seconds, and its share of the seconds of all calls."""
        calls = self.now.calls
        name = max(calls, key=lambda one: calls[one])
        return name, calls[name] / sum(calls.values())

    @cached_property
    def advice(self) -> tuple[str, float] | None:
        """The change that gives the shortest step, and its seconds; None below 3 % or on a busy machine."""
        tried = {" ".join(self._changed(one.placement)): one.step for one in self.others}
        tried |= {
            words: Costs(s, self.profile, self.costs.devices).estimate(at).step for words, s, at in self._changes()
        }
        words, step = min(tried.items(), key=lambda one: one[1], default=("", math.inf))
        return (words, step) if step < 0.97 * self.now.step and not self.profile.busy else None

    def _changed(self, at: Placement) -> list[str]:
        """The overrides that turn the recipe's placement into another."""
        before, after = self.now.placement.overrides(), at.overrides()
        gone = ["runtime.mesh={}"] if "runtime.mesh" in before and "runtime.mesh" not in after else []
        pairs = zip(at.words(), after.items(), strict=True)
        return [word for word, (key, value) in pairs if value != before.get(key)] + gone

    def _changes(self) -> Iterator[tuple[str, Settings, Placement]]:
        """Yield (text, settings, placement) for single changes of settings other than the placement."""
        s, at = self.settings, self.now.placement
        if self.costs.work.sampled:
            if at.ray and not at.shared:
                yield f"rollout.max_lag={at.lag + 1} (learns from older samples)", s, replace(at, lag=at.lag + 1)
            slots = 2 * s.rollout.slots
            yield f"rollout.slots={slots}", replace(s, rollout=replace(s.rollout, slots=slots)), at
        micro = 2 * s.learn.micro_tokens
        yield f"learn.micro_tokens={micro}", replace(s, learn=replace(s.learn, micro_tokens=micro)), at

    # --- told

    def plain(self) -> dict[str, Any]:
        """Return the plan as values for JSON. `key` is a hash of the planned settings (`runs/planned.py`)."""
        return {
            "hardware": self.profile.hardware,
            "devices": self.costs.devices,
            "parameters": self.parameters,
            "steps": self.steps,
            "bottleneck": dict(zip(("call", "share"), self.bottleneck, strict=True)),
            "advice": None if self.advice is None else dict(zip(("change", "step"), self.advice, strict=True)),
            "plans": {name: self.of(one) for name, one in self.named.items()},
            "notes": self.profile.notes,
        }

    def of(self, one: Estimate) -> dict[str, Any]:
        """Return an estimate as values for JSON."""
        at, now = one.placement, one is self.now
        hours = self.steps * one.step / 3600
        return {
            "key": key_of(self.settings if now else at.placed(self.settings)),
            "settings": {} if now else at.overrides(),
            "step": one.step,
            "range": [factor * one.step for factor in RANGE],
            "calls": dict(one.calls),
            "idle": one.idle,
            "hours": hours,
            "cost": hours * self.used(at) * self.price,
            "memory": {name: dict(parts) for name, parts in one.memory.items()},
        }

    def used(self, at: Placement) -> int:
        """Devices that a placement takes: GPUs, or all cores."""
        return at.devices if self.profile.gpu else self.costs.devices

    @property
    def parameters(self) -> dict[str, int]:
        found = {str(one.role): sum(map(math.prod, one.layout.parameters.values())) for one in self.costs.models}
        return found | {f"judge {number}": config.parameters for number, config in self.costs.judges.items()}

    def lines(self) -> Iterator[str]:
        now, s = self.now, self.settings
        yield from (f"note: {note}" for note in self.profile.notes)
        sizes = ", ".join(f"{name} {count / 1e6:,.2f} M" for name, count in self.parameters.items())
        yield f"{s.method} on {self.profile.hardware}, {self.costs.devices} devices: {now.placement}"
        yield f"parameters: {sizes}"
        yield from _memory(now.memory)
        yield from (f"  {name:20}{seconds:10.3f} s a step" for name, seconds in now.calls.items())
        figures = self.of(now)
        cost = f", cost {figures['cost']:,.2f}" if self.price else ""
        least, most = figures["range"]
        yield (
            f"step {now.step:.3f} s ({least:.3f} to {most:.3f}), {now.idle:.0%} of the devices' time idle; "
            f"{self.steps:,} steps take {figures['hours']:,.2f} hours{cost}"
        )
        if not self.fits(now):
            there = self.profile.capacity / GIB
            yield f"does not fit: a process has {now.largest / GIB:,.1f} GiB, there are {there:,.1f}"
        yield f"bottleneck: {self.bottleneck[0]}, {self.bottleneck[1]:.0%} of all calls' seconds"
        if self.advice is not None:
            words, step = self.advice
            yield f"what would help most: {words}: {step:.3f} s a step ({step / now.step - 1:+.0%})"
        yield from [UNRANKED] if self.profile.busy else self._beside()

    def _beside(self) -> Iterator[str]:
        """Yield lines on other placements, and how much slower they are than the best."""
        fastest = self.named["best"].step
        for name, one in self.named.items():
            words = " ".join(self._changed(one.placement)) if one is not self.now else "as the recipe says"
            yield f"  {name:10}{one.step:9.3f} s {one.step / fastest - 1:+6.0%}  {one.placement}: {words}"
        if self.costs.devices > 1 and (found := self.free) is not None and found.seconds < fastest:
            proved = "" if found.proved else ", the best that was found"
            yield f"  free      {found.seconds:9.3f} s{proved}: each call on devices of its own, which cannot run yet"


def _memory(memory: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a line for each kind of process: its memory in GiB, by part."""
    for name, parts in memory.items():
        shown = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items() if size >= 0.005 * GIB)
        yield f"  {name:16}{sum(parts.values()) / GIB:8.2f} GiB: {shown}"
