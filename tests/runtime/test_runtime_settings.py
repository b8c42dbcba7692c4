"""What of the runtime's settings is refused."""

from __future__ import annotations

from typing import Any

import pytest

from assent.runtime.settings import DistributedSettings, RuntimeSettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "ray", "strategy": "zero"}, "runtime.strategy=zero is not one of replicate, fsdp"),
        ({"strategy": "fsdp"}, "runtime.strategy=fsdp needs runtime=ray"),
        ({"kind": "ray", "cpu_offload": True}, "runtime.cpu_offload=true needs runtime.strategy=fsdp, not replicate"),
    ],
)
def test_strategies_that_cannot_be(given: dict[str, Any], message: str) -> None:
    assert RuntimeSettings(**given).problems() == [message]


def test_shards_of_ray_ranks_are_no_problem() -> None:
    given = RuntimeSettings(kind="ray", strategy="fsdp", cpu_offload=True, num_training_workers=2)
    assert given.problems() == []


def test_the_file_for_all_stages_hands_its_strategy_on() -> None:
    settings = DistributedSettings()
    settings.cluster.runtime, settings.strategy.name = "ray", "fsdp"
    settings.check()
    assert settings.run_settings()["runtime"]["strategy"] == "fsdp"
