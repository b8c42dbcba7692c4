"""What processes reserve on nodes, worked by hand."""

from __future__ import annotations

import pytest

from plaudit.runtime.resources import (
    Resources,
    ResourcesError,
    check_gpus,
    check_memory,
    check_room,
    crowded,
    equal_share,
    packed,
    part_of,
    shown,
    small_store,
)


def of(*cpus: float) -> list[Resources]:
    return [{"CPU": float(amount)} for amount in cpus]


@pytest.mark.parametrize(
    ("cpus", "processes", "share"),
    [
        ((8,), 2, 4.0),
        ((8,), 3, 2.0),  # 3 * 2 = 6, 3 * 3 = 9
        ((8, 8), 5, 2.0),  # of 3 a node holds 2, both 4; of 2 it holds 4
        ((8, 8), 4, 4.0),
        ((8, 4), 3, 4.0),  # 2 + 1
        ((2, 1), 3, 1.0),
        ((0, 2, 2), 4, 1.0),  # a head that computes nothing
        ((2,), 3, 0.66),  # 3 * 66 = 198 of 200 hundredths
        ((2, 1), 4, 0.66),  # 3 + 1; of 0.75 it would be 2 + 1
        ((1, 1), 3, 0.5),
        ((0,), 1, 0.01),  # what does not fit is refused, with its sums
    ],
)
def test_an_equal_share_is_the_most_of_which_all_find_room(
    cpus: tuple[float, ...], processes: int, share: float
) -> None:
    assert equal_share(of(*cpus), processes) == {"CPU": share}
    assert packed(of(*cpus), [{"CPU": share}] * processes) == any(cpus)


def test_a_share_with_which_nothing_would_start_is_refused_with_the_sum() -> None:
    assert equal_share(of(2), 40) == {"CPU": 0.05}
    with pytest.raises(ResourcesError, match=r"41 processes .* 0\.04 CPU each of the 2 CPU"):
        equal_share(of(2), 41)
    with pytest.raises(ResourcesError, match=r"0\.03 CPU each of the 0\.1 CPU .* 0\.05"):
        equal_share(of(2), 3, beside=of(1.9))


@pytest.mark.parametrize(
    ("nodes", "processes", "share"),
    [
        ([(8, 2)], 2, {"CPU": 4.0, "GPU": 1.0}),
        ([(8, 1)], 2, {"CPU": 4.0}),  # not enough for all: who is to have them is for the settings to say
        ([(8, 0)], 2, {"CPU": 4.0}),
        ([(8, 4), (8, 0)], 4, {"CPU": 2.0, "GPU": 1.0}),  # all on the first node, where the GPUs are
        ([(8, 2), (2, 2)], 4, {"CPU": 1.0, "GPU": 1.0}),  # 2 + 2; of 2 CPUs the second node would hold one
    ],
)
def test_each_has_a_gpu_where_there_is_one_for_each(
    nodes: list[tuple[float, float]], processes: int, share: Resources
) -> None:
    there: list[Resources] = [{"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]
    assert equal_share(there, processes, gpus=True) == share
    assert packed(there, [share] * processes)
    assert "GPU" not in equal_share(there, processes)


@pytest.mark.parametrize(
    ("nodes", "beside", "processes", "share"),
    [
        ([(16, 0)], [{"CPU": 8.0}], 4, {"CPU": 2.0}),
        ([(2, 0)], [{"CPU": 1.0}], 2, {"CPU": 0.5}),
        ([(8, 0), (4, 0)], [{"CPU": 6.0}], 2, {"CPU": 2.0}),  # 2 on the first node, 4 on the second
        ([(16, 3)], [{"CPU": 8.0}], 2, {"CPU": 4.0, "GPU": 1.0}),
        ([(16, 3)], [{"CPU": 8.0, "GPU": 1.0}], 3, {"CPU": 2.0}),  # three GPUs for four
        ([(4, 0)], [{"CPU": 8.0}], 1, {"CPU": 0.01}),  # what does not fit is refused, with its sums
        ([(4, 0)], [{"CPU": 2.0}], 0, {"CPU": 1.0}),  # for nobody
    ],
)
def test_what_some_are_told_to_reserve_is_not_shared(
    nodes: list[tuple[float, float]], beside: list[Resources], processes: int, share: Resources
) -> None:
    there: list[Resources] = [{"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]
    assert equal_share(there, processes, beside=beside, gpus=True) == share
    assert packed(there, [*beside, *[share] * processes]) == (beside[0]["CPU"] <= nodes[0][0])


def test_a_node_that_names_no_cpu_has_none() -> None:
    assert equal_share([{}, {"CPU": 2.0}], 2) == {"CPU": 1.0}
    assert equal_share([{}], 1) == {"CPU": 0.01}
    with pytest.raises(ResourcesError, match=r"1 CPU .*has nothing"):
        check_room([{}], of(1), what="one worker")


def test_resources_are_shown_by_name_without_rays_markers() -> None:
    told = {"memory": 1.5 * 2**30, "GPU": 0.5, "CPU": 2.0, "object_store_memory": 9.0, "node:1.2.3.4": 1.0}
    assert shown(told | {"bundle_group_0f": 1.0}) == "2 CPU, 0.5 GPU, 1.5 GiB memory"


@pytest.mark.parametrize(("amount", "sharers", "part"), [(1.0, 3, 0.3333), (0.3, 3, 0.1), (8.0, 2, 4.0), (0.0, 2, 0.0)])
def test_who_share_a_bundle_take_what_ray_can_count(amount: float, sharers: int, part: float) -> None:
    assert part_of({"CPU": amount}, "CPU", sharers) == part
    assert part_of({}, "CPU", sharers) == 0.0


def test_the_largest_share_of_anything_is_packed_first() -> None:
    """Of one resource alone, or by its amount, 2 CPUs and 9 of memory would take the place of the other two."""
    nodes = [{"CPU": 4.0, "memory": 10.0}, {"CPU": 4.0, "memory": 40.0}]
    asked = ((1.0, 14.0), (2.0, 9.0), (4.0, 7.0))
    assert packed(nodes, [{"CPU": cpus, "memory": memory} for cpus, memory in asked])


def test_people_are_told_of_far_more_threads_than_cpus() -> None:
    assert crowded(of(2, 2), [1] * 16) == ""
    assert crowded(of(2), [1] * 101).startswith("101 processes have 101 threads in all, the cluster has 2 CPU: a step ")
    assert crowded(of(2), [64, 64]).startswith("2 processes have 128 threads in all")


def test_more_processes_than_there_is_memory_to_start_are_refused_with_the_sums() -> None:
    """Their CPUs are counted in hundredths: of those there is enough."""
    nodes: list[Resources] = [{"CPU": 2.0, "memory": 3.5 * 2**30}, {"CPU": 1.0, "memory": 4.0 * 2**30}]
    check_room(nodes, [equal_share(nodes, 41)] * 41, what="1 training and 40 rollout workers")
    with pytest.raises(ResourcesError) as e:
        check_memory(nodes, 41)
    assert str(e.value).startswith(
        "41 processes take 10.0 GiB memory in all, 250 MiB each before they have a model, the cluster has 7.5 GiB"
    )
    check_memory(nodes, 30)
    check_memory([*nodes, {"CPU": 1.0}], 41)  # a node that does not tell


def test_ranks_that_would_share_a_gpu_are_refused() -> None:
    one: list[Resources] = [{"CPU": 8.0, "GPU": 1.0}]
    with pytest.raises(ResourcesError, match=r"2 training .*resources_per_worker={GPU: 1}"):
        check_gpus(one, [{"CPU": 4.0}] * 2)
    check_gpus(one, [{"CPU": 4.0}])
    check_gpus(one, [{"CPU": 4.0, "GPU": 1.0}] * 2)  # too many, which `check_room` says
    check_gpus(of(8), [{"CPU": 4.0}] * 2)


def test_what_fits_only_in_all_is_refused_with_the_sums_of_nodes() -> None:
    with pytest.raises(ResourcesError) as error:
        check_room(of(8, 8, 2), [{"CPU": 3.0}] * 5, what="five workers")
    assert str(error.value).startswith(
        "five workers ask for 15 CPU in all (5 for 3 CPU). They do not fit, since each must be on one node and the "
        "cluster's have 2 with 8 CPU; 1 with 2 CPU: lower runtime.num_training_workers, rollout.workers or "
    )
    check_room(of(8, 8, 3), [{"CPU": 3.0}] * 5, what="five workers")


def test_what_exceeds_the_sum_is_refused_with_it() -> None:
    nodes: list[Resources] = [{"CPU": 8.0, "GPU": 1.0, "memory": float(2**30), "node:127.0.0.1": 1.0}]
    with pytest.raises(ResourcesError, match=r"2 CPU, 2 GPU .* 8 CPU, 1 GPU, 1\.0 GiB m"):
        check_room(nodes, [{"CPU": 1.0, "GPU": 1.0}] * 2, what="two workers")


@pytest.mark.parametrize(
    ("bundles", "fits"),
    [
        (of(1, 3, 1, 3), True),  # 3 and 1 on each node; in the order given, 1 and 3, then 1, then no 3
        (of(3, 3, 2), False),
        ([{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0, "home": 1.0}], True),  # who has one choice is first
        ([{"CPU": 4.0}, {"CPU": 1.0, "home": 1.0}, {"CPU": 1.0, "home": 1.0}], False),  # one home only
        ([{"home": 0.5}, {"home": 0.5}, {"CPU": 4.0}, {"CPU": 4.0}], True),
        ([{"CPU": 1.0, "GPU": 1.0}], False),
    ],
)
def test_bundles_are_packed_on_nodes(bundles: list[Resources], fits: bool) -> None:
    assert packed([{"CPU": 4.0, "home": 1.0}, {"CPU": 4.0}], bundles) == fits


def test_a_store_without_room_for_two_versions_is_told_of() -> None:
    nodes = [{"object_store_memory": float(mb << 20)} for mb in (512, 100)]
    assert small_store(nodes, 50 << 20) == ""
    assert small_store([], 50 << 20) == "", "the head did not answer"
    said = small_store(nodes, 200 << 20)
    assert "store of 100 MiB has no room for two versions of weights of 200 MiB" in said
    assert "/dev/shm 500 MiB" in said, "two and a half times as much"
