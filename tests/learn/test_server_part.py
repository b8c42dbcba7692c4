"""Servers and pushers without processes: what they learn together, and what they leave on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.runtime.settings import Servers
from plaudit.servers.part import ServerPart
from plaudit.servers.pusher import Pusher
from plaudit.types import Role

Make = Callable[..., Learner]
STEADY = {"eps": 1e-3, "weight_decay": 0.1}


class Together:
    """Workers and servers of one model, which take turns."""

    def __init__(self, make: Make, workers: int = 2, dtype: torch.dtype = torch.float32, **servers: Any):
        self.settings = Servers(**servers)
        self.learners = [make(dtype=dtype, optimizer=STEADY) for _ in range(workers)]
        self.pushers = [Pusher(learner, self.settings) for learner in self.learners]
        settings = self.learners[0].optimizer_settings
        self.servers = [ServerPart(settings, self.settings) for _ in range(self.settings.count)]
        self.begin(None)

    def begin(self, path: Path | None) -> None:
        for server, one in zip(self.servers, self.pushers[0].begun(path)[:-1], strict=True):
            server.load(one)

    def step(self, batch: Batch, step: int = 0) -> None:
        shards = batch.shards(len(self.pushers))
        rates = [one.prepare(shard, step, 1.0) for one, shard in zip(self.pushers, shards, strict=True)]
        self.give([1.0] * len(self.pushers), rates[0]["learning_rate/policy"])

    def give(self, shares: list[float], rate: float = 0.0) -> None:
        pushes = [one.push()[:-1] for one in self.pushers]
        squares = [server.add(shares, *parts) for server, *parts in zip(self.servers, *pushes, strict=True)]
        messages = [server.step(rate, sum(squares) ** 0.5)[0] for server in self.servers]
        for one in self.pushers:
            one.pull(*messages)

    def own_step(self, batch: Batch, step: int = 0) -> None:
        for one, shard in zip(self.pushers, batch.shards(len(self.pushers)), strict=True):
            one.prepare(shard, step, 1.0)
            assert shard.token_share is not None
            one.apply(True, float(shard.token_share.sum()))

    def save(self, folder: Path) -> None:
        states = [server.state() for server in self.servers]
        for number, one in enumerate(self.pushers):
            servers = [] if number else [state for state, _ in states]
            one.save(folder / "policy.safetensors", number, states[0][1], *servers)

    def restore(self, folder: Path, saved: int = 2) -> None:
        path = folder / "policy.safetensors"
        self.begin(path)
        for number, one in enumerate(self.pushers):
            one.load(*(server.whole()[0] for server in self.servers))
            one.restore(path, number, saved, {})

    def weights(self, number: int = 0) -> torch.Tensor:
        return torch.cat([p.detach().float().view(-1) for p in self.learners[number].model.parameters()])


def flat(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().float().view(-1) for p in learner.model.parameters()])


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pushed_gradients_are_one_ranks_step(batch: Batch, make_learner: Make, dtype: torch.dtype) -> None:
    """Clipped, with decay on matrices; each number of servers gives the same bits."""
    alone = make_learner(dtype=dtype, optimizer=STEADY)
    one, three = (Together(make_learner, dtype=dtype, count=count) for count in (1, 3))
    for step in range(3):
        alone.step(batch, step)
        one.step(batch, step)
        three.step(batch, step)
    assert far(flat(alone), one.weights()) < (1e-6 if dtype is torch.float32 else 0.01)
    assert torch.equal(one.weights(), three.weights())
    assert torch.equal(one.weights(0), one.weights(1))
    assert not one.learners[0].optimizer.moments, "workers hold none"
    held = [sum(values.numel() for values in server.held.values()) for server in three.servers]
    assert max(held) <= flat(alone).numel() + 3 * 256, "each server has a third of masters and moments"


@pytest.mark.parametrize("push", ["bfloat16", "int8"])
def test_rounded_pushes_learn_nearly_the_same(batch: Batch, make_learner: Make, push: str) -> None:
    exact, rounded = Together(make_learner), Together(make_learner, push=push, count=2)
    start = exact.weights()
    for step in range(6):
        exact.step(batch, step)
        rounded.step(batch, step)
    moved = float((exact.weights() - start).norm())
    assert float((exact.weights() - rounded.weights()).norm()) < 0.1 * moved
    masters = torch.cat([server.values for server in rounded.servers])
    assert far(masters, rounded.weights()) < 0.01 * float((masters - start).abs().max()), "nothing adds up"


def test_local_steps_are_averaged_by_tokens_and_carried_on_by_nesterov(batch: Batch, make_learner: Make) -> None:
    pair = Together(make_learner, local_steps=2, rate=0.5, momentum=0.5)
    start = pair.weights()
    alone = [make_learner(optimizer=STEADY | {"max_gradient_norm": 0.0}) for _ in range(2)]
    for learner in pair.learners:
        learner.optimizer.settings.max_gradient_norm = 0.0
    for _ in range(2):
        pair.own_step(batch)
        assert torch.equal(pair.weights(), start), "between calls the model has the servers' weights"
        for learner, shard in zip(alone, batch.shards(2), strict=True):
            assert shard.token_share is not None
            learner.step(shard.with_columns(weight=shard.weight / shard.token_share.sum()), 0)
    far_each = [start - flat(learner) for learner in alone]
    pair.give([0.25, 0.75])
    first = 0.25 * far_each[0] + 0.75 * far_each[1]
    assert far(pair.weights(), start - 0.5 * (first + 0.5 * first)) < 1e-5
    before = pair.weights()
    pair.give([0.5, 0.5])  # nobody went anywhere: momentum alone
    assert far(pair.weights(), before - 0.5 * 0.5 * (0.5 * first)) < 1e-5


def test_a_late_worker_keeps_its_own_steps_when_it_takes_new_weights(batch: Batch, make_learner: Make) -> None:
    pair = Together(make_learner, local_steps=4)
    pair.own_step(batch)
    one, start = pair.pushers[0], pair.weights()
    assert one.own is not None
    went = start - one.own
    one.load(*(torch.ones(len(start)).view(torch.uint8).numpy(),))
    assert torch.equal(pair.weights(), torch.ones(len(start)))
    pushed = torch.from_numpy(one.push()[0]).view(torch.float32)
    assert far(pushed, went) < 1e-6


@pytest.mark.parametrize(
    "servers",
    [
        {},
        {"push": "int8", "count": 2},
        {"local_steps": 3},
        {"local_steps": 3, "push": "bfloat16", "count": 2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_what_is_saved_goes_on_to_the_bit(
    batch: Batch, make_learner: Make, servers: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also within a round: moments, masters, momentum, what rounding has kept back; and with other servers."""
    local = servers.get("local_steps", 1) > 1

    def go(one: Together, steps: range) -> None:
        for step in steps:
            one.own_step(batch, step) if local else one.step(batch, step)
            if local and step == 2:
                one.give([0.5, 0.5])

    first = Together(make_learner, dtype=dtype, **servers)
    go(first, range(4))
    first.save(tmp_path)
    model = {name: tensor.clone() for name, tensor in first.learners[0].model.state_dict().items()}
    go(first, range(4, 6))
    for count in (1, 3):
        again = Together(make_learner, dtype=dtype, **servers | {"count": count})
        for learner in again.learners:
            learner.model.load_state_dict(model)
        again.restore(tmp_path)
        go(again, range(4, 6))
        if local:
            first.give([0.5, 0.5]) if count == 1 else None
            again.give([0.5, 0.5])
        assert torch.equal(first.weights(), again.weights())


def test_a_checkpoint_of_servers_is_a_ranks_and_the_other_way_round(
    batch: Batch, make_learner: Make, tmp_path: Path
) -> None:
    pair, alone = Together(make_learner, count=2), make_learner(optimizer=STEADY)
    for step in range(2):
        pair.step(batch, step)
        alone.step(batch, step)
    pair.save(tmp_path / "pair")
    alone.save(tmp_path / "alone" / "policy.safetensors")
    further = make_learner(optimizer=STEADY)
    further.model.load_state_dict(pair.learners[0].model.state_dict())
    further.restore(tmp_path / "pair" / "policy.safetensors", {})
    back = Together(make_learner, count=3)
    back.learners[0].model.load_state_dict(alone.model.state_dict())
    back.restore(tmp_path / "alone", saved=0)
    for one in (pair, back):
        one.step(batch, 2)
    alone.step(batch, 2)
    further.step(batch, 2)
    assert far(flat(alone), flat(further)) < 1e-6
    assert far(pair.weights(), back.weights()) < 1e-6


def test_another_models_state_is_refused(batch: Batch, make_learner: Make, tmp_path: Path) -> None:
    Together(make_learner).save(tmp_path)
    other = Together(partial(make_learner, role=Role.CRITIC), workers=1)
    with pytest.raises(ValueError, match=r"head\.weight"):
        other.begin(tmp_path / "policy.safetensors")
