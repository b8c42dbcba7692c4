"""A whole run whose judge is several processes, each with a part of every matrix."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import Kill, Killer
from kills import same_weights

from plaudit import load_settings, run

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]


def test_a_lost_process_of_a_judge_changes_nothing(make_recipe: Recipe, judge: Path, tmp_path: Path) -> None:
    """It scores as one process does but for rounding, and after a loss to the bit as before."""

    def recipe(name: str, **more: Any) -> dict[str, Any]:
        rewards = [{"kind": "judge", "path": str(judge), **more}]
        runtime = {"kind": "ray", "heartbeat_timeout": 10.0} if more else {}
        return make_recipe("grpo", tmp_path / name, rewards=rewards, runtime=runtime)

    alone = run(load_settings(recipe("alone")))
    whole = run(load_settings(recipe("whole", workers=1, tensor=2)))
    killer = Killer([Kill("judge", "reward", 1, which=1)])
    with killer.at_work():
        disturbed = run(load_settings(recipe("killed", workers=1, tensor=2)), hooks=[killer.hook])
    assert killer.kills[0].victim.endswith(", process 1")
    assert same_weights(whole, disturbed)
    assert [one["reward/mean"] for one in whole.metrics] == [one["reward/mean"] for one in disturbed.metrics]
    first, other = (done.metrics[0]["reward/judge"] for done in (alone, whole))
    assert other == pytest.approx(first, abs=1e-6)
    assert "a local run gives the same bits" not in (whole.folder / "log.txt").read_text()
