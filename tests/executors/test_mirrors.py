"""Which ranks hold the same, where copies go, what a holder keeps; `tests/runs/test_mirrored_runs.py` has losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plaudit.executors.mirrored import Holder
from plaudit.executors.mirrors import alike, peers
from plaudit.runtime.settings import RuntimeSettings


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, [0]),
        ({"num_training_workers": 3}, [0, 0, 0]),
        ({"mesh": {"context": 2}}, [0, 0]),
        ({"mesh": {"tensor": 2}}, [0, 1]),
        ({"mesh": {"pipeline": 2}}, [0, 1]),
        ({"mesh": {"data": 2, "tensor": 2}}, [0, 1, 0, 1]),
        ({"mesh": {"data": 2, "pipeline": 2}}, [0, 0, 2, 2]),
        ({"mesh": {"data": 2, "tensor": 2, "pipeline": 2}}, [0, 1, 0, 1, 4, 5, 4, 5]),
        ({"num_training_workers": 3, "strategy": "fsdp"}, [0, 1, 2]),
        ({"mesh": {"data": 2, "context": 2}, "strategy": "zero1"}, [0, 1, 2, 3]),
        ({"mesh": {"data": 2, "tensor": 2}, "strategy": "fsdp"}, [0, 1, 2, 3]),
        ({"mesh": {"replicas": 2, "data": 2}, "strategy": "fsdp"}, [0, 1, 0, 1]),
    ],
)
def test_ranks_that_hold_the_same_have_one_copy(given: dict[str, Any], first: list[int]) -> None:
    assert alike(RuntimeSettings(kind="ray", **given)) == first


def test_copies_go_to_the_next_node_with_ranks_before_one_without() -> None:
    assert peers(["a", "a", "b", "c"], ["a", "b", "c", "d"]) == {
        "a": ["b", "c", "d"],
        "b": ["c", "a", "d"],
        "c": ["a", "b", "d"],
    }
    assert peers(["a", "a"], ["a", "d"]) == {"a": ["d"]}
    assert peers(["a"], ["a"]) == {"a": []}


def test_a_holder_keeps_the_newest_whole_step_beside_the_one_that_arrives() -> None:
    holder, sent = Holder(), np.zeros(2, dtype=np.float32)
    for step, whole in ((1, -1), (2, 1), (3, 1)):  # some other holder never got step 2
        sent[:] = step
        holder.hold((0, 0), step, whole, {"policy": ({"master/weight": sent}, {"passes": step})})
    with pytest.raises(KeyError):
        holder.give((0, 0), 2)
    for step in (1, 3):
        arrays, more = holder.give((0, 0), step)[0]["policy"]
        assert arrays["master/weight"].tolist() == [step, step]
        assert more == {"passes": step}
