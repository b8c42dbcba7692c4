"""Convert schedules and intervals in transformers' form, which TRL, async_rlhf and LLM-on-Ray share."""

from __future__ import annotations

import math

from plaudit.importers.table import Found, Translation

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def scheduled(r: Translation, key: str, name: str, warmup: float) -> Found:
    """Yield settings of the schedule called `name`. `warmup` is a share of all updates if below 1, else a number."""
    if name not in SCHEDULES:
        r.refuse(key, f"it must be one of {', '.join(SCHEDULES)}")
    yield "optimizer.schedule", SCHEDULES.get(name, "linear")
    if warmup and name != "constant":
        yield "optimizer.warmup", f"{max(round(warmup / r.updates), 1)} steps" if warmup >= 1 else float(warmup)


def spaced(
    r: Translation, section: str, key: str, steps_key: str, *, otherwise: float, by_default: str = "no"
) -> Found:
    """Yield the setting `<section>.every` for a strategy (no, steps, epoch). A number of steps below 1 is a share of
    all steps."""
    how, steps = str(r(key, by_default)).lower(), r(steps_key, otherwise)
    if how == "epoch":
        yield f"{section}.every", "1 epoch"
    elif how in ("no", "false"):
        if section == "save":
            yield "save.every", None
    elif how != "steps":
        r.refuse(key, "it must be no, steps or epoch")
    elif steps >= 1:
        yield f"{section}.every", max(round(steps / r.updates), 1)
    elif total := r.found.get("train.steps"):
        yield f"{section}.every", math.ceil(total * steps)
    elif 0 < (epochs := round(steps * r.found.get("train.epochs", 1.0), 6)) < math.inf:
        yield f"{section}.every", "1 epoch" if epochs == 1 else f"{epochs:.6f}".rstrip("0").rstrip(".") + " epochs"
    else:
        r.refuse(steps_key, "it must be above 0: a number of steps, or a share of all steps")
