"""A tiny model and a batch of uneven rows for the learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import GPT2

from plaudit.algorithms import PPO, SFT, Objective, RewardModel
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.models.base import LanguageModel
from plaudit.models.load import fresh_model
from plaudit.types import Role, Row

Make = Callable[..., Learner]
OBJECTIVES: dict[Role, Objective] = {Role.POLICY: SFT(), Role.CRITIC: PPO(), Role.JUDGE: RewardModel()}


def tiny(role: Role = Role.POLICY, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LanguageModel:
    head: Any = "lm" if role is Role.POLICY else "scalar"
    return fresh_model(GPT2, head=head, seed=seed, vocab_size=50, dtype=dtype)


@pytest.fixture
def batch() -> Batch:
    """Ten rows of 3 to 16 tokens with every column that the three losses read, weighed."""
    torch.manual_seed(0)
    sizes = [3, 16, 5, 9, 4, 12, 7, 7, 15, 6]
    rows = [
        Row(
            tokens=tuple(torch.randint(50, (size,)).tolist()),
            trainable=(False, *(True,) * (size - 1)),
            group=number // 2,
            weight=1.0 + number // 4,
        )
        for number, size in enumerate(sizes)
    ]
    made = Batch.of(rows, unit=2)
    noise = torch.randn(2, sum(sizes))
    return SFT().weigh(made.with_columns(values=noise[0] / 10, returns=noise[1]))


@pytest.fixture
def make_learner() -> Make:
    def make(role: Role = Role.POLICY, **more: Any) -> Learner:
        optimizer = OptimizerSettings(**({"learning_rate": 0.01, "schedule": "constant"} | more.pop("optimizer", {})))
        return Learner(
            more.pop("model", None) or tiny(role, dtype=more.pop("dtype", torch.float32)),
            role,
            more.pop("loss", None) or OBJECTIVES[role].losses()[role],
            optimizer=optimizer,
            settings=LearnSettings(**more.pop("settings", {})),
            total_steps=more.pop("total_steps", 10),
            **more,
        )

    return make
