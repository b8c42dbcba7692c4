"""Open a service on one learner in this process; a worker group of several would take its place here.

checkpoint -> base model, tokenizer, ThreadGroup[Adapters] -> Service, with the models of an earlier one
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plaudit.learn.settings import LearnSettings
from plaudit.models.decoder import Decoder
from plaudit.models.device import device_of
from plaudit.models.load import load_model, load_tokenizer
from plaudit.runtime.local import LocalWorkerGroup, do
from plaudit.runtime.worker import Arguments, Kind_co, Result
from plaudit.support.paths import at_home
from plaudit.training_api.adapters import Adapters
from plaudit.training_api.server import Service


class ThreadGroup(LocalWorkerGroup[Kind_co]):
    """One worker in this process, whose calls run in a thread, so that requests are answered meanwhile."""

    def __init__(self, worker: Kind_co):
        super().__init__(worker)
        self._thread = ThreadPoolExecutor(1)

    async def scatter(
        self, method: Callable[[Kind_co, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        (mine,) = arguments
        call = partial(do, self.worker, self.name, method.__name__, *mine)
        return [await asyncio.get_running_loop().run_in_executor(self._thread, call)]


def opened(
    model: str,
    *,
    device: str,
    dtype: str,
    folder: Path,
    name: str,
    models: int,
    heartbeat: float,
    say: Callable[[str], None],
) -> Service:
    """Return the service, with the options of the command. Raises ValueError for a model without a native decoder."""
    base = load_model(model, device=device_of(device), dtype=getattr(torch, dtype))
    if not isinstance(base, Decoder):
        raise ValueError(
            f"{model} runs through transformers: give a model of a family that the native decoder computes"
        )
    group = ThreadGroup(Adapters(base.requires_grad_(False), LearnSettings(precision=dtype)))
    named = name or at_home(model).resolve().name
    limits: dict[str, Any] = {"places": models, "heartbeat": heartbeat}
    service = Service(group, base, load_tokenizer(model), folder, name=named, say=say, **limits)
    asyncio.run(service.resume())
    return service
