"""Read and write the part of a rank's models that steps change, so that copies can be kept after each step.

Scorer, Learner -> moving -> tensors, plain values -> moved -> the same on a rank with the same part
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plaudit.learn.learner import Learner
from plaudit.learn.optim import MASTER
from plaudit.learn.scorer import Scorer
from plaudit.learn.sharding import local


def moving(member: Scorer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's state of `member` that steps change: tensors (its own, not copies) and plain values."""
    if not isinstance(member, Learner):
        return {name: local(parameter).detach() for name, parameter in member.model.named_parameters()}, {}
    masters = {f"{MASTER}/{name}": master.detach() for name, master in member.optimizer.masters.items()}
    return member.optimizer.state() | masters, {"passes": member.passes.state()}


@torch.no_grad()
def moved(member: Scorer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Copy into `member` what `moving` returned on a rank with the same part."""
    for name, mine in moving(member)[0].items():
        mine.copy_(tensors[name])
    if isinstance(member, Learner):
        member.optimizer.round()
        member.passes.restore(values["passes"])
