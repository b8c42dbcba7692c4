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
from typing import Any

import torch
from torch import Tensor

from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.optim import Optimizer
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.learn.sharding import Placement, Whole
from plaudit.models.decoder import Decoder
from plaudit.models.device import device_of
from plaudit.models.load import load_model
from plaudit.models.lora import adapter_names, add_lora, load_lora, peft_names, save_lora
from plaudit.models.settings import LoraSettings
from plaudit.support.paths import write_whole
from plaudit.training_api.losses import loss_of
from plaudit.types import Role, Stats

ALPHA = 32.0
"""Alpha of every adapter, as Tinker's."""
OPTIMIZER, ABOUT = "optimizer.safetensors", "about.json"
Computed = tuple[dict[int, Tensor], float]


def base_model(path: str, *, device: str, dtype: str, **placed: Any) -> Decoder:
    """Load a frozen base model; `placed` is as in `load_model`. Raises ValueError for one without a native decoder."""
    base = load_model(path, device=device_of(device), dtype=getattr(torch, dtype), **placed)
    if not isinstance(base, Decoder):
        raise ValueError(f"{path} runs through transformers: give a model of a family that the native decoder computes")
    return base.requires_grad_(False)


def adapted(base: Decoder, rank: int, seed: int = 0) -> Decoder:
    """Return a decoder with fresh adapters that shares all parameters of `base`, which stays as it is."""
    model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    return add_lora(model, LoraSettings(rank=rank, alpha=ALPHA), seed=seed)


class Adapters:
    """The adapters of `base` by name. All ranks must call each method, with its shard of a batch."""

    def __init__(self, base: Decoder, settings: LearnSettings):
        self.base, self.settings = base, settings
        self._learners: dict[str, Learner] = {}
        self._gradients: dict[str, dict[str, Tensor]] = {}
        """What an adapter's passes since its last step added up to."""

    def placed(self, model: Decoder) -> Placement:
        """Return the placement of an adapter's model among the ranks."""
        return Whole(model)

    def create(self, name: str, rank: int, seed: int) -> None:
        model = adapted(self.base, rank, seed)
        self._learners[name] = Learner(
            model,
            Role.POLICY,
            loss_of("cross_entropy", {}, {}),
            optimizer=OptimizerSettings(schedule="constant"),
            settings=self.settings,
            total_steps=1,
            placement=self.placed(model),
        )
        self._gradients[name] = {}

    def drop(self, name: str) -> None:
        self._learners.pop(name, None)
        self._gradients.pop(name, None)

    def compute(self, batch: Batch, name: str, loss: str, options: Mapping[str, float], train: bool) -> Computed:
        """Compute a loss over the batch; with `train`, add its gradient to the adapter's. Return the log-probs of this
        rank's rows by their number, (tokens,), and the loss over all ranks. Raises ValueError, and adds nothing, if it
        is not finite."""
        learner, found = self._learners[name], dict[int, Tensor]()
        learner.loss = loss_of(loss, options, found)
        if not train:
            return found, learner.placement.merge(learner.evaluate(batch))[f"loss/{Role.POLICY}"]
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
        """Return copies of an adapter's weights, by our names; {} on all ranks but one."""
        learner = self._learners[name]
        found = learner.placement.parameters(adapter_names(learner.model))
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in found.items()}

    def save(self, name: str, folder: Path, about: Mapping[str, object], optimizer: bool) -> None:
        """Write an adapter in peft's format, its optimizer's state if asked, and `about` it, on a disk that all ranks
        have."""
        learner = self._learners[name]
        tensors = learner.placement.parameters(peft_names(learner.model).values(), everyone=True)

        def write() -> None:
            save_lora(learner.model, folder, base=str(about["base_model"]), tensors=tensors)
            write_whole(folder / ABOUT, json.dumps(about))

        learner.placement.begin(write)
        if optimizer:
            learner.save(folder / OPTIMIZER)

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
