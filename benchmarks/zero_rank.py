"""What ranks of both systems share: the model, the rows, the commands, and how memory is measured.

Needs torch alone, as the peers' environments have no Plaudit.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from task import MODELS, VOCABULARY
from torch import Tensor
from torch._subclasses import FakeTensor

CONFIG = MODELS["25M"] | {"max_position_embeddings": 64, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
ROWS, LENGTH, MICRO = 48, 64, 8
"""Rows of a step of all ranks, their tokens, and the rows of a pass."""
RATE, BETAS, EPS, LIMIT = 1e-3, (0.9, 0.95), 1e-8, 1.0
BUCKET = 1 << 22
"""Elements of a collective, where a system asks for it."""
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class System(Protocol):
    """One rank's part of a system."""

    name: str

    def build(self, saved: str | None) -> None:
        """Make the model, or take it up from a checkpoint."""
        ...

    def backward(self, rows: Tensor) -> None:
        """Compute the gradient of this rank's part of a step's rows."""
        ...

    def gradient(self) -> dict[str, Tensor]:
        """The whole gradient. All ranks call it."""
        ...

    def step(self) -> float:
        """Move by the gradient; return its norm."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The whole weights. All ranks call it."""
        ...

    def save(self, folder: str) -> None: ...


def rows_of(step: int) -> Tensor:
    """The rows of a step of all ranks: random tokens."""
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def resident(field: str) -> float:
    """MiB by this process's own account: VmRSS now, VmHWM at most since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def held() -> float:
    """MiB of all tensors that there are."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # isinstance would wake lazy objects
    found = [one for one in found if not issubclass(type(one), FakeTensor)]  # a compiler's, without data
    found += [one.grad for one in found if one.is_leaf and one.grad is not None]
    sizes = {}
    for one in found:
        local = one.to_local() if hasattr(one, "to_local") else one
        if local.device.type == "cpu":
            sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(sizes.values()) / 2**20


def serve(system: System) -> None:
    """Do as standard input says, line by line."""
    from safetensors.torch import load_file, save_file

    folder, done, before = Path(json.loads(sys.argv[1])["start"]), 0, resident("VmRSS")
    reference = folder / f"{system.name} gradient.safetensors"

    def step(look: Any = None) -> dict[str, float]:
        nonlocal done
        rows, began = rows_of(done), time.perf_counter()
        system.backward(rows)
        found = {} if look is None else look()
        norm = system.step()
        done += 1
        return {"seconds": time.perf_counter() - began, "tokens": ROWS * LENGTH, "norm": norm, **found}

    def compare(*write: str) -> dict[str, float]:
        gradient = system.gradient()
        if write:
            save_file(gradient, reference)
            return {}
        alone = load_file(reference)
        far = max(float((gradient[key] - alone[key]).abs().max()) for key in alone)
        gradient.clear()
        alone.clear()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return {"gap": far}

    for line in sys.stdin:
        answer: dict[str, Any] = {}
        what, *given = json.loads(line)
        if what == "first":
            system.build(None)
            answer = step(lambda given=given: compare(*given))
        elif what == "load":
            try:
                system.build(given[0])
                done = int((Path(given[0]) / "done").read_text())
            except Exception as error:  # noqa: BLE001  # it is the answer
                answer = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        elif what == "step":
            answer = step()
        elif what == "held":
            answer = {"held": held(), "peak": resident("VmHWM") - before}
        elif what == "save":
            system.save(given[0])
            if RANK == 0:
                (Path(given[0]) / "done").write_text(str(done))
        else:
            weights = system.weights()
            if RANK == 0:
                save_file(weights, given[0])
        print(f"@{json.dumps(answer)}", flush=True)
