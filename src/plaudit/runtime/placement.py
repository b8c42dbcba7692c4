"""Where the calls of a run are computed, as `runtime.placement` says it. By default a reference and a critic are on the
training ranks, and rollout workers have devices of their own.

    {reference: {workers: 2}, critic: {inside: reference}, generate: {shares: train}} -> Where, by call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plaudit.support.fields import nearest, shown

GENERATE, TRAIN = "generate", "train"
OF_RANKS = ("reference", "critic")
"""Calls that ranks of their own can do."""
CALLS = (GENERATE, *OF_RANKS)
ELSEWHERE = {TRAIN: "runtime.num_training_workers and runtime.mesh", "judge": "rewards.N.workers"}
"""Settings that say where other calls are."""
PLANNED = ("auto", "symmetric", "heuristic")
"""Placements that the command line chooses, by a profile of the machine."""
AXES = ("data", "tensor", "replicas")
OWN = ("workers", "mesh", "resources")
FORMS = {GENERATE: f"{{inside: {TRAIN}}} or {{shares: {TRAIN}}}"}
FORMS |= dict.fromkeys(OF_RANKS, "such as {workers: 2, mesh: {tensor: 2}, resources: {CPU: 1}}, or {inside: CALL}")


@dataclass(frozen=True)
class Where:
    """In the processes of another call (`inside`); in processes of its own on that call's devices, in turn with it
    (`shares`); or on devices of its own."""

    workers: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    inside: str = ""
    shares: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in vars(self).items() if value)


def placed(given: Any) -> dict[str, Where]:
    """Calls whose place is given. Empty if something is wrong with it (`faults`), or it is still to be chosen."""
    wrong = given in PLANNED or next(faults(given), None)
    return {} if wrong else {call: Where(**entry) for call, entry in given.items()}


def faults(given: Any) -> Iterator[str]:
    """What is wrong with a placement, as ends of sentences that begin with its key."""
    if not isinstance(given, Mapping):
        if given not in PLANNED:
            yield (
                f"={shown(given)} must be one of {', '.join(PLANNED)}, or a mapping of calls ({', '.join(CALLS)}), "
                "such as {reference: {workers: 2}}"
            )
        return
    for call, entry in given.items():
        if call in ELSEWHERE:
            yield f" has {call}: {ELSEWHERE[call]} says where that is"
        elif call not in CALLS:
            yield f" has no call {call!r}{nearest(str(call), CALLS)}"
        elif not isinstance(entry, Mapping) or not entry:
            yield f".{call}={shown(entry)} must be {FORMS[call]}"
        else:
            yield from _of_call(call, entry, given)


def _of_call(call: str, entry: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    with_others = ("inside", "shares") if call == GENERATE else ("inside",)
    known = with_others if call == GENERATE else (*OWN, *with_others)
    if unknown := [key for key in entry if key not in known]:
        yield f".{call} has no {unknown[0]!r}{nearest(str(unknown[0]), known)}. It must be {FORMS[call]}"
        return
    if (named := [key for key in with_others if key in entry]) and len(entry) > 1:
        yield f".{call}={shown(entry)} has more than {named[0]}: keep {FORMS[call]}"
        return
    hosts = [TRAIN, *(other for other in OF_RANKS if call != GENERATE and other != call and _own(given.get(other)))]
    for key in named:
        if entry[key] not in hosts:
            yield (
                f".{call}.{key}={shown(entry[key])} has no processes of its own beside this call's: "
                f"take {' or '.join(hosts)}"
            )
    yield from (f".{call}.{told}" for told in _own_ranks(entry))


def _own(entry: Any) -> bool:
    """True for a call with processes of its own."""
    return isinstance(entry, Mapping) and bool(entry) and "inside" not in entry


def _own_ranks(entry: Mapping[str, Any]) -> Iterator[str]:
    if not _counts(workers := entry.get("workers", 1)):
        yield f"workers={shown(workers)} must be a whole number of at least 1"
    mesh, resources = entry.get("mesh", {}), entry.get("resources", {})
    if not isinstance(mesh, Mapping) or not all(axis in AXES and _counts(size) for axis, size in mesh.items()):
        yield f"mesh={shown(mesh)} must give ranks by axis ({', '.join(AXES)}), such as {{tensor: 2}}"
    amounts = resources.values() if isinstance(resources, Mapping) else [None]
    if not all(isinstance(one, int | float) and 0 <= one < float("inf") for one in amounts):
        yield f"resources={shown(resources)} must be amounts by name, such as {{CPU: 4, GPU: 1}}"


def _counts(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= 2**32
