"""Processes that generate together, as plain processes on gloo: the first leads and writes down what was answered.

    python group_at_work.py JOBS.json WORLD        forks the processes

Left out: Ray, which a test of a whole run has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import forked
import torch
import torch.distributed as dist
from tiny_models import Letters, episodes
from torch import Tensor

from plaudit.batch import Batch
from plaudit.compute.axis import ALONE, Axis
from plaudit.learn.ranks import join
from plaudit.learn.scorer import Scorer
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.lora import adapter_names, add_lora
from plaudit.models.settings import LoraSettings
from plaudit.models.share import Share
from plaudit.rollout.content import digest_beneath
from plaudit.rollout.engine import generate_all
from plaudit.rollout.led import CommandChannel, Follower, Leading
from plaudit.rollout.native import NativeEngine
from plaudit.types import Completion, Role, Row, Sampling
from plaudit.weights.pieces import WeightsError

Job = dict[str, Any]
Answer = dict[str, list[Any]]
PLAN = (
    Sampling(seed=1, max_tokens=12),
    Sampling(seed=2, max_tokens=30, temperature=0.6),
    Sampling(seed=3, max_tokens=17, top_p=0.8, min_tokens=3),
    Sampling(seed=4, max_tokens=21, stop=("cab",)),
    Sampling(temperature=0.0, max_tokens=15),
)
SLOTS = 4  # fewer than requests: rows are refilled, moved and copied
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_of(job: Job, *, seed: int = 0, axis: Axis = ALONE) -> Decoder:
    """A random model, lively enough that answers differ; its parts are those of the whole one. Adapters go by the seed,
    and the model beneath does not."""
    rank = job["rank"]
    model = fresh_model(job["config"], seed=0 if rank else seed, dtype=DTYPES[job["dtype"]], axis=axis)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    assert isinstance(model, Decoder)
    if rank:
        add_lora(model, LoraSettings(rank=rank)).fill(partial(drawn, seed=seed))
    return model.requires_grad_(False)


def drawn(share: Share, seed: int) -> None:
    """Adapters that change something."""
    source = torch.Generator().manual_seed(seed)
    for name, shape in share.layout.adapters.items():
        share.put(name, torch.randn(shape, generator=source) / 8)


def weights_of(job: Job, seed: int = 0) -> Mapping[str, Tensor]:
    """What a rollout worker is sent."""
    model = model_of(job, seed=seed)
    adapters = {name: model.get_parameter(name) for name in adapter_names(model)}
    return adapters or dict(model.hf_tensors())


def plain(groups: Sequence[Sequence[Completion]]) -> list[list[Answer]]:
    return [
        [{"tokens": [*one.tokens], "logprobs": [*one.logprobs], "versions": [*one.versions]} for one in group]
        for group in groups
    ]


def answers(engine: NativeEngine, job: Job) -> list[list[Answer]]:
    return plain(generate_all(engine, job["prompts"], PLAN))


def rows_of(groups: Sequence[Sequence[Answer]], prompts: Sequence[Sequence[int]]) -> Batch:
    """What a learner reads of the answers that were drawn from the whole distribution."""
    rows = []
    for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for answer in group[:2]:
            size = len(answer["tokens"])
            rows.append(
                Row(
                    tokens=(*prompt, *answer["tokens"]),
                    trainable=(*(False,) * len(prompt), *(True,) * size),
                    group=number,
                    logprobs=(*(0.0,) * len(prompt), *answer["logprobs"]),
                    versions=(*(-1,) * len(prompt), *(0,) * size),
                )
            )
    return Batch.of(rows)


def learned(model: Decoder, groups: Sequence[Sequence[Answer]], prompts: Sequence[Sequence[int]]) -> list[float]:
    """The learner's log-probs of the answers, which are drawn at temperatures of 1 and 0.6."""
    rows = rows_of(groups, prompts)
    found = Scorer(model, Role.POLICY).annotate(rows).proximal
    assert found is not None
    return found[rows.trainable].tolist()  # type: ignore[no-any-return]


async def interrupted(engine: NativeEngine, job: Job) -> list[list[Answer]]:
    """Some callers give up, and new weights come into the answers of the others."""
    asked = [asyncio.ensure_future(engine.generate(prompt, PLAN)) for prompt in job["prompts"]]
    for _ in range(6):
        await asyncio.sleep(0)
    asked[1].cancel()
    for _ in range(6):
        await asyncio.sleep(0)
    engine.load(weights_of(job, seed=5), 1)
    return plain([await one for number, one in enumerate(asked) if number != 1])


def lead(job: Job, model: Decoder, channel: CommandChannel) -> dict[str, Any]:
    engine = NativeEngine(model, Letters(), slots=SLOTS, decoding=Leading(model, channel))
    found: dict[str, Any] = {"held": sum(parameter.numel() for parameter in model.parameters())}
    found |= {"first": answers(engine, job), "again": answers(engine, job)}
    assert engine.table is not None
    found["cached"] = engine.table.cache.kv_heads
    found["alone"] = plain(
        [[generate_all(engine, [prompt], [one])[0][0] for one in PLAN] for prompt in job["prompts"][:2]]
    )
    found["episodes"], found["played again"] = (plain(episodes(engine, job["prompts"])) for _ in range(2))
    engine.sleep()
    engine.wake()
    found["interrupted"] = asyncio.run(interrupted(engine, job))
    found["new"] = answers(engine, job)
    try:
        engine.load(weights_of(job), 2)
    except WeightsError as error:
        found["refused"] = str(error)
    engine.decoding.channel.send(["end"])  # type: ignore[attr-defined]
    return found


def do(job: Job, number: int, world: int) -> None:
    model = model_of(job, axis=Axis(number, world))
    channel = CommandChannel(model.axis)
    out, scored = Path(job["out"]), {}
    beneath = digest_beneath(model.held(), channel.total)
    if number == 0:
        found = lead(job, model, channel) | {"beneath": beneath}
        out.write_text(json.dumps(found))
    else:
        follower = Follower(model, channel, patience=2.0)
        follower.load(weights_of(job, seed=5), 1)
        follower.thread.join()  # until "end", a word that it does not know
    dist.barrier()
    found = json.loads(out.read_text())
    learner = model_of(job, axis=Axis(number, world))
    for name, groups in (("one", job["answers"]), ("group", found["first"])):
        scored[name] = learned(learner, groups, job["prompts"])
    if number == 0:
        out.write_text(json.dumps(found | {"scored": scored}))
    dist.barrier()


def at_work(jobs: Sequence[Job], world: int, folder: Path, environment: dict[str, str]) -> None:
    """Do the jobs in so many processes. Fails with what a process said where one fails."""
    forked.at_work(__file__, jobs, world, folder, environment)


def work(jobs: Sequence[Job], number: int, world: int, address: str) -> None:
    """A process of the worker group."""
    join(address, number, world, device=torch.device("cpu"), timeout=100.0)
    for job in jobs:
        do(job, number, world)


if __name__ == "__main__":
    forked.fork(work)
