"""Record decoding steps once and repeat them: on a GPU a step then costs one launch, not one per kernel.

    tokens, positions (n,) -> fixed tensors -> [recorded: embed, layers and their cache, head] -> logits (n, vocab)

A recording has one shape and fixed addresses. So the number of rows is rounded up to one of few sizes (what idle rows
write has weight 0), the longest sequence to one of few lengths (the mask hides the rest). Each pair is recorded when
it first occurs. Weights may change in place; a cache or parameters at other addresses need new recordings. Left out:
prompts, whose shapes hardly occur twice, and sampling, which is launched while the step computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from plaudit.compute.invariant import few, filled_up
from plaudit.compute.library import OFF
from plaudit.models.decoder import Decoder
from plaudit.rollout.decode.cache import Cache, Decode, ProductCache

Step = Callable[[], None]
Record = Callable[[Step], Step]
"""Runs a step and returns a function that repeats it: the same operations on the same memory, without the Python."""

MANY_ROWS = 64
"""Numbers of rows are rounded up to powers of two up to this number, and to multiples of it beyond."""
SHORTEST = 128
"""Least sequence length for which a step is recorded."""
TOLERANCE = {torch.float32: 0.01}
"""The relative difference that a row's logits may have between a recorded step and a plain one, whose shapes call other
kernels. Those of another row would differ by more than 1."""
TOLERANCE_HALVES = 0.2
"""The same limit in lower precision than float32."""


def graphs_wanted() -> bool:
    """True unless PLAUDIT_CUDA_GRAPHS=off is set, as for a driver that has trouble with CUDA graphs."""
    return os.environ.get("PLAUDIT_CUDA_GRAPHS", "on").lower() not in OFF


def rounded_rows(running: int, slots: int) -> int:
    size = 1 << (running - 1).bit_length() if running <= MANY_ROWS else filled_up(running, MANY_ROWS)
    return min(size, slots)


def rounded_length(longest: int, room: int) -> int:
    """Round a length up to one of few, by at most a quarter; the result is at least SHORTEST and at most `room`."""
    return min(max(few(longest, digits=3), SHORTEST), room)


class RecordedSteps:
    """Records and repeats decoding steps on one cache. The first recorded step is compared with a plain one."""

    def __init__(self, model: Decoder, cache: Cache, record: Record):
        assert isinstance(cache, ProductCache), type(cache)  # a `PageCache` changes its slots' rows
        self.model, self.cache, self._record = model, cache, record
        self._addresses = self._where()
        self._steps: dict[tuple[int, int], Step] = {}
        self._checked = False
        self._tokens, self._positions = torch.zeros(2, cache.slots, dtype=torch.int64, device=cache.device)
        self._logits = torch.zeros(cache.slots, model.vocab_size, device=cache.device)

    def rows(self, running: int) -> int:
        """Return how many rows a recorded step computes for `running` rows: rounded up to one of few sizes."""
        return rounded_rows(running, self.cache.slots)

    def stale(self) -> bool:
        """True if parameters have moved to other addresses since recording, so that recordings cannot be used."""
        return self._addresses != self._where()

    def logits(self, tokens: Tensor, positions: Tensor, *, running: int, longest: int) -> Tensor:
        """Return logits (running, vocab) in float32 after tokens (n,) at positions (n,), n = `rows(running)`. Rows from
        `running` on are idle. `longest` is the largest position of a running row + 1. Idle rows' positions are below it
        too: a row that sees no key writes NaN. The caller may write to the logits; the next call overwrites them.

        Raises RuntimeError if the step cannot be recorded, or its logits differ from a plain step's."""
        shape = len(tokens), rounded_length(longest, self.cache.length)
        self._tokens[: len(tokens)] = tokens
        self._positions[: len(tokens)] = positions
        if shape not in self._steps:
            self._steps[shape] = self._record(partial(self._step, *shape))
        if not self._checked:
            self._logits.zero_()  # else logits of the warm-up step would hide that the recording is empty
        self._steps[shape]()
        logits = self._logits[:running]
        if not self._checked:
            self._check(logits, Decode(self.cache, positions[:running], longest), tokens[:running])
            self._checked = True
        return logits

    def _step(self, rows: int, longest: int) -> None:
        hidden = self.model(self._tokens[:rows], Decode(self.cache, self._positions[:rows], longest))
        self._logits[:rows] = self.model.head(hidden)

    def _check(self, logits: Tensor, plain: Decode, tokens: Tensor) -> None:
        expected = self.model.head(self.model(tokens, plain)).float()
        gap = float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).max())
        if not gap <= TOLERANCE.get(self.model.dtype, TOLERANCE_HALVES):
            raise RuntimeError(f"its logits differ by {gap:.1%} from those of a plain step")

    def _where(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.model.parameters())


class CudaGraphs:
    """Records steps as CUDA graphs, which share memory for intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> Step:
        with torch.cuda.device(self._device):  # torch records the streams of its current one, which is the first GPU
            return self._record(step)

    def _record(self, step: Step) -> Step:
        # Libraries and the model set things up at their first call, which must not be recorded.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:  # other threads may go on using the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        finally:  # if recording fails, torch leaves its own stream current
            torch.cuda.set_stream(current)
        return graph.replay
