"""One rank of training: every role's model with its learner or scorer, built from settings in its process.

    settings, checkpoint -> policy, critic or judge, reference -> Learner or Scorer of each

In a local run the loop calls the only rank in its own process; under Ray each rank is a process. Left out: data,
rollout and rewards, which belong to the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plaudit.algorithms.base import Objective
from plaudit.data.template import AS_CHAT, chosen_template
from plaudit.executors.base import Plan
from plaudit.executors.collected import Node
from plaudit.executors.following import Followed
from plaudit.executors.initial import dtype_of, initial_model, initial_path
from plaudit.executors.mirrored import Mirrored
from plaudit.executors.pinned import Pins
from plaudit.executors.publisher import Publisher
from plaudit.learn.learner import Learner
from plaudit.learn.passes import Passes
from plaudit.learn.ranks import Alone, Ranks, join
from plaudit.learn.readout import Teacher
from plaudit.learn.scorer import BaseScorer, Scorer
from plaudit.learn.sharding import Placement, Waiting, Whole, apart, recompute_layers
from plaudit.learn.shards import Sharded
from plaudit.learn.stages import Staged
from plaudit.learn.teachers import Teachers
from plaudit.learn.tensor import Axes, Cut
from plaudit.learn.watched import WATCHED, Watched
from plaudit.loop.checkpoint import Store
from plaudit.models.base import LanguageModel
from plaudit.models.boxes import Keep, Pending, beside, write_boxes
from plaudit.models.config import HeadKind
from plaudit.models.decoder import Decoder
from plaudit.models.described import not_cut
from plaudit.models.device import device_of
from plaudit.models.folders import whole_path
from plaudit.models.load import FILE_BYTES, describe, load_model, load_tokenizer, save_model
from plaudit.models.lora import FOLDER, add_lora, lora_of, peft_names, restore_lora, save_lora
from plaudit.models.mesh import Mesh, check_mesh
from plaudit.models.share import Share, begin_weights, filled
from plaudit.models.tokenizer import check_tokens, check_vocabulary
from plaudit.runtime.memory import (
    RankOutOfMemory,
    free_memory,
    keep_freed_memory,
    make_room,
    out_of_memory,
    release_freed_memory,
)
from plaudit.runtime.network import free_address
from plaudit.runtime.settings import NO_SHARDS
from plaudit.settings.tree import Settings, SettingsError
from plaudit.types import Role
from plaudit.weights.collective import Invitation, Sender
from plaudit.weights.packed import PackedWeights, PackReport


class Trainer:
    """A rank. `part` gives the learner or scorer of a role."""

    def __init__(
        self, settings: Settings, plan: Plan, ranks: Ranks | None = None, roles: Collection[Role] = tuple(Role)
    ):
        """`roles`: roles whose models this rank has, if the method uses them."""
        self.settings, self.plan, self.ranks = settings, plan, ranks or Alone()
        self.objective: Objective = settings.objective
        self.passes = Passes.of(settings.learn)
        for budget, tokens in zip((self.passes.micro, self.passes.score), plan.passes or (), strict=False):
            budget.lower(tokens)
        self.device = device_of(settings.device)
        runtime, device = settings.runtime, torch.device(self.device)
        self.pending = Pending(free_memory)
        self.keep: Keep = write_boxes if runtime.served else self.pending.add
        timeout, replicas = runtime.collective_timeout, runtime.replicas
        mesh = Mesh(**runtime.axes)
        self.axes = Axes.along(self.ranks, mesh, device=device, timeout=timeout, replicas=replicas)
        self.tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
        # Checkpoints keep the template that their chats were rendered with.
        self.tokenizer.chat_template = chosen_template(settings.data, self.tokenizer)
        if plan.as_chat is not None:
            self.tokenizer.init_kwargs[AS_CHAT] = plan.as_chat
        self.store = Store(plan.checkpoints)
        self.models: dict[Role, LanguageModel] = {}
        self.placements: dict[Role, Placement] = {}
        trained = self.objective.losses().keys() & {*roles}
        refers = Role.REFERENCE in self.objective.asks and Role.REFERENCE in roles
        check_tokens("critic.path", settings.critic.path if Role.CRITIC in trained else None, self.tokenizer)
        check_tokens("reference.path", settings.reference.path if refers else None, self.tokenizer)
        for role in (role for role in self.objective.losses() if role in trained):
            self._place(role, self._trained(role, head="scalar" if role in (Role.JUDGE, Role.CRITIC) else "lm"))
            if settings.learn.activation_checkpointing:
                recompute_layers(self.models[role])
        if refers:
            self._place(Role.REFERENCE, self._reference())
        self.teachers = [self._teacher(source, path) for source, path in self.objective.teachers.items() if refers]
        self.watched = Watched()
        self.members = {role: self._member(role) for role in self.models}
        if (settings.runtime.shares or settings.runtime.inside) and settings.samples:
            self.offload()

    @contextmanager
    def part(self, role: str) -> Iterator[Scorer | Watched]:
        """Yield the part named `role`: its learner or scorer, or `watched`. With several ranks, an out-of-memory error
        inside becomes RankOutOfMemory, since other ranks may wait for this one."""
        try:
            yield self.watched if role == WATCHED else self.members[Role(role)]
        except Exception as error:
            if self.ranks.world == 1 or not out_of_memory(error):
                raise
            micro, score = self.passes.micro.tokens, self.passes.score.tokens
            message = f"rank {self.ranks.rank} ran out of memory with the {role} ({str(error).splitlines()[0]:.200})"
            raise RankOutOfMemory(f"{message}. Lower learn.micro_tokens={micro}.", micro, score) from None

    def save(self, role: str, folder: Path) -> None:
        """Save a role's model, adapters merged, and the adapters separately. All ranks must call it: each copies its
        boxes of the weights, which `pending.write` writes later; rank 0 writes all else. The files do not depend on the
        number of ranks."""
        model, place = self.models[Role(role)], self.placements[Role(role)]
        if (share := place.share()) is None:  # transformers runs it, and writes it
            if (whole := place.whole()) is not None:
                save_model(whole, folder, tokenizer=self.tokenizer)
            return
        adapters = place.parameters(peft_names(model).values(), everyone=True)
        if not place.begin(partial(self._begin, role, folder, share, adapters)):
            return
        if not folder.is_dir():  # rank 0 has another disk: the driver collects what is written here
            folder = beside(folder)
            folder.mkdir(parents=True)
            begin_weights(share, folder, most=FILE_BYTES)
        self.keep(filled(share, folder, most=FILE_BYTES, adapters=adapters))

    def _begin(self, role: str, folder: Path, share: Share, adapters: Mapping[str, Tensor]) -> None:
        """Write a model's folder with its adapters; create the weights' files at full size, but without values."""
        model = self.models[Role(role)]
        folder.mkdir(parents=True, exist_ok=True)
        begin_weights(share, folder, most=FILE_BYTES)
        describe(model, folder, dtype=share.dtype, tokenizer=self.tokenizer)
        if adapters:
            base = whole_path(initial_path(self.settings, self.tokenizer, Role(role)))
            save_lora(model, folder / FOLDER, base=base, tensors=adapters)

    def onload(self) -> None:
        """Bring all models' offloaded state back to the device, to be ready to train."""
        for member in self.members.values():
            member.onload()

    def offload(self) -> None:
        """Free device memory for other processes until `onload`; weights stay, since samplers need them."""
        for member in self.members.values():
            member.offload()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by their Hugging Face names, for a sampler in this process, which has one rank."""
        return dict(self.models[Role.POLICY].hf_tensors())

    @cached_property
    def publisher(self) -> Publisher:
        """The `Publisher` by which this rank sends the policy's weights to samplers in other processes."""
        place, dtype = self.placements[Role.POLICY], dtype_of(self.settings)
        return Publisher(self.models[Role.POLICY], place, self.ranks, dtype=dtype, device=self.device)

    # --- models

    def _trained(self, role: Role, *, head: HeadKind) -> LanguageModel:
        """Return a role's model from the plan's checkpoint, or from its start without one, with LoRA if set."""
        saved = None if self.plan.resume is None else self.store.model(role, self.plan.resume)
        lora = self.settings.adapters(role)
        if lora.rank > 0:
            adapted = add_lora(self._initial(role, head=head), lora, seed=self.settings.seed)
            return adapted if saved is None else restore_lora(adapted, saved)
        return self._initial(role, head=head) if saved is None else self._load(str(saved), head=head)

    def _reference(self) -> LanguageModel:
        settings, policy = self.settings, self.models.get(Role.POLICY)
        saved = self.store.folder / Role.REFERENCE / (self.plan.resume or "")
        moving = settings.reference.ema > 0
        dtype = torch.float32 if moving else dtype_of(settings)  # bfloat16 would lose an EMA's steps
        if self.plan.resume is not None and moving and saved.is_dir():
            reference = self._load(str(saved), dtype=dtype)
        elif settings.reference.path is not None:
            reference = self._load(settings.reference.path, dtype=dtype)
        elif policy is not None and lora_of(policy) is not None:
            return policy  # `BaseScorer` runs it with its adapters off
        else:
            reference = self._initial(Role.POLICY).to(dtype)
        return reference.requires_grad_(False)

    def _teacher(self, source: str, path: str) -> tuple[LanguageModel, Placement]:
        check_tokens(f"algorithm.teachers.{source}", path, self.tokenizer)
        model = self._load(path).requires_grad_(False)
        self._fit(model, f"teacher of {source}")
        return model, self._placement(model, refers=True)

    def _initial(self, role: Role, *, head: HeadKind = "lm") -> LanguageModel:
        placed: dict[str, Any] = {"deferred": self._shards, "axis": self.axes.axis, "stage": self.axes.stage}
        return initial_model(self.settings, self.tokenizer, self.device, role, head=head, **placed)

    def _load(self, path: str, *, head: HeadKind = "lm", dtype: torch.dtype | None = None) -> LanguageModel:
        dtype, seed = dtype or dtype_of(self.settings), self.settings.seed
        placed: dict[str, Any] = {"deferred": self._shards, "axis": self.axes.axis, "stage": self.axes.stage}
        return load_model(path, head=head, dtype=dtype, device=self.device, seed=seed, **placed)

    def _place(self, role: Role, model: LanguageModel) -> None:
        """Give a model its placement among the ranks. A model in two roles has one already."""
        self._fit(model, role)
        places = {id(self.models[other]): place for other, place in self.placements.items()}
        self.models[role], refers = model, role is Role.REFERENCE
        self.placements[role] = places[id(model)] if id(model) in places else self._placement(model, refers=refers)

    def _fit(self, model: LanguageModel, name: str) -> None:
        """Give a model its axis of context. Raises SettingsError if rows, tokenizer or mesh do not fit it."""
        self.plan.longest.check(f"the {name}", model.max_positions)
        check_vocabulary(self.tokenizer, model)
        if self.axes.context.size > 1:
            mesh = Mesh(**self.settings.runtime.axes)
            if not isinstance(model, Decoder):
                raise not_cut(mesh, "it runs through transformers")
            check_mesh(model.config, mesh)
            model.context_axis = self.axes.context

    def _placement(self, model: LanguageModel, *, refers: bool) -> Placement:
        """Return a model's placement among the ranks. `refers`: it may stay in host memory until it is used."""
        waits = refers and "reference" in self.settings.runtime.offload and apart(self.device)
        place = self._along_data(model, waits=waits)
        if isinstance(model, Decoder) and model.axis.size > 1:
            place = Cut(place, model, self.axes.tensor)
        if isinstance(model, Decoder) and model.stage.count > 1:
            place = Staged(place, model, self.axes.line, self.ranks)
        return place

    def _along_data(self, model: LanguageModel, *, waits: bool) -> Placement:
        runtime, device, ranks = self.settings.runtime, torch.device(self.device), self.axes.data
        if not self._shards:
            return Waiting(model, ranks, device=device) if waits else Whole(model, ranks)
        if runtime.offloaded and self.device == "cpu":
            raise SettingsError("runtime.offload: weights has no effect on the CPU: leave it out, or take device=cuda")
        offload, grid = runtime.offloaded or waits, self.axes.grid
        place = Sharded(model, ranks, device=device, cpu_offload=offload, stage=runtime.stage, grid=grid)
        release_freed_memory()  # a fallback model was loaded whole before
        return place

    @property
    def _shards(self) -> bool:
        return self.settings.runtime.sharded and not isinstance(self.axes.data, Alone)

    # --- members

    def _member(self, role: Role) -> Scorer:
        settings, model = self.settings, self.models[role]
        temperature = settings.rollout.temperature if self.objective.online else 1.0
        if role is Role.REFERENCE:
            policy = self.models.get(Role.POLICY)
            kind = BaseScorer if model is policy else Scorer
            how: dict[str, Any] = {"temperature": temperature, "token_budget": self.passes.score}
            first = kind(model, role, leader=policy, placement=self.placements[role], **how)
            others = [Scorer(one, role, placement=place, **how) for one, place in self.teachers]
            return Teachers([first, *others]) if others else first
        optimizer = settings.optimizer
        if role is Role.CRITIC:
            optimizer = replace(optimizer, learning_rate=settings.critic.learning_rate)
        loss = self.objective.losses()[role]
        compared = role is Role.POLICY and self.objective.reads_divergence
        return Learner(
            model,
            role,
            self.watched.watching(loss) if role is Role.POLICY and settings.log.samples_megabytes else loss,
            optimizer=optimizer,
            settings=settings.learn,
            total_steps=self.plan.total_steps,
            temperature=temperature,
            halt=self.objective.halt if role is Role.POLICY else lambda stats: None,
            placement=self.placements[role],
            passes=self.passes,
            waits="optimizer" in settings.runtime.offload and apart(self.device),
            keep=self.keep,
            teacher=Teacher.of(self.models[Role.REFERENCE], model) if compared else None,
        )


class RankProcess(Trainer, Node, Mirrored, Followed, Pins):
    """A rank in a separate process; `build` joins the other ranks and makes the models. `recipe` has plain values."""

    def __init__(self, recipe: Mapping[str, Any], plan: Plan, roles: Collection[Role]):
        self.recipe, self.plan, self.roles = recipe, plan, roles
        self.sender = Sender()

    def address(self) -> str:
        return free_address()

    def build(self, address: str, rank: int, world: int, timeout: float) -> None:
        """Join the process group of all `world` ranks, then build this rank's models."""
        from plaudit.settings.recipes import load_settings

        keep_freed_memory()
        settings = load_settings(self.recipe)
        torch.manual_seed(settings.seed)
        device = torch.device(device_of(settings.device))
        shards, backend = settings.runtime.sharded, settings.runtime.backend
        if shards and backend == "gloo" and device.type == "cuda":
            raise SettingsError(NO_SHARDS)
        ranks = join(address, rank, world, device=device, timeout=timeout, always=shards, backend=backend)
        Trainer.__init__(self, settings, self.plan, ranks, self.roles)
        self.check_follows()

    def offload(self) -> None:
        super().offload()
        make_room()

    def packed_bytes(self) -> int:
        """Return the bytes of the policy's weights that all ranks send together."""
        return self.publisher.bytes()

    def pack_part(self, version: int, part: int) -> tuple[PackedWeights | None, PackReport]:
        """Return a part of this rank's policy weights for samplers (None without one), and for the driver the digest of
        all weights and the part's sizes. All ranks must be called, first for part 0."""
        if part == 0:
            self.publisher.begin(version)
        sent = self.publisher.pack_part(part)
        return sent, self.publisher.report(part, sent)

    async def whole(self, version: int, part: int) -> tuple[PackedWeights | None, PackReport]:
        """As `pack_part`, but whole, and beside this rank's other work. Raises NotHeldError for any other version."""
        whole = self.publisher.whole(version, part)
        return whole, self.publisher.report(part, whole)

    def hold(self, version: int, device: str) -> PackReport:
        """Pack all parts together and keep them for `send`. Return the digest of all weights, and their sizes."""
        self.publisher.begin(version)
        if (held := self.publisher.all(device)) is None:
            self.sender.packed = self.sender.changes = None
            return PackReport(self.publisher.digest, 0, 0, 0)
        self.sender.packed, self.sender.changes = held
        return PackReport(self.publisher.digest, 1, held[1].bytes, held[0].bytes)

    async def meet(self) -> str:
        return await self.sender.meet()

    async def send(self, invitation: Invitation) -> None:
        await self.sender.send(invitation)

    async def dissolve(self, invitation: Invitation) -> None:
        await self.sender.dissolve(invitation)
