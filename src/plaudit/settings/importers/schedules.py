"""Schedules and intervals in the words of transformers, which TRL's, async_rlhf's and LLM-on-Ray's files share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from plaudit.settings.importers.table import Reading

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def scheduled(r: Reading, key: str, name: str, warm_key: str, warmup: float) -> Iterator[tuple[str, Any]]:
    """The schedule of this name. `warmup` is a share of all steps, or from 1 on their number."""
    if name not in SCHEDULES:
        r.refuse(key, f"the rate is {', '.join(SCHEDULES)}")
    yield "optimizer.schedule", SCHEDULES.get(name, "linear")
    total = r("max_steps", 0)
    if warmup >= 1 and total <= warmup:
        r.refuse(warm_key, "it is a share of all steps here: give warmup_ratio, or a larger max_steps beside it")
        return
    share = warmup / total if warmup >= 1 else warmup
    if share and name != "constant":
        yield "optimizer.warmup", float(share)


def spaced(
    r: Reading, section: str, key: str, steps_key: str, *, otherwise: float, by_default: str = "no"
) -> Iterator[tuple[str, Any]]:
    """How often something is done. Steps below 1 are a share of all."""
    how, steps = str(r(key, by_default)).lower(), r(steps_key, otherwise)
    if how == "epoch":
        yield f"{section}.every", "1 epoch"
    elif how in ("no", "false"):
        if section == "save":
            yield "save.every", None
    elif how != "steps":
        r.refuse(key, "it is no, steps or epoch")
    elif steps >= 1:
        yield f"{section}.every", max(round(steps / r.updates), 1)
    elif total := r.found.get("train.steps"):
        yield f"{section}.every", math.ceil(total * steps)
    elif (epochs := steps * r.found.get("train.epochs", 1.0)) == int(epochs) > 0:
        yield f"{section}.every", f"{int(epochs)} epoch{'s' * (epochs > 1)}"
    else:
        r.refuse(steps_key, "it is a number of steps, or a share of max_steps: give one of both")
