"""Our side of `zero.py`: the learner, its placement and optimizer as a run has them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zero_rank import BETAS, EPS, LENGTH, LIMIT, MICRO, RANK, RATE, WORLD, serve

from plaudit.algorithms.sft import SFT
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.ranks import join
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.learn.sharding import Placement, Whole
from plaudit.learn.shards import Sharded
from plaudit.models.load import FILE_BYTES, load_model
from plaudit.models.share import begin_weights, write_weights
from plaudit.runtime.memory import keep_freed_memory, release_freed_memory
from plaudit.types import Role, Row

CASE: dict[str, Any] = json.loads(sys.argv[1])
STATE = "policy.safetensors"


class Plaudit:
    name = "plaudit"
    learner: Learner

    def build(self, saved: str | None) -> None:
        cpu, self.start = torch.device("cpu"), Path(CASE["start"]) / "model"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        ranks = join(address, RANK, WORLD, device=cpu, timeout=600.0, always=True)
        model = load_model(str(saved or self.start), deferred=CASE["stage"] > 0)
        place: Placement = Whole(model, ranks)
        if CASE["stage"]:
            place = Sharded(model, ranks, device=cpu, stage=CASE["stage"])
        release_freed_memory()
        self.objective = SFT()
        self.learner = Learner(
            model,
            Role.POLICY,
            self.objective.losses()[Role.POLICY],
            optimizer=OptimizerSettings(
                learning_rate=RATE, betas=BETAS, eps=EPS, max_gradient_norm=LIMIT, schedule="constant"
            ),
            settings=LearnSettings(micro_tokens=MICRO * LENGTH),
            total_steps=99,
            placement=place,
            waits=CASE.get("offload", False),
        )
        if saved is not None:
            self.learner.restore(Path(saved) / STATE, {})

    def backward(self, rows: Tensor) -> None:
        made = [
            Row(tokens=tuple(row), trainable=(False, *(True,) * (LENGTH - 1)), group=number)
            for number, row in enumerate(rows.tolist())
        ]
        self.learner.prepare(self.objective.weigh(Batch.of(made)).shards(WORLD)[RANK], 0, 1.0)

    def gradient(self) -> dict[str, Tensor]:
        if not CASE["stage"]:
            return {name: gradient.clone() for name, gradient in self.learner.optimizer.collected.items()}
        found = {}
        for name, parameter in self.learner.optimizer.parameters.items():
            assert parameter.grad is not None
            found[name] = parameter.grad.full_tensor()  # type: ignore[attr-defined]
        return found

    def step(self) -> float:
        self.learner.apply(True)
        return self.learner.optimizer.norm

    def weights(self) -> dict[str, Tensor]:
        whole = self.learner.placement.whole()
        return {} if whole is None else {name: x.detach().clone() for name, x in whole.hf_tensors()}

    def save(self, folder: str) -> None:
        place, to = self.learner.placement, Path(folder)
        if not RANK:
            to.mkdir()
            shutil.copy(self.start / "config.json", to)
        dist.barrier()
        share = place.share()
        assert share is not None
        if place.begin(partial(begin_weights, share, to, most=FILE_BYTES)):
            write_weights(share, to, most=FILE_BYTES)
        self.learner.save(to / STATE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()  # as ranks do
    serve(Plaudit())
