"""Compute the bytes that each rank holds of a recipe's models, by part, and gathers in a pass. No torch.

recipe -> configurations by role; mesh -> Layout -> bytes a rank by part
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.families import read_config
from plaudit.models.files import read_json
from plaudit.models.folders import config_file
from plaudit.models.layout import Layout
from plaudit.models.mesh import Mesh, Place, check_mesh
from plaudit.models.parts import numbered
from plaudit.models.settings import LoraSettings
from plaudit.models.tokenizer import load_tokenizer
from plaudit.settings.tree import Settings
from plaudit.types import Role

MIB, GIB = 2**20, 2**30
PARTS = ("weights", "gradients", "moments", "masters")


@dataclass(frozen=True)
class Model:
    """A model of the run, with its layout over ranks."""

    role: str
    layout: Layout
    trained: bool
    bytes: int
    """Bytes of one weight in the precision of forward passes."""
    zero: int = 3
    """ZeRO stage: what is in shards during passes (3: weights and gradients, 2: gradients, 1: neither)."""

    def numbers(self, place: Place) -> tuple[int, int]:
        """Count the frozen and the trained numbers that a rank holds."""
        layout = self.layout
        mine = [ours for ours in layout.parameters if place.stage in layout.stages(ours)]
        held = sum(math.prod(layout.shape(ours, place)) for ours in mine)
        if not self.trained:
            return held, 0
        if not layout.lora.rank:
            return 0, held
        head = math.prod(layout.shape("head.weight", place)) if layout.head == "scalar" and "head.weight" in mine else 0
        adapters = (name for name in layout.adapters if place.stage in layout.stages(name))
        return held - head, head + sum(math.prod(layout.shape(name, place)) for name in adapters)

    @property
    def published(self) -> int:
        """Bytes of the model that are published to rollout workers: its adapters, or all weights."""
        return self.bytes * self.numbers(self.layout.mesh.place(0))[1]

    def held(self, place: Place) -> dict[str, int]:
        """Bytes by part that a rank keeps between passes. AdamW's moments are float32. Shards of trained weights are
        float32 and need no masters; an unsharded weight has a master if its precision is lower."""
        frozen, trained = self.numbers(place)
        sharded = self.layout.mesh.shards > 1
        masters = 0 if sharded or self.bytes == 4 else 4
        return {
            "weights": frozen * self.bytes + trained * (4 if sharded else self.bytes),
            "gradients": trained * 4,
            "moments": trained * 8,
            "masters": trained * masters,
        }

    def gathered(self, stage: int) -> int:
        """Most bytes that a rank gathers at once in a pass over shards: embeddings, last norm and head during the whole
        pass, and two layers (the current and the next one). ZeRO 1 and 2 gather all, and ZeRO 1 has whole gradients in
        float32."""
        if self.layout.mesh.shards == 1:
            return 0
        whole = Layout(self.layout.config, self.layout.head, replace(self.layout.mesh, data=1, context=1))
        place = replace(whole.mesh.place(0), stage=stage)
        sizes: Counter[str] = Counter()
        for ours in whole.parameters:
            if stage in whole.stages(ours):
                sizes[numbered(ours)[0]] += math.prod(whole.shape(ours, place))
        layers = sorted((size for number, size in sizes.items() if number), reverse=True)
        weights = sizes[""] + sum(layers if self.zero < 3 else layers[:2])
        trained = replace(self, layout=whole).numbers(place)[1] if self.zero == 1 else 0
        return self.bytes * weights + 4 * trained


def models_of(settings: Settings, mesh: Mesh | None = None, ranks: int | None = None) -> list[Model]:
    """Return the models of a run's training ranks on `mesh`; without it, on `ranks` ranks as the section `runtime`
    says. Raises MeshError, with the nearest mesh that fits."""
    runtime, objective = settings.runtime, settings.objective
    workers = max(1, ranks // (runtime.width * runtime.pipeline)) if ranks else runtime.workers
    axes = held = mesh or Mesh(**runtime.axes | {"data": workers})
    if mesh is None and runtime.sharded:
        held = replace(axes, replicas=runtime.replicas, data=max(1, workers // runtime.replicas))
    elif mesh is None:
        held = replace(axes, replicas=workers * runtime.context, data=1, context=1)
    policy = config_of(settings, settings.model.path)
    models = []

    def add(role: Role, config: DecoderConfig, *, trained: bool, lora: LoraSettings, bytes: int) -> None:
        if not runtime.trains(role):
            return
        head: HeadKind = "scalar" if role in (Role.JUDGE, Role.CRITIC) else "lm"
        check_mesh(config, axes, ranks)
        models.append(Model(role, Layout(config, head, held, lora), trained, bytes, runtime.stage or 3))

    low = 2 if settings.learn.precision == "bfloat16" else 4
    for role in objective.losses():
        config = critic_of(settings, policy) if role is Role.CRITIC else policy
        add(role, config, trained=True, lora=settings.adapters(role), bytes=low)
    reference = settings.reference
    if Role.REFERENCE in objective.asks and (reference.path or not settings.model.lora.rank):  # else adapters are off
        paths = (reference.path, *objective.teachers.values())
        for own in (config_of(settings, path) if path else policy for path in paths):
            add(Role.REFERENCE, own, trained=False, lora=LoraSettings(), bytes=4 if reference.ema else low)
    return models


def critic_of(settings: Settings, policy: DecoderConfig) -> DecoderConfig:
    """The critic's configuration: its folder's, else the first judge's with an equal vocab_size, else the policy's."""
    if settings.critic.path:
        return config_of(settings, settings.critic.path)
    judges = (config for config in judges_of(settings).values() if config.vocab_size == policy.vocab_size)
    return next(judges, policy)


def judges_of(settings: Settings) -> dict[int, DecoderConfig]:
    """The configurations of the run's judges by their index in `rewards`; {} if the run does not sample."""
    judges = {number: one.path for number, one in enumerate(settings.rewards) if one.kind == "judge" and one.path}
    return {number: config_of(settings, path) for number, path in judges.items()} if settings.samples else {}


def config_of(settings: Settings, path: str | None) -> DecoderConfig:
    """The configuration of a folder or hub id, of which only config.json is read, or that of a fresh model."""
    if path is not None:
        return read_config(read_json(config_file(path)))
    config = dict(settings.model.config)
    if "vocab_size" not in config and settings.model.tokenizer is not None:
        config["vocab_size"] = len(load_tokenizer(settings.model.tokenizer))
    return read_config(config)
