"""The order of a step: slots are freed for the next rollouts only once the weights that learned from them are out."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import GPT2

from plaudit.algorithms import SFT
from plaudit.data.cursor import Cursor
from plaudit.learn.learner import Learner
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.loop.models import Learners, Models
from plaudit.loop.offline import OfflineSource
from plaudit.loop.progress import Delivery, Moment, Progress
from plaudit.loop.train import train
from plaudit.models.load import fresh_model
from plaudit.runtime.local import LocalWorkerGroup
from plaudit.types import Role, Row, Stats

STEPS = 5
EMPTY = 3
"""The step whose delivery carries no rows, as when no group has a signal."""


class Told(OfflineSource):
    """An offline source that notes when it is asked and told."""

    def __init__(self, events: list[str], items: list[tuple[Row, ...]]):
        super().__init__(items, Cursor(len(items), seed=0), batch_size=2, unit=1)
        self.events, self.given = events, list[Delivery]()

    async def next(self) -> Delivery:
        delivery = await super().next()
        if len(self.given) + 1 == EMPTY:
            delivery = Delivery(batch=None, epoch=delivery.epoch)
        self.given.append(delivery)
        self.events.append(f"next {len(self.given)}")
        return delivery

    async def done(self, delivery: Delivery) -> None:
        self.events.append(f"done {1 + next(n for n, given in enumerate(self.given) if given is delivery)}")


def rows() -> list[tuple[Row, ...]]:
    torch.manual_seed(0)
    return [(Row(tokens=tuple(torch.randint(50, (6,)).tolist()), trainable=(False, *(True,) * 5)),) for _ in range(8)]


def trained(events: list[str], **more: Any) -> list[dict[str, torch.Tensor]]:
    """The weights as they were at the start and whenever they were published."""
    model = fresh_model(GPT2, seed=0, vocab_size=50)
    learner = Learner(
        model,
        Role.POLICY,
        SFT().losses()[Role.POLICY],
        optimizer=OptimizerSettings(learning_rate=0.01),
        settings=LearnSettings(),
        total_steps=STEPS,
    )
    published = [{name: tensor.detach().clone() for name, tensor in model.named_parameters()}]

    async def publish(version: int) -> Stats:
        await asyncio.sleep(0)  # whoever did not wait for it would overtake it here
        published.append({name: tensor.detach().clone() for name, tensor in model.named_parameters()})
        events.append(f"publish {version}")
        return {}

    async def hook(moment: Moment) -> Stats:
        await asyncio.sleep(0)
        events.append(f"hook {moment.progress.step}")
        return {}

    asyncio.run(
        train(
            Told(events, rows()),
            Models(SFT(), {Role.POLICY: Learners(LocalWorkerGroup(learner))}),
            publish,
            [hook],
            until=lambda progress: progress.step >= STEPS,
            progress=Progress(),
            memory={},
            seed=0,
            **more,
        )
    )
    return published


def test_done_comes_after_publish_and_hooks_for_every_step() -> None:
    events: list[str] = []
    published = trained(events)
    in_turn = [[f"next {step}", f"publish {step}", f"hook {step}", f"done {step}"] for step in range(1, STEPS + 1)]
    assert events == [event for step in in_turn for event in step]
    for step, (before, after) in enumerate(pairwise(published), start=1):
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert moved == (step != EMPTY)  # what is published has learned from its step


@pytest.mark.parametrize("after", [1, 4])
def test_a_run_that_is_asked_to_stop_frees_the_slots_of_its_last_step_too(after: int) -> None:
    events: list[str] = []
    trained(events, stop=lambda: f"publish {after}" in events)
    assert events[-4:] == [f"next {after}", f"publish {after}", f"hook {after}", f"done {after}"]
    assert len(events) == 4 * after
