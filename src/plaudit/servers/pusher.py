"""A worker's side of parameter servers, for one trained model: its learner's gradients go there, new weights come back.

    prepare -> [apply, for several steps ->] push -> messages for the servers; messages of the servers -> pull

Between calls the model has the servers' weights. With local steps the worker's own weights are kept apart meanwhile, so
that samplers, checkpoints and references never see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.optim import MASTER
from plaudit.runtime.settings import Servers
from plaudit.servers.part import MOMENTS, STEP, Beginning
from plaudit.servers.pushes import Array, Feedback, cuts, decode, encode
from plaudit.types import Stats

Units = Batch


def share(units: Units) -> float:
    """Return the share that these units have of the trained tokens of their whole step."""
    assert units.token_share is not None, "a step's batch is weighed"
    return float(units.token_share.double().sum())


class Pusher:
    """Exchanges gradients and weights of one learner with servers. The caller promises that all ranks of an island make
    the same calls, except `begun`, `push` and `save`, which only the island's first rank makes."""

    def __init__(self, learner: Learner, servers: Servers):
        self.learner, self.servers, self.drifts = learner, servers, servers.local_steps > 1
        self.optimizer = learner.optimizer
        self.masters = list(self.optimizer.masters.values())
        self.sizes = [master.numel() for master in self.masters]
        self.runs = cuts(sum(self.sizes), servers.count)
        self.feedback = Feedback(sum(self.sizes), servers.push)
        self.own: Tensor | None = None
        """The worker's weights after its own steps; None: the servers'."""
        if not self.drifts:
            self.optimizer.moments = {}  # the servers have moments

    def begun(self, path: Path | None) -> tuple[Any, ...]:
        """Return each server's Beginning, from the checkpoint at `path` (of any strategy) if given; then a 0."""
        state, steps = dict[str, Tensor](), 0.0
        if path is not None:
            self.optimizer.moments = {name: self.optimizer.zeros(one) for name, one in self.optimizer.masters.items()}
            self.learner.restore(path, {})
            if not self.drifts:
                moments, self.optimizer.moments = list(self.optimizer.moments.values()), {}
                state, steps = {kind: _flat(one[kind] for one in moments) for kind in MOMENTS}, float(moments[0][STEP])
            if (more := _of(path, "worker0")).exists():
                state |= load_file(more)
        state = {MASTER: self._weights(), **state}
        return (*(self._beginning(start, stop, steps, state) for start, stop in self.runs), 0)

    def _beginning(self, start: int, stop: int, steps: float, state: Mapping[str, Tensor]) -> Beginning:
        pieces, begin = [], 0
        for master, size in zip(self.masters, self.sizes, strict=True):
            if (numbers := min(begin + size, stop) - max(begin, start)) > 0:
                pieces.append((numbers, master.dim() >= 2))
            begin += size
        whole = {kind: values for kind, values in state.items() if len(values) == begin}
        return Beginning(pieces, steps, {kind: encode(one[start:stop], "float32") for kind, one in whole.items()})

    def prepare(self, batch: Batch, step: int, rate: float) -> Stats:
        """Compute gradients of a batch and return figures. With local steps, add them to gradients not applied yet."""
        if not self.drifts:
            self.optimizer.clear()
        with self._drifted():
            return self.learner.prepare(batch, step, rate)

    def apply(self, take: bool, share: float) -> None:
        """Take the prepared step on the worker's own weights, or drop it. `share` is the worker's share of the whole
        step's tokens; gradients are divided by it, so that they are means over the worker's own tokens."""
        with self._drifted():
            torch._foreach_div_(list(self.optimizer.collected.values()), share)
            self.optimizer.norm /= share
            self.learner.apply(take)

    def push(self) -> tuple[Any, ...]:
        """Return a message per server (gradient; with local steps servers' weights minus own), then bytes in all."""
        if not self.drifts:
            values = _flat(self.optimizer.collected.values())
            self.optimizer.clear()
        else:
            values = self._weights() - (self._weights() if self.own is None else self.own)
        messages = self.feedback.encode(values, self.runs)
        return (*messages, sum(message.nbytes for message in messages))

    def pull(self, *messages: Array) -> None:
        """Set the model to the weights after the servers' step, and drop own weights and gradients."""
        found = _flat(decode(message, self.servers.push) for message in messages)
        self._set(found if self.servers.push == "float32" else self._weights() + found)
        self.own = None
        self.settle(True)

    def settle(self, taken: bool) -> None:
        self.feedback.settle(taken)
        self.optimizer.clear()

    def load(self, *wholes: Array) -> None:
        """Set the model to the servers' weights. With local steps, the worker's own weights move by the same change."""
        found = _flat(decode(whole, "float32") for whole in wholes)
        if self.own is not None:
            self.own += found - self._weights()
        self._set(found)
        self.feedback.settle(True)

    def save(self, path: Path, number: int, steps: float = 0.0, *servers: Mapping[str, Array]) -> dict[str, Any]:
        """Write the state of worker `number`; worker 0 also writes what servers keep. Return values for `restore`. The
        moments that worker 0 writes are in the file that a rank would write, from which any strategy can resume."""
        kinds = servers[0] if servers else {}
        state = {kind: _flat(decode(one[kind], "float32") for one in servers) for kind in kinds}
        if self.drifts:
            values = self.learner.save(_of(path, f"moments{number}") if number else path)
        elif not number:
            split = zip(*(torch.split(state.pop(kind), self.sizes) for kind in MOMENTS), strict=True)
            for (name, master), pair in zip(self.optimizer.masters.items(), split, strict=True):
                moments = {kind: one.view(master.shape) for kind, one in zip(MOMENTS, pair, strict=True)}
                self.optimizer.moments[name] = {STEP: torch.tensor(steps), **moments}
            values = self.learner.save(path)
            self.optimizer.moments = {}
        else:
            values = {}
        if self.servers.push == "float32":
            state.pop(MASTER, None)  # equal to the model's weights, which are saved
        own = {} if self.own is None else {"own": self.own}
        save_file({"carried": self.feedback.carried, **own, **state}, _of(path, f"worker{number}"))
        return values

    def restore(self, path: Path, number: int, saved: int, values: Mapping[str, Any]) -> None:
        """Restore what worker `number` (from 0) of `saved` wrote: rounding errors that it has not sent yet and, with
        local steps, its optimizer's state and own weights. If `number` is not below `saved`, restore only, with local
        steps, the optimizer's state of worker `number % saved`. Every worker takes the pass sizes in `values`."""
        other = number % max(1, saved)
        if self.drifts:
            self.learner.restore(_of(path, f"moments{other}") if other else path, values)
        self.learner.passes.restore(values.get("passes", {}))
        if number < saved:
            state = load_file(_of(path, f"worker{number}"))
            if len(state["carried"]) == len(self.feedback.carried):  # runtime.servers.push may have changed
                self.feedback.carried = state["carried"]
            self.own = state.get("own") if self.drifts else None

    def _weights(self) -> Tensor:
        return _flat(self.masters)

    @torch.no_grad()
    def _set(self, weights: Tensor) -> None:
        for master, values in zip(self.masters, torch.split(weights, self.sizes), strict=True):
            master.copy_(values.view_as(master))
        self.optimizer.round()

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


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the numbers of all tensors end to end, as one CPU tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()


def _of(path: Path, what: str) -> Path:
    return path.with_suffix(f".{what}.safetensors")
