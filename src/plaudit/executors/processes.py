"""Make rollout workers and judges in their processes (`trainer.py` makes ranks)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from plaudit.compute.axis import Axis
from plaudit.evaluate.judge import Judge
from plaudit.executors.initial import dtype_of, initial_model
from plaudit.executors.pinned import Pins
from plaudit.learn.ranks import join
from plaudit.learn.tensor import Cut
from plaudit.models.decoder import Decoder
from plaudit.models.described import check_cut, folder_config
from plaudit.models.device import device_of
from plaudit.models.folders import local_folder
from plaudit.models.load import load_tokenizer
from plaudit.models.lora import add_lora, merged_copy
from plaudit.models.mesh import Mesh, check_tensor
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.workers import Scores
from plaudit.rollout.build import build_engine
from plaudit.rollout.content import Adapters, Content, digest_beneath
from plaudit.rollout.engine import Engine
from plaudit.rollout.led import CommandChannel, Follower, Leading
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime import stage
from plaudit.runtime.memory import keep_freed_memory
from plaudit.runtime.network import free_address
from plaudit.runtime.worker import Worker
from plaudit.settings.tree import Settings
from plaudit.weights.collective import Receiver

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_worker import RayWorker
    from plaudit.runtime.ray_worker_group import RayWorkerGroup

PROCESS = ", process "
"""Separator in a process's name: WORKER, process NUMBER; for all but a worker's first process."""


class Part:
    """One of several processes of a worker; `build` joins the worker's other processes and makes the model's part."""

    def address(self) -> str:
        return free_address()

    def build(self, address: str, number: int, world: int, timeout: float) -> None:
        """Join the other processes of this worker, and load this one's tensor-parallel part of the model."""
        raise NotImplementedError


Kind = TypeVar("Kind", bound=Part)


def make_rollout_worker(recipe: Mapping[str, Any]) -> RolloutWorker:
    """Return a rollout worker, made in its own process; its engine waits for its first weights."""
    from plaudit.settings.recipes import load_settings

    keep_freed_memory()
    settings = load_settings(recipe)
    engine, content = _engine(settings)
    return RolloutWorker(engine, content, _receiver(settings), interrupt=settings.rollout.interrupt)


class RolloutProcess(Part, RolloutWorker):
    """One of several processes of a rollout worker. The first has the engine; others follow its passes."""

    def __init__(self, recipe: Mapping[str, Any]):
        self.recipe = recipe

    def build(self, address: str, number: int, world: int, timeout: float) -> None:
        from plaudit.settings.recipes import load_settings

        keep_freed_memory()
        settings = load_settings(self.recipe)
        device = device_of(settings.device)
        join(address, number, world, device=torch.device(device), timeout=timeout, backend=settings.runtime.backend)
        path, keys = settings.model.path, settings.model.config
        check_cut(keys if path is None else folder_config(local_folder(path)), Mesh(tensor=world), check_tensor)
        tokenizer = load_tokenizer(str(settings.model.tokenizer or path))
        model, content = initial_model(settings, tokenizer, device, axis=Axis(number, world)), Content()
        assert isinstance(model, Decoder), "no other model is cut"
        channel, slots = CommandChannel(model.axis), settings.rollout.slots
        if settings.model.lora.rank > 0:
            model = add_lora(model, settings.model.lora, seed=settings.seed)
            content = Adapters(model, shared=True, beneath=digest_beneath(model.held(), channel.total))
        model.requires_grad_(False)
        leads = number == 0
        engine = (
            NativeEngine(model, tokenizer, slots=slots, decoding=Leading(model, channel))
            if leads
            else Follower(model, channel, patience=timeout)
        )
        RolloutWorker.__init__(self, engine, content, _receiver(settings), interrupt=settings.rollout.interrupt)


class Judging(Pins):
    """A judge in its own process."""

    def __init__(self, judge: Judge):
        self.judge = judge

    def of_sequences(self, sequences: list[tuple[int, ...]]) -> list[float]:
        return self.judge.of_sequences(sequences)

    def of_distant(self, sequences: list[tuple[int, ...]]) -> list[float]:
        return self.judge.of_distant(sequences)


class JudgeProcess(Part, Judging):
    """One of several processes of a judge. All of them compute each forward pass together."""

    def __init__(self, recipe: Mapping[str, Any], path: str):
        self.recipe, self.path = recipe, path

    def build(self, address: str, number: int, world: int, timeout: float) -> None:
        from plaudit.settings.recipes import load_settings

        keep_freed_memory()
        settings = load_settings(self.recipe)
        device, backend = torch.device(device_of(settings.device)), settings.runtime.backend
        ranks = join(address, number, world, device=device, timeout=timeout, backend=backend)
        judge = load_judge(settings, self.path, axis=Axis(number, world, ranks.group, spread=True))
        assert isinstance(judge.model, Decoder), "no other model is cut"
        self.judge = replace(judge, placement=Cut(judge.place, judge.model, ranks))


async def rollout_group(runtime: RayRuntime, recipe: Mapping[str, Any], name: str, **how: Any) -> Worker[RolloutWorker]:
    """Start a rollout worker of several processes; `how` is as in `worker_group`."""
    from plaudit.runtime.ray_worker_group import GroupWorker

    return GroupWorker(name, await worker_group(runtime, RolloutProcess, recipe, name=name, **how))


async def judge_worker(
    runtime: RayRuntime,
    recipe: Mapping[str, Any],
    reward: RewardSettings,
    *,
    patience: float,
    placed: Callable[[Sequence[str]], None],
    **how: Any,
) -> Worker[Scores]:
    """Start a judge, of one process or several; `patience`, `placed` and `how` are as in `worker_group`."""
    from plaudit.runtime.ray_worker_group import Abreast

    if reward.tensor == 1:
        return await runtime.spawn(make_judge, recipe, reward.path, place=0, **how)
    how |= {"world": reward.tensor, "patience": patience, "placed": placed}
    return Abreast(how["name"], await worker_group(runtime, JudgeProcess, recipe, reward.path, **how))


async def worker_group(
    runtime: RayRuntime,
    kind: Callable[..., Kind],
    *arguments: Any,
    name: str,
    world: int,
    group: Any,
    threads: int,
    patience: float,
    placed: Callable[[Sequence[str]], None] = lambda nodes: None,
) -> RayWorkerGroup[Kind]:
    """Start `world` processes, one in each bundle of the placement group, and let them join. `patience`: seconds that
    they wait for each other. `placed` is given the node of each."""
    from plaudit.runtime.ray_worker_group import RayWorkerGroup

    names = [name, *(f"{name}{PROCESS}{number}" for number in range(1, world))]
    started = [
        runtime.spawn(kind, *arguments, name=one, group=group, place=place, threads=threads)
        for place, one in enumerate(names)
    ]
    try:
        joined = RayWorkerGroup(await asyncio.gather(*started), patience=patience)
        address = await joined.first.call(Part.address)
        await joined.scatter(Part.build, [(address, n, world, patience) for n in range(world)], starts=True)
    except BaseException:
        for worker in runtime.workers:
            if worker.name in names:
                worker.kill()
        raise
    placed([worker.node for worker in joined.workers])
    return joined


def driven(worker: RayWorker[RolloutWorker]) -> Worker[RolloutWorker]:
    """Wrap a rollout worker whose vLLM has several processes: if one of them fails, the worker is ended and lost."""
    from plaudit.runtime.ray_worker_group import GroupWorker, RayWorkerGroup

    return GroupWorker(worker.name, RayWorkerGroup([worker]))


def _receiver(settings: Settings) -> Receiver:
    return Receiver(device_of(settings.device))


def _engine(settings: Settings) -> tuple[Engine, Content]:
    tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
    rollout = settings.rollout
    longest, devices = settings.asked_tokens, settings.runtime.rollout_width
    vllm = rollout.for_vllm(longest_prompt=longest, sleeps=settings.runtime.shares, devices=devices)
    device = device_of(settings.device) if vllm is None else "cpu"  # vLLM has its own copy of the model
    model, content = initial_model(settings, tokenizer, device), Content()
    if settings.model.lora.rank > 0:
        adapted = add_lora(model, settings.model.lora, seed=settings.seed)
        # As in one process: without lag the engine computes what the learner does, else on merged weights.
        shared = vllm is None and rollout.max_lag == 0
        model, content = adapted if shared else merged_copy(adapted), Adapters(adapted, shared=shared)
    model = model.requires_grad_(False)
    return build_engine(model, tokenizer, slots=rollout.slots, vllm=vllm, say=stage.enter), content


def make_judge(recipe: Mapping[str, Any], path: str) -> Judging:
    """Make a judge in its own process."""
    from plaudit.settings.recipes import load_settings

    keep_freed_memory()
    return Judging(load_judge(load_settings(recipe), path))


def load_judge(settings: Settings, path: str, **placed: Any) -> Judge:
    """Load a judge on the run's device, in its precision; `placed` is as in `Judge.load`."""
    device, dtype = device_of(settings.device), dtype_of(settings)
    offload = any(reward.offload for reward in settings.rewards if reward.path == path)
    budget = settings.learn.score_tokens
    return Judge.load(path, device=device, dtype=dtype, token_budget=budget, offload=offload, **placed)
