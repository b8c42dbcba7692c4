"""Warns when a run's figures look wrong: what is seen, what it usually means, what to try.

    metrics of a step -> history (the first and the latest figures) -> every sign -> warnings

A sign has a severity. At 1 it warns once, and stays silent until it has been calm again for some steps. Left out:
stopping or changing a run, which is the user's decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

CALM = 0.8
"""Severity below which a sign may warn again."""
QUIET = 50
"""Checks after a warning before the same sign may warn again."""
BEGIN = 5
"""How many figures make up "at the start"."""
RECENT = 5
"""How many figures make up "now"."""
SETTLED = BEGIN + RECENT
"""Number of figures from which "now" and "at the start" share none."""
MEMORY = 160
"""Number of latest figures that are kept."""

LOWERED = ("micro_tokens/min", "score_tokens/min")
"""Figures that exist only if memory ran out."""
FIRST_GAP = 1e-3
"""Largest normal gap between sampler and learner before the first update, in nats a token."""
FRESH_GAP = 0.02
"""The same for later steps, on samples of the newest weights."""
OLD_GAP = 0.1
"""The same for samples a version old or more: log-ratios then have a deviation of sqrt(2 * 0.1) = 0.45, and few weights
are cut."""


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
        return fmean(self.begin)

    @property
    def now(self) -> float:
        return fmean(self.latest[-RECENT:])


class History(dict[str, Series]):
    """The series of every metric seen so far; empty for a missing metric."""

    def __missing__(self, name: str) -> Series:
        return Series()


@dataclass(frozen=True, slots=True)
class Sign:
    """The severity of one sign (1: warn) and its message."""

    severity: float
    words: str


FINE = Sign(0.0, "")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that warns now."""

    sign: str
    severity: float
    words: str


class Health:
    """Watch the figures of one run. `check` takes a step's metrics and returns warnings, usually none."""

    def __init__(self, left_out: Collection[str] = ()):
        """`left_out` names signs that do not apply to this run."""
        self._signs = {name: sign for name, sign in SIGNS.items() if name not in left_out}
        self._history = History()
        self._silent: dict[str, int] = {}  # checks for which a sign that warned stays silent at least

    def check(self, metrics: Mapping[str, Any]) -> list[str]:
        """The alarms of a step's metrics as sentences."""
        place = f"Step {metrics['step']:.0f}: " if "step" in metrics else ""
        return [place + alarm.words for alarm in self.alarms(metrics)]

    def alarms(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        figures = {name: value for name, value in metrics.items() if name not in ("step", "epoch", "time")}
        for name, value in figures.items():
            if value is not None and math.isfinite(value):
                self._history.setdefault(name, Series()).add(float(value))
        signs = {"finite": _not_finite(figures), "memory": _memory(figures)}
        signs |= {name: sign(self._history) for name, sign in self._signs.items()}
        newly = [(name, sign) for name, sign in signs.items() if self._newly(name, sign.severity)]
        return [Alarm(name, sign.severity, sign.words) for name, sign in newly]

    def state(self) -> dict[str, Any]:
        """State for `restore`, as plain JSON."""
        series = {name: [s.begin, s.latest, s.count] for name, s in self._history.items()}
        return {"series": series, "silent": dict(self._silent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history = History(
            {name: Series(list(begin), list(latest), count) for name, (begin, latest, count) in state["series"].items()}
        )
        self._silent = dict(state["silent"])

    def _newly(self, name: str, severity: float) -> bool:
        if name in self._silent:
            self._silent[name] -= 1
            if self._silent[name] <= 0 and severity < CALM:
                del self._silent[name]
            return False
        if severity < 1:
            return False
        self._silent[name] = QUIET
        return True


Look = Callable[[History], Sign]


def _watching(metric: str, *, least: int = RECENT, online: bool = False) -> Callable[[Callable[[Series], Sign]], Look]:
    """Makes a sign of one metric: fine before `least` figures, and, if `online`, in runs without rewards or from 0."""

    def made(judged: Callable[[Series], Sign]) -> Look:
        def look(history: History) -> Sign:
            series = history[metric]
            if series.count < least or (online and (history["reward/mean"].count == 0 or series.start <= 0)):
                return FINE
            return judged(series)

        return look

    return made


def _not_finite(figures: Mapping[str, Any]) -> Sign:
    bad = [f"{name} is {value}" for name, value in figures.items() if value is None or not math.isfinite(value)]
    return Sign(
        float(bool(bad)),
        f"{', '.join(bad)}. A loss or gradient has overflowed, or a reward divided by zero. Resume from the last good "
        "checkpoint with a lower learning rate or a smaller gradient norm limit, and look at the rewards of this step.",
    )


def _memory(figures: Mapping[str, Any]) -> Sign:
    lowered = {name.removesuffix("/min"): value for name, value in figures.items() if name in LOWERED}
    asked = ", ".join(f"{name}={value:.0f}" for name, value in lowered.items())
    return Sign(
        float(bool(lowered)),
        "memory did not hold a pass of the size in the settings; the step was repeated in smaller passes with "
        f"the same gradient. The run keeps the smaller size ({asked}); lower learn.micro_tokens to start with it.",
    )


@_watching("entropy", least=SETTLED, online=True)  # in supervised training it is meant to fall
def _entropy(entropy: Series) -> Sign:
    return Sign(
        0.25 * entropy.start / max(entropy.now, 1e-9),
        f"entropy has fallen to {entropy.now:.3g} nats a token, from {entropy.start:.3g} at the start. The policy "
        "usually has settled on a few answers and no longer explores. Try a lower learning rate, a larger KL "
        "coefficient or a wider upper clip range.",
    )


@_watching("kl/reference", least=SETTLED)
def _kl(kl: Series) -> Sign:
    before = fmean(kl.latest[-4 * RECENT : -RECENT])
    jump = min(kl.now / 10.0, kl.now / max(3.0 * before, 1e-9))
    return Sign(
        max(kl.now / 30.0, jump),
        f"the KL to the reference is {kl.now:.3g} nats an answer ({before:.3g} a little earlier). The policy is "
        "running away from the model it started from, and the judge was never trained on what it writes there. Try a "
        "larger or adaptive KL coefficient, or a lower learning rate; an earlier checkpoint may be the better model.",
    )


def _hacking(history: History) -> Sign:
    gold = history["reward/gold"]
    judge = history["reward/judge"] if "reward/judge" in history else history["reward/mean"]
    length = min(len(gold.latest), len(judge.latest))
    worst = FINE
    for window in (20, 40, 80, MEMORY):
        if window > length:
            break
        rise, fall = _trend(judge.latest[-window:]), -_trend(gold.latest[-window:])
        severity = min(rise, fall) / 3.5
        if severity > worst.severity:
            half = window // 2
            judges = f"{fmean(judge.latest[-window:-half]):.3g} to {fmean(judge.latest[-half:]):.3g}"
            golds = f"{fmean(gold.latest[-window:-half]):.3g} to {fmean(gold.latest[-half:]):.3g}"
            worst = Sign(
                severity,
                f"the judge's reward rises ({judges} over {window} steps) while the gold reward falls ({golds}). The "
                "policy usually exploits the judge's mistakes. Stop here or take an earlier checkpoint; try a larger "
                "KL coefficient, or a judge trained on more pairs and on answers of this policy.",
            )
    return worst


def _trend(values: Sequence[float]) -> float:
    """How many standard errors the second half lies above the first (Welch's t)."""
    half = len(values) // 2
    early, late = values[:half], values[half:]
    error = math.sqrt(variance(early) / len(early) + variance(late) / len(late))
    return (fmean(late) - fmean(early)) / max(error, 1e-9)


@_watching("length/mean", least=SETTLED, online=True)
def _length(length: Series) -> Sign:
    ratio = max(length.now, 1e-9) / length.start
    way = "longer" if ratio > 1 else "shorter"
    return Sign(
        max(ratio, 1 / ratio) / 2,
        f"answers have become {way}: {length.now:.3g} tokens on average, {length.start:.3g} at the start. The reward "
        f"usually favours {way} answers whatever they say. Read some samples; compare rewards of answers of equal "
        "length, and try a token-wise or constant aggregation of the loss or a length term in the reward.",
    )


@_watching("unfinished")
def _unfinished(share: Series) -> Sign:
    grown = min(share.now / 0.2, (share.now - share.start) / 0.2)
    return Sign(
        max(share.now / 0.5, grown),
        f"{share.now:.0%} of the answers are cut off by length ({share.start:.0%} at the start). The policy does not "
        "end its answers, or the limit is too low. Raise the limit on new tokens, or give unfinished answers a "
        "penalty instead of scoring them as they are.",
    )


@_watching("groups/equal")
def _equal_groups(share: Series) -> Sign:
    return Sign(
        share.now / 0.8,
        f"in {share.now:.0%} of the groups all answers have the same reward, so these prompts teach nothing. They are "
        "too easy, too hard, or the reward fails. Try prompts of medium difficulty, more samples a prompt, a higher "
        "temperature, or dynamic sampling.",
    )


@_watching("empty")
def _empty(share: Series) -> Sign:
    return Sign(
        share.now / 0.8,
        f"nothing was learned in {share.now:.0%} of the latest steps: no group had a signal. All answers to a prompt "
        "had the same reward, or none had one: it failed (reward/failed), no reward was meant for such answers "
        "(reward/not_applicable), or they were masked as unfinished. "
        "Read some samples; try prompts of medium difficulty, more samples a prompt, or more room for answers.",
    )


@_watching("clip_fraction")
def _clipping(share: Series) -> Sign:
    return Sign(
        share.now / 0.3,
        f"{share.now:.0%} of the tokens are clipped. The policy moves too far within one batch, and those tokens no "
        "longer teach. Try a lower learning rate, fewer epochs or mini-batches a step, or less lag.",
    )


def _sampler(history: History) -> Sign:
    """The gap between sampler and learner. Fresh samples differ only by arithmetic, older ones also by what the policy
    has learned since."""
    gap, lag = history["kl/sampler"], history["lag/mean"]
    if not gap.count:
        return FINE
    first, age = gap.begin[0], lag.now if lag.count else 0.0
    if age > 0:
        return Sign(
            gap.now / (FRESH_GAP + (OLD_GAP - FRESH_GAP) * min(age, 1.0)),
            f"sampler and learner differ by {gap.now:.3g} nats a token on samples that are {age:.2g} versions old on "
            "average. The policy moves faster than its samples follow, and importance weights no longer make up for "
            "it. Try a lower learning rate or less lag; without lag the gap should be about 0.",
        )
    if gap.count == 1:
        return Sign(
            first / FIRST_GAP,
            f"before the first update sampler and learner already differ by {first:.3g} nats a token; it should be "
            "about 0. Both see other weights, another temperature, a truncated distribution, dropout or coarser "
            "arithmetic. Compare the log-probs of one answer on both sides before training on.",
        )
    return Sign(
        gap.now / FRESH_GAP,
        f"sampler and learner differ by {gap.now:.3g} nats a token ({first:.3g} in the first step), though samples are "
        "fresh. Check that new weights reach the sampler; try truncated importance weights or the same precision on "
        "both sides.",
    )


def _outage(history: History) -> Sign:
    waited = history["time/outage"]
    seconds = waited.latest[-1] if waited.count else 0.0
    return Sign(
        seconds,
        f"the step waited {seconds:.0f} s for rewards that failed, and has the scores that it would have had. Nothing "
        "was learned meanwhile. Look at the reward servers or functions that the log names; a second server of `urls` "
        "answers while one is away.",
    )


def _starving(history: History) -> Sign:
    """The learner's idle time. Without lag, learning begins when the last answer is there, so waiting is no sign."""
    waited, step, lag = history["time/batch"], history["time/step"], history["lag/mean"]
    if waited.count < SETTLED or not lag.count or lag.now <= 0:
        return FINE
    share = waited.now / max(step.now, 1e-9)
    return Sign(
        share / 0.5,
        f"the learner is idle for {share:.0%} of its time, waiting for samples, although they may be old. "
        "Generation or rewards do not keep up with it. Try more rollout workers on processors of their own, or faster "
        "rewards; more lag helps where some answers or rewards take long, and not where all workers are busy.",
    )


SIGNS: Mapping[str, Look] = {
    "entropy": _entropy,
    "kl": _kl,
    "hacking": _hacking,
    "length": _length,
    "unfinished": _unfinished,
    "equal groups": _equal_groups,
    "empty": _empty,
    "clipping": _clipping,
    "sampler": _sampler,
    "outage": _outage,
    "starving": _starving,
}
