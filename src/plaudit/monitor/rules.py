"""The rules of health: how figures show that something is wrong with a run.

    History -> a rule's arithmetic (here), its words (rules.yaml) -> severity and numbers

Limits are shares, or relative to the start of the same run, per token, or relative to the spread of a figure. They do
not depend on a judge's scale, the length of answers or the size of a model. `docs/health.md` lists the rules with the
runs that each one catches; `scripts/health_runs.py` makes these runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, variance

import yaml

BEGIN = 5
"""Number of first values whose mean is "at the start"."""
RECENT = 5
"""Number of latest values whose mean is "now"."""
SETTLED = BEGIN + RECENT
"""Number of values that a figure needs so that "now" and "at the start" do not overlap."""
MEMORY = 160
"""Number of latest values that are kept."""
SURE = 3.5
"""Standard errors above which a trend counts; many, because neighbouring steps are correlated."""
CERTAIN = 1.9
"""Highest severity of a trend: further steps make it more certain, not worse."""

FIRST_GAP = 1e-3
"""Largest normal gap between sampler and learner before the first update, in nats per token."""
FRESH_GAP = 0.02
"""Largest normal gap between sampler and learner at later steps, on samples of the newest weights."""
OLD_GAP = 0.1
"""Largest normal gap on samples a version old or more: log-ratios then have a deviation of sqrt(2 * 0.1) = 0.45, and
few importance weights are truncated."""


@dataclass(slots=True)
class Series:
    """One metric: its first figures and its latest ones."""

    begin: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.begin) < BEGIN:
            self.begin.append(value)
        self.latest = [*self.latest[-(MEMORY - 1) :], value]

    @property
    def start(self) -> float:
        return fmean(self.begin) if self.begin else 0.0

    @property
    def now(self) -> float:
        return fmean(self.latest[-RECENT:]) if self.latest else 0.0


class History(dict[str, Series]):
    """The series of every metric seen so far; empty for a missing metric."""

    truths: tuple[str, ...] = ("reward/gold",)
    """Figures of rewards that are not trained on, the best one first."""

    def __missing__(self, name: str) -> Series:
        return Series()

    @property
    def truth(self) -> str:
        return next((name for name in self.truths if name in self), "")


Finding = tuple[float, Mapping[str, float | str]]
"""A rule's severity (from 1 on it warns), and the numbers in its sentence."""
FINE: Finding = (0.0, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRule:
    """A sign that something is wrong."""

    name: str
    reads: tuple[str, ...]
    """Names of the figures that the rule reads. It is not applied to a run without the first one."""
    look: Callable[[History], Finding]
    when: str
    """The rule's limit in words, for docs/health.md."""
    saw: str
    """What was seen: a sentence with placeholders for the numbers."""
    why: str
    advice: tuple[str | Mapping[str, str], ...]
    """What to try, as rules.yaml explains it."""
    least: int = RECENT
    """Fewest values of the first figure with which the rule is applied."""

    def __call__(self, history: History) -> Finding:
        return self.look(history) if history[self.reads[0]].count >= self.least else FINE


def _share(name: str, limit: float) -> Callable[[History], Finding]:
    """Return a rule's function: the recent mean of the figure `name`, a share, should stay below `limit`."""
    return lambda history: (history[name].now / limit, {"now": history[name].now, "start": history[name].start})


def _trend(early: Sequence[float], late: Sequence[float]) -> float:
    """Return by how many standard errors the later values exceed the earlier ones (Welch's t). Needs two of each."""
    error = math.sqrt(variance(early) / len(early) + variance(late) / len(late))
    return (fmean(late) - fmean(early)) / max(error, 1e-9)


def _per_token(history: History, kl: float, length: float) -> float:
    """Convert a KL of whole answers to a KL per token, in units of the policy's entropy per token at the start."""
    return kl / max(length, 1.0) / max(history["entropy"].start, 1e-2)


def _entropy(history: History) -> Finding:
    entropy = history["entropy"]
    if history["reward/mean"].count == 0 or entropy.start <= 0:  # entropy is meant to fall in supervised training
        return FINE
    return 0.25 * entropy.start / max(entropy.now, 0.05 * entropy.start), {"now": entropy.now, "start": entropy.start}


def _kl(history: History) -> Finding:
    kl, length = history["kl/reference"], history["length/mean"]
    now = _per_token(history, kl.now, length.now)
    return now, {"now": kl.now, "token": kl.now / max(length.now, 1.0), "entropy": history["entropy"].start}


def _hacking(history: History) -> Finding:
    truth = history[history.truth]
    judge = history["reward/judge" if "reward/judge" in history.keys() - set(history.truths) else "reward/mean"]
    length = min(len(truth.latest), len(judge.latest))
    worst = FINE
    for window in (20, 40, 80, MEMORY):
        if window > length:
            break
        half = window // 2
        (j0, j1), (t0, t1) = ((s.latest[-window:-half], s.latest[-half:]) for s in (judge, truth))
        severity = min(_trend(j0, j1) / SURE, -_trend(t0, t1) / SURE, CERTAIN)
        if severity > worst[0]:
            numbers = {"j0": fmean(j0), "j1": fmean(j1), "t0": fmean(t0), "t1": fmean(t1)}
            worst = severity, {"window": float(window), "truth": history.truth, **numbers}
    return worst


def _idle_reward(history: History) -> Finding:
    """Find a growing KL without a rise of the reward: compare the latest values with the oldest that are kept."""
    kl, reward, length = history["kl/reference"], history["reward/mean"], history["length/mean"]
    early, late = reward.latest[:SETTLED], reward.latest[-SETTLED:]
    if reward.count < 2 * SETTLED:
        return FINE
    rise = _per_token(history, kl.now - fmean(kl.latest[:RECENT]), length.now)
    numbers = {"then": fmean(kl.latest[:RECENT]), "now": kl.now, "r0": fmean(early), "r1": fmean(late)}
    return (rise / 0.2 if _trend(early, late) < 1 else 0.0), numbers


def _length(history: History) -> Finding:
    length = history["length/mean"]
    truth = history[history.truth]
    if truth.count < BEGIN + SETTLED:
        return FINE
    ratio = max(length.now, 1e-9) / max(length.start, 1e-9)
    before, after = truth.begin, truth.latest[-SETTLED:]
    numbers = {"now": length.now, "start": length.start, "t0": fmean(before), "t1": fmean(after)}
    severity = min(max(ratio, 1 / ratio) / 1.5, -_trend(before, after) / SURE, CERTAIN)
    return severity, {"truth": history.truth, **numbers}


def _cut(history: History, *, by_turns: bool) -> Finding:
    """Find answers that a limit ends: of turns, or of length, which are all others that are unfinished."""
    turns, every = history["episode/cut"], history["unfinished"]
    now, start = (turns.now, turns.start) if by_turns else (every.now - turns.now, every.start - turns.start)
    return max(now / 0.5, (now - start) / 0.2), {"now": now, "start": start}


def _no_calls(history: History) -> Finding:
    """Find tools that nothing calls: fewer than one call in a hundred episodes."""
    recent = [sum(history[f"episode/{name}"].latest[-SETTLED:]) for name in ("calls", "unread_calls")]
    now = sum(recent) / SETTLED
    return 0.01 / max(now, 0.005), {"now": now, "steps": float(SETTLED)}


def _bad_calls(history: History) -> Finding:
    """Find calls that cannot be read or whose tool fails, if there are any calls: at least one in ten episodes."""
    read, unread, failed = (history[f"episode/{name}"].now for name in ("calls", "unread_calls", "failed_calls"))
    made = max(read + unread, 0.1)
    return (unread + failed) / made / 0.5, {"unread": unread / made, "failed": failed / made}


def _clipping(history: History) -> Finding:
    """Find too much clipping, if the policy also moves: a narrow clip, such as GSPO's, clips many tokens of a policy
    that hardly moves."""
    clipped, moved = history["clip_fraction"], history["kl/old"]
    far = moved.now / FRESH_GAP if moved.count else math.inf
    return min(clipped.now / 0.3, far), {"now": clipped.now, "start": clipped.start}


def _sampler(history: History) -> Finding:
    """Find a gap between sampler and learner; with lag a larger one is allowed, since the policy has moved since."""
    gap, age = history["kl/sampler"], history["lag/mean"].now
    allowed = FIRST_GAP if gap.count == 1 and age == 0 else FRESH_GAP + (OLD_GAP - FRESH_GAP) * min(age, 1.0)
    return gap.now / allowed, {"now": gap.now, "first": gap.begin[0], "age": age, "allowed": allowed}


def _critic(history: History) -> Finding:
    explained = history["explained_variance"]
    return 1 - fmean(explained.latest[-SETTLED:]), {"now": fmean(explained.latest[-SETTLED:])}


def _centring(history: History) -> Finding:
    mean, deviation = history["advantage/mean"], history["advantage/std"]
    size = fmean(abs(value) for value in mean.latest[-RECENT:])
    return size / max(deviation.now, 1e-6), {"now": mean.now, "deviation": deviation.now}


def _skipped(history: History) -> Finding:
    recent = history["skipped"].latest[-4 * RECENT :]
    return sum(recent), {"now": sum(recent), "steps": float(len(recent))}


def _halted(history: History) -> Finding:
    recent = history["halted"].latest[-SETTLED:]
    steps = float(sum(value > 0 for value in recent))
    return steps / (0.5 * SETTLED), {"now": steps, "steps": float(len(recent))}


def _outage(history: History) -> Finding:
    seconds = history["time/outage"].latest[-1]
    return seconds, {"now": seconds}


def _waits(name: str, limit: float) -> Callable[[History], Finding]:
    """Return a rule's function for the share of a step's time in which learner or sampler waits for the other. Without
    lag they take turns, so waiting is normal."""

    def look(history: History) -> Finding:
        waited, step, lag = history[name], history["time/step"], history["lag/mean"]
        part = waited.now / max(step.now, 1e-9) if lag.now > 0 else 0.0
        return part / limit, {"now": part}

    return look


def _loss(history: History) -> Finding:
    loss = history["loss/policy"]
    if history["reward/mean"].count or loss.start <= 0:  # the value of a policy gradient's loss has no meaning
        return FINE
    return loss.now / (1.5 * loss.start), {"now": loss.now, "start": loss.start}


LOOKS: Mapping[str, Callable[[History], Finding]] = {
    "entropy": _entropy,
    "kl": _kl,
    "idle reward": _idle_reward,
    "hacking": _hacking,
    "length": _length,
    "unfinished": partial(_cut, by_turns=False),
    "turns": partial(_cut, by_turns=True),
    "no calls": _no_calls,
    "bad calls": _bad_calls,
    "equal groups": _share("groups/equal", 0.8),
    "empty": _share("empty", 0.8),
    "clipping": _clipping,
    "critic": _critic,
    "centring": _centring,
    "sampler": _sampler,
    "failed rewards": _share("reward/failed", 0.02),
    "outage": _outage,
    "skipped": _skipped,
    "halted": _halted,
    "starving": _waits("time/batch", 0.5),
    "idle rollout": _waits("time/rollout_idle", 0.7),
    "loss": _loss,
}
WORDS = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
RULES = tuple(
    HealthRule(name=name, look=LOOKS[name], **words | {"advice": tuple(words["advice"])})
    for name, words in WORDS.items()
)
