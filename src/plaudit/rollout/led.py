"""Native generation by several processes, each with a part of every matrix: the first leads, the others follow.

    requests -> NativeEngine -> Leading -> [commands, as JSON] -> CommandChannel -> Follower -> the same passes
                                   <- the ranks' columns of the logits, sums of activations ->
    weights -> every process keeps those that arrived -> the first says when -> each takes its own boxes

Only the first process knows requests, queues and random numbers, and draws tokens; so all have the same. Sums over
processes are in rank order (`compute/axis.py`): a sample does not depend on what is decoded beside it. If a pass fails
in one process, the others are stuck in a collective: the worker raises `OutOfStep` and has to be replaced. Left out:
steps by one kernel, CUDA graphs, and another try with fewer slots after memory ran out.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.compute.axis import Axis
from plaudit.models.decoder import Decoder
from plaudit.rollout.decode.decoding import Admission, Decoding
from plaudit.rollout.decode.table import Table
from plaudit.rollout.queued import Draft
from plaudit.runtime import stage
from plaudit.runtime.memory import make_room
from plaudit.runtime.worker import OutOfStep, reason_of
from plaudit.types import Completion, Sampling
from plaudit.weights.pieces import WeightsError

log = logging.getLogger(__name__)

IDLE = timedelta(days=365)
"""Time-out of a follower's wait for the next command. The loss of the first process ends the wait at once."""
Command = list[Any]
"""[name of a command that `Follower` knows, its arguments], as JSON values."""


class CommandChannel:
    """A gloo process group in which rank 0 sends commands to the others. All ranks must create it together."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self._group = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, *commands: Command) -> None:
        words = torch.frombuffer(bytearray(json.dumps(commands).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor(len(words)), group=self._group, group_src=0)
        dist.broadcast(words, group=self._group, group_src=0)

    def receive(self) -> list[Command]:
        size = torch.tensor(0)
        dist.broadcast(size, group=self._group, group_src=0)
        words = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(words, group=self._group, group_src=0)
        commands: list[Command] = json.loads(bytes(words.tolist()))
        return commands

    def total(self, sums: Tensor) -> None:
        """Replace numbers by their sums over all processes."""
        dist.all_reduce(sums, group=self._group)

    def failed(self, here: bool) -> list[int]:
        """Gather from all processes whether each failed (`here`: this one). Return the numbers of those that did."""
        all_of_them = list(torch.zeros(self.axis.size, dtype=torch.int64))
        dist.all_gather(all_of_them, torch.tensor(int(here)), group=self._group)
        return [number for number, failed in enumerate(all_of_them) if failed]


class Leading(Decoding):
    """The `Decoding` of the first process. It sends drawn tokens and removed rows with the next command."""

    def __init__(self, model: Decoder, channel: CommandChannel):
        super().__init__(model)
        self.channel = channel
        self._unsent: list[Command] = []
        self._broken = False

    def logits(self, new: Admission, slots: int) -> tuple[Table, Tensor]:
        drafts = [(draft.prompt, draft.further, draft.limit, draft.sampling.episode) for draft in new.drafts]
        with self._in_step():
            self._send(["step", drafts, new.resumed, new.fresh, new.copies, slots])
            return super().logits(new, slots)

    def drawn(self, tokens: Tensor, given: Sequence[int]) -> None:
        super().drawn(tokens, given)
        self._unsent.append(["drawn", tokens.tolist(), list(given)])

    def keep(self, rows: Collection[int], most: int) -> None:
        super().keep(rows, most)
        self._unsent.append(["keep", list(rows), most])

    def drop(self) -> None:
        super().drop()
        self._unsent.append(["drop"])

    def remove(self, rows: Collection[int]) -> None:
        super().remove(rows)
        self._unsent.append(["remove", list(rows)])

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        refused: Exception | None = None
        with self._in_step():
            self._send(["take", version])
            try:
                super().take(weights, version)
            except (WeightsError, ValueError) as error:
                refused = error
            failed = self.channel.failed(refused is not None)
        if refused is not None:
            raise refused
        if failed:
            raise WeightsError(f"process {failed[0]} of this worker did not get version {version}, or does not hold it")

    def forget(self) -> None:
        super().forget()
        if not self._broken:
            self._unsent.clear()
            with self._in_step():
                self._send(["forget"])

    def _send(self, command: Command) -> None:
        commands, self._unsent = [*self._unsent, command], []
        self.channel.send(*commands)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """While active, processes wait for each other; raise any error as OutOfStep, since they no longer agree."""
        try:
            yield
        except Exception as error:
            self._broken = True
            reason = f"its processes are no longer at the same step ({type(error).__name__}: {reason_of(error)})"
            raise OutOfStep(reason) from error


class Follower:
    """The `Engine` of the other processes of a multi-process rollout worker: a thread runs the leader's commands."""

    busy = False

    def __init__(self, model: Decoder, channel: CommandChannel, *, patience: float):
        """`patience`: seconds to wait for weights that the first process has already."""
        self.channel, self.patience = channel, patience
        self.decoding = Decoding(model)
        self._arrived: dict[int, Mapping[str, Tensor]] = {}
        self._change = threading.Condition()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        raise RuntimeError("This process follows: the first one of its worker answers.")

    async def drain(self) -> None:
        """Do nothing: requests are only in the first process, whose own `drain` waits for them."""

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Keep these weights until the first process takes its own."""
        assert weights is not None, "no learner shares its weights with this process"
        with self._change:
            self._arrived = {version: weights}
            self._change.notify_all()

    def go_back(self) -> None:
        """Drop the weights that have arrived: the run went back to a checkpoint, and its weights come next."""
        with self._change:
            self._arrived = {}

    def sleep(self) -> None:
        """Do nothing: this process frees its memory when the first process sends "forget"."""

    wake = close = sleep

    def _follow(self) -> None:
        commands: Mapping[str, Callable[..., None]] = {
            "step": self._step,
            "drawn": self._drawn,
            "keep": self.decoding.keep,
            "drop": self.decoding.drop,
            "remove": self.decoding.remove,
            "take": self._take,
            "forget": self._forget,
        }
        try:
            with torch.no_grad():
                while True:
                    for word, *arguments in self.channel.receive():
                        commands[word](*arguments)
        except Exception as error:
            log.warning("A rollout process cannot follow any longer.", exc_info=error)
            stage.fail(f"{type(error).__name__}: {reason_of(error)}")

    def _step(
        self, drafts: list[Any], resumed: int, fresh: list[int], copies: list[tuple[int, int]], slots: int
    ) -> None:
        joining = [
            Draft(prompt, Sampling(episode=episode), limit, further=further)
            for prompt, further, limit, episode in drafts
        ]
        self.decoding.logits(Admission(joining, resumed, fresh, copies), slots)

    def _drawn(self, tokens: list[int], given: list[int]) -> None:
        table = self.decoding.table
        assert table is not None
        self.decoding.drawn(torch.tensor(tokens, device=self.decoding.model.device), given)
        for row, (draft, token) in enumerate(zip(table.drafts, tokens, strict=True)):
            if row in given:
                draft.read += 1
            else:
                draft.tokens.append(token)

    def _take(self, version: int) -> None:
        try:
            with self._change:
                if not self._change.wait_for(lambda: version in self._arrived, self.patience):
                    raise WeightsError(f"version {version} did not arrive within {self.patience:g} s")
                weights = self._arrived.pop(version)
            self.decoding.take(weights, version)
        except (WeightsError, ValueError) as error:
            log.warning("A rollout process did not take new weights.", exc_info=error)
            self.channel.failed(True)
        else:
            self.channel.failed(False)

    def _forget(self) -> None:
        self.decoding.forget()
        make_room()
