"""Place a model's layers on the stages of a pipeline, and run micro-batches through them (`turns.py` has the order).

    Whole, Sharded or Cut, over the ranks with the same layers -> Staged
    micro-batches -> hidden states from stage to stage -> loss and figures at the last one -> gradients back

Each stage has the whole batch, and so knows the shape of each tensor that it will receive: micro-batches may differ in
size. What passes of one tick give each other is sent and received in one batch, and all ranks take the batches in the
order of ticks: with NCCL, a pair of ranks' sends and receives would otherwise wait for each other. No pass waits
for a send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.algorithms.figures import merge_stats
from plaudit.batch import Batch
from plaudit.learn.passes import Cutting, TokenBudget
from plaudit.learn.ranks import Ranks, Together, begun
from plaudit.learn.readout import READOUTS, Inputs, Result_co, Work
from plaudit.learn.sharding import Around, Placement, Result, Spec, Within
from plaudit.learn.tensor import put_together
from plaudit.learn.turns import Turn, target, ticks
from plaudit.models.base import LanguageModel
from plaudit.models.boxes import DTYPES, NAMES
from plaudit.models.decoder import Decoder
from plaudit.models.layout import Layout
from plaudit.types import Stats


class Staged(Around):
    """Places the layers of a pipeline stage. `inner` places them among the ranks that have the same layers; `line` has
    the ranks of this pipeline by stage, which take the same rows; `everyone` has all ranks."""

    def __init__(self, inner: Placement, model: Decoder, line: Ranks, everyone: Ranks):
        super().__init__(inner)
        assert isinstance(line, Together)
        self.model, self.line, self.everyone, self.number = model, line, everyone, model.stage.number
        self.layout = Layout(model.config, model.head_kind, model.stage.mesh, model.lora)
        self.measured: Stats = {}
        share = inner.share()
        assert share is not None
        self.dtype = share.dtype
        line.most(0)  # NCCL: all ranks of a group must take part in its first call

    def fit(self, budget: TokenBudget, cut: Cutting, work: Work[Result]) -> list[Result]:
        began, passing = time.perf_counter(), Passing(self, work, cut(budget.tokens))
        results = passing.run()
        if work.trains:
            self._measure(work.role, time.perf_counter() - began, passing.idle)
        return results

    def _measure(self, role: str, seconds: float, idle: float) -> None:
        """Set the figure `bubble`: the share of time in which the stages wait, the mean over the data axis's ranks."""
        stages = self.line.tell((seconds, idle))
        longest, busy = max(whole for whole, _ in stages), sum(whole - idle for whole, idle in stages)
        bubble = 1.0 - busy / (longest * len(stages))
        replicas = self.ranks.world // self.ranks.alike
        self.measured = {f"bubble/{role}": bubble / replicas} if self.model.stage.last else {}

    def merge(self, stats: Stats) -> Stats:
        merged = self.inner.merge(stats | self.measured)
        self.measured = {}
        return merge_stats(self.line.tell(merged))

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            if len(places := self.layout.stages(name)) > 1:  # a tied embedding: first and last stage get equal sums
                (other,) = set(places) - {self.number}
                gradient += self.line.exchange(gradient, other)
        self.inner.sum(gradients)

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        mine = {name: gradient for name, gradient in gradients.items() if self._first(name)}
        return math.sqrt(self.line.total(self.inner.norm(mine) ** 2))

    def _first(self, name: str) -> bool:
        """True if this is the first stage with this parameter or adapter."""
        return self.layout.stages(name)[0] == self.number

    def within(self, key: str, tensor: Tensor) -> Within:
        one = self.inner.within(key, tensor)
        return one._replace(mine=one.mine and self._first(key.rpartition("/")[2]))

    def specs(self, mine: Mapping[str, Spec]) -> Mapping[str, Spec]:
        specs = self.line.tell({key: (NAMES[dtype], shape) for key, (dtype, shape) in mine.items()})
        return {key: (DTYPES[name], tuple(shape)) for one in specs for key, (name, shape) in one.items()}

    @torch.no_grad()
    def parameters(self, names: Iterable[str], *, everyone: bool = False) -> dict[str, Tensor]:
        names = list(names)
        mine = self.inner.parameters([name for name in names if self._first(name)], everyone=everyone)
        if not everyone and (self.ranks.rank or self.model.axis.rank):
            return {}
        found = {}
        for name in names:
            own = mine[name].cpu() if name in mine else torch.empty(self.layout.whole(name), dtype=self.dtype)
            found[name] = self.line.spread(own, self.layout.stages(name)[0]).cpu()
        return found if everyone or not self.number else {}

    def whole(self) -> LanguageModel | None:
        return put_together(self, self.model)

    def begin(self, work: Callable[[], None]) -> bool:
        return begun(work, not self.everyone.rank, self.everyone.most) and self.writes


class Passing(Generic[Result_co]):
    """Forward and, when training, backward passes of micro-batches through one pipeline stage."""

    def __init__(self, place: Staged, work: Work[Result_co], parts: Sequence[Batch]):
        self.place, self.line, self.model = place, place.line, place.model
        self.work, self.parts = work, parts
        self.stage = (self.line.rank, self.line.world, self.model.stage.mesh.spans)
        self._left = len(parts) * self.stage[2]
        """Backward passes that are still to be made."""
        self.ticks = ticks(*self.stage[1:], len(parts), trains=work.trains)
        self.idle = 0.0
        """Seconds for which this stage waited for others."""
        self.results: list[Result_co] = []
        self._inputs: dict[int, tuple[Batch, Inputs]] = {}
        self._rows: dict[int, int] = {}
        self._coming: dict[Turn, tuple[Any, Tensor]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        """Handles of batches with a send, and tensors that must last until then."""
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """{(span, micro-batch): (input, whose gradient is sent back, output)} of passes without a backward pass yet."""

    def run(self) -> list[Result_co]:
        for tick in self.ticks:
            turn, given = tick[self.line.rank], None
            if turn is not None:
                given = (self._back if turn.backward else self._forth)(turn)
            self._exchange(tick, given)
            self._sent = [sent for sent in self._sent if not sent[0].is_completed()]
        for handle, _ in self._sent:
            self._wait(handle)
        return self.results

    def _exchange(self, tick: Sequence[Turn | None], given: Tensor | None) -> None:
        """Begin to send `given`, this stage's output of the tick, and to receive what others give this stage."""
        operations, coming = [], list[Turn | None]()
        for giver, turn in enumerate(tick):
            to = None if turn is None else target(turn, giver, *self.stage[1:])
            if to is not None and self.line.rank in (giver, to[0]):
                sends = giver == self.line.rank
                tensor = given if sends else self._room(to[1].part)
                assert tensor is not None
                kind, other = (dist.isend, to[0]) if sends else (dist.irecv, giver)
                operations.append(dist.P2POp(kind, tensor, group=self.line.group, group_peer=other))
                coming.append(None if sends else to[1])
        handles = dist.batch_isend_irecv(operations) if operations else []
        if len(handles) < len(operations):  # NCCL returns one for the batch
            handles = handles * len(operations)
        for later, handle, one in zip(coming, handles, operations, strict=True):
            if later is None:
                self._sent.append((handle, one.tensor))
            else:
                self._coming[later] = (handle, one.tensor)

    def _room(self, part: int) -> Tensor:
        """Memory for the hidden states of a micro-batch, or for their gradient."""
        if part not in self._rows:
            self._prepared(part)
        shape = (self._rows[part], self.model.config.width)
        return torch.empty(shape, dtype=self.place.dtype, device=self.line.device)

    def _prepared(self, part: int) -> tuple[Batch, Inputs]:
        if part not in self._inputs:
            batch = self.parts[part].to(self.work.device)
            inputs = READOUTS[self.work.role].prepared(self.model, batch)
            self._inputs[part], self._rows[part] = (batch, inputs), len(inputs.tokens) // self.model.axis.runs
        return self._inputs[part]

    def _received(self, turn: Turn) -> Tensor:
        handle, room = self._coming.pop(turn)
        self._wait(handle)
        return room.to(self.work.device)

    def _wait(self, handle: Any) -> None:
        began = time.perf_counter()
        handle.wait()
        self.idle += time.perf_counter() - began

    def _given(self, x: Tensor) -> Tensor:
        return x.detach().to(self.line.device).contiguous()

    def _forth(self, turn: Turn) -> Tensor | None:
        """Make a forward pass. Return the hidden states for the next stage, if there is one."""
        work, given = self.work, None
        batch, inputs = self._prepared(turn.part)
        x = None
        if turn in self._coming:
            x = self._received(turn).requires_grad_(work.trains)
        out = self.model(inputs.tokens if x is None else x, inputs.context, inputs.read, turn.span)
        if target(turn, *self.stage) is None:
            output = READOUTS[work.role].finish(self.model, batch, inputs, out, work.temperature)
            loss, result = work.finish(output, batch)
            self.results.append(result)
            out = loss
        else:
            given = self._given(out)
        if work.trains:
            self._kept[turn.span, turn.part] = (x, out)
        if turn.span == self.stage[2] - 1:
            del self._inputs[turn.part]
        return given

    def _back(self, turn: Turn) -> Tensor | None:
        """Make a backward pass. Return the gradient for the stage before, if there is one."""
        x, out = self._kept.pop((turn.span, turn.part))
        self._left -= 1
        self.place.accumulate(self._left > 0)
        torch.autograd.backward(out, self._received(turn) if turn in self._coming else None)
        if x is None:
            return None
        assert x.grad is not None
        return self._given(x.grad)
