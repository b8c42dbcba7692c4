"""Which kills a command deals, what it tells, and how it goes on. Killing is `tests/runs/test_ray_runs.py`."""

from __future__ import annotations

import itertools
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEALTH, PHASES, WORKERS, Kill
from kills import Clock, impossible, table, told, write
from rounds import ROUNDS, planned

ROLES = (*WORKERS, "node", "driver")


def test_two_hundred_kills_bring_every_role_into_every_phase_and_freeze_every_worker_there() -> None:
    kills = [kill for round_ in planned(200, 0) for kill in round_.kills]
    assert len(kills) == 200
    every = [(kill.role, kill.phase) for kill in kills]
    assert min(every.count(both) for both in itertools.product(ROLES, PHASES)) >= 2
    cuts = [every.count(("partition", phase)) for phase in PHASES]
    assert set(cuts) <= {1, 2}, "they take longer"
    frozen = {(kill.role, kill.phase) for kill in kills if kill.signal == signal.SIGSTOP}
    assert frozen >= set(itertools.product(WORKERS, PHASES))


@pytest.mark.parametrize("kind", ROUNDS)
def test_six_rounds_of_a_kind_bring_each_of_its_roles_into_each_phase_alike(kind: str) -> None:
    rounds = planned(6 * ROUNDS[kind].count, 5, kind)
    assert len(rounds) == 6
    every = [(kill.role, kill.phase) for round_ in rounds for kill in round_.kills]
    counts = [every.count(both) for both in set(every)]
    assert len(counts) % len(ROUNDS[kind].phases) == 0
    assert max(counts) - min(counts) <= 1


def test_other_seeds_deal_in_another_order_and_the_same_one_alike() -> None:
    first, again, other = ([kill.planned for kill in planned(18, seed)[0].kills] for seed in (0, 0, 1))
    assert first == again != other


def test_the_table_has_a_row_for_each_role_and_phase_in_order() -> None:
    kills = [
        Kill("driver", "save", 1, found=2.0, next_step=30.0, equal=True, fine=True),
        Kill("rank", "update", 1, found=0.1, next_step=4.0, repeated=1, fine=True),
        Kill("rank", "update", 2, signal.SIGSTOP, found=5.0, next_step=9.0, fine=False),
        Kill("rank", "update", 3, found=0.3, next_step=5.0, fine=True),
        Kill("node", "save", 3),
        Kill("judge", "reward", 1, found=0.1, next_step=2.0, fine=True),  # of a run whose samples may be old
        Kill("judge", "save", 1, found=0.1, next_step=2.0, fine=True),
        Kill("judge", "save", 3, found=0.1, next_step=2.0, equal=True, fine=True),
    ]
    assert table(kills).splitlines()[2:] == [
        "| judge | reward | 1 | - | 0.1 / 0.1 | 2.0 / 2.0 | 0 | - |",
        "| judge | save | 2 | - | 0.1 / 0.1 | 2.0 / 2.0 | 0 | yes (1 of 2) |",
        "| training rank | update | 3 | 1 | 0.3 / 5.0 | 5.0 / 9.0 | 1 | NO (1) |",
        "| node | save | 1 | - | - | - | 0 | NO (1) |",
        "| driver | save | 1 | - | 2.0 / 2.0 | 30.0 / 30.0 | 0 | yes |",
    ]


def test_it_goes_on_behind_the_rounds_that_a_file_has(tmp_path: Path) -> None:
    rounds, file = planned(30, 0), tmp_path / "kills.jsonl"
    assert told(file, rounds) == told(None, rounds) == []
    rounds[0].kills[0].found = 0.5
    write(file, rounds[0])
    again = planned(30, 0)
    assert told(file, again) == [rounds[0].kills]
    with pytest.raises(SystemExit, match="another command's kills"):
        told(file, planned(30, 1))


def test_partitions_alone_are_refused_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert impossible("nodes") == impossible(None) == ["partitions"]
    with pytest.raises(SystemExit, match="ip, tc, unshare"):
        impossible("partitions")


def test_the_page_advises_what_is_tried() -> None:
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    assert all(f"RAY_health_check_{key}={value}" in page.read_text() for key, value in HEALTH.items())


def test_it_tells_how_far_it_is_by_the_time_that_rounds_took() -> None:
    rounds = planned(41, 0)
    clock = Clock(rounds)
    guess = 18 * 6.0 + 18 * 7.0 + 5 * 8.0
    assert clock.before(rounds[0]).endswith(f"; 0 of 41 done in 0 min, about {guess / 60:.0f} min left")
    clock.spent, clock.guessed = 216.0, 108.0  # twice as long as thought
    assert clock.before(rounds[1]) == "round 2 of 3: 18 kills (ppo); 18 of 41 done in 4 min, about 6 min left"
