"""A worker's side of parameter servers, for one trained model: its learner's gradients go there, new weights come back.

    prepare -> [apply, for several steps ->] push -> messages for the servers; messages of the servers -> pull

Between calls the model has the servers' weights. With local steps the worker's own weights stand aside meanwhile, so
that samplers, checkpoints and references never see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.pushes import Array, Feedback, cuts, decode, encode
from plaudit.learn.server import Table
from plaudit.runtime.settings import Servers
from plaudit.types import Stats


class Pusher:
    """The caller promises that all ranks of an island make the same calls, but `push` is for the first one only."""

    def __init__(self, learner: Learner, servers: Servers):
        self.learner, self.servers, self.drifts = learner, servers, servers.local_steps > 1
        self.masters = learner.optimizer.masters
        self.table = Table({name: tuple(p.shape) for name, p in self.masters.items()}, bool(learner.optimizer.rounded))
        self.runs = cuts(self.table.total, servers.count)
        self.feedback = Feedback(self.table.total, servers.push)
        self.own: Tensor | None = None
        """The worker's weights after its own steps; None: the servers'."""
        if not self.drifts:
            learner.optimizer.moments = {}  # servers have them

    def begun(self) -> tuple[Any, ...]:
        """Return the weights of each server's run, and the table."""
        weights = self._weights()
        return (*(encode(weights[start:stop], "float32") for start, stop in self.runs), self.table)

    def prepare(self, batch: Batch, step: int, rate: float) -> Stats:
        self.learner.optimizer.clear()
        with self._drifted():
            return self.learner.prepare(batch, step, rate)

    def apply(self, take: bool, share: float) -> None:
        """Take the prepared step on the worker's own weights. `share`: of the whole step's tokens, which its gradient
        is a sum over; its own step is their mean."""
        optimizer = self.learner.optimizer
        with self._drifted():
            torch._foreach_div_(list(optimizer.collected.values()), share)
            optimizer.norm /= share
            self.learner.apply(take)

    def push(self) -> tuple[Any, ...]:
        """Return a message for each server, and the bytes of all: of the gradient, or of how far own steps went."""
        optimizer = self.learner.optimizer
        if not self.drifts:
            values = torch.cat([gradient.reshape(-1) for gradient in optimizer.collected.values()]).cpu()
            optimizer.clear()
        else:
            values = self._weights() - self.own if self.own is not None else torch.zeros(self.table.total)
        messages = self.feedback.encode(values, self.runs)
        return (*messages, sum(message.nbytes for message in messages))

    def pull(self, *messages: Array) -> None:
        """Take the servers' step."""
        found = torch.cat([decode(message, self.servers.push) for message in messages])
        self._set(found if self.servers.push == "float32" else self._weights() + found)
        self.own = None
        self.settle(True)

    def settle(self, taken: bool) -> None:
        self.feedback.settle(taken)
        self.learner.optimizer.clear()

    def load(self, *wholes: Array) -> None:
        """Take the servers' weights. What own steps have added stays added."""
        found, before = torch.cat([decode(whole, "float32") for whole in wholes]), self._weights()
        if self.own is not None:
            self.own += found - before
        self._set(found)
        self.feedback.settle(True)

    def save(self, path: Path, number: int) -> dict[str, Any]:
        """Write what only this worker has, the `number`th of all."""
        values = self.learner.save(_of(path, number)) if self.drifts else {"passes": self.learner.passes.state()}
        kept = {"carried": self.feedback.carried} | ({} if self.own is None else {"own": self.own})
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(kept, path.with_suffix(f".worker{number}.safetensors"))
        return values

    def restore(self, path: Path, number: int, saved: int, values: dict[str, Any]) -> None:
        """Restore what `save` wrote, of one of `saved` workers; a further one begins with another's moments."""
        if self.drifts:
            self.learner.restore(_of(path, number % max(1, saved)), values)
        self.learner.passes.restore(values.get("passes", {}))
        if number < saved:
            kept = load_file(path.with_suffix(f".worker{number}.safetensors"))
            if len(kept["carried"]) == len(self.feedback.carried):  # runtime.servers.push may have changed
                self.feedback.carried = kept["carried"]
            self.own = kept.get("own") if self.drifts else None

    def _weights(self) -> Tensor:
        return torch.cat([master.detach().reshape(-1) for master in self.masters.values()]).cpu()

    @torch.no_grad()
    def _set(self, weights: Tensor) -> None:
        sizes = [master.numel() for master in self.masters.values()]
        for master, values in zip(self.masters.values(), torch.split(weights, sizes), strict=True):
            master.copy_(values.view_as(master))
        self.learner.optimizer.round()

    @contextmanager
    def _drifted(self) -> Iterator[None]:
        """While active, the model has the worker's own weights."""
        if not self.drifts:
            yield
            return
        servers = self._weights()
        if self.own is not None:
            self._set(self.own)
        try:
            yield
        finally:
            self.own = self._weights()
            self._set(servers)


def _of(path: Path, number: int) -> Path:
    """The file of a worker's moments: the first one's is that of a rank, from which others can go on."""
    return path.with_suffix(f".moments{number}.safetensors") if number else path
