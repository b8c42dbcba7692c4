"""A policy that is measured, not trained: its answers to prompts, and its log-probs of given texts.

prompts -> Policy.answers (each prompt its own seeds) -> groups of Answer -> scored by every reward -> figures
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from plaudit.batch import Batch
from plaudit.evaluate.settings import SamplingSettings
from plaudit.learn.scorer import Scorer
from plaudit.models.base import LanguageModel
from plaudit.models.load import load_model, load_tokenizer
from plaudit.models.tokenizer import check_vocabulary
from plaudit.rewards.base import Reward
from plaudit.rewards.earned import unless_failed
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import Sampler
from plaudit.rollout.rollouter import Play, completion_seed
from plaudit.runtime.coroutines import finished, together
from plaudit.types import Completion, Prompt, Role, Row, Score

Result = TypeVar("Result")
Advance = Callable[[int], None]
"""Called with the number of units of work that were just done."""
SCORED_AT_ONCE = 64
"""Number of prompts whose answers are scored at the same time."""


def unheard(done: int) -> None:
    """An `Advance` that does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion of a prompt, with a score by each reward."""

    prompt: Prompt
    completion: Completion
    scores: Mapping[str, Score] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.completion.finished

    @property
    def logprob(self) -> float:
        """The sum of the completion's sampled log-probs, in nats."""
        return sum(self.completion.logprobs)

    def parts(self, name: str) -> dict[str, float]:
        """Return the parts that a reward returned beside its score, without values that are not finite."""
        return {part: value for part, value in self.scores[name].parts.items() if abs(value) < float("inf")}

    def rows(self) -> list[Row]:
        """Return prompt and completion as a row, or the rows of an episode; what the policy sampled is trainable."""
        one, whole = self.completion, [(self.prompt.tokens, slice(None))]
        sampled = (True,) * len(one.tokens) if one.episode is None else one.episode.sampled
        parts = whole if one.episode is None else one.episode.sequences(self.prompt.tokens)
        return [
            Row(tokens=(*before, *one.tokens[part]), trainable=(*(False,) * len(before), *sampled[part]))
            for before, part in parts
        ]

    def json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt.text,
            "completion": self.completion.text,
            "finish": str(self.completion.finish),
            "tokens": self.completion.length,
            "logprob": self.logprob,
            "rewards": {name: score.value for name, score in self.scores.items()},
            "parts": {f"{name}/{part}": value for name in self.scores for part, value in self.parts(name).items()},
        }


Answers = list[list[Answer]]
"""The answers to each prompt, prompts in the order of the data."""


@dataclass(frozen=True)
class Policy:
    """A language model with its tokenizer."""

    model: LanguageModel
    tokenizer: Any

    @classmethod
    def load(cls, path: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Policy:
        """Load the policy from a checkpoint's folder (or a hub id), frozen and in eval mode."""
        model, tokenizer = load_model(path, device=device, dtype=dtype), load_tokenizer(path, tried=False)
        check_vocabulary(tokenizer, model)
        model.requires_grad_(False)
        return cls(model.eval(), tokenizer)

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        *,
        seed: int,
        advance: Advance = unheard,
        cut: bool = False,
        play: Callable[[Sampler], Play] | None = None,
        longest: int = 0,
    ) -> Answers:
        """Draw `sampling.samples` answers to each prompt; they depend only on seed, settings, weights, prompt's index.

        Raises ValueError if the model's context might cut an answer, unless `cut` allows that. `play` makes the player
        of episodes for an engine, which have at most `longest` tokens."""
        if not cut:
            limit = ("environment", longest) if longest else ("sampling", sampling.max_tokens)
            check_room(prompts, *limit, self.model)
        draw = sampling.draw()
        engine = build_engine(self.model, self.tokenizer, slots=sampling.slots)
        played = None if play is None else play(engine)

        async def answer(index: int, prompt: Prompt) -> list[Answer]:
            plan = [replace(draw, seed=completion_seed(seed, index, k)) for k in range(sampling.samples)]
            completions = await (engine.generate(prompt.tokens, plan) if played is None else played(prompt, plan))
            advance(len(plan))
            return [Answer(prompt=prompt, completion=completion) for completion in completions]

        try:
            return finished(together(answer(index, prompt) for index, prompt in enumerate(prompts)))
        finally:
            engine.close()

    def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, token_budget: int = 16384, advance: Advance = unheard
    ) -> Tensor:
        """Log-probs of the batch's trained tokens under logits / temperature, 0 on the others, (n,) on the CPU."""
        check_lengths(batch, self.model)
        scorer = Scorer(self.model, Role.POLICY, temperature=temperature, token_budget=token_budget)
        parts: list[Tensor] = []
        for part in batch.consecutive(token_budget):
            for output in scorer.outputs(part):
                assert output.logprobs is not None
                parts.append(output.logprobs.cpu())
            advance(len(part))
        return torch.cat(parts)


def scored(answers: Answers, rewards: Mapping[str, Reward]) -> Answers:
    """Return the same answers with a score by every reward, under the reward's name."""

    async def of_group(group: list[Answer]) -> list[Answer]:
        completions = [answer.completion for answer in group]
        given = {name: await reward.score(group[0].prompt, completions) for name, reward in rewards.items()}
        found = {name: unless_failed(completions, scores) for name, scores in given.items()}
        return [
            replace(answer, scores={**answer.scores, **{name: found[name][k] for name in found}})
            for k, answer in enumerate(group)
        ]

    async def of_all() -> Answers:
        result: Answers = []
        for start in range(0, len(answers), SCORED_AT_ONCE):
            result += await asyncio.gather(*(of_group(group) for group in answers[start : start + SCORED_AT_ONCE]))
        return result

    return finished(of_all())


def check_room(prompts: Sequence[Prompt], section: str, most: int, model: LanguageModel) -> None:
    """Raise ValueError if the model's context, and not max_tokens, would cut an answer to one of the prompts."""
    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    if longest + most > model.max_positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with {section}.max_tokens={most} that is more than the model's "
            f"{model.max_positions} positions. Lower {section}.max_tokens or data.max_prompt_tokens"
        )


def check_lengths(batch: Batch, model: LanguageModel) -> None:
    """Raise ValueError for a text that is longer than the model's positions."""
    longest = int(batch.lengths.max())
    if longest > model.max_positions:
        raise ValueError(
            f"a text has {longest} tokens, and the model has {model.max_positions} positions: lower data.max_tokens"
        )


def check_comparable(policy: Policy, reference: Policy) -> None:
    """Raise ValueError if the tokenizers' vocabularies differ, since log-probs of the same ids cannot be compared."""
    if policy.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise ValueError(
            "policy and reference have different vocabularies, so their log-probs cannot be compared: "
            "give the model that the policy was trained from"
        )
