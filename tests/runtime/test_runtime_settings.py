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
        ({"weights": "collective"}, "runtime.weights=collective needs runtime=ray"),
        ({"kind": "ray", "weights": "nccl"}, "runtime.weights=nccl is not one of store, collective"),
        ({"kind": "ray", "cpu_offload": True}, "runtime.cpu_offload=true needs runtime.strategy=fsdp, not replicate"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], message: str) -> None:
    assert RuntimeSettings(**given).problems() == [message]


def test_shards_of_ray_ranks_are_no_problem() -> None:
    given = RuntimeSettings(kind="ray", strategy="fsdp", cpu_offload=True, num_training_workers=2)
    assert given.problems() == []


def test_the_file_for_all_stages_hands_its_strategy_and_way_of_weights_on() -> None:
    settings = DistributedSettings()
    settings.strategy.name, settings.communication.weights = "fsdp", "collective"
    with pytest.raises(ValueError, match=r"communication\.weights=collective needs cluster\.runtime=ray"):
        settings.check()
    settings.cluster.runtime = "ray"
    settings.check()
    runtime = settings.run_settings()["runtime"]
    assert (runtime["strategy"], runtime["weights"]) == ("fsdp", "collective")
    settings.communication.weights = "carrier pigeon"
    with pytest.raises(ValueError, match=r"carrier pigeon is not one of store, collective"):
        settings.check()
