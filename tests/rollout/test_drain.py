"""New weights that wait: sequences under way end with the old ones, and no other begins."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from tiny_models import OPT, Letters, prompts, transformers_model

from plaudit.models.fallback import Fallback
from plaudit.rollout.engine import Engine, generate_all
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.static import StaticEngine
from plaudit.rollout.worker import OutOfDateError, RolloutWorker
from plaudit.types import Completion, Sampling
from plaudit.weights.packed import pack

PLAN = [Sampling(max_tokens=15, seed=seed) for seed in range(3)]
"""One more than the slots."""


def engine_of(kind: str, pairs: Any) -> Any:
    if kind == "native":
        return NativeEngine(copy.deepcopy(pairs("gpt2")[0]), Letters(), slots=2)
    return StaticEngine(Fallback(transformers_model("opt", **OPT), head="lm"), Letters(), slots=2)


def changed(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() * 1.3 for name, tensor in engine.model.hf_tensors()}


def answers(engine: Engine, question: list[int]) -> list[Completion]:
    [found] = generate_all(engine, [question], PLAN)
    return found


@pytest.mark.parametrize("kind", ["native", "static"])
def test_drained_sequences_are_the_old_weights_and_the_next_the_new_ones(pairs: Any, kind: str) -> None:
    engine, [question] = engine_of(kind, pairs), prompts(6)
    old = answers(engine, question)

    async def under_way() -> tuple[list[Completion], list[Completion]]:
        asking = asyncio.create_task(engine.generate(question, PLAN))
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.drain()
        late = asyncio.create_task(engine.generate(question, PLAN))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.busy
        assert not asking.done() and not late.done()
        engine.load(changed(engine), 1)
        return await asking, await late

    mixed, late = asyncio.run(under_way())
    new = answers(engine, question)
    assert [completion.versions for completion in mixed] == [(0,) * 15, (0,) * 15, (1,) * 15]
    assert [completion.tokens for completion in mixed] == [one.tokens for one in (old[0], old[1], new[2])]
    assert [one.tokens for one in late] == [one.tokens for one in new]
    assert {version for one in late for version in one.versions} == {1}
    assert [one.tokens for one in old] != [one.tokens for one in new]


def test_an_idle_engine_is_drained_at_once(pairs: Any) -> None:
    engine = engine_of("native", pairs)
    asyncio.run(engine.drain())
    engine.load(None, 1)
    assert {version for completion in answers(engine, [1]) for version in completion.versions} == {1}


@pytest.mark.parametrize("interrupt", [True, False])
def test_a_worker_does_as_it_is_told(pairs: Any, interrupt: bool) -> None:
    engine, [question] = engine_of("native", pairs), prompts(6)
    worker = RolloutWorker(engine, interrupt=interrupt)

    async def under_way() -> list[Completion]:
        asking = asyncio.create_task(worker.generate(0, question, PLAN[:2]))
        for _ in range(5):
            await asyncio.sleep(0)
        packed = pack(changed(engine), 1)
        assert await worker.load(0, packed) == (1, packed.digest)
        return await asking

    versions = [set(completion.versions) for completion in asyncio.run(under_way())]
    assert versions == [{0, 1} if interrupt else {0}] * 2


def test_a_run_that_goes_back_waits_for_no_sequence(pairs: Any) -> None:
    """The weights that waited for the end are those of the attempt that was given up."""
    engine, [question] = engine_of("native", pairs), prompts(6)
    worker = RolloutWorker(engine, interrupt=False)

    async def steps() -> list[Completion]:
        asking = asyncio.create_task(worker.generate(0, question, PLAN))
        for _ in range(3):
            await asyncio.sleep(0)
        late = asyncio.create_task(worker.load(0, pack(changed(engine), 5)))
        await asyncio.sleep(0)
        await worker.begin(1)
        with pytest.raises(OutOfDateError):
            await asking
        with pytest.raises(OutOfDateError):
            await late
        await worker.load(1, pack(dict(engine.model.hf_tensors()), 2))
        return await worker.generate(1, question, PLAN)

    assert {version for completion in asyncio.run(steps()) for version in completion.versions} == {2}
