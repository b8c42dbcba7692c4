"""The models that a run starts with, before checkpoints and adapters.

settings, tokenizer, role -> a folder or hub id, or none -> its model, or a fresh one
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from plaudit.compute.axis import ALONE, Axis
from plaudit.models.base import LanguageModel
from plaudit.models.config import HeadKind
from plaudit.models.load import fresh_model, load_model, load_tokenizer
from plaudit.models.mesh import WHOLE, Stage
from plaudit.models.tokenizer import contradictions
from plaudit.settings.tree import Settings
from plaudit.types import Role

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Torch's dtype for each choice of learn.precision."""


def dtype_of(settings: Settings) -> torch.dtype:
    """Return the dtype of weights and activations that learn.precision names."""
    return DTYPES[settings.learn.precision]


def initial_model(
    settings: Settings,
    tokenizer: Any,
    device: str,
    role: Role = Role.POLICY,
    *,
    head: HeadKind = "lm",
    deferred: bool = False,
    axis: Axis = ALONE,
    stage: Stage = WHOLE,
) -> LanguageModel:
    """Return a role's model as a run starts with it. `deferred`: a native model's values are loaded only when it is
    placed. `axis` and `stage`: return this rank's tensor-parallel part and pipeline stage."""
    path = initial_path(settings, tokenizer, role)
    common: dict[str, Any] = {"head": head, "seed": settings.seed, "dtype": dtype_of(settings), "device": device}
    common |= {"deferred": deferred, "axis": axis, "stage": stage}
    if path is not None:
        return load_model(path, **common)
    return fresh_model(settings.model.config, vocab_size=len(tokenizer), **common)


def initial_path(settings: Settings, tokenizer: Any, role: Role) -> str | None:
    """Return the folder or hub id that a role's model starts from; None for a fresh one."""
    if role is Role.CRITIC:
        return settings.critic.path or judge_for_critic(settings, tokenizer) or settings.model.path
    return settings.model.path


def judge_for_critic(settings: Settings, tokenizer: Any) -> str | None:
    """Return the path of the run's first judge with the policy's vocabulary, or None; warn of other judges."""
    judges = [reward.path for reward in settings.rewards if reward.kind == "judge" and reward.path]
    for path in judges:
        if not contradictions(load_tokenizer(path), tokenizer):
            return path
        log.warning("The critic does not start from the judge %s, whose tokenizer is not the policy's.", path)
    return None
