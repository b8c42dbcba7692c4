"""What a method answers. An objective says what to minimise; an online algorithm also says where its batch comes from.

Loop and learner never ask which method runs: they call these answers. A method is a frozen dataclass whose fields are
its hyperparameters; what it must remember between steps lives in the `memory` that `credit` is handed, plain numbers
that a checkpoint saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from plaudit.batch import Batch
from plaudit.maths.aggregate import Aggregation, token_weights, unit_weights
from plaudit.maths.kl import k3
from plaudit.types import Finish, Group, Response, Role, Row, Sampling, Stats

Memory = MutableMapping[str, float]
Data = Literal["demonstrations", "preferences", "prompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a learner's model says of a batch; which field is set follows from the model's role."""

    logprobs: Tensor | None = None  # policy (n,), 0 on untrained tokens
    entropy: Tensor | None = None  # policy (n,), 0 on untrained tokens
    values: Tensor | None = None  # critic (n,), of the state before each trained token
    scores: Tensor | None = None  # judge (r,), read at each row's last token


LossFn = Callable[[Output, Batch], tuple[Tensor, Stats]]
"""The batch's share of the step's loss (weights are already over the whole step) and figures that add up likewise;
the loss itself is recorded as loss/ROLE where they lack it."""


@dataclass(frozen=True)
class Objective:
    """Base of every method."""

    data: ClassVar[Data]
    """What its rows are read from."""
    asks: ClassVar[frozenset[Role]] = frozenset()
    """Models whose columns it needs beside the one it trains."""
    unit: ClassVar[int] = 1
    """Adjacent rows that are never separated."""
    uses_ratio: ClassVar[bool] = False
    """Whether log-probs of sampler and learner are compared, so that truncated sampling would bias it."""

    def adapted(self, *, off_policy: bool) -> Self:
        """The method where samples may be older than the weights, or another engine's, or cannot be."""
        return self

    @property
    def recompute_old(self) -> bool | None:
        """Whether the learner's own log-probs before the first update replace the sampler's in ratios."""
        return False

    def losses(self) -> Mapping[Role, LossFn]:
        """The models it trains, each with its loss."""
        raise NotImplementedError

    def weigh(self, batch: Batch) -> Batch:
        """Weights over one optimizer step, whole, before it is cut or spread. Default: mean over trained tokens."""
        return weighed(batch, Aggregation.TOKEN)

    def updates(self) -> tuple[int, int]:
        """(passes over the batch, optimizer steps a pass)."""
        return 1, 1

    def halt(self, stats: Stats) -> str | None:
        """A reason not to take the optimizer step that these figures belong to, nor the rest of its batch."""
        return None


@dataclass(frozen=True)
class Algorithm(Objective):
    """An online method: an objective, and three answers about its batch."""

    data: ClassVar[Data] = "prompts"

    def plan(self, sampling: Sampling) -> list[Sampling]:
        """How the completions of one prompt are drawn (seeds are set by the rollout)."""
        return [sampling]

    def rows(self, group: Group) -> list[Row]:
        """Training rows of a scored group; none if it carries no signal. Default: every response that was scored."""
        return [row_of(group, response) for response in group.responses if response.reward is not None]

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        """Who gets how much credit: advantages (and returns) from rewards and annotated columns."""
        return batch, {}


def weighed(batch: Batch, how: Aggregation, *, constant: float = 1.0) -> Batch:
    """The batch with token weights, token shares and unit weights over itself."""
    row, rows = batch.row, len(batch)
    assert batch.row_weight is not None
    return batch.with_columns(
        weight=token_weights(batch.trainable, row, rows, how, constant=constant),
        token_share=token_weights(batch.trainable, row, rows, Aggregation.TOKEN),
        row_weight=unit_weights(batch.row_weight, batch.unit),
    )


def row_of(group: Group, response: Response, *, baseline: float = 0.0) -> Row:
    """Prompt and response as one row: the prompt is not trained and has no log-probs."""
    prompt = group.prompt.tokens
    before = len(prompt)
    assert response.reward is not None, "a response without a reward has no row"
    return Row(
        tokens=(*prompt, *response.tokens),
        trainable=(*(False,) * before, *response.trainable),
        group=group.index,
        logprobs=(*(0.0,) * before, *response.completion.logprobs),
        versions=(*(-1,) * before, *response.completion.versions),
        reward=response.reward,
        baseline=baseline,
        truncated=response.completion.finish is Finish.LENGTH,
    )


def scored(responses: Sequence[Response]) -> list[tuple[float, Response]]:
    """The responses that have a reward, with it."""
    return [(response.reward, response) for response in responses if response.reward is not None]


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")


def check_range(name: str, value: float | None, low: float, high: float = math.inf, *, infinite: bool = False) -> None:
    """Raise ValueError unless low <= value <= high (None passes); without a bound above, an `infinite` value may be."""
    if value is not None and not (low <= value <= high and (infinite or math.isfinite(value))):
        bound = f"at least {low}, and finite" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name}={value} must be {bound}")


def mean_where(x: Tensor, mask: Tensor) -> float:
    """Mean of x over the mask, 0 for an empty one; for figures."""
    return float(x[mask].mean()) if bool(mask.any()) else 0.0


def sampler_gap(current: Tensor, batch: Batch) -> Stats:
    """k3 between sampler and learner, mean over trained tokens: before a batch's first update, how far engine and
    learner disagree. Nothing for rows that were not sampled."""
    if batch.behaviour is None:
        return {}
    assert batch.token_share is not None
    return {"kl/old": float((k3(batch.behaviour - current.detach()) * batch.token_share).sum())}


def pair_figures(margin: Tensor, weight: Tensor) -> Stats:
    """Share of pairs ordered as labelled, a tie counting half, by weight."""
    right = (margin > 0).float() + 0.5 * (margin == 0).float()
    return {"accuracy": float((right * weight).sum()), "margin": float((margin.detach() * weight).sum())}
