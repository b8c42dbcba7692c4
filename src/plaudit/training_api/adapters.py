"""Adapters of one base model that are trained side by side: each is a decoder that shares the base's weights, with a
learner and an optimizer of its own.

    create -> compute (gradients add up) -> step -> tensors, for samplers; save, load

The server calls its methods through a `WorkerGroup`, as those of any worker.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.optim import Optimizer
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.models.decoder import Decoder
from plaudit.models.lora import adapter_names, add_lora, load_lora, save_lora
from plaudit.models.settings import LoraSettings
from plaudit.support.paths import write_whole
from plaudit.training_api.losses import LossOptions, loss_of
from plaudit.types import Role, Stats

ALPHA = 32.0
"""Alpha of every adapter, as Tinker's."""
OPTIMIZER, ABOUT = "optimizer.safetensors", "about.json"
Computed = tuple[dict[int, Tensor], float]


def adapted(base: Decoder, rank: int, seed: int = 0) -> Decoder:
    """Return a decoder with fresh adapters that shares all parameters of `base`, which stays as it is."""
    model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    return add_lora(model, LoraSettings(rank=rank, alpha=ALPHA), seed=seed)


class Adapters:
    """The adapters of `base` by name."""

    def __init__(self, base: Decoder, settings: LearnSettings):
        self.base, self.settings = base, settings
        self._learners: dict[str, Learner] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}
        """What an adapter's passes since its last step added up to."""

    def create(self, name: str, rank: int, seed: int) -> None:
        idle = OptimizerSettings(schedule="constant")
        self._learners[name] = Learner(
            adapted(self.base, rank, seed),
            Role.POLICY,
            loss_of("cross_entropy", LossOptions(), {}),
            optimizer=idle,
            settings=self.settings,
            total_steps=1,
        )
        self._gradients[name] = {}

    def drop(self, name: str) -> None:
        self._learners.pop(name, None)
        self._gradients.pop(name, None)

    def compute(self, batch: Batch, name: str, loss: str, options: LossOptions, train: bool) -> Computed:
        """Compute a loss over the batch; with `train`, add its gradient to the adapter's. Return the log-probs of rows
        by their number, (tokens,), and the loss. Raises ValueError, and adds nothing, if it is not finite."""
        learner, found = self._learners[name], dict[int, Tensor]()
        learner.loss = loss_of(loss, options, found)
        if not train:
            return found, learner.evaluate(batch)[f"loss/{Role.POLICY}"]
        stats = learner.prepare(batch, 0, 1.0)
        new = learner.optimizer.collected
        learner.optimizer.clear()
        if stats["skipped"]:
            raise ValueError(
                f"the loss {stats[f'loss/{Role.POLICY}']} or its gradient is not finite: nothing was added"
            )
        before = self._gradients[name]
        self._gradients[name] = {key: before[key] + one if before else one for key, one in new.items()}
        return found, stats[f"loss/{Role.POLICY}"]

    def step(self, name: str, settings: OptimizerSettings, rate: float) -> Stats:
        """Take an optimizer step with the gradients so far, which are zeros if there are none."""
        learner = self._learners[name]
        optimizer = learner.optimizer
        optimizer.settings, optimizer.rate = settings, rate
        optimizer.collect()
        optimizer.collected |= self._gradients[name]
        norm = optimizer.gradient_norm()
        if not math.isfinite(norm):
            raise ValueError("the gradient is not finite: the step was not taken")
        learner.apply(True)
        self._gradients[name] = {}
        return {"gradient_norm": norm, "learning_rate": rate}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return copies of an adapter's weights, by our names."""
        model = self._learners[name].model
        return {key: model.get_parameter(key).detach().clone() for key in adapter_names(model)}

    def save(self, name: str, folder: Path, about: Mapping[str, object], optimizer: bool) -> None:
        """Write an adapter in peft's format, its optimizer's state if asked, and `about` it."""
        learner = self._learners[name]
        save_lora(learner.model, folder, base=str(about["base_model"]))
        if optimizer:
            learner.save(folder / OPTIMIZER)
        write_whole(folder / ABOUT, json.dumps(about))

    def load(self, name: str, folder: Path, optimizer: bool) -> None:
        """Read what `save` wrote. Without `optimizer`, its state begins again."""
        learner = self._learners[name]
        if optimizer and not (folder / OPTIMIZER).exists():
            raise ValueError("the save has no optimizer's state: load it without, or load one of save_state")
        load_lora(learner.model, folder)
        self._gradients[name] = {}
        learner.optimizer = Optimizer(learner.model, learner.optimizer_settings, learner.placement)
        if optimizer:
            learner.restore(folder / OPTIMIZER, {})
