"""A reward by a language model that reads the answers.

    each answer                        -> graded by a rubric (`llm.py`)  -> the grades' weighted mean, a part each
    pairwise: answers to one prompt    -> compared with one another      -> the share that each has won

One reply that cannot be read is no value: it is neither 0 nor left out of a mean. Left out: a vote of several models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean

from plaudit.rewards.batched import columns_of
from plaudit.rewards.llm import Decision, LlmJudge, asked_of, weighted
from plaudit.rewards.remote import Failed
from plaudit.rewards.settings import CriterionSettings, RewardSettings
from plaudit.runtime.coroutines import together
from plaudit.types import NOT_APPLICABLE, Completion, Prompt, Score

OPPONENTS = 8
"""Most answers with which one is compared. Requests then grow with the answers, and not with their square."""
CONSISTENT = "consistent"
"""Part of a pairwise score: the share of the answer's comparisons whose two orders agree."""
COLUMN = re.compile(r"\{(\w+)\}")


class LlmReward:
    """Grades each answer by the rubric or, with `pairwise`, compares it with others to the same prompt.

    - An answer whose reply lacks a criterion, or that got no reply, has no score. The failure is transient if another
      request may succeed.
    - A comparison that failed leaves both answers without a score: a share of fewer comparisons would be another one.
    - A single answer has nothing to be compared with, so that `pairwise` does not apply to it.
    """

    reads_tokens, waits = False, True

    def __init__(self, settings: RewardSettings):
        self.name, self.rubric, self.pairwise = settings.name or settings.kind, settings.rubric, settings.pairwise
        self.judge = LlmJudge(settings.llm)
        own = *(one.name for one in settings.rubric), *[CONSISTENT] * settings.pairwise
        self.parts = [f"{self.name}/{one}" for one in own]

    def lacking(self, prompts: Sequence[Prompt]) -> str:
        """Return why the rubric cannot be used for these prompts: a column that no row has; "" if it can."""
        there = {column for prompt in prompts for column in columns_of(prompt)}
        for one in self.rubric if prompts else ():
            if absent := [column for column in COLUMN.findall(one.text) if column not in there]:
                known = ", ".join(sorted(there)) or "none"
                return f"the criterion {one.name!r} asks for {{{absent[0]}}}, no column of the rows: there are {known}"
        return ""

    def tried(self, prompts: Sequence[Prompt]) -> tuple[list[str], list[str]]:
        """Return errors and warnings, as `FunctionReward.tried`; the model is not asked."""
        return [why] if (why := self.lacking(prompts)) else [], []

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        texts, asked = [one.text for one in completions], asked_of(prompt)
        try:
            rubric = [_for(prompt, one) for one in self.rubric]
        except Failed as failed:
            return [_failed([failed])] * len(texts)
        if not self.pairwise:
            different = list(dict.fromkeys(texts))
            scores = await together(self._graded(asked, text, rubric) for text in different)
            return [scores[different.index(text)] for text in texts]
        pairs, met = pairings(len(texts)), list[list[Decision]]([] for _ in texts)
        found = await together(self.judge.compare(asked, texts[one], texts[two], rubric) for one, two in pairs)
        for (one, two), decision in zip(pairs, found, strict=True):
            met[one].append(decision)
            met[two].append(decision.turned)
        return [_won(own) for own in met]

    async def _graded(self, asked: str, text: str, rubric: Sequence[CriterionSettings]) -> Score:
        try:
            parts = await self.judge.grades(asked, text, rubric)
        except Failed as failed:
            return _failed([failed])
        return Score(value=weighted(parts, rubric), parts=parts)


def pairings(count: int) -> list[tuple[int, int]]:
    """Return the pairs of answers to compare: every two, or of many each with the OPPONENTS nearest in a ring."""
    if count <= OPPONENTS + 1:
        return list(combinations(range(count), 2))
    return [(one, (one + step) % count) for step in range(1, OPPONENTS // 2 + 1) for one in range(count)]


def _won(decisions: Sequence[Decision]) -> Score:
    """Return the share won over an answer's comparisons, a tie counting half."""
    if not decisions:
        return Score(value=None, reason=NOT_APPLICABLE)
    if failures := [one.failed for one in decisions if one.failed is not None]:
        return _failed(failures)
    parts = {name: fmean(one.parts[name] for one in decisions) for name in decisions[0].parts}
    parts[CONSISTENT] = fmean(one.consistent for one in decisions)
    return Score(value=fmean(one.value for one in decisions if one.value is not None), parts=parts)


def _failed(failures: Sequence[Failed]) -> Score:
    lasting = any(one.final or one.of_content for one in failures)
    return Score(value=None, reason=str(failures[0]), transient=not lasting)


def _for(prompt: Prompt, criterion: CriterionSettings) -> CriterionSettings:
    """Return the criterion with the row's columns in their places. Raises Failed if the row lacks one."""
    columns = columns_of(prompt)
    if absent := [column for column in COLUMN.findall(criterion.text) if columns.get(column) is None]:
        raise Failed(f"the row has no {absent[0]!r}, for which {criterion.name!r} asks", of_content=True)
    return replace(criterion, text=COLUMN.sub(lambda place: str(columns[place[1]]), criterion.text))
