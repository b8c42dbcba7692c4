"""An engine whose texts are given, one token a step: what stands around its answers can be looked at as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from plaudit.rollout.queued import Draft, QueuedEngine


class Written(QueuedEngine):
    """Answers with these texts in turn. A step is `pause` seconds after the one before it."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], pause: float = 0.0):
        super().__init__(tokenizer, slots=8, max_length=2000, ends=[tokenizer.eos_token_id])
        self.texts, self.pause = list(texts), pause
        self.running: dict[Draft, list[int]] = {}

    async def _drive(self) -> None:
        while self._queue.under_way or self._queue.open:
            self._advance()
            await asyncio.sleep(self.pause)

    def _advance(self) -> None:
        for draft in self._queue.take():
            said = self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]  # type: ignore[operator]
            self.running[draft] = [*said, *self.ends]
        for draft, left in list(self.running.items()):
            draft.tokens.append(left.pop(0))
            draft.logprobs.append(-1.0)
            full = len(draft.tokens) >= draft.limit
            ending = self._ending(draft, ended=draft.tokens[-1] in self.ends, full=full)
            if ending is not None:
                del self.running[draft]
                self._answer(draft, *ending)

    def _forget(self) -> None:
        self.running = {}

    def _withdraw(self, drafts: Collection[Draft]) -> None:
        for draft in drafts:
            self.running.pop(draft, None)
