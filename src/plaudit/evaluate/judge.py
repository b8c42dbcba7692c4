"""A checkpoint of a judge as a reward, wherever answers are scored: in training, in evaluation, from a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from plaudit.batch import Batch
from plaudit.data.tokenize import encode_prompt, encode_texts
from plaudit.evaluate.policy import check_lengths
from plaudit.learn.scorer import Scorer
from plaudit.learn.sharding import Placement, Waiting, apart
from plaudit.models.base import LanguageModel
from plaudit.models.load import check_scores, load_model, load_tokenizer
from plaudit.rewards.judge import JudgeReward, ScoreBatch
from plaudit.types import Completion, Prompt, Role, Row


@dataclass(frozen=True)
class Judge:
    """A reward model with its tokenizer."""

    model: LanguageModel
    tokenizer: Any
    token_budget: int = 16384
    placement: Placement | None = None
    """Where its parameters are; None for all on its device."""

    @classmethod
    def load(
        cls,
        path: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        token_budget: int = 16384,
        offload: bool = False,
    ) -> Judge:
        """The judge in a checkpoint's folder (or a hub id). With `offload` it waits in host memory between scorings.
        Raises ValueError for a model that is none."""
        check_scores(path)
        model = load_model(path, head="scalar", dtype=dtype, device=device)
        model.requires_grad_(False)
        place = Waiting(model, device=torch.device(device)) if offload and apart(device) else None
        return cls(model.eval(), load_tokenizer(path), token_budget, place)

    def scores(self, batch: Batch) -> list[float]:
        """One score a row, read at its last token."""
        check_lengths(batch, self.model)
        scorer = Scorer(self.model, Role.JUDGE, token_budget=self.token_budget, placement=self.placement)
        found: list[float] = []
        for output in scorer.outputs(batch):
            assert output.scores is not None
            found += output.scores.tolist()
        return found

    def reward(self, tokenizer: Any, *, busy: Callable[[], bool] = lambda: False, pause: float = 0.0) -> JudgeReward:
        """As a reward of answers that `tokenizer` made; with another vocabulary the judge reads the texts anew.

        An answer that lacks the end token gets it: the judge was trained on whole texts.
        """
        longest = self.model.max_positions
        return judge_reward(self.of_sequences, self.tokenizer, tokenizer, longest=longest, busy=busy, pause=pause)

    def of_sequences(self, sequences: list[tuple[int, ...]]) -> list[float]:
        """One score a sequence."""
        return self.scores(Batch.of([Row(tokens=tokens, trainable=(False,) * len(tokens)) for tokens in sequences]))

    def encode(self, prompt: Prompt, completion: Completion) -> tuple[int, ...]:
        return encode_pair(prompt, completion, self.tokenizer)


def judge_reward(
    score_batch: ScoreBatch,
    own: Any,
    tokenizer: Any,
    *,
    longest: int,
    busy: Callable[[], bool] = lambda: False,
    pause: float = 0.0,
) -> JudgeReward:
    """A reward of answers that `tokenizer` made, wherever the judge is; `own` is the tokenizer it was trained with,
    `longest` how many tokens it has positions for."""
    encode = None if own.get_vocab() == tokenizer.get_vocab() else partial(encode_pair, tokenizer=own)
    return JudgeReward(score_batch, busy=busy, pause=pause, encode=encode, append_eos=own.eos_token_id, longest=longest)


def encode_pair(prompt: Prompt, completion: Completion, tokenizer: Any) -> tuple[int, ...]:
    """Apart and joined, as the pairs that judges are trained on."""
    return (*encode_prompt(prompt.text, tokenizer), *encode_texts([completion.text], tokenizer)[0])
