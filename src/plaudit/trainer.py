"""One rank of training: every role's model with its learner or scorer, built from settings where it is to run.

    settings, checkpoint -> policy, critic or judge, reference -> Learner or Scorer of each -> do(role, method, ...)

In a local run the loop calls the one rank in its own process; under Ray each rank is a process. Left out: data, rollout
and rewards, which belong to whoever drives the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plaudit.algorithms.base import Objective
from plaudit.data.chat import chat_template
from plaudit.learn.learner import Learner
from plaudit.learn.ranks import Alone, Ranks, free_address, join
from plaudit.learn.scorer import BaseScorer, Scorer
from plaudit.learn.sharding import Placement, Sharded, Waiting, Whole, apart, recompute_layers
from plaudit.loop.checkpoint import Store
from plaudit.models.base import LanguageModel
from plaudit.models.config import HeadKind
from plaudit.models.device import device_of
from plaudit.models.digest import digest
from plaudit.models.load import fresh_model, load_model, load_tokenizer, local_folder, save_model
from plaudit.models.lora import FOLDER, adapter_names, add_lora, lora_of, restore_lora, save_lora
from plaudit.models.tokenizer import check_vocabulary, contradict
from plaudit.runtime.memory import give_back_memory, keep_freed_memory, release_freed_memory
from plaudit.runtime.settings import NO_SHARDS
from plaudit.settings import Settings, SettingsError
from plaudit.types import Role
from plaudit.weights.collective import Invitation, Sender
from plaudit.weights.parcel import Parcel, pack

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Longest:
    """The longest sequence that a run will train on or sample."""

    tokens: int
    what: str
    """What that is, for people."""

    def check(self, whose: str, room: int, *, otherwise: str = "") -> None:
        """Refuse rows that would not fit the context of a model with room for so many tokens. `otherwise`: what else
        would help."""
        if self.tokens > room:
            raise SettingsError(
                f"{self.what} take {self.tokens} tokens together, {whose} has room for {room}: "
                "lower data.max_tokens, data.max_prompt_tokens or rollout.max_tokens" + otherwise
            )


@dataclass(frozen=True)
class Plan:
    """What a rank must know beside the settings."""

    checkpoints: Path
    resume: str | None
    total_steps: int
    longest: Longest


def dtype_of(settings: Settings) -> torch.dtype:
    """Of weights and activations."""
    dtype: torch.dtype = getattr(torch, settings.learn.precision)
    return dtype


def initial_model(
    settings: Settings, tokenizer: Any, device: str, role: Role = Role.POLICY, *, head: HeadKind = "lm"
) -> LanguageModel:
    """A role's model as a run starts."""
    path = settings.model.path
    if role is Role.CRITIC:
        path = settings.critic.path or judge_for_critic(settings, tokenizer) or path
    if path is not None:
        return load_model(path, head=head, dtype=dtype_of(settings), device=device, seed=settings.seed)
    config, seed, dtype = settings.model.config, settings.seed, dtype_of(settings)
    return fresh_model(config, head=head, seed=seed, dtype=dtype, vocab_size=len(tokenizer), device=device)


def judge_for_critic(settings: Settings, tokenizer: Any) -> str | None:
    """The first judge of the run whose tokens are the policy's."""
    judges = [reward.path for reward in settings.rewards if reward.kind == "judge" and reward.path]
    for path in judges:
        if not contradict(load_tokenizer(path), tokenizer):
            return path
        log.warning("The critic does not start from the judge %s, whose tokenizer is not the policy's.", path)
    return None


class Trainer:
    """A rank. `do` reaches the learner or scorer of a role."""

    def __init__(self, settings: Settings, plan: Plan, ranks: Ranks | None = None):
        self.settings, self.plan, self.ranks = settings, plan, ranks or Alone()
        self.objective: Objective = settings.objective
        self.device = device_of(settings.device)
        self.tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
        # Checkpoints keep the template that their chats were rendered with.
        self.tokenizer.chat_template = chat_template(settings.data.chat_template) or self.tokenizer.chat_template
        self.store = Store(plan.checkpoints)
        self.models: dict[Role, LanguageModel] = {}
        self.placements: dict[Role, Placement] = {}
        self._check_tokens("critic.path", settings.critic.path if Role.CRITIC in self.objective.losses() else None)
        self._check_tokens("reference.path", settings.reference.path if Role.REFERENCE in self.objective.asks else None)
        for role in self.objective.losses():
            self._place(role, self._trained(role, head="scalar" if role in (Role.JUDGE, Role.CRITIC) else "lm"))
            if settings.learn.activation_checkpointing:
                recompute_layers(self.models[role])
        if Role.REFERENCE in self.objective.asks:
            self._place(Role.REFERENCE, self._reference())
        role = min(self.models, key=lambda role: self.models[role].max_positions)
        self.plan.longest.check(f"the {role}", self.models[role].max_positions)
        self.members = {role: self._member(role) for role in self.models}
        self._beneath: str | None = None
        if settings.rollout.share_devices and settings.samples:
            self.rest()

    def do(self, role: str, method: str, *arguments: Any) -> Any:
        """Call the learner or scorer of a role."""
        return getattr(self.members[Role(role)], method)(*arguments)

    def save(self, role: str, folder: Path) -> None:
        """Write a role's whole model, adapters merged, and beside it the adapters alone. All ranks are asked, the
        first writes."""
        model = self.placements[Role(role)].whole()
        if model is None:
            return
        save_model(model, folder, tokenizer=self.tokenizer)
        if lora_of(model) is not None:
            path = self.settings.model.path
            base = str(local_folder(path).resolve()) if path is not None and Path(path).is_dir() else path
            save_lora(model, folder / FOLDER, base=base)

    def rise(self) -> None:
        """Be ready to train."""
        for member in self.members.values():
            if isinstance(member, Learner):
                member.optimizer.rise()

    def rest(self) -> None:
        """Leave the device to others until `rise`; weights stay, since samplers are told them."""
        for member in self.members.values():
            if isinstance(member, Learner):
                member.optimizer.rest()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by their Hugging Face names, for samplers. All are asked, the first tells."""
        model = self.placements[Role.POLICY].whole()
        return {} if model is None else dict(model.hf_tensors())

    def parcel(self, version: int, *, device: str = "cpu") -> Parcel | None:
        """What samplers in other processes need of the policy: `weights`, or where it has adapters, these alone by
        their parameters' names, for samplers have the model beneath. All are asked, the first tells."""
        place, adapters = self.placements[Role.POLICY], adapter_names(self.models[Role.POLICY])
        weights = place.parameters(adapters) if adapters else self.weights()
        if adapters and self._beneath is None:
            names = [name for name, _ in self.models[Role.POLICY].named_parameters()]
            self._beneath = digest(place.parameters(name for name in names if name not in adapters))
        return pack(weights, version, beneath=self._beneath or "", device=device) if weights else None

    def parcel_bytes(self) -> int:
        """The size of what `parcel` packs."""
        model = self.models[Role.POLICY]
        adapters = adapter_names(model)
        numbers = sum(p.numel() for name, p in model.named_parameters() if not adapters or name in adapters)
        return numbers * dtype_of(self.settings).itemsize

    # --- models

    def _trained(self, role: Role, *, head: HeadKind) -> LanguageModel:
        """A role's model as training goes on from here. A critic never has adapters: its task is new to the model."""
        saved = None if self.plan.resume is None else self.store.model(role, self.plan.resume)
        lora = self.settings.model.lora
        if lora.rank > 0 and role is not Role.CRITIC:
            adapted = add_lora(self._initial(role, head=head), lora, seed=self.settings.seed)
            return adapted if saved is None else restore_lora(adapted, saved)
        return self._initial(role, head=head) if saved is None else self._load(str(saved), head=head)

    def _reference(self) -> LanguageModel:
        settings, policy = self.settings, self.models[Role.POLICY]
        saved = self.store.folder / Role.REFERENCE / (self.plan.resume or "")
        moving = settings.reference.ema > 0
        dtype = torch.float32 if moving else dtype_of(settings)  # its small steps would round to nothing
        if self.plan.resume is not None and moving and saved.is_dir():
            reference = self._load(str(saved), dtype=dtype)
        elif settings.reference.path is not None:
            reference = self._load(settings.reference.path, dtype=dtype)
        elif lora_of(policy) is not None:
            return policy  # asked with its adapters off
        else:
            reference = self._initial(Role.POLICY).to(dtype)
        return reference.requires_grad_(False)

    def _initial(self, role: Role, *, head: HeadKind = "lm") -> LanguageModel:
        return initial_model(self.settings, self.tokenizer, self.device, role, head=head)

    def _load(self, path: str, *, head: HeadKind = "lm", dtype: torch.dtype | None = None) -> LanguageModel:
        dtype = dtype or dtype_of(self.settings)
        return load_model(path, head=head, dtype=dtype, device=self.device, seed=self.settings.seed)

    def _place(self, role: Role, model: LanguageModel) -> None:
        """Give a model its place among the ranks. One that plays two roles has it already."""
        check_vocabulary(self.tokenizer, model)
        places = {id(self.models[other]): place for other, place in self.placements.items()}
        self.models[role] = model
        waits = role is Role.REFERENCE and self.settings.reference.offload and apart(self.device)
        self.placements[role] = places[id(model)] if id(model) in places else self._placement(model, waits=waits)

    def _check_tokens(self, setting: str, path: str | None) -> None:
        """Refuse a model to which the policy's ids are other texts."""
        if path is not None and contradict(load_tokenizer(path), self.tokenizer):
            raise SettingsError(
                f"{setting}={path} has another tokenizer than the policy: to it the same ids are other texts. Give a "
                "model with the policy's tokenizer"
            )

    def _placement(self, model: LanguageModel, *, waits: bool) -> Placement:
        """`waits`: in host memory, until it is asked."""
        runtime, device = self.settings.runtime, torch.device(self.device)
        if runtime.strategy == "replicate" or isinstance(self.ranks, Alone):
            return Waiting(model, self.ranks, device=device) if waits else Whole(model, self.ranks)
        if runtime.cpu_offload and self.device == "cpu":
            raise SettingsError("runtime.cpu_offload=true has no effect on the CPU: set it to false, or device=cuda")
        place = Sharded(model, self.ranks, device=device, cpu_offload=runtime.cpu_offload or waits)
        release_freed_memory()  # of the whole model
        return place

    # --- members

    def _member(self, role: Role) -> Learner | Scorer:
        settings, model = self.settings, self.models[role]
        temperature = settings.rollout.temperature if self.objective.data == "prompts" else 1.0
        if role is Role.REFERENCE:
            policy = self.models[Role.POLICY]
            kind = BaseScorer if model is policy else Scorer
            budget = settings.learn.score_tokens
            place = self.placements[role]
            return kind(model, role, temperature=temperature, token_budget=budget, leader=policy, placement=place)
        return Learner(
            model,
            role,
            self.objective.losses()[role],
            optimizer=settings.critic.optimizer if role is Role.CRITIC else settings.optimizer,
            settings=settings.learn,
            total_steps=self.plan.total_steps,
            temperature=temperature,
            halt=self.objective.halt if role is Role.POLICY else lambda stats: None,
            placement=self.placements[role],
        )


class RankProcess:
    """A rank in a process of its own: first it meets the others, then it is built. Settings come as plain values."""

    def __init__(self, recipe: Mapping[str, Any], plan: Plan):
        self.recipe, self.plan = recipe, plan
        self.trainer: Trainer | None = None
        self.sender = Sender()

    def address(self) -> str:
        return free_address()

    def build(self, address: str, rank: int, world: int, timeout: float) -> None:
        from plaudit.recipes import load_settings

        keep_freed_memory()
        settings = load_settings(self.recipe)
        torch.manual_seed(settings.seed)
        device = torch.device(device_of(settings.device))
        shards = settings.runtime.strategy == "fsdp"
        backend = settings.runtime.backend
        if shards and backend == "gloo" and device.type == "cuda":
            raise SettingsError(NO_SHARDS)
        ranks = join(address, rank, world, device=device, timeout=timeout, always=shards, backend=backend)
        self.trainer = Trainer(settings, self.plan, ranks)

    def do(self, role: str, method: str, *arguments: Any) -> Any:
        assert self.trainer is not None
        return self.trainer.do(role, method, *arguments)

    def save(self, role: str, folder: Path) -> None:
        """Rank 0 writes; the others are asked too, for weights that are spread over ranks."""
        assert self.trainer is not None
        self.trainer.save(role, folder)

    def rise(self) -> None:
        assert self.trainer is not None
        self.trainer.rise()

    def rest(self) -> None:
        assert self.trainer is not None
        self.trainer.rest()
        give_back_memory()

    def parcel(self, version: int) -> tuple[Parcel | None, str]:
        """The policy's weights for samplers, and their digest, from rank 0; the others are asked likewise."""
        assert self.trainer is not None
        parcel = self.trainer.parcel(version)
        return parcel, "" if parcel is None else parcel.digest

    def parcel_bytes(self) -> int:
        assert self.trainer is not None
        return self.trainer.parcel_bytes()

    def hold(self, version: int, device: str) -> str:
        """Likewise, to be sent from here. Returns their digest."""
        assert self.trainer is not None
        self.sender.parcel = parcel = self.trainer.parcel(version, device=device)
        return "" if parcel is None else parcel.digest

    async def meet(self) -> str:
        return await self.sender.meet()

    async def send(self, invitation: Invitation) -> None:
        await self.sender.send(invitation)

    async def dissolve(self, invitation: Invitation) -> None:
        await self.sender.dissolve(invitation)
