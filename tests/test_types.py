"""The values that flow between rollout, reward and learner."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from plaudit.types import Completion, Finish, Response, Row, Sampling, Score


def test_greedy_is_temperature_zero() -> None:
    assert Sampling(temperature=0.0).greedy
    assert not Sampling(temperature=0.01).greedy


@pytest.mark.parametrize(("finish", "finished"), [(Finish.EOS, True), (Finish.STOP, True), (Finish.LENGTH, False)])
def test_only_a_length_cut_is_unfinished(finish: Finish, finished: bool) -> None:
    completion = Completion(tokens=(4, 2), logprobs=(-1.0, -2.0), versions=(0, 0), text="x", finish=finish)
    response = Response(completion=completion, trainable=(True, True), score=Score(value=1.0), reward=1.0)
    assert response.finished is finished
    assert response.tokens == (4, 2)


def test_a_score_that_failed_is_not_zero() -> None:
    assert Score(value=None, reason="the judge timed out").value is None


def test_values_are_frozen_and_take_names_only() -> None:
    row = Row(tokens=(1,), trainable=(False,))
    with pytest.raises(FrozenInstanceError):
        row.reward = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Row((1,), (False,))  # type: ignore[misc]


def test_types_stay_light() -> None:
    code = "import sys, plaudit.types; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
