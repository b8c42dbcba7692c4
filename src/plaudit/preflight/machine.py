"""Compare what this machine has with what a run asks for. Needs neither torch nor Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plaudit.runtime.memory import free_memory
from plaudit.runtime.resources import ResourcesError, check_room
from plaudit.settings.tree import Settings

FIXED = ("trained", "reference", "judge")
"""Parts of memory that do not depend on the size of a pass."""
GIB = 2**30


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gpus() -> list[str]:
    """Device files of GPUs (/dev/nvidiaN, or dxg), at most as many as CUDA_VISIBLE_DEVICES lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")) or ["dxg"] * Path("/dev/dxg").exists()
    return (
        there if visible is None else there[: len([one for one in visible.split(",") if one.strip() not in ("", "-1")])]
    )


def on_gpu(s: Settings) -> bool:
    return s.device.startswith("cuda") or (s.device == "auto" and bool(gpus()) and not _without_cuda())


def _without_cuda() -> bool:
    """True if the installed torch is a build for CPUs, by its version; False if torch is absent."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def memory_there(*, gpu: bool) -> float:
    """Return bytes of memory: the smallest GPU's total, or what is free on this machine (or in this process's control
    group). Infinity if unknown."""
    if gpu:
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            lines = subprocess.run(asked, capture_output=True, text=True, timeout=1.0, check=True).stdout
            return min(float(line) for line in lines.split()) * 2**20
        except (OSError, subprocess.SubprocessError, ValueError):
            return float("inf")
    return free_memory()


def described(s: Settings) -> str:
    """Return a line that says on which devices the run would compute, and the memory and disk there."""
    gpu, free = on_gpu(s), disk_there(Path(s.output))[1]
    where = f"cuda, {len(gpus())} GPUs" if gpu else f"cpu, {cores()} cores"
    memory = "of a GPU" if gpu else "of memory"
    return f"here: {where}, {memory_there(gpu=gpu) / GIB:.1f} GiB {memory} and {free / GIB:.1f} GiB of disk are free"


def disk_there(output: Path) -> tuple[Path, int]:
    """Return the first folder that exists of `output` and its parents, and the free bytes of its disk."""
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    return there, shutil.disk_usage(there).free


def about_memory(parts: Mapping[str, float], s: Settings) -> Iterator[str]:
    """Yield an error if weights, gradients and moments do not fit this machine, however small a pass is."""
    ranks: float = s.runtime.replicas if s.runtime.sharded else s.runtime.workers  # copies of the models here
    ranks = ranks / s.runtime.ranks if on_gpu(s) else ranks  # copies, or parts of one, on one GPU
    held, there = sum(parts.get(part, 0.0) for part in FIXED) * ranks, memory_there(gpu=on_gpu(s))
    if held > there:
        sizes = ", ".join(f"{part} {parts[part] * ranks / GIB:.1f}" for part in FIXED if part in parts)
        yield (
            f"memory: models, gradients and moments take {held / GIB:.1f} GiB ({sizes}), and {there / GIB:.1f} GiB are "
            "left: use a smaller model, learn.precision=bfloat16, model.lora.rank, or runtime.strategy=fsdp over more "
            "devices"
        )


def tight_memory(parts: Mapping[str, float], s: Settings) -> Iterator[str]:
    """Yield a warning if full passes may not fit beside the models, unless `about_memory` complains."""
    whole, there = sum(parts.values()), memory_there(gpu=on_gpu(s))
    if whole > there and not any(about_memory(parts, s)):
        sizes = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items())
        yield (
            f"memory: full passes would take {whole / GIB:.1f} GiB ({sizes}), and {there / GIB:.1f} GiB are left: "
            "lower learn.micro_tokens or rollout.slots, or set learn.activation_checkpointing=true"
        )


def about_disk(needed: float, output: Path) -> Iterator[str]:
    """Yield an error if checkpoints of `needed` bytes do not fit on the disk of the run's folder."""
    there, free = disk_there(output)
    if needed > free:
        yield (
            f"disk: checkpoints take {needed / GIB:.1f} GiB, and {there} has {free / GIB:.1f} GiB free: lower "
            "save.keep, free some, or set output to another disk"
        )


def about_devices(s: Settings) -> Iterator[str]:
    """Yield errors for GPUs and Ray reservations that this machine lacks. A cluster at an address is not checked."""
    here = gpus()
    if s.device.startswith("cuda") and s.runtime.address is None:
        number = s.device.partition(":")[2]
        if _without_cuda():
            yield f"device={s.device}: the installed torch {version('torch')} is a build for CPUs"
        elif not here or (number.isdigit() and int(number) >= len(here)):
            yield f"device={s.device}: this machine shows {len(here)} GPUs. Set device=cpu or auto"
    if s.runtime.kind == "ray" and s.runtime.address is None:
        runtime = s.runtime
        groups = (runtime, *runtime.apart.values())
        asked = [dict(group.resources_per_worker) for group in groups for _ in range(group.ranks)]
        asked += [dict(runtime.resources_per_rollout_worker)] * (_rollouts(s) * runtime.rollout_width)
        asked += s.reserving
        nodes = [{"CPU": float(cores()), "GPU": float(len(here)), "memory": memory_there(gpu=False)}]
        try:
            check_room(nodes, asked, what="training ranks, rollout workers, rewards and environments")
        except ResourcesError as error:
            yield str(error)


def _rollouts(s: Settings) -> int:
    """Number of rollout workers that reserve their own devices at the start; 0 if the setting is wrong, which another
    check reports."""
    if not s.samples or s.runtime.shares or s.runtime.inside or list(s.rollout.contradictions()):
        return 0
    return s.rollout.workers_range[0]


def crowded(s: Settings) -> Iterator[str]:
    """Yield a warning if a local run sets more threads than this process may use cores."""
    if s.runtime.kind == "local" and s.threads is not None and s.threads > cores():
        yield f"threads={s.threads}, and this process may use {cores()} cores: more threads than cores are slower"
