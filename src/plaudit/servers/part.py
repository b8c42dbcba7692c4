"""A parameter server's part of one trained model: masters and optimizer state of a contiguous run of its numbers.

    pushes of workers -> add -> step: AdamW on a sum of gradients, or Nesterov on a mean of differences -> new weights

A model's trained numbers are laid end to end, and a server holds a run of them. Nesterov momentum on the differences
that workers' local steps make is DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105). Left out: files,
which a worker reads and writes as a rank does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from plaudit.learn.optim import MASTER, Optimizer
from plaudit.learn.settings import OptimizerSettings
from plaudit.runtime.settings import Servers
from plaudit.servers.pushes import Array, decode, encode

SENT, MOMENTUM, STEP, MOMENTS = "sent", "momentum", "step", ("exp_avg", "exp_avg_sq")
"""Kinds of state that a server keeps besides masters. `sent`: the weights that workers hold, if pushes are rounded."""


class Beginning(NamedTuple):
    """The state from which a server begins."""

    pieces: Sequence[tuple[int, bool]]
    """For each parameter in the server's run: (how many of its numbers, True if it is a matrix: weight decay)."""
    steps: float
    state: Mapping[str, Array]
    """Saved state of the run's numbers by kind: masters, moments."""


class ServerPart:
    """Keeps a run of weights and updates it. The caller promises `load` before all else, and `add` before `step`."""

    def __init__(self, optimizer: OptimizerSettings, servers: Servers):
        self.settings, self.servers, self.averages = optimizer, servers, servers.local_steps > 1

    def load(self, begin: Beginning) -> None:
        state = {kind: decode(values, "float32").clone() for kind, values in begin.state.items()}
        self.values, kinds = state[MASTER], (MOMENTUM,) if self.averages else MOMENTS
        self.held = {kind: state.get(kind, torch.zeros_like(self.values)) for kind in kinds} | {MASTER: self.values}
        self.sent = self.values
        if self.servers.push != "float32":
            self.sent = self.held[SENT] = state.get(SENT, self.values.clone())
        self.sum, self.sizes = torch.zeros_like(self.values), [size for size, _ in begin.pieces]
        if self.averages:
            return
        masters = torch.split(self.values, self.sizes)
        shaped = [
            one.view(1, -1) if is_matrix else one for one, (_, is_matrix) in zip(masters, begin.pieces, strict=True)
        ]
        self.optimizer = Optimizer(nn.ParameterList(shaped), self.settings)
        for kind in MOMENTS:
            for moments, held in zip(self._moments, torch.split(self.held[kind], self.sizes), strict=True):
                moments[kind] = held.view_as(moments[kind])
        for moments in self._moments:
            moments[STEP].fill_(begin.steps)

    @property
    def _moments(self) -> Sequence[dict[str, torch.Tensor]]:
        return list(self.optimizer.moments.values())

    def add(self, shares: Sequence[float], *pushes: Array) -> float:
        """Sum the pushes, each times its share of the step's tokens, in this order. Return the sum's squared norm."""
        self.sum = torch.zeros_like(self.values)
        for share, push in zip(shares, pushes, strict=True):
            self.sum.add_(decode(push, self.servers.push), alpha=share)
        return float(torch.linalg.vector_norm(self.sum.double())) ** 2

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> tuple[Array, int]:
        """Step with the sum of `add`; `norm`: its norm over all servers. Return the message for workers, its bytes."""
        if self.averages:
            momentum = self.held[MOMENTUM].mul_(self.servers.momentum).add_(self.sum)
            self.values.sub_(self.sum.add_(momentum, alpha=self.servers.momentum), alpha=self.servers.rate)
        else:
            optimizer, gradients = self.optimizer, torch.split(self.sum, self.sizes)
            optimizer.rate, optimizer.norm = rate, norm
            pairs = zip(optimizer.parameters.items(), gradients, strict=True)
            optimizer.collected = {name: gradient.view_as(p) for (name, p), gradient in pairs}
            optimizer.step()
        if self.servers.push == "float32":
            return self.whole()
        message = encode(self.values - self.sent, self.servers.push)
        self.sent.add_(decode(message, self.servers.push))
        return message, message.nbytes

    def whole(self) -> tuple[Array, int]:
        """Return the weights that workers hold, as a float32 message, and its bytes."""
        message = encode(self.sent, "float32")
        return message, message.nbytes

    def state(self) -> tuple[dict[str, Array], float]:
        """Return the state that `load` takes, by kind, and the number of AdamW steps (0 with local steps)."""
        steps = 0.0 if self.averages or not self.sizes else float(self._moments[0][STEP])
        return {kind: encode(values, "float32") for kind, values in self.held.items()}, steps

    def sound(self) -> bool:
        return all(bool(values.isfinite().all()) for values in self.held.values())
