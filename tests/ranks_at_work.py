"""Training ranks as plain processes on gloo, each running the loop's own step over a worker group of themselves.

    python ranks_at_work.py JOBS.json WORLD        forks the ranks, which share one import of torch

A job trains from a fresh model or a checkpoint, on batches that are the same for any number of ranks, and leaves
weights, figures and, if asked, a checkpoint. Left out: data, rollout and Ray, which tests of whole runs have.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from plaudit import load_settings
from plaudit.algorithms import Output
from plaudit.batch import Batch
from plaudit.compute import logprobs
from plaudit.executors.base import Plan
from plaudit.executors.initial import initial_model
from plaudit.executors.inside import Adapted, Reallocation
from plaudit.executors.trainer import Trainer
from plaudit.learn import ranks as told
from plaudit.learn.learner import Learner
from plaudit.learn.ranks import Ranks, Together, join
from plaudit.learn.sharding import local
from plaudit.loop.checkpoint import Writer
from plaudit.loop.models import Learners, Models
from plaudit.loop.progress import Delivery
from plaudit.loop.train import Ending, learn
from plaudit.models.decoder import Decoder
from plaudit.models.settings import Longest
from plaudit.models.share import Share
from plaudit.runtime.local import do as ask
from plaudit.runtime.worker_group import WorkerGroup
from plaudit.types import Role, Row, Stats
from plaudit.weights import pieces

Job = dict[str, Any]
GRADIENT = {"eps": 1e3, "learning_rate": 1e3, "max_gradient_norm": 0.0, "schedule": "constant"}
"""Of AdamW whose first step is the gradient itself: rate g / (|g| + eps) = g, but for a thousandth of |g|."""
pieces.PART_BYTES = 20_000
COLLECTIVES = {name: getattr(fsdp, name) for name in ("foreach_all_gather", "foreach_reduce")}
told.BUCKET_ELEMENTS = 5000  # so that gradients of these small models travel in several runs, and some alone


class Among(WorkerGroup[Trainer]):
    """Every rank runs the loop, answers for itself and hears what the others answered."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.world = trainer, trainer.ranks.world
        self.width, self.stages = trainer.settings.runtime.width, trainer.settings.runtime.pipeline

    async def scatter(self, method: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        answer = ask(self.trainer, self.name, method.__name__, *arguments[self.trainer.ranks.rank])
        if self.world == 1:
            return [answer]
        answers = [None] * self.world
        dist.all_gather_object(answers, answer)
        return answers


def batch_of(step: int, *, unit: int, rows: int = 10, common: int = 0) -> Batch:
    """Rows of very different lengths, so that ranks differ in their number of micro-batches. The rows of a group have
    their first `common` tokens in common."""
    draw = torch.Generator().manual_seed(step)
    sizes = [4 + 3 * (number * 7 % rows) for number in range(rows)]
    made = []
    for number, size in enumerate(sizes):
        noise = torch.randn(size, generator=draw)
        tokens = (torch.randint(300, (size,), generator=draw) + 5).tolist()
        first = [number // 5 + 7] * min(common, size)
        made.append(
            Row(
                tokens=(*first, *tokens[len(first) :]),
                trainable=(False, False, *(True,) * (size - 2)),
                group=number // 5,
                logprobs=(0.0, 0.0, *(-6.0 + 0.1 * noise[2:]).tolist()),
                versions=(-1, -1, *(step,) * (size - 2)),
                reward=float(noise[0]),
            )
        )
    return Batch.of(made, unit=unit)


def do(job: Job, rank: int, world: int, address: str) -> None:
    with patch("plaudit.settings.checks._installed", return_value=True):  # runtime=ray: these ranks are started without
        settings = load_settings(job["recipe"])
    device = torch.device(settings.device if settings.device == "cuda" else "cpu")
    if dist.is_initialized():
        ranks: Ranks = Together(device)
    else:
        ranks = join(address, rank, world, device=device, timeout=240.0, always=bool(address))
    asyncio.run(
        train(job, Trainer(settings, Plan(Path(job["folder"]), job.get("resume"), 6, Longest(40, "a row")), ranks))
    )


def short_of_memory(trainer: Trainer, rank: int, most: int) -> None:
    """On this rank a backward pass over more than `most` tokens allocates what no machine has room for."""
    learner = trainer.members[Role.POLICY]
    assert isinstance(learner, Learner)
    loss = learner.loss

    def measured(output: Output, part: Batch) -> tuple[Tensor, Stats]:
        found, figures = loss(output, part)
        if found.requires_grad and trainer.ranks.rank == rank and len(part.tokens) > most:
            found.register_hook(lambda gradient: torch.empty(1 << 55, dtype=torch.uint8))
        return found, figures

    learner.loss = measured


def count_collectives() -> Counter[str]:
    """Count from here on how often FSDP2 gathers a unit's weights and sums its gradients."""
    counts: Counter[str] = Counter()

    def counted(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return do(*given, **named)

        return counting

    for name, do in COLLECTIVES.items():
        setattr(fsdp, name, counted(name, do))
    return counts


async def train(job: Job, trainer: Trainer) -> None:
    objective, store, first = trainer.objective, trainer.store, trainer.ranks.rank == 0
    worker_group = Among(trainer)
    if "short" in job:
        short_of_memory(trainer, *job["short"])
    models = Models.together(worker_group, objective, trainer.settings.reference.ema)
    actors = models.trained
    if job.get("resume"):
        _, values = store.read(job["resume"])
        for role, actor in actors.items():
            await actor.restore(store.model("state", job["resume"]) / f"{role}.safetensors", values[role])
    figures, counts = [], count_collectives()
    memory: dict[str, float] = {}
    if job.get("publish"):
        publish(trainer, Path(job["out"]) / "before", 0)
    for step in range(*job["steps"]):
        batch = batch_of(step, unit=objective.unit, common=job.get("common", 0))
        _, stats = await learn(models, Delivery(batch=batch, epoch=1), memory, Ending(), step=step, seed=0)
        figures.append(stats)
        if job.get("save") == step + 1:
            await save(trainer, actors, f"epoch1epochstep{step + 1}globalstep{step + 1}")
    if job["recipe"]["method"] == "sft":
        figures.append(await actors[Role.POLICY].evaluate(objective.weigh(batch)))
    if job.get("publish"):
        publish(trainer, Path(job["out"]), 1)
    kept = sum(local(p).numel() for model in trainer.models.values() for p in model.parameters())
    held = {"kept": kept, "of ranks": trainer.ranks.tell(kept), "collectives": dict(counts)}
    whole = {role: trainer.placements[role].whole() for role in trainer.models}
    if first:
        out = Path(job["out"])
        out.mkdir(parents=True, exist_ok=True)
        for role, model in whole.items():
            assert model is not None
            save_file({name: x.contiguous().clone() for name, x in model.hf_tensors()}, out / f"{role}.safetensors")
        (out / "figures.json").write_text(json.dumps({"steps": figures} | held))


def publish(trainer: Trainer, out: Path, version: int) -> None:
    """Leave this rank's whole weights, and what it gives those that have the last version's."""
    (out / "sent").mkdir(parents=True, exist_ok=True)
    publishing = trainer.publisher
    publishing.begin(version)
    for part in range(len(publishing.parts)):
        name = f"packed{trainer.ranks.rank}.{part}.pickle"
        sent = publishing.pack_part(part)
        assert sent is not None
        whole = publishing.whole(version, part) if sent.base or sent.halves else sent
        assert whole is not None
        assert publishing.report(part, sent)[2:] == (sent.bytes, whole.bytes)
        for folder, packed in ((out, whole), (out / "sent", sent)):
            (folder / name).write_bytes(pickle.dumps(packed))
    assert publishing.pack_part(len(publishing.parts)) is None
    assert not any(publishing.parts), "views and gathered tensors are let go"
    share = trainer.placements[Role.POLICY].share()
    if share is not None and trainer.ranks.world > 1 and trainer.settings.runtime.pipeline == 1:
        sample(trainer, share, out)


def sample(trainer: Trainer, share: Share, out: Path) -> None:
    """Leave the whole model that this rank would sample from, and what it got from others."""
    policy = trainer.models[Role.POLICY]
    whole = initial_model(trainer.settings, trainer.tokenizer, trainer.device)
    assert isinstance(whole, Decoder)
    told: dict[str, str] = {}
    if (lora := trainer.settings.model.lora).rank:
        adapted = Adapted(trainer.placements[Role.POLICY], whole, lora)
        adapted.run()
        sent = trainer.publisher.digest + trainer.publisher.beneath
        assert adapted.digest() == sent or trainer.ranks.rank, "only the first rank has that of the adapters"
    else:
        moved = Reallocation(share, whole, trainer.ranks)
        moved.run()
        moved.run()
        both = zip(whole.named_parameters(), policy.named_parameters(), strict=True)
        shared = sum(a.numel() for (_, a), (_, b) in both if a.data_ptr() == local(b).data_ptr())
        told = {"bytes": str(moved.bytes), "shared": str(shared)}
    tensors = {name: tensor.contiguous().clone() for name, tensor in whole.hf_tensors()}
    save_file(tensors, out / f"inside{trainer.ranks.rank}.safetensors", told)


async def save(trainer: Trainer, actors: Mapping[Role, Learners], name: str) -> None:
    """A checkpoint as a run makes it: every rank takes part, the first writes."""
    values: dict[str, Any] = {}
    ahead = trainer.store.staging("state")
    for role, actor in actors.items():
        values[role] = await actor.save(ahead / f"{role}.safetensors")
    for role in trainer.models:
        trainer.save(role, trainer.store.staging(role))
    trainer.pending.write([ahead, *map(trainer.store.staging, trainer.models)])
    if dist.is_initialized():
        dist.barrier()
    if trainer.ranks.rank == 0:
        copy = partial(shutil.copytree, dirs_exist_ok=True)
        writers: dict[str, Writer] = {role: partial(copy, trainer.store.staging(role)) for role in trainer.models}
        trainer.store.write(name, writers, {}, values, ahead=ahead)


def at_work(jobs: Sequence[Job], world: int, folder: Path, environment: Mapping[str, str]) -> None:
    """Do the jobs on so many ranks. Fails with what a rank said where one fails."""
    forked.at_work(__file__, jobs, world, folder, environment)


def of_gradient(job: Job) -> Job:
    """The job with optimizers whose first step is the gradient itself."""
    job["recipe"]["optimizer"] = GRADIENT
    if job["recipe"]["method"] == "ppo":
        job["recipe"]["critic"] = {"learning_rate": GRADIENT["learning_rate"]}
    return job


SAVED = "epoch1epochstep1globalstep1"


@dataclass(frozen=True)
class Compared:
    """What several ranks must do as one does: pairs of a case and a mesh."""

    worlds: Mapping[str, int]
    """Ranks of each mesh."""
    learned: Sequence[tuple[str, str]]
    gradients: Sequence[tuple[str, str]]
    again: Sequence[tuple[str, str]]
    """Resumed on the mesh of before."""
    from_one: Sequence[tuple[str, str]]
    on_one: Sequence[tuple[str, str]]
    moved: Sequence[tuple[str, str, str]] = ()
    """Resumed on another mesh of as many ranks, or more."""

    def done(self, make: Callable[..., Job], root: Path, environment: dict[str, str]) -> Path:
        """Do all, into folders <case>/<mesh> of `root`. `make(case, how, mesh, ...)` is the job of a case."""

        def resumed(case: str, how: str, on: str, mesh: str | None = None) -> Job:
            job = make(case, f"{how} on {on}", mesh, steps=(1, 3), resume=SAVED)
            return {**job, "folder": str(root / case / how)}

        def one_step(case: str, how: str, mesh: str | None = None) -> Job:
            return of_gradient(make(case, f"gradient {how}", mesh, steps=(0, 1)))

        for case in dict.fromkeys(case for case, _ in (*self.learned, *self.gradients)):
            do(make(case, "alone", save=1), 0, 1, "")
            do(one_step(case, "alone"), 0, 1, "")
        for world in sorted(set(self.worlds.values())):
            jobs = [make(case, how, how, save=1) for case, how in self.learned if self.worlds[how] == world]
            jobs += [one_step(case, how, how) for case, how in self.gradients if self.worlds[how] == world]
            jobs += [resumed(case, how, "the same", how) for case, how in self.again if self.worlds[how] == world]
            jobs += [resumed(case, "alone", how, how) for case, how in self.from_one if self.worlds[how] == world]
            jobs += [resumed(case, how, to, to) for case, how, to in self.moved if self.worlds[to] == world]
            at_work(jobs, world, root / str(world), environment)
        for case, how in self.on_one:
            do(resumed(case, how, "one"), 0, 1, "")
        return root


def furthest(one: Path, other: Path) -> float:
    """The largest difference of any weight of any model; large weights count in shares of their size."""
    files = sorted(one.glob("*.safetensors"))
    assert files and [f.name for f in files] == [f.name for f in sorted(other.glob("*.safetensors"))]
    found = 0.0
    for file in files:
        mine, theirs = load_file(file), load_file(other / file.name)
        assert {n: (x.shape, x.dtype) for n, x in mine.items()} == {n: (x.shape, x.dtype) for n, x in theirs.items()}
        found = max(found, *(difference(mine[name], theirs[name]) for name in mine))
    return found


def difference(one: Tensor, other: Tensor) -> float:
    size = 4 * other.float().abs().clamp(min=0.25) if one.dtype is torch.bfloat16 else other.abs().clamp(min=1.0)
    return float(((one.float() - other.float()).abs() / size).max())


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def work(jobs: Sequence[Job], rank: int, world: int, address: str) -> None:
    """A rank's process."""
    logprobs.CHUNK_ELEMENTS, logprobs.LEAST_ROWS = 1, 16  # log-probs of a pass take several chunks, and
    logprobs.KEEP_ELEMENTS = 5000  # those of the longer passes are computed again
    for job in jobs:
        do(job, rank, world, address)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    forked.fork(work)
