"""What of the runtime's settings is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit import load_settings
from plaudit.runtime.settings import NO_SHARDS, SHARED, DistributedSettings, RuntimeSettings
from plaudit.weights.transport import Collective, transport_of

TIMES = ("start", "collective", "heartbeat", "call")
THERE = {"kind": "ray", "address": "10.0.0.1:6379"}
NO_EFFECT = "has no effect on the cluster at runtime.address=10.0.0.1:6379, which runs already: leave it out"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "ray", "strategy": "zero"}, "runtime.strategy=zero is not one of replicate, fsdp"),
        ({"strategy": "fsdp"}, "runtime.strategy=fsdp needs runtime=ray"),
        ({"weights": "collective"}, "runtime.weights=collective needs runtime=ray"),
        ({"kind": "ray", "weights": "nccl"}, "runtime.weights=nccl is not one of store, collective"),
        ({"kind": "ray", "cpu_offload": True}, "runtime.cpu_offload=true needs runtime.strategy=fsdp, not replicate"),
        ({"backend": "gloo"}, "runtime.backend=gloo needs runtime=ray"),
        ({"kind": "ray", "backend": "mpi"}, "runtime.backend=mpi is not one of auto, gloo, nccl"),
        *(({key: 100}, f"runtime.{key}=100 needs runtime=ray") for key in ("object_store_mb", "max_failures")),
        *(({f"{what}_timeout": 7.0}, f"runtime.{what}_timeout=7.0 needs runtime=ray") for what in TIMES),
        ({"dashboard": True}, "runtime.dashboard=True needs runtime=ray"),
        *(
            (
                {"kind": "ray", f"{what}_timeout": math.inf},
                f"runtime.{what}_timeout=inf must be a number of seconds: without an end, nobody would be missed",
            )
            for what in ("collective", "heartbeat")
        ),
        *(
            (
                {"kind": "ray", key: {"CPU": 0.0}},
                f"runtime.{key}={{'CPU': 0.0}} reserves nothing: give a part of a CPU, such as 0.1",
            )
            for key in ("resources_per_worker", "resources_per_rollout_worker")
        ),
        ({"kind": "ray", "num_training_workers": 0}, "runtime.num_training_workers=0 must be 1 or more"),
        ({"kind": "ray", "max_failures": -2}, "runtime.max_failures=-2 must be 0 or more, or -1 for no limit"),
        ({"kind": "ray", "object_store_mb": 79}, "runtime.object_store_mb=79 is below Ray's least, 80"),
        (
            {"kind": "ray", "resources_per_worker": {"GPU": -1.0}},
            "runtime.resources_per_worker.GPU=-1.0 must be 0 or more",
        ),
        *(
            ({"kind": "ray", f"{what}_timeout": 0.0}, f"runtime.{what}_timeout=0.0 must be above 0 seconds")
            for what in TIMES
        ),
        ({**THERE, "dashboard": True}, f"runtime.dashboard=True {NO_EFFECT}"),
        ({**THERE, "object_store_mb": 100}, f"runtime.object_store_mb=100 {NO_EFFECT}"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], message: str) -> None:
    assert RuntimeSettings(**given).problems() == [message]


def test_what_is_at_its_bound_can_be() -> None:
    given = RuntimeSettings(
        kind="ray", max_failures=-1, object_store_mb=80, resources_per_worker={"CPU": 0.0, "GPU": 1.0}
    )
    assert given.problems() == []


def test_a_replay_may_say_how_the_processes_of_the_run_were_held() -> None:
    """Its settings are those of that run, and it has none; how many ranks there were matters to the weights."""
    given = RuntimeSettings(heartbeat_timeout=5.0, weights="collective", backend="gloo", num_training_workers=2)
    assert given.problems(replays=True) == ["runtime.num_training_workers=2 needs runtime=ray"]


def test_shards_of_ray_ranks_are_no_problem() -> None:
    given = RuntimeSettings(kind="ray", strategy="fsdp", cpu_offload=True, num_training_workers=2)
    assert given.problems() == []


GPU = {"GPU": 1.0}
ON_GPUS = {"resources_per_worker": GPU, "resources_per_rollout_worker": GPU}
CPUS = "runtime.backend=nccl needs GPUs, and device=cpu keeps to CPUs: take gloo, or another device"
A_GPU_EACH = "runtime.backend=nccl needs a GPU for each process: set runtime.{}={{GPU: 1}}"


@pytest.mark.parametrize(
    ("given", "run", "problems"),
    [
        ({"backend": "nccl", **ON_GPUS}, {}, []),
        ({"backend": "nccl", **ON_GPUS}, {"device": "cpu"}, [CPUS]),
        ({"backend": "nccl"}, {}, [A_GPU_EACH.format("resources_per_worker")]),
        ({"backend": "nccl", "resources_per_worker": GPU}, {}, []),
        (
            {"backend": "nccl", "resources_per_worker": GPU, "weights": "collective"},
            {},
            [A_GPU_EACH.format("resources_per_rollout_worker")],
        ),
        ({"backend": "nccl", "resources_per_worker": GPU, "weights": "collective"}, {"samples": False}, []),
        ({"backend": "nccl", **ON_GPUS, "weights": "collective"}, {"shared": True}, [SHARED]),
        ({"backend": "gloo", **ON_GPUS}, {"device": "cuda"}, []),
        ({"backend": "gloo", "strategy": "fsdp"}, {}, []),
        ({"backend": "gloo", "strategy": "fsdp"}, {"device": "cuda"}, [NO_SHARDS]),
        ({"backend": "gloo", "strategy": "fsdp", **ON_GPUS}, {}, [NO_SHARDS]),
        ({"backend": "gloo", "strategy": "fsdp", **ON_GPUS}, {"device": "cpu"}, []),
    ],
)
def test_what_a_backend_cannot_do(given: dict[str, Any], run: dict[str, Any], problems: list[str]) -> None:
    where = {"device": "auto", "samples": True, "shared": False} | run
    assert RuntimeSettings(kind="ray", **given).about_backend(**where) == problems


def test_a_run_hears_of_it_before_anything_starts(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    recipe = make_recipe("grpo", tmp_path, runtime={"kind": "ray", "backend": "nccl"}, device="cpu")
    with pytest.raises(ValueError, match=r"runtime\.backend=nccl needs GPUs, and device=cpu"):
        load_settings(recipe)


def test_nccl_for_all_stages_takes_a_gpu_for_each_process() -> None:
    settings = DistributedSettings()
    settings.cluster.runtime, settings.communication.backend = "ray", "nccl"
    with pytest.raises(ValueError, match=r"communication\.backend=nccl needs cluster\.gpus_per_worker=1, not null"):
        settings.check()
    settings.cluster.gpus_per_worker = 1
    settings.check()
    runtime = settings.run_settings()["runtime"]
    assert (runtime["backend"], runtime["resources_per_worker"]) == ("nccl", {"GPU": 1})


@pytest.mark.parametrize(("runtime", "expected"), [(None, {}), ("local", {"runtime": {"kind": "local"}})])
def test_the_file_for_all_stages_says_of_local_runs_that_they_are(
    runtime: str | None, expected: dict[str, Any]
) -> None:
    """Recipes that ask for Ray run here then, too."""
    settings = DistributedSettings()
    settings.cluster.runtime = runtime
    settings.check()
    assert settings.run_settings() == expected


@pytest.mark.parametrize(
    ("backend", "gpus", "carries"),
    [("auto", True, "nccl"), ("auto", False, "gloo"), ("gloo", True, "gloo"), ("nccl", True, "nccl")],
)
def test_weights_travel_by_the_backend(backend: str, gpus: bool, carries: str) -> None:
    transport = transport_of(RuntimeSettings(kind="ray", weights="collective", backend=backend), gpus=gpus)
    assert isinstance(transport, Collective)
    assert transport.backend == carries


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
