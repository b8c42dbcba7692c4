"""Which ranks share a bundle, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from plaudit.executors.together import Located, arrangement, joined, levels, on, split, where
from plaudit.runtime.resources import Resources
from plaudit.runtime.settings import RuntimeSettings


def of(workers: int, **mesh: int) -> RuntimeSettings:
    more: dict[str, Any] = {"strategy": "fsdp"} if "replicas" in mesh else {}
    return RuntimeSettings(kind="ray", num_training_workers=workers, mesh=mesh, **more)


def nodes(*cpus: float) -> list[Resources]:
    return [{"CPU": float(amount)} for amount in cpus]


def parts(runtime: RuntimeSettings, *cpus: float, **more: Any) -> list[tuple[int, ...]]:
    return arrangement(nodes(*cpus), [{"CPU": 1.0}] * runtime.ranks, levels(runtime), **more)


def test_ranks_that_communicate_most_are_grouped_the_largest_groups_first() -> None:
    assert [*levels(of(2, tensor=2), first=4)] == [[(4, 5), (6, 7)]]
    # Of two workers with two stages, stage 0 has ranks 0-3 and stage 1 ranks 4-7.
    staged = [*levels(of(2, tensor=2, pipeline=2))]
    assert staged == [[(0, 1, 4, 5), (2, 3, 6, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert [*levels(of(2, replicas=2))] == [[(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]]


@pytest.mark.parametrize(
    ("runtime", "cpus", "found"),
    [
        (of(2, tensor=2), (3, 3), [(0, 1), (2, 3)]),  # else Ray would place them 3 + 1
        (of(2, context=2), (4,), [(0, 1), (2, 3)]),
        (of(2, tensor=2), (2, 1, 1), [(0, 1), (2,), (3,)]),  # one has room together, the other has not
        (of(2, tensor=2), (1, 1, 1, 1), [(0,), (1,), (2,), (3,)]),
        (of(2, tensor=2), (1, 1), [(0,), (1,), (2,), (3,)]),  # no room at all is refused elsewhere
        (of(2, tensor=2, pipeline=2), (4, 4), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (of(2, tensor=2, pipeline=2), (6, 2), [(0, 1, 4, 5), (2, 3), (6, 7)]),  # one whole, the other by stages
        (of(2, replicas=2), (2, 3), [(0, 1), (2, 3)]),
        (of(3), (1, 1, 1), [(0,), (1,), (2,)]),
    ],
)
def test_as_many_groups_as_fit_are_together(
    runtime: RuntimeSettings, cpus: tuple[float, ...], found: list[tuple[int, ...]]
) -> None:
    assert parts(runtime, *cpus) == found


def test_what_others_reserve_is_counted() -> None:
    runtime = of(2, tensor=2)
    assert parts(runtime, 3, 3, beside=nodes(1, 1)) == [(0, 1), (2, 3)]
    assert parts(runtime, 3, 3, beside=nodes(2)) == [(0, 1), (2,), (3,)]


def test_a_bundle_is_the_sum_of_its_ranks_in_rays_unit() -> None:
    bundles = [{"CPU": 0.33, "GPU": 1.0}] * 3
    assert joined(bundles, [(0, 1), (2,)]) == [{"CPU": 0.66, "GPU": 2.0}, {"CPU": 0.33, "GPU": 1.0}]
    assert joined([{"CPU": 0.1}] * 3, [(0, 1, 2)]) == [{"CPU": 0.3}], "not 0.30000000000000004"


A, B, C = "a" * 32, "b" * 32, "c" * 32


def test_where_ranks_are_is_said_and_those_apart_are_counted() -> None:
    assert on([A, A]) == "node aaaaaaaa"
    assert on([A, B, A]) == "nodes aaaaaaaa and bbbbbbbb"
    assert where("training ranks", {0: "A", 1: "A", 2: "B", 3: "B", 4: "A", 6: "A"}) == (
        "training ranks 0-1 on A, 2-3 on B, 4 on A, 6 on A"
    )
    assert (split(2, [A, A, B, B]), split(2, [A, A, A, B]), split(1, [A, B]), split(4, [A, A, B, B])) == (0, 1, 0, 1)


def test_workers_of_several_processes_are_located_once_and_where_they_move() -> None:
    said: list[str] = []
    bundles: list[Resources] = [{"CPU": 2.0}] * 2
    located = Located("rollout workers", "runtime.mesh: rollout_tensor", 3, bundles, "runtime.key", said.append)
    located.started(2, [A, A])
    located.started(0, [A, A])
    assert said == [], "the first three are said together"
    located.started(1, [A, B])
    place, warning = said
    assert place == "rollout workers 0 on node aaaaaaaa, 1 on nodes aaaaaaaa and bbbbbbbb, 2 on node aaaaaaaa"
    assert warning.startswith("1 of 3 groups of 2 processes of rollout workers that compute each row together")
    assert "runtime.mesh: rollout_tensor" in warning
    assert "A group needs 4 CPU on one node: reserve less (runtime.key)" in warning
    located.started(1, [A, B])
    assert len(said) == 2, "a replacement in its place is where it was"
    for nodes in ([B, C], [A, C]):
        located.started(1, nodes)
    moved, divided, again = said[2:]
    assert (moved, again) == (
        "rollout workers 1 on nodes bbbbbbbb and cccccccc",
        "rollout workers 1 on nodes aaaaaaaa and cccccccc",
    )
    assert divided.startswith("1 of 1 groups of 2 processes of rollout workers"), "said once"


def test_nothing_is_said_of_one_node_until_a_worker_leaves_it() -> None:
    said: list[str] = []
    located = Located("rewards.0 judges", "rewards.0.tensor", 1, [{"CPU": 1.0}] * 2, "rewards.0.resources", said.append)
    located.started(0, [A, A])
    assert said == []
    located.started(0, [B, B])
    assert said == ["rewards.0 judges 0 on node bbbbbbbb"]
