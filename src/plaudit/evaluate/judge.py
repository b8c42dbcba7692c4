"""A judge's checkpoint as a reward: in training, in evaluation, or from a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from plaudit.batch import Batch
from plaudit.data.fields import Message, template_arguments
from plaudit.data.reader import Reader, Tokens, after, chat_of, encode_prompt, encode_texts
from plaudit.data.settings import DataSettings
from plaudit.evaluate.policy import check_lengths
from plaudit.learn.scorer import Scorer
from plaudit.learn.sharding import Placement, Waiting, Whole, apart
from plaudit.models.base import LanguageModel
from plaudit.models.described import check_scores
from plaudit.models.load import load_model, load_tokenizer
from plaudit.rewards.judge import JudgeReward, ScoreBatch
from plaudit.types import Completion, Finish, Prompt, Role, Row
from plaudit.types.distant import joined, values


@dataclass(frozen=True)
class Judge:
    """A reward model with its tokenizer."""

    model: LanguageModel
    tokenizer: Any
    token_budget: int = 16384
    placement: Placement | None = None
    """Where its parameters are, if in shards or host memory; None if all are on its device."""

    @classmethod
    def load(
        cls,
        path: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        token_budget: int = 16384,
        offload: bool = False,
        **placed: Any,
    ) -> Judge:
        """Load the judge from a checkpoint's folder (or a hub id). With `offload`, its weights are in host
        memory between scorings. `placed` goes to `load_model`. Raises ValueError for a model that is no judge."""
        check_scores(path)
        model = load_model(path, head="scalar", dtype=dtype, device=device, **placed)
        model.requires_grad_(False)
        place = Waiting(model, device=torch.device(device)) if offload and apart(device) else None
        return cls(model.eval(), load_tokenizer(path, tried=False), token_budget, place)

    @property
    def place(self) -> Placement:
        return self.placement or Whole(self.model)

    @cached_property
    def _scorer(self) -> Scorer:
        """The scorer. It is kept, since it lowers its token budget once memory runs out."""
        return Scorer(self.model, Role.JUDGE, token_budget=self.token_budget, placement=self.place)

    def reward(self, tokenizer: Any | None, *, thread: bool = False, **more: Any) -> JudgeReward:
        """Return a reward for answers that `tokenizer` made; None for answers of which only the text is known. With
        `thread`, it scores in a thread, and other coroutines continue. `more` is as in `judge_reward`."""
        longest, ends = self.model.max_positions, self.model.special.eos
        return judge_reward(
            self._beside if thread else self.of_sequences, self.tokenizer, tokenizer, ends=ends, longest=longest, **more
        )

    async def _beside(self, sequences: list[tuple[int, ...]]) -> list[float]:
        return await asyncio.to_thread(self.of_sequences, sequences)

    def of_sequences(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        """Return one score a sequence, read where transformers' classifiers do: at the last token that is not the
        checkpoint's pad. If that pad is the end token too, this is the token before the end. Raises ValueError for
        sequences longer than the model's context."""
        read = [self._without_pads(sequence) for sequence in sequences]
        batch = Batch.of([Row(tokens=tokens, trainable=(False,) * len(tokens)) for tokens in read])
        check_lengths(batch, self.model)
        found: list[float] = []
        for output in self._scorer.outputs(batch):
            assert output.scores is not None
            found += output.scores.tolist()
        return found

    def of_distant(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """As `of_sequences`, for tokens that may be on other nodes and are fetched first (`types/distant.py`)."""
        return self.of_sequences(values(sequences))

    def _without_pads(self, sequence: tuple[int, ...]) -> tuple[int, ...]:
        """Remove the pads at its end: tokens after the one that is read cannot change its state."""
        length = len(sequence)
        while length > 1 and sequence[length - 1] == self.model.special.pad:
            length -= 1
        return sequence[:length]


def judge_reward(
    score_batch: ScoreBatch,
    own: Any,
    tokenizer: Any | None,
    *,
    ends: Collection[int],
    longest: int,
    busy: Callable[[], bool] = lambda: False,
    pause: float = 0.0,
    as_chat: bool | None = None,
) -> JudgeReward:
    """Return a reward for answers sampled with `tokenizer` (None: only texts are known). `score_batch` calls the judge
    in its process. Of the judge, `own` is the tokenizer, `ends` the end tokens, `longest` the number of positions.
    `as_chat` is as in `JudgeInput`."""
    reading = JudgeInput(own, ends, as_chat)
    sampled = tokenizer is not None and own.get_vocab() == tokenizer.get_vocab()
    encode = partial(reading.sequence, sampled=sampled)
    return JudgeReward(score_batch, busy=busy, pause=pause, encode=encode, longest=longest)


class JudgeInput:
    """Tokenises prompt and answer for a judge as in its training, with chats rendered by its own tokenizer's
    template. An answer without an end token gets one; another end token is replaced by the judge's.

    A plain prompt is read as a chat's user turn if `as_chat` says so; None lets the checkpoint decide, as for a policy.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], as_chat: bool | None = None):
        # an answer without thoughts is read as having closed them: judges score finished answers
        self.reader = Reader(tokenizer, DataSettings(thoughts="closed", as_chat=as_chat), ends)
        self.tokenizer, self.chats = tokenizer, self.reader.chats
        self.as_chat = bool(self.reader.settings.as_chat and self.chats.template)
        self._asked: tuple[Prompt, str, Tokens] | None = None

    def sequence(self, prompt: Prompt, completion: Completion, *, sampled: bool) -> Tokens:
        """Return the judge's tokens. With `sampled` (equal vocabularies), the answer keeps its drawn tokens if the
        judge's prompt has the same tokens too. Raises ValueError for a chat that its template refuses."""
        messages = [dict(turn) for turn in prompt.messages]
        turns = chat_of(prompt.text, messages, self.reader.settings) if self.chats.template else ()
        chat = bool(turns)
        text, asked = self._prompt(prompt, turns, sampled=sampled)
        if sampled and asked == prompt.tokens:
            body = completion.tokens[:-1] if completion.finish is Finish.EOS else completion.tokens
            end = self._end(chat=chat)
            before = len(body) - len(end) + 1  # a template may write something before the end token
            whole: Tokens = joined(asked, body[:before] if end[:-1] == body[before:] else body, end)
            return whole
        answer = self._completion(prompt, turns, completion, text) if chat else completion.text
        alone, whole_text = encode_texts([text, text + answer], self.tokenizer)
        span, tokens = after(alone, whole_text, answer, self.tokenizer, chat=chat)
        asked = asked[: len(asked) - span]
        return (*asked, *tokens, *(() if tokens and tokens[-1] in self.reader.ends else self._end(chat=chat)))

    def _prompt(self, prompt: Prompt, turns: Sequence[Message], *, sampled: bool) -> tuple[str, Tokens]:
        """Return the prompt's text and tokens. The last prompt's are cached, since all of its answers are scored."""
        if not turns:
            return prompt.text, prompt.tokens if sampled else encode_prompt(prompt.text, self.tokenizer)
        if self._asked is None or self._asked[0] is not prompt:
            text = self.chats.prompt(turns, template_arguments(prompt.extra))
            self._asked = prompt, text, encode_texts([text], self.tokenizer)[0]
        return self._asked[1:]

    def _completion(self, prompt: Prompt, turns: Sequence[Message], completion: Completion, text: str) -> str:
        answer = {"role": "assistant", "content": completion.text}
        try:
            return self.chats.completion(text, turns, answer, template_arguments(prompt.extra))
        except ValueError:  # an answer that the template would change, such as one with half a thought
            return completion.text

    def _end(self, *, chat: bool) -> Tokens:
        form = self.chats.form if chat else None
        if form is not None and form.end:
            return encode_texts([form.end], self.tokenizer)[0]
        return () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
