"""The forward passes of a decoding step: a new token of each running row, and the prompts of rows that join.

    table, rows that run, rows whose prompt is new -> logits after the last token of each

Where several processes hold parts of the model, each takes the same passes, and the first one gets the logits.

A step is one kernel on the CPU (`steps.py`) and a recorded one on a GPU (`graphs.py`). Otherwise torch computes it
operation by operation, in one pass with new prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plaudit.models.decoder import Decoder
from plaudit.rollout.decode.cache import Decode, Joined, Prefill
from plaudit.rollout.decode.graphs import Record, RecordedSteps
from plaudit.rollout.decode.pages import PageCache
from plaudit.rollout.decode.steps import Steps, can_step, stamp
from plaudit.rollout.decode.table import Table

log = logging.getLogger(__name__)


class Forward:
    """Computes a decoder's logits; its weights are laid out again for the kernel after a change. `recorder` makes the
    `Record` of a device; if recording fails, that is logged once, and steps continue without it."""

    def __init__(self, model: Decoder, recorder: Callable[[torch.device], Record] | None):
        self.model, self.device, self.recorder = model, model.device, recorder
        self._lays_out = recorder is None and self.device.type == "cpu"
        self.forget()

    def forget(self) -> None:
        """Drop recorded steps and laid-out weights, which the next step makes again."""
        self.recorded: RecordedSteps | None = None
        self._steps: Steps | None = None
        self._parameters: tuple[Tensor, ...] = ()
        self._stamp: tuple[int, ...] = ()

    def logits(self, table: Table, running: int, fresh: Sequence[int]) -> Tensor:
        """Return logits (rows, vocab) after the last token of each running row, then after each fresh row's prompt."""
        self._lay_out(table, running)
        prompts = self._prompts(table, fresh) if fresh else None
        model, longest = self.model, table.longest(running)
        stepped = self._stepped(table, running, longest) if running else None
        if stepped is not None and prompts is None:
            return stepped
        if stepped is not None or not running:
            assert prompts is not None, "no step is taken without work"
            hidden = model(*prompts, prompts[1].ends)
        else:
            last, positions = table.newest(running, longest)
            decode = Decode(table.cache, positions, longest)
            if prompts is None:
                hidden = model(last, decode)
            else:
                tokens, prefill = prompts
                read = torch.cat((torch.arange(running, device=self.device), running + prefill.ends))
                hidden = model(torch.cat((last, tokens)), Joined(decode, prefill), read)
        logits: Tensor = model.axis.side_by_side(model.head(hidden).float())
        return logits if stepped is None else torch.cat((stepped, logits))

    def _lay_out(self, table: Table, running: int) -> None:
        """Lay weights out again if they were written to since the last step, or replaced while no row was running."""
        recorded = self.recorded
        if recorded is not None and (recorded.cache is not table.cache or (not running and recorded.stale())):
            self.recorded = None
        if self._lays_out:
            if not running:
                self._parameters = tuple(self.model.parameters())
            if (now := stamp(self._parameters)) != self._stamp:
                self._steps, self._stamp = Steps(self.model) if can_step(self.model) else None, now

    def _prompts(self, table: Table, fresh: Sequence[int]) -> tuple[Tensor, Prefill]:
        """Return the prompts of these rows, concatenated, and the `Prefill` that writes them into the cache."""
        prompts = [table.drafts[row].prompt for row in fresh]
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        return tokens, Prefill(table.cache, fresh, [len(prompt) for prompt in prompts])

    def _stepped(self, table: Table, running: int, longest: int) -> Tensor | None:
        """Return running rows' logits by one kernel or a recorded step; None without either or if recording fails."""
        if self._steps is not None:
            assert isinstance(table.cache, PageCache), type(table.cache)
            return self._steps.logits(table.cache, *table.newest(running, longest))
        if self.recorder is None:
            return None
        try:
            if self.recorded is None:
                self.recorded = RecordedSteps(self.model, table.cache, self.recorder(self.device))
            tokens, positions = table.newest(self.recorded.rows(running), longest)
            return self.recorded.logits(tokens, positions, running=running, longest=longest)
        except RuntimeError as error:
            log.warning(
                "decoding goes on without CUDA graphs, as by PLAUDIT_CUDA_GRAPHS=off: one was recorded, but %s",
                error,
            )
            self.recorder = self.recorded = None
            return None
