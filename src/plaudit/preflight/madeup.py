"""Rows of given sizes to measure with: groups of random answers, or items of an offline method's data."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from plaudit.batch import Batch
from plaudit.preflight.work import Amounts, Shape, amounts, trained_rows
from plaudit.runs.assemble import Job
from plaudit.types import Completion, Finish, Group, Prompt, Response, Row, Score


class MadeUp:
    """Makes groups, items and batches as a run's method would get them, and counts their tokens (`Amounts`)."""

    def __init__(self, job: Job):
        self.settings, self.objective, self.online = job.settings, job.objective, job.settings.samples
        self.chance, self.vocabulary = random.Random(0), len(job.tokenizer)
        self.items: Any = job.data.items
        self._asked: Any = job.objective

    def draws(self) -> list[Any]:
        """Return how each answer to a prompt is sampled."""
        return list(self._asked.plan(self.settings.rollout.draw()))

    def prompts(self) -> tuple[int, int]:
        """Return the median and the largest length of the data's prompts, in tokens."""
        lengths = sorted(len(item.tokens) for item in self.items)
        return lengths[len(lengths) // 2], lengths[-1]

    def sizes(self) -> Iterator[list[Any]]:
        """Yield lists of groups, or of data items, from a few to as many as a pass or a step holds."""
        micro = self.settings.learn.micro_tokens
        if not self.online:
            ordered = sorted(self.items[:2000], key=lambda item: sum(shape_of(item)[1]))
            for place, part in ((0.5, 0.01), (0.1, 0.25), (0.9, 0.25), (0.5, 0.5), (0.1, 1.0), (0.9, 1.0)):
                middle = int(place * (len(ordered) - 1))
                count = max(1, int(part * micro / max(1.0, amounts([shape_of(ordered[middle])]).tokens)))
                yield ordered[max(0, min(middle, len(ordered) - count)) :][:count]
            return
        (middle, long), most, plan = self.prompts(), self.settings.answer_tokens, len(self.draws())
        few, many = max(1, most // 4), max(1, self.settings.rollout.prompts_per_step)
        for prompt, answer, part in (
            *((middle, few, 0.0), (middle, most, 0.05), (middle, most, 0.3), (long, few, 0.3)),
            *((middle, few, 1.0), (middle, most, 1.0), (long, max(1, most // 2), 0.6)),
        ):
            fits = micro // (prompt + plan * answer)
            yield [self._group(prompt, answer) for _ in range(max(1, min(fits, round(part * many))))]

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.chance.randrange(self.vocabulary) for _ in range(length))

    def _group(self, prompt: int, answer: int) -> Group:
        asked, count = Prompt(id="made up", text="", tokens=self._tokens(prompt)), self.chance.randrange(1 << 30)
        return Group(index=count, prompt=asked, responses=tuple(self._response(answer, draw) for draw in self.draws()))

    def _response(self, length: int, draw: Any) -> Response:
        completion = Completion(
            tokens=self._tokens(length),
            logprobs=(-3.0,) * length,
            versions=(0,) * length,
            text="",
            finish=Finish.LENGTH,
        )
        score = Score(value=self.chance.random())
        trainable = (True,) * length
        return Response(completion=completion, trainable=trainable, score=score, reward=score.value, greedy=draw.greedy)

    def batch(self, groups: Sequence[Any]) -> Batch:
        rows: list[Row] = [row for one in groups for row in (self._asked.rows(one) if self.online else one)]
        return Batch.of(rows, unit=self.objective.unit)

    def weighed(self, batch: Batch) -> Batch:
        """Return an annotated batch with advantages and weights, as a learner gets it."""
        return self.objective.weigh(self._asked.credit(batch, {})[0].trained() if self.online else batch)

    def learned(self, groups: Sequence[Any]) -> Amounts:
        """Amounts of the rows that are learned from."""
        if not self.online:
            return amounts([shape_of(item) for item in groups])
        rows = trained_rows(self.settings)
        return amounts([(prompt, answers[:rows]) for prompt, answers in map(asked_of, groups)])


def asked_of(group: Group) -> Shape:
    return len(group.prompt.tokens), tuple(len(answer.tokens) for answer in group.responses)


def shape_of(item: Sequence[Row]) -> Shape:
    """Return an offline item's shape: its rows share the tokens before the first trainable one of any row."""
    first = min(row.trainable.index(True) if any(row.trainable) else len(row.tokens) for row in item)
    return first, tuple(len(row.tokens) - first for row in item)
