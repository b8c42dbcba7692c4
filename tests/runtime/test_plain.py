"""What calls of plain values carry."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import pytest

from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime.plain import dumps, is_plain, loads
from plaudit.types import Completion, Finish, Numbers, Prompt, Sampling, Score


@dataclass(frozen=True, slots=True)
class Base:
    one: int


@dataclass(frozen=True, slots=True)
class Longer(Base):
    """Its slots are only those that it adds."""

    other: int
    third: int


def test_plain_values_arrive_as_they_were() -> None:
    tokens = Numbers("i", [4, 2])
    completion = Completion(
        tokens=tokens, logprobs=Numbers("f", [-1.0, -2.0]), versions=tokens, text="x", finish=Finish.EOS
    )
    given = (
        Sampling(temperature=0.5, stop=("a",), seed=2**63),
        completion,
        Prompt(id="1", text="x", tokens=(1,), extra={"level": 3}),
        Score(value=None, parts={"a": 1.0}, reason="late", transient=True),
    )
    arrived = loads(dumps(given))
    assert arrived == given
    assert [type(one) for one in arrived] == [type(one) for one in given]
    assert isinstance(arrived[1].tokens, Numbers)
    with pytest.raises(FrozenInstanceError):
        arrived[0].seed = 1


def test_other_kinds_arrive_too() -> None:
    given = (Longer(1, 2, 3), Base(4), {"a": [1.5, None]}, Finish.EOS)
    assert loads(dumps(given)) == given
    assert isinstance(loads(dumps(given))[3], Finish)


def test_only_methods_that_say_so_are_plain() -> None:
    assert is_plain(RolloutWorker.generate)
    assert not is_plain(RolloutWorker.load)
