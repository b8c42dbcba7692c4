"""Count the work of one step: passes, tokens, answers. No torch.

    settings, lengths of prompts and answers -> Work -> Amounts of a pass, decoding steps of an engine

Lengths are those of the run's data and answers; without samples, every answer is as long as it may be.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plaudit.settings.tree import Settings
from plaudit.types import Completion, Finish, Group, Prompt, Response, Score

Shape = tuple[int, tuple[int, ...]]
"""Tokens of a prompt, and of each of its answers. The answers share the prompt."""
MOST = 512
"""Most prompts of a step that are counted one by one; with more, these stand for all."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Counts on which the time of forward (and backward) passes depends."""

    passes: float = 0.0
    tokens: float = 0.0
    """Tokens that are computed: a prompt counts once for all of its answers."""
    squares: float = 0.0
    """Sum of the rows' squared lengths, for attention."""
    heads: float = 0.0
    """Tokens that pass the head."""

    def times(self, factor: float) -> Amounts:
        """Return all counts multiplied by `factor`."""
        return Amounts(self.passes * factor, self.tokens * factor, self.squares * factor, self.heads * factor)

    def cut(self, most: float) -> Amounts:
        """Return the same rows cut into passes of at most `most` tokens, at least one pass."""
        return replace(self, passes=max(1, math.ceil(self.tokens / most)))

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.passes, self.tokens, self.squares, self.heads)


def amounts(shapes: Sequence[Shape], most: float = math.inf) -> Amounts:
    """Return the amounts of passes over rows of these shapes, cut into at most `most` tokens a pass."""
    tokens, squares, heads = 0, 0, 0
    for prompt, answers in shapes:
        answered = sum(answers)
        tokens, heads = tokens + prompt + answered, heads + answered
        squares += sum((prompt + answer) ** 2 for answer in answers)
    return Amounts(1.0, tokens, squares, heads).cut(most)


@dataclass(frozen=True)
class Work:
    """The work of one training step."""

    sampled: tuple[Shape, ...]
    """What is generated and judged; empty for an offline method."""
    learned: tuple[Shape, ...]
    """Rows that are learned from."""
    scale: float
    """The shapes are the work of this many steps; below 1, they are a part of one step's."""
    scored: tuple[str, ...]
    """Roles whose columns are computed before learning."""
    trained: tuple[str, ...]
    updates: tuple[int, int]
    """Passes over the batch, and optimizer steps of each."""
    micro: int
    """Most tokens of a pass with gradients."""
    score: int
    """Most tokens of a pass without gradients."""

    @property
    def answers(self) -> float:
        return sum(len(answers) for _, answers in self.sampled) / self.scale

    def share(self, ranks: int) -> Amounts:
        """Return the amounts that the busiest of `ranks` learns from. Each rank gets whole prompts."""
        count = len(self.learned)
        if count / self.scale <= ranks:
            return max((amounts([one]) for one in self.learned), key=lambda one: one.tokens)
        if ranks == 1 or count <= ranks:
            return amounts(self.learned).times(1 / self.scale / ranks)
        shares: list[tuple[float, int, list[Shape]]] = [(0.0, number, []) for number in range(ranks)]
        for shape in sorted(self.learned, key=lambda one: -amounts([one]).tokens):
            load, number, mine = heapq.heappop(shares)
            heapq.heappush(shares, (load + amounts([shape]).tokens, number, [*mine, shape]))
        return amounts(max(shares)[2]).times(1 / self.scale)

    def batches(self, workers: int) -> tuple[list[tuple[Shape, ...]], float]:
        """Return the prompts of at most four rollout workers, and the factor from these to a worker's real share."""
        count = len(self.sampled)
        each = max(1, math.ceil(count / self.scale / workers))
        if each >= count:
            return [self.sampled], each / count
        return [self.sampled[start : start + each] for start in range(0, count, each)][:4], 1.0


def work_of(s: Settings, prompts: Sequence[int], answers: Sequence[int], rows: Sequence[Shape]) -> Work:
    """Return a step's work. `prompts`, `answers`: their lengths in tokens (no answers: as long as they may be). `rows`:
    shapes of an offline method's data."""
    objective: Any = s.objective
    scored = [str(role) for role in ("reference", "critic") if role in objective.asks]
    common: dict[str, Any] = {
        "scored": (*(["policy"] if objective.recompute_old else []), *scored),
        "trained": tuple(str(role) for role in objective.losses()),
        "updates": objective.updates(),
        "micro": s.learn.micro_tokens,
        "score": s.learn.score_tokens,
    }
    chance = random.Random(0)
    if objective.data != "prompts":
        drawn = tuple(chance.choice(rows) for _ in range(min(MOST, s.train.batch_size)))
        return Work(sampled=(), learned=drawn, scale=len(drawn) / s.train.batch_size, **common)
    count, trained = min(MOST, s.rollout.prompts_per_step), trained_rows(s)
    most = s.answer_tokens
    plan = len(objective.plan(s.rollout.draw()))
    lengths = [min(most, length) for length in answers] or [most]
    sampled = tuple((chance.choice(prompts), tuple(chance.choices(lengths, k=plan))) for _ in range(count))
    learned = tuple((prompt, drawn[:trained]) for prompt, drawn in sampled)
    return Work(sampled=sampled, learned=learned, scale=count / s.rollout.prompts_per_step, **common)


def trained_rows(s: Settings) -> int:
    """Return the number of rows that a method makes of a prompt's answers if all rewards differ."""
    objective: Any = s.objective
    draws = objective.plan(s.rollout.draw())
    answer = Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), text="", finish=Finish.EOS)
    responses = tuple(
        Response(completion=answer, trainable=(True,), score=Score(value=float(n)), reward=float(n), greedy=one.greedy)
        for n, one in enumerate(draws)
    )
    prompt = Prompt(id="", text="", tokens=(1,))
    return len(objective.rows(Group(index=0, prompt=prompt, responses=responses)))


Decode = Callable[[float, float, float, float], float]
"""Function (steps, rows summed over steps, context lengths summed over rows and steps, tokens of prompts that begin) ->
seconds."""


def decoding(shapes: Sequence[Shape], slots: int, decode: Decode) -> float:
    """Estimate the seconds in which one engine of `slots` rows answers all prompts; a row is refilled when it ends."""
    waiting = [(prompt, answer, number) for number, (prompt, answers) in enumerate(shapes) for answer in answers]
    waiting.reverse()
    active: list[tuple[int, int]] = []  # (decoding step at which a sequence ends, its length then)
    seconds, step, context, begun = 0.0, 0, 0, set[int]()
    while waiting or active:
        fresh = 0
        while waiting and len(active) < slots:
            prompt, answer, number = waiting.pop()
            if number not in begun:
                begun.add(number)
                fresh += prompt
            heapq.heappush(active, (step + max(1, answer), prompt + max(1, answer)))
            context += prompt
        rows, ends = len(active), active[0][0]
        steps = ends - step
        seconds += decode(steps, rows * steps, steps * context + rows * steps * (steps - 1) / 2, fresh)
        step, context = ends, context + rows * steps
        while active and active[0][0] == step:
            context -= heapq.heappop(active)[1]
    return seconds
