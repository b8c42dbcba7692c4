"""Read the file of `scripts/train.py --dist_config`: where the stages of a pipeline run and how they share the work.

A key that the chosen runtime cannot use is refused, so that every accepted key has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plaudit.importers.rows import SettingRow, complaints, flat, recipe
from plaudit.support.fields import Rule, refuse, shown

MOST = "cluster.max_rollout_workers"
RESERVED = [f"runtime.{key}" for key in ("resources_per_worker", "resources_per_rollout_worker")]
ROWS = (
    SettingRow(theirs="cluster.runtime", ours="runtime.kind"),
    SettingRow(theirs="cluster.address", ours="runtime.address", ray=True),
    SettingRow(theirs="cluster.num_workers", ours="runtime.num_training_workers", ray=True, idle=(None, 1)),
    SettingRow(
        theirs="cluster.num_rollout_workers",
        ours="rollout.workers",
        ray=True,
        idle=(None, 1),
        kind=int,
        rule=Rule(least=1),
    ),
    SettingRow(theirs=MOST, ours="rollout.workers", convert=lambda most: None, ray=True, kind=int, rule=Rule(least=1)),
    SettingRow(theirs="cluster.cpus_per_worker", ours="threads"),
    *(SettingRow(theirs="cluster.cpus_per_worker", ours=f"{ours}.CPU", ray=True, idle=()) for ours in RESERVED),
    SettingRow(
        theirs="cluster.gpus_per_worker",
        ours="device",
        convert=("cpu", "cuda").__getitem__,
        kind=int,
        rule=Rule(choices=(0, 1)),
    ),
    *(SettingRow(theirs="cluster.gpus_per_worker", ours=f"{ours}.GPU", ray=True, idle=()) for ours in RESERVED),
    SettingRow(theirs="strategy.name", ours="runtime.strategy", ray=True, idle=(None, "replicate")),
    SettingRow(theirs="strategy.micro_tokens", ours="learn.micro_tokens"),
    SettingRow(theirs="fault_tolerance.checkpoint_interval", ours="save.every", kind=int, rule=Rule(least=1)),
    SettingRow(theirs="fault_tolerance.resume", ours="resume", convert={True: "latest"}.get, kind=bool),
    SettingRow(theirs="fault_tolerance.max_failures", ours="runtime.max_failures_per_hour", ray=True),
    SettingRow(theirs="fault_tolerance.timeout", ours="runtime.heartbeat_timeout", ray=True),
    SettingRow(
        theirs="communication.backend",
        ours="runtime.backend",
        convert=lambda backend: None if backend == "auto" else backend,
        ray=True,
        idle=(None, "auto"),
    ),
    SettingRow(theirs="communication.weights", ours="runtime.weights", ray=True),
    SettingRow(theirs="communication.timeout", ours="runtime.collective_timeout", ray=True),
)


def imported(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the file sets, as a nested mapping of our keys. Raises SettingsError with every value
    that is invalid or that the file's runtime cannot use."""
    values = flat(tree, ROWS)
    refuse(complaints(values, ROWS))
    refuse(list(_contradictions(values)))
    found = recipe(values, ROWS, ray=values["cluster.runtime"] == "ray")
    if values[MOST] is not None:
        found["rollout"]["workers"] = [values["cluster.num_rollout_workers"], values[MOST]]
    return found


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    least, most = values["cluster.num_rollout_workers"], values[MOST]
    if least is None and most is not None:
        yield f"{MOST}={most} also needs cluster.num_rollout_workers, the number of workers at the start"
    if least is not None and most is not None and most < least:
        yield f"cluster.max_rollout_workers={most} is below cluster.num_rollout_workers={least}: raise it"
    if values["cluster.runtime"] != "ray":
        idle = {row.theirs: row.idle for row in ROWS if row.ray and row.idle}
        yield from (f"{k}={values[k]} needs cluster.runtime=ray" for k, free in idle.items() if values[k] not in free)
    elif values["communication.backend"] == "nccl" and values["cluster.gpus_per_worker"] != 1:
        gpus = shown(values["cluster.gpus_per_worker"])
        yield f"communication.backend=nccl needs cluster.gpus_per_worker=1, not {gpus}"
