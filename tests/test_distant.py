"""Distant numbers: whatever the driver does with their places, ranks fetch what by-value rows would have."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import GPT2

from plaudit.algorithms.policy_gradient import reference_kl
from plaudit.algorithms.rows import row_of
from plaudit.batch import ROW_COLUMNS, TOKEN_COLUMNS, Batch
from plaudit.learn.scorer import Scorer  # it also says how a batch travels
from plaudit.models.load import fresh_model
from plaudit.types import Completion, Finish, Group, Numbers, Prompt, Response, Role, Score
from plaudit.types.distant import BYTES, Distant, apart, arrived, joined, values

GROUPS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5)
"""Lengths of answers, by prompt."""


class Kept:
    """A source in this process. What travels is its number."""

    columns: ClassVar[list[Any]] = []
    asked = 0

    def __init__(self, number: int):
        self.number = number

    def all(self, sources: Sequence[Kept]) -> list[Any]:
        Kept.asked += len(sources)
        return [Kept.columns[one.number] for one in sources]


def completion(number: int, length: int) -> Completion:
    first = 1 + 100 * number
    return Completion(
        tokens=Numbers("i", range(first, first + length)),
        logprobs=Numbers("f", [-0.25 * (first + place) for place in range(length)]),
        versions=Numbers("i", [number + (2 * place > length) for place in range(length)]),
        text=f"answer {number}",
        finish=Finish.EOS,
    )


def sent(completions: list[Completion], least: int = 0) -> list[Completion]:
    """The completions as they arrive in the driver."""
    columns, told = pickle.loads(pickle.dumps(apart(completions, least)))
    Kept.columns.append(columns)
    return arrived(told, Kept(len(Kept.columns) - 1))


def group(index: int, completions: list[Completion]) -> Group:
    responses = [
        Response(completion=one, trainable=(True,) * len(one.tokens), score=Score(value=1.0), reward=float(place))
        for place, one in enumerate(completions)
    ]
    prompt = Prompt(id=f"{index}", text="", tokens=tuple(range(1, 3 + index)))
    return Group(index=index, prompt=prompt, responses=tuple(responses))


def batches(lengths: list[list[int]], *, least: int = 0) -> tuple[Batch, Batch]:
    """The same rows by value and distant."""
    near: list[Any] = []
    far: list[Any] = []
    for index, own in enumerate(lengths):
        completions = [completion(10 * index + place, length) for place, length in enumerate(own)]
        near += [row_of(one, response) for one in [group(index, completions)] for response in one.responses]
        there = group(index, sent(completions, least))
        far += [row_of(there, response) for response in there.responses]
    return Batch.of(near), Batch.of(far)


def assert_same(found: Batch, expected: Batch) -> None:
    assert found.unit == expected.unit and not found.sources
    for name in (*TOKEN_COLUMNS, *ROW_COLUMNS):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None and theirs is None) or (mine.dtype == theirs.dtype and torch.equal(mine, theirs)), name


def travelled(batch: Batch) -> Batch:
    arrived: Batch = pickle.loads(pickle.dumps(batch))
    return arrived


@given(GROUPS, st.integers(1, 4), st.integers(0, 40), st.randoms())
def test_ranks_get_the_rows_that_would_have_come_by_value(
    lengths: list[list[int]], world: int, least: int, chance: Any
) -> None:
    """Some prompts' answers stay, others come at once; rows are chosen, shuffled and cut before they travel."""
    near, far = batches(lengths, least=least)
    rows = list(range(len(near)))
    chance.shuffle(rows)
    chosen = torch.tensor(rows[: chance.randint(1, len(rows))])
    pairs = zip(near.select(chosen).shards(world), far.select(chosen).shards(world), strict=True)
    for mine, theirs in pairs:
        assert_same(travelled(theirs).landed(), mine)
        assert_same(
            travelled(theirs.sequences()).landed(),
            replace(mine.sequences(), behaviour=mine.behaviour) if theirs.sources else mine.sequences(),
        )


def test_the_driver_knows_lengths_and_versions_and_fetches_nothing() -> None:
    before = Kept.asked
    near, far = batches([[3, 2], [4]])
    assert torch.equal(far.lengths, near.lengths) and torch.equal(far.version, near.version)  # type: ignore[arg-type]
    assert torch.equal(far.trainable, near.trainable)
    assert far.behaviour is not None
    assert torch.equal(far.behaviour.isnan(), far.trainable), "a log-prob that is not here cannot be taken for one"
    assert (far.tokens[far.trainable] < 0).all()
    assert Kept.asked == before
    far.landed()
    assert Kept.asked == before + 2, "each source once"


def test_of_an_answer_that_stays_only_what_is_trained_travels() -> None:
    _, short = batches([[10]])
    _, long = batches([[10_000]])
    assert len(pickle.dumps(long)) - len(pickle.dumps(short)) == pytest.approx(9_990, rel=0.01), "`trainable`: a byte"


def test_reading_a_distant_answer_fetches_it() -> None:
    first, second = completion(1, 4), completion(2, 3)
    there = sent([first, second])
    assert there == [first, second] and hash(there[1]) == hash(there[1])
    assert there[1].tokens[1] == second.tokens[1] and list(there[1].logprobs) == list(second.logprobs)
    assert tuple(there[0].tokens[:-1]) == tuple(first.tokens[:-1]) and isinstance(there[0].tokens[:-1], Distant)
    assert np.array(there[1].tokens).tolist() == list(second.tokens)
    assert values([there[0].tokens, (7, 8), there[1].tokens[3:]]) == [tuple(first.tokens), (7, 8), ()]


def test_short_answers_come_at_once() -> None:
    some = [completion(1, 2), completion(2, 1)]
    assert sent(some, least=3 * BYTES + 1) == some
    assert not any(isinstance(one.tokens, Distant) for one in sent(some, least=3 * BYTES + 1))
    assert all(isinstance(one.tokens, Distant) for one in sent(some, least=3 * BYTES))


def test_prompts_and_ends_around_distant_numbers() -> None:
    (there,) = sent([completion(0, 3)])
    whole = joined((9, 8), joined((), there.tokens[:2], (5,)), (6,))
    assert isinstance(whole, Distant) and len(whole) == 6
    assert tuple(whole) == (9, 8, 1, 2, 5, 6) and whole[1:4] == (8, 1, 2)
    assert tuple(pickle.loads(pickle.dumps(whole))) == (9, 8, 1, 2, 5, 6)
    assert joined((9,), (1, 2), (6,)) == (9, 1, 2, 6)


@pytest.mark.parametrize("lengths", [[[9], [1]], [[1], [9]]], ids=["the first far", "the first near"])
def test_ranks_of_a_reference_give_log_probs_that_the_driver_lacks(lengths: list[list[int]]) -> None:
    """One rank has only answers that stay, the other only such as came at once."""
    near, far = batches(lengths, least=5 * BYTES)
    model = fresh_model(GPT2, seed=0, vocab_size=2000)
    ranks = [Scorer(model, Role.REFERENCE) for _ in range(2)]
    shards = [travelled(shard) for shard in far.sequences().shards(2)]
    assert [bool(shard.sources) for shard in shards].count(True) == 1
    found = far.rejoined([rank.columns(shard) for rank, shard in zip(ranks, shards, strict=True)])
    expected = ranks[0].annotate(near)
    assert found.behaviour is not None and expected.behaviour is not None
    assert torch.equal(found.behaviour, expected.behaviour)
    assert torch.equal(reference_kl(found)[1], reference_kl(expected)[1])
