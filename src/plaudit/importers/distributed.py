"""Read the file of `scripts/train.py --dist_config`: where the stages of a pipeline run and how they share the work.

`distributed.yaml` has its keys. One that the chosen runtime cannot use is refused, so that every accepted key has an
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit.importers.table import Found, KeyTable, Translation, Work, flat, imported, table
from plaudit.support.fields import shown

IDLE = {"cluster.num_workers": 1, "cluster.num_rollout_workers": 1, "strategy.name": "replicate"}
"""Keys for Ray with the values that have no effect, which are accepted without Ray too."""


def keys() -> KeyTable:
    """Return the table of the file's keys."""
    return table("distributed settings", "distributed")


def recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the file sets, as a nested mapping of our keys. Raises SettingsError with every value
    that is invalid or that the file's runtime cannot use."""
    values = flat(tree, keys().known)
    if values.get("communication.backend") == "auto":
        del values["communication.backend"]
    return imported(Translation(table=keys(), method="sft", foreign=values), WORK).recipe


def workers(r: Translation) -> Found:
    least, most = r("cluster.num_rollout_workers"), r("cluster.max_rollout_workers")
    if most is not None and least is None:
        r.refuse("cluster.max_rollout_workers", "it also needs cluster.num_rollout_workers, the number at the start")
    elif most is not None and most < least:
        r.refuse("cluster.max_rollout_workers", f"it is below cluster.num_rollout_workers={least}: raise it")
    elif least is not None:
        yield "rollout.workers", least if most is None else [least, most]


def devices(r: Translation) -> Found:
    cores, gpus = r("cluster.cpus_per_worker"), r("cluster.gpus_per_worker")
    if gpus not in (None, 0, 1):
        r.refuse("cluster.gpus_per_worker", "it must be 0 or 1")
    elif gpus is not None:
        yield "device", "cuda" if gpus else "cpu"
    reserved = {name: value for name, value in (("CPU", cores), ("GPU", gpus)) if value is not None}
    if reserved and r("cluster.runtime") == "ray":
        yield "runtime.resources_per_worker", reserved
        yield "runtime.resources_per_rollout_worker", {**reserved}


def checkpoints(r: Translation) -> Found:
    if (steps := r("fault_tolerance.checkpoint_interval")) is not None:
        yield "save.every", steps
    if r("fault_tolerance.resume"):
        yield "resume", "latest"


def spread(r: Translation) -> Found:
    """Without Ray, refuse values that need it, and leave out values that have no effect."""
    gpus = r("cluster.gpus_per_worker")
    if r("cluster.runtime") == "ray":
        if r("communication.backend") == "nccl" and gpus != 1:
            r.refuse("communication.backend", f"it needs cluster.gpus_per_worker=1, not {shown(gpus)}")
        return
    for key in r.table.worked_out["spread"]["theirs"]:
        if r(key) not in (None, IDLE.get(key)):
            r.problems.append(f"{key}={shown(r(key))} needs cluster.runtime=ray")
        for ours in r.table.ours(key):
            r.found.pop(ours, None)
    yield from ()


WORK: Mapping[str, Work] = {work.__name__: work for work in (workers, devices, checkpoints, spread)}
