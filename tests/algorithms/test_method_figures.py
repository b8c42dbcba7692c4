"""Figures of a step are floats, and add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plaudit.algorithms.figures import merge_stats, plain, whole_stats
from plaudit.algorithms.pairs import pair_figures
from plaudit.maths.aggregate import unit_weights
from plaudit.types import Stats


def test_figures_add_up_but_extremes_stay_extremes() -> None:
    parts: list[Stats] = [
        {"loss": 0.25, "ratio/max": 1.5, "ratio/min": 0.5},
        {"loss": 0.5, "ratio/max": 1.2, "ratio/min": 0.1},
    ]
    assert merge_stats(parts) == {"loss": 0.75, "ratio/max": 1.5, "ratio/min": 0.1}


def test_a_figure_that_only_some_parts_have_is_kept() -> None:
    assert merge_stats([{"a": 1.0}, {"b": -2.0, "b/max": -3.0}, {"a": 2.0}]) == {"a": 3.0, "b": -2.0, "b/max": -3.0}
    assert merge_stats([]) == {}


@pytest.mark.parametrize("pairs", [3, 49, 97, 1000])
def test_shares_of_pairs_are_exact(pairs: int) -> None:
    """All right is 1 and all wrong 0, by 32-bit weights in whatever parts; which half is right changes no bit."""
    weight = unit_weights(torch.ones(2 * pairs), 2)[::2]

    def accuracy(margin: Tensor) -> float:
        parts = zip(margin.split(7), weight.split(7), strict=True)
        return whole_stats(pair_figures(*part) for part in parts)["accuracy"]

    assert (accuracy(torch.ones(pairs)), accuracy(-torch.ones(pairs))) == (1.0, 0.0)
    half = torch.arange(pairs) % 2 * 2.0 - 1
    assert accuracy(half) == accuracy(half.sort().values) == round(pairs // 2 / pairs, 6)


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
    with pytest.raises(TypeError, match=r"mine.*'gap'"):
        plain({"loss": 1.0, "gap": value}, "the figures of mine")
    with pytest.raises(TypeError, match=r"mine.*dict"):
        plain([("gap", 1.0)], "the figures of mine")  # type: ignore[arg-type]
