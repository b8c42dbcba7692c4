"""Which ranks share a bundle, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from plaudit.executors.together import arrangement, joined, levels, split, where
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


def test_where_ranks_are_is_said_and_those_apart_are_counted() -> None:
    a, b = "a" * 32, "b" * 32
    assert (
        where("training", [a, a, b, b, a])
        == "training ranks 0-1 on node aaaaaaaa, 2-3 on node bbbbbbbb, 4 on node aaaaaaaa"
    )
    assert (split(2, [a, a, b, b]), split(2, [a, a, a, b]), split(1, [a, b]), split(4, [a, a, b, b])) == (0, 1, 0, 1)
