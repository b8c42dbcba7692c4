"""The interface of a method. An objective says what to minimise; an online algorithm also says how its batch is made.

    Sampling -> plan -> one Sampling a completion       Group -> rows -> Row, ... -> Batch
    Batch, memory -> credit -> Batch with advantages    Batch -> weigh -> Batch with weights
    Output, Batch -> loss -> the batch's share of the step's loss, figures

Callers do not test which method runs. A method is a frozen dataclass: its fields are its hyperparameters. Its state
between steps is in `memory`: plain numbers that a checkpoint saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from plaudit.algorithms.rows import Answers, rows_of
from plaudit.batch import Batch
from plaudit.maths.aggregate import Aggregation, token_weights, unit_weights
from plaudit.support.fields import Section, setting
from plaudit.types import Group, Response, Role, Row, Sampling, Stats

Memory = MutableMapping[str, float]
Data = Literal["demonstrations", "preferences", "judgements", "prompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A model's outputs for a batch. The model's role determines which fields are set."""

    logprobs: Tensor | None = None  # policy (n,), 0 on untrained tokens
    entropy: Tensor | None = None  # policy (n,), 0 on untrained tokens
    values: Tensor | None = None  # critic (n,), of the state before each trained token
    scores: Tensor | None = None  # judge (r,), read at each row's last token
    divergence: Tensor | None = None  # policy (n,), KL(policy || teacher) over the vocabulary, 0 on untrained tokens


LossFn = Callable[[Output, Batch], tuple[Tensor, Stats]]
"""Returns (the batch's share of the step's loss, figures that add up). The learner adds loss/ROLE if it is missing."""


@dataclass(frozen=True)
class Objective(Section):
    """Base of every method."""

    data: ClassVar[Data]
    """Kind of data that the method reads: `prompts` if it is online, else demonstrations, preferences or judgements."""
    asks: ClassVar[frozenset[Role]] = frozenset()
    """Roles of the models that must fill batch columns before `credit`, such as the reference's log-probs."""
    unit: ClassVar[int] = 1
    """Number of adjacent rows that are never separated: 2 for pairs."""
    evaluated: ClassVar[tuple[str, ...]] = ("loss",)
    """Figures on held-out rows by which an offline method's best checkpoint can be chosen (`evaluate.best`)."""
    has_baseline: ClassVar[bool] = False
    """True if an answer's reward is compared with those of other answers to its prompt."""
    uses_rewards: ClassVar[bool] = True
    """False if an online method can train without any reward."""
    has_teacher: ClassVar[bool] = False
    teachers: ClassVar[Mapping[str, str]] = {}
    """Whether the reference is a teacher, which the policy is to become like; further ones, numbered from 1."""
    reads_divergence: ClassVar[bool] = False
    """True if the policy's loss reads `Output.divergence`, for which the teacher is in the policy's processes."""
    uses_ratio: ClassVar[bool] = False
    """True if the loss has ratios of learner to sampler: top-k, top-p or min_tokens would then bias it."""

    @property
    def online(self) -> bool:
        """True if the method trains on answers that its own policy sampled."""
        return self.data == "prompts"

    def adapted(self, *, off_policy: bool) -> Self:
        """Return the method with null settings resolved. `off_policy`: older weights or another engine may sample."""
        return self

    @property
    def recompute_old(self) -> bool | None:
        """True if the learner's own log-probs before the first update replace the sampler's in ratios."""
        return False

    def losses(self) -> Mapping[Role, LossFn]:
        """Return the roles that the method trains, each with its loss."""
        raise NotImplementedError

    def weigh(self, batch: Batch) -> Batch:
        """Return a whole optimizer step's batch with weights, before it is split. Default: mean over trained tokens."""
        return weighed(batch, Aggregation.TOKEN)

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        """Return the batch with advantages (and returns), from rewards and annotated columns, and figures."""
        return batch, {}

    def updates(self) -> tuple[int, int]:
        """Return (passes over the batch, optimizer steps a pass)."""
        return 1, 1

    def halt(self, stats: Stats) -> str | None:
        """Return why a step with these figures, and the rest of its batch, should be skipped; None to take it."""
        return None


@dataclass(frozen=True)
class Algorithm(Objective):
    """An online method: an objective, and how its batch is made."""

    samples: int = setting(1, least=1)
    """Completions a prompt."""

    data: ClassVar[Data] = "prompts"

    def plan(self, sampling: Sampling) -> list[Sampling]:
        """Return one Sampling for each completion of a prompt. The rollout sets the seeds."""
        return [sampling] * self.samples

    def rows(self, group: Group) -> list[Row]:
        """Return a scored group's training rows, [] if it carries no signal. Default: those of each response that has a
        reward or `continues`. Untrained rows count in baselines and means, and are dropped after `weigh`."""
        return [row for r in group.responses if r.reward is not None or r.continues for row in rows_of(group, r)]


def weighed(batch: Batch, aggregation: str | float) -> Batch:
    """Return the batch with `weight`, `token_share` and `row_weight` set over all its answers (`maths/aggregate.py`). A
    number as `aggregation` divides each answer's sum of token losses."""
    constant = 1.0 if isinstance(aggregation, str) else float(aggregation)
    how = Aggregation(aggregation) if isinstance(aggregation, str) else Aggregation.CONSTANT
    answers = Answers(batch)
    assert batch.row_weight is not None
    return batch.with_columns(
        weight=token_weights(batch.trainable, answers.token, answers.count, how, constant=constant),
        token_share=token_weights(batch.trainable, answers.token, answers.count, Aggregation.TOKEN),
        row_weight=unit_weights(batch.row_weight, batch.unit),
    )


def scored(responses: Sequence[Response]) -> list[tuple[float, Response]]:
    """Return (reward, response) of the responses that have a reward."""
    return [(response.reward, response) for response in responses if response.reward is not None]
