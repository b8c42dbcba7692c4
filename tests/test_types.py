"""The values that flow between rollout, reward and learner."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.types import Completion, Finish, Response, Row, Sampling, Score, Stats, merge_stats, plain


def test_figures_add_up_but_extremes_stay_extremes() -> None:
    parts: list[Stats] = [
        {"loss": 0.25, "ratio/max": 1.5, "ratio/min": 0.5},
        {"loss": 0.5, "ratio/max": 1.2, "ratio/min": 0.1},
    ]
    assert merge_stats(parts) == {"loss": 0.75, "ratio/max": 1.5, "ratio/min": 0.1}


def test_a_figure_that_only_some_parts_have_is_kept() -> None:
    assert merge_stats([{"a": 1.0}, {"b": -2.0, "b/max": -3.0}, {"a": 2.0}]) == {"a": 3.0, "b": -2.0, "b/max": -3.0}
    assert merge_stats([]) == {}


def test_merging_leaves_its_parts_alone() -> None:
    part: Stats = {"loss": 1.0}
    merge_stats([part, part])
    assert part == {"loss": 1.0}


def test_figures_of_any_kind_of_number_are_floats() -> None:
    given = {"int": 3, "numpy": np.float32(0.5), "torch": torch.tensor(1.5, requires_grad=True), "bool": True}
    told = plain(given, "the figures")
    assert told == {"int": 3.0, "numpy": 0.5, "torch": 1.5, "bool": 1.0}
    assert {type(value) for value in told.values()} == {float}


@pytest.mark.parametrize("value", ["0.5", None, torch.ones(2), [1.0]])
def test_a_figure_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="the figures of mine: 'gap' is no number but"):
        plain({"loss": 1.0, "gap": value}, "the figures of mine")
    with pytest.raises(TypeError, match="the figures of mine must be a dict"):
        plain([("gap", 1.0)], "the figures of mine")  # type: ignore[arg-type]


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
