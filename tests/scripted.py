"""An engine whose answers are given, so that what stands around them can be looked at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from plaudit.types import Completion, Finish, Numbers, Sampling


class Scripted:
    """Answers with these texts in turn. `asked` has the contexts that it was asked with."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], ends: Collection[int] = (), stop: Sequence[str] = ()):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.ends, self.stop = {*ends, tokenizer.eos_token_id}, stop
        self.asked = list[tuple[int, ...]]()

    async def generate(self, tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        self.asked.append(tuple(tokens))
        text = self.texts.pop(0)
        said = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        stopped = any(stop in text for stop in self.stop)
        if said[-1] not in self.ends and not stopped:
            said.append(self.tokenizer.eos_token_id)
        return [
            Completion(
                tokens=Numbers("i", said),
                logprobs=Numbers("f", [-1.0] * len(said)),
                versions=Numbers("i", [7] * len(said)),
                text="",
                finish=Finish.STOP if stopped else Finish.EOS,
            )
            for _ in plan
        ]
