"""Sessions of clients, the models that they train, and the futures that their requests become.

    a request's id and work -> begin -> a future, in its session -> retrieve -> result

A session ends when no heartbeat comes. `model.json` of each model is what a later server goes on from.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plaudit.support.paths import write_whole
from plaudit.training_api.samplers import Sampler

SESSIONS, WAITING, SAMPLERS = 256, 4096, 16
"""Most sessions; of a session, most requests whose results are kept, and samplers: those that it used last."""
RETRIEVED = 64
"""Results that stay after they were retrieved, since a client asks again if its connection broke."""
HELD_SECONDS = 30.0
"""Seconds that a client waits for a result before it asks again; its own limit is 45."""
STATE = "model.json"
Result = bytes | dict[str, Any]


class ApiError(ValueError):
    """A request that is refused, with its HTTP status."""

    def __init__(self, reason: str, status: int = 400):
        super().__init__(reason)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Model:
    """An adapter in training, as `model.json` has it."""

    id: str
    session: str
    base: str
    rank: int
    seed: int
    steps: int = 0
    saved: str = ""
    """Path of the last save, or of the one that it was loaded from; "" if there is none."""
    saved_steps: int = 0
    optimizer: bool = True
    """True if it goes on with the optimizer's state of that save."""
    lost: int = 0
    """Steps that restarts of the server lost, until the client was told."""
    last: int = 0
    """Number of the last request (its seq_id)."""


@dataclass(slots=True, kw_only=True)
class Session:
    id: str
    seen: float
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    futures: dict[str, asyncio.Future[Result]] = field(default_factory=dict)
    retrieved: list[str] = field(default_factory=list)


class Sessions:
    """All sessions. `heartbeat`: seconds after a client's last request until its session ends; `ended(model)` is
    called for each of its models."""

    def __init__(self, folder: Path, heartbeat: float, ended: Callable[[Model], None]):
        self.folder, self.heartbeat, self._ended = folder, heartbeat, ended
        self.all: dict[str, Session] = {}

    def open(self) -> str:
        self._sweep()
        if len(self.all) >= SESSIONS:
            raise ApiError(f"the server has its {SESSIONS} sessions: ask again later", 429)
        return self.add(secrets.token_hex(16)).id

    def add(self, key: str) -> Session:
        return self.all.setdefault(key, Session(id=key, seen=time.monotonic()))

    def of(self, key: str) -> Session:
        """Return the session of the id of a session, model, sampler or request. Its client is there, as it asks."""
        self._sweep()
        if (session := self.all.get(key.partition(":")[0])) is None:
            raise ApiError(
                f"there is no session of {key!r:.100}: it ends {self.heartbeat:g} s after its client's last request. "
                "Create a new client from a saved state",
                410,
            )
        session.seen = time.monotonic()
        return session

    @property
    def models(self) -> list[Model]:
        self._sweep()
        return [model for session in self.all.values() for model in session.models.values()]

    def model(self, key: str) -> Model:
        if (model := self.of(key).models.get(key)) is None:
            raise ApiError(f"there is no model {key!r:.100}: create it first", 404)
        return model

    def _sweep(self) -> None:
        """End the sessions whose clients are gone."""
        for key in [key for key, one in self.all.items() if time.monotonic() - one.seen > self.heartbeat]:
            self.end(key)

    def end(self, key: str) -> None:
        """End a session, if there is one: its models give up their places, and what it waits for is cancelled."""
        if (session := self.all.pop(key, None)) is not None:
            for future in session.futures.values():
                future.cancel()
            for model in session.models.values():
                (self.folder / model.id / STATE).unlink(missing_ok=True)
                self._ended(model)

    def write(self, model: Model) -> None:
        """Write what a later server needs to go on with this model, unless its session has ended."""
        if (session := self.all.get(model.session)) is not None and model.id in session.models:
            (self.folder / model.id).mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / model.id / STATE, json.dumps(asdict(model)))

    def keep(self, session: str, number: int, sampler: Sampler) -> str:
        """Add a sampler to a session; return its id."""
        owner = self.of(session)
        samplers, key = owner.samplers, f"{owner.id}:sample:{number}"
        samplers.setdefault(key, sampler)
        while len(samplers) > SAMPLERS:
            del samplers[next(iter(samplers))]
        return key

    def sampler(self, key: str) -> Sampler:
        samplers = self.of(key).samplers
        if key not in samplers:
            raise ApiError(f"there is no sampler {key!r:.80}: a session keeps the {SAMPLERS} that it used last", 404)
        samplers[key] = samplers.pop(key)  # at the end: the last one used
        return samplers[key]

    def begin(self, request: str, work: Callable[[], asyncio.Future[Result]]) -> str:
        """Begin the work of a request, unless the same one was sent before. Return its id."""
        futures = self.of(request).futures
        if request not in futures:
            if len(futures) >= WAITING:
                raise ApiError(f"{WAITING} results of this session were not retrieved: retrieve some first", 429)
            futures[request] = work()
            futures[request].add_done_callback(lambda one: one.cancelled() or one.exception())  # else asyncio logs it
        return request

    async def retrieve(self, request: str) -> Result | None:
        """Return a request's result, or None if it is not there yet. Raises what its work raised."""
        session = self.of(request)
        if (future := session.futures.get(request)) is None:
            raise ApiError(
                f"the request {request!r:.100} is unknown. If the server was started again, the model goes on from its "
                "last save, and the next step's metrics have steps_lost",
                404,
            )
        if not (await asyncio.wait({future}, timeout=HELD_SECONDS))[0]:
            return None
        session.retrieved = [one for one in session.retrieved if one != request] + [request]
        for old in session.retrieved[:-RETRIEVED]:
            session.futures.pop(old)
        session.retrieved = session.retrieved[-RETRIEVED:]
        if future.cancelled():
            raise ApiError("the session has ended", 410)
        return future.result()
