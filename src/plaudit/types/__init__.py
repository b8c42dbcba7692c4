"""The values that flow from prompts to the learner: plain Python without torch, so that workers stay light.

    Prompt -> engine -> Completion -> reward -> Response, Group -> algorithm -> Row -> Batch

Tensors begin in `batch.py`. A type that only one stage needs is defined in that stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plaudit.types.episode import Episode as Episode
from plaudit.types.numbers import Numbers as Numbers
from plaudit.types.sampling import Finish as Finish
from plaudit.types.sampling import Sampling as Sampling
from plaudit.types.score import LARGEST_SCORE as LARGEST_SCORE
from plaudit.types.score import NOT_APPLICABLE as NOT_APPLICABLE
from plaudit.types.score import Score as Score

Stats = dict[str, float]
"""Named figures of a step. They add up across micro-batches and ranks (a mean is a sum of pre-divided terms). Names
that end in `max` or `min` take the extreme instead. `algorithms/figures.py` merges them."""


class Role(StrEnum):
    """A model's role in a run. `judge` is the learned reward model, `critic` the value model."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    JUDGE = "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, tokenised and ready to be answered.
    `id` is stable across runs ("file.jsonl:17"); `text` is what `tokens` say; `answer` is what a rule compares with;
    `messages` is the chat that was rendered, without turns that did not fit; `extra` has the row's other columns."""

    id: str
    text: str
    tokens: tuple[int, ...]
    answer: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns, as `Numbers`: sampled tokens (the end token included), their log-probs and versions. Or
    an episode of several turns, with tokens of its environment in between: log-prob 0, version -1."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    text: str
    """Of an episode, the text of the policy's last turn."""
    finish: Finish
    episode: Episode | None = None

    @property
    def length(self) -> int:
        """Number of tokens that the policy sampled. Those of an environment are no part of an answer's length."""
        return len(self.tokens) if self.episode is None else sum(self.episode.sampled)

    @property
    def finished(self) -> bool:
        return self.finish not in (Finish.LENGTH, Finish.TURNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A scored completion.

    Example of two turns, where a tool answers in between (T = trained):
        tokens     I  ask  <call>  | 4  2 | so  42  <eos>
        trainable  T  T    T       | -  - | T   T   T
    """

    completion: Completion
    trainable: Sequence[int]
    score: Score
    reward: float | None
    """`score.value` after shaping. None if there is no score, or an unfinished answer continues or is left out."""
    process: tuple[tuple[int, float], ...] = ()
    """`score.process` after shaping: the part of `reward` that stands at tokens before the end."""
    continues: bool = False
    """True for an unfinished answer without a reward: the critic's value after its last token stands for the rest."""
    greedy: bool = False
    """True for a baseline that was not sampled, as in ReMax; figures of samples leave it out."""

    @property
    def tokens(self) -> Sequence[int]:
        return self.completion.tokens

    @property
    def finished(self) -> bool:
        return self.completion.finished

    @property
    def trained(self) -> bool:
        """False for a masked answer. Its reward, if it has one, only counts in its group's baseline."""
        return any(self.trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All responses to one prompt, in the order of the plan. `index` counts prompts from the run's start."""

    index: int
    prompt: Prompt
    responses: tuple[Response, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence for the learner: prompt and answer together. Every per-token field has one entry a token and obeys
    the column rule: entry t is about emitting token t given the tokens before it. The first token is never trained."""

    tokens: Sequence[int]
    trainable: Sequence[int]
    group: int = 0
    """Number of the group; rows of one prompt share it."""
    further: bool = False
    """True for a row of the same episode as the row before it: they share one reward and count as one answer."""
    logprobs: Sequence[float] | None = None  # behaviour log-probs, by the sampler; 0 on tokens that were not sampled
    versions: Sequence[int] | None = None  # policy version that sampled each token; -1 on others
    reference: Sequence[float] | None = None  # reference log-probs, if they were computed once before training
    reward: float = 0.0
    process: tuple[tuple[int, float], ...] = ()
    """(token, reward) pairs of this row: the part of the answer's reward that stands there, and not at its end."""
    baseline: float = 0.0
    weight: float = 1.0
    """Relative weight of the row (1 / pairs of its prompt for a reward model)."""
    teacher: int = 0  # number of the teacher: 0 is reference.path, others are algorithm.teachers
    margin: float = 0.0
    """By how much this chosen row should beat the rejected one next to it."""
    continues: bool = False
    """True if the answer was cut off by length: the critic's value after its last token stands for its reward."""
