"""A parameter server's part of one trained model: masters of a run of all numbers, and what their optimizer remembers.

    pushes of workers -> add -> step: AdamW on a sum of gradients, or Nesterov on a mean of differences -> new weights

A table lists the trained parameters, and a server holds a run of its numbers, laid end to end. Nesterov's momentum on
what workers did by themselves for several steps is DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).
Workers hold `sent`: the masters as far as the messages have rounded them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plaudit.learn.optim import MASTER, Optimizer
from plaudit.learn.pushes import Array, cuts, decode, encode
from plaudit.learn.settings import OptimizerSettings
from plaudit.models.boxes import Stored, create, laid_out, read_box, stored_in, write_box
from plaudit.runtime.settings import Servers
from plaudit.support.paths import flush

SENT, MOMENTUM, STEP, MOMENTS = "sent", "momentum", "step", ("exp_avg", "exp_avg_sq")
OWN = ".servers.safetensors"
"""Ends the name of the file with what only servers have; moments are in the file that a rank would write."""


@dataclass(frozen=True)
class Table:
    """The trained parameters of a model."""

    shapes: Mapping[str, tuple[int, ...]]
    rounds: bool
    """True if workers compute with rounded masters."""

    @property
    def total(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


class Held(NamedTuple):
    """Numbers of a parameter within a server's run."""

    name: str
    first: int
    last: int
    """Excluded; both count from the parameter's first number."""
    at: int
    """Place of the first in the run."""

    @property
    def run(self) -> slice:
        return slice(self.at, self.at + self.last - self.first)


class ServerPart:
    """The caller promises `load` before all else, and `add` before `step`."""

    def __init__(self, optimizer: OptimizerSettings, servers: Servers, number: int):
        self.settings, self.servers, self.number = optimizer, servers, number
        self.averages = servers.local_steps > 1

    def load(self, table: Table, weights: Array) -> None:
        """Begin with these weights, of this server's run."""
        (start, stop) = cuts(table.total, self.servers.count)[self.number]
        self.table, self.held = table, list(_held(table, start, stop))
        self.values = decode(weights, "float32").clone()
        self.sum = torch.zeros_like(self.values)
        self.sent = self.values.clone() if self.servers.push != "float32" else self.values
        if self.averages:
            self.momentum = torch.zeros_like(self.values)
            return
        # Weights decay in matrices only, so pieces of them stay two-dimensional.
        shaped = [self.values[one.run].view(*(1,) * (len(table.shapes[one.name]) > 1), -1) for one in self.held]
        self.optimizer = Optimizer(nn.ParameterList(shaped), self.settings)

    def add(self, shares: Sequence[float], *pushes: Array) -> float:
        """Sum what workers pushed, each times its share, in this order. Return the sum of squares."""
        self.sum = torch.zeros_like(self.values)
        for share, push in zip(shares, pushes, strict=True):
            self.sum.add_(decode(push, self.servers.push), alpha=share)
        return float(torch.linalg.vector_norm(self.sum.double())) ** 2

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> tuple[Array, int]:
        """Take the step with the sum, whose norm over all servers is given. Return what workers need, and its bytes."""
        if self.averages:
            momentum = self.servers.momentum
            self.momentum.mul_(momentum).add_(self.sum)
            self.values.sub_(self.sum.add_(self.momentum, alpha=momentum), alpha=self.servers.rate)
        else:
            self.optimizer.rate, self.optimizer.norm = rate, norm
            parameters = self.optimizer.parameters.items()
            self.optimizer.collected = {
                name: self.sum[one.run].view_as(p) for one, (name, p) in zip(self.held, parameters, strict=True)
            }
            self.optimizer.step()
        if self.servers.push == "float32":
            message = encode(self.values, "float32")
        else:
            message = encode(self.values - self.sent, self.servers.push)
            self.sent.add_(decode(message, self.servers.push))
        return message, message.nbytes

    def whole(self) -> tuple[Array, int]:
        """Return the weights that workers hold, and their bytes."""
        message = encode(self.sent, "float32")
        return message, message.nbytes

    def sound(self) -> bool:
        return all(bool(one.isfinite().all()) for one in (self.values, *self._state().values()))

    # --- checkpoints

    def _state(self) -> dict[str, Tensor]:
        """Everything by kind, each a tensor of the run, but for the steps of each parameter and for masters that are
        the workers' weights: these are saved as a model."""
        found = {} if self.sent is self.values and not self.table.rounds else {MASTER: self.values}
        if self.sent is not self.values:
            found[SENT] = self.sent
        if self.averages:
            return found | {MOMENTUM: self.momentum}
        moments = self.optimizer.moments.values()
        return found | {kind: torch.cat([torch.zeros(0), *(one[kind].view(-1) for one in moments)]) for kind in MOMENTS}

    def _file(self, kind: str, path: Path) -> Path:
        """A checkpoint that ranks could write has the same file."""
        ranks = kind in (*MOMENTS, STEP) or (kind == MASTER and self.table.rounds and not self.averages)
        return path if ranks else path.with_suffix(OWN)

    def _places(self, path: Path) -> tuple[dict[str, Stored], dict[Path, bytes]]:
        shapes, places, headers = self.table.shapes, dict[str, Stored](), dict[Path, bytes]()
        files: dict[Path, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for kind in (*self._state(), *([] if self.averages else [STEP])):
            specs = {f"{kind}/{name}": (torch.float32, () if kind == STEP else shapes[name]) for name in shapes}
            files.setdefault(self._file(kind, path), {}).update(specs)
        for file, specs in files.items():
            more, header = laid_out(file.parent, specs, name=file.name.removesuffix(".safetensors"))
            places, headers = places | more, headers | header
        return places, headers

    def begin(self, path: Path) -> None:
        """Make the files that all servers write into."""
        path.parent.mkdir(parents=True, exist_ok=True)
        create(*self._places(path))

    def write(self, path: Path) -> None:
        """Write this run's numbers."""
        places, headers = self._places(path)
        for kind, values in self._state().items():
            for one in self.held:
                write_box(_flat(places[f"{kind}/{one.name}"]), ((one.first, one.last),), values[one.run])
        for one, moments in zip(self.held, [] if self.averages else self.optimizer.moments.values(), strict=False):
            if one.first == 0:
                write_box(places[f"{STEP}/{one.name}"], (), moments[STEP])
        for file in headers:
            flush(file)

    def restore(self, path: Path) -> None:
        """Read this run's numbers, after `load`. A file of ranks has no weights: those of `load` stay. Raises
        ValueError if the tensors are not this model's."""
        files = [file for file in (path, path.with_suffix(OWN)) if file.exists()]
        stored = stored_in(files)
        optional = (MASTER, SENT, MOMENTUM)
        for kind, values in self._state().items():
            for one in self.held:
                place = stored.get(f"{kind}/{one.name}")
                if place is None and kind in optional:
                    continue
                if place is None or place.shape != self.table.shapes[one.name]:
                    raise ValueError(
                        f"{path} has no {kind}/{one.name} of shape {self.table.shapes[one.name]}. Resume with the "
                        "model and the runtime.servers that the run began with"
                    )
                for first, piece in read_box(_flat(place), ((one.first, one.last),)):
                    values[one.at + first : one.at + first + len(piece)] = piece
            if kind in MOMENTS:
                for one, moments in zip(self.held, self.optimizer.moments.values(), strict=True):
                    moments[kind].view(-1).copy_(values[one.run])
        for one, moments in zip(self.held, [] if self.averages else self.optimizer.moments.values(), strict=False):
            moments[STEP].fill_(float(next(read_box(stored[f"{STEP}/{one.name}"], ()))[1]))


def _held(table: Table, start: int, stop: int) -> Iterator[Held]:
    """What of each parameter lies in a run."""
    begin = 0
    for name, shape in table.shapes.items():
        end = begin + math.prod(shape)
        first, last = max(begin, start), min(end, stop)
        if first < last:
            yield Held(name, first - begin, last - begin, first - start)
        begin = end


def _flat(stored: Stored) -> Stored:
    return replace(stored, shape=(math.prod(stored.shape),))
