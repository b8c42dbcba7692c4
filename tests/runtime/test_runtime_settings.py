"""What of the runtime's settings is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit import load_settings
from plaudit.importers.distributed import recipe
from plaudit.runtime.settings import NO_SHARDS, SHARED, RuntimeSettings, Servers
from plaudit.support.fields import complaints
from plaudit.weights.broadcast import Collective, transport_of

TIMES = ("start", "collective", "heartbeat")
SERVED: dict[str, Any] = {"kind": "ray", "strategy": "server", "num_training_workers": 3}
REFUSED = (
    ({"pushes": "int8"}, "servers has no 'pushes'; did you mean push?"),
    ({"push": "int4"}, "servers.push=int4 must be one of float32, bfloat16, int8"),
    ({"local_steps": 0}, "servers.local_steps=0 must be at least 1"),
    ({"count": "two"}, "servers.count=two must be"),
    ({"quorum": 4}, "servers.quorum=4 is more than num_training_workers=3"),
)


def problems(given: RuntimeSettings, *, replays: bool = False) -> list[str]:
    return [*complaints(given), *given.unread(replays=replays)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kind": "ray", "strategy": "zero"},
            "strategy=zero must be one of replicate, zero1, zero2, fsdp, server; did",
        ),
        ({"strategy": "fsdp"}, "strategy=fsdp needs runtime=ray"),
        ({"offload": ["optimiser"]}, "offload=['optimiser'] must be one of reference, optimizer, weights"),
        ({"kind": "ray", "strategy": "zero2", "offload": ["weights"]}, "offload=['weights'] takes shards of weights"),
        ({"weights": "collective"}, "weights=collective needs runtime=ray"),
        ({"kind": "ray", "weights": "nccl"}, "weights=nccl must be"),
        ({"backend": "gloo"}, "backend=gloo needs runtime=ray"),
        ({"kind": "ray", "backend": "mpi"}, "backend=mpi must be"),
        ({"max_failures_per_hour": 100}, "max_failures_per_hour=100 needs runtime=ray"),
        *(({f"{what}_timeout": 7.0}, f"{what}_timeout=7.0 needs runtime=ray") for what in TIMES),
        *(({"kind": "ray", f"{w}_timeout": math.inf}, f"{w}_timeout=inf must be") for w in ("collective", "heartbeat")),
        *(
            ({"kind": "ray", key: {"CPU": 0.0}}, f"{key}={{'CPU': 0.0}} reserves nothing")
            for key in ("resources_per_worker", "resources_per_rollout_worker")
        ),
        ({"kind": "ray", "num_training_workers": 0}, "num_training_workers=0 must be"),
        ({"kind": "ray", "mesh": {"tensor": 0}}, "mesh={'tensor': 0} must be at least 1"),
        ({"kind": "ray", "mesh": {"rollout": 2}}, "mesh has no axis 'rollout'"),
        ({"kind": "ray", "mesh": {"tensr": 2}}, "mesh has no axis 'tensr'; did you mean tensor?"),
        *(
            ({"kind": "ray", "mesh": {"pipeline": 2}, "placement": placement}, "mesh has pipeline=2, and placement=")
            for placement in ({"generate": {"inside": "train"}}, "auto")
        ),
        ({"kind": "ray", "mesh": {"replicas": 2, "data": 2}}, "mesh has replicas=2, copies of what ranks share"),
        (
            {"kind": "ray", "mesh": {"replicas": 2}, "strategy": "fsdp"},
            "mesh has replicas=2, copies of what ranks share",
        ),
        ({"mesh": {"tensor": 2}}, "mesh={'tensor': 2} needs runtime=ray"),
        ({"kind": "ray", "servers": {"count": 2}}, "servers={'count': 2} needs strategy=server"),
        *(({**SERVED, "servers": given}, message) for given, message in REFUSED),
        ({**SERVED, "mesh": {"tensor": 2}}, "mesh has tensor, and strategy=server"),
        ({**SERVED, "mesh": {"mirrors": 1}}, "mesh has mirrors, and strategy=server"),
        ({**SERVED, "offload": ["optimizer"]}, "offload=['optimizer']: with strategy=server"),
        ({"kind": "ray", "mesh": {"spans": 2}}, "mesh has spans=2, those of layers on a stage"),
        ({"kind": "ray", "max_failures_per_hour": -2}, "max_failures_per_hour=-2 must be at least -1"),
        ({"kind": "ray", "resources_per_worker": {"GPU": -1.0}}, "resources_per_worker={'GPU': -1.0} must be"),
        *(({"kind": "ray", f"{what}_timeout": 0.0}, f"{what}_timeout=0.0 must be above 0 (seconds)") for what in TIMES),
    ],
)
def test_what_cannot_be(given: dict[str, Any], message: str) -> None:
    (told,) = problems(RuntimeSettings(**given))
    assert told.startswith(message)


def test_what_is_at_its_bound_can_be() -> None:
    given = RuntimeSettings(kind="ray", max_failures_per_hour=-1, resources_per_worker={"CPU": 0.0, "GPU": 1.0})
    assert problems(given) == []


def test_a_replay_may_say_how_the_processes_of_the_run_were_held() -> None:
    """Its settings are those of that run, and it has none; how many ranks there were matters to the weights."""
    given = RuntimeSettings(heartbeat_timeout=5.0, weights="collective", backend="gloo", num_training_workers=2)
    assert problems(given, replays=True) == ["num_training_workers=2 needs runtime=ray"]


def test_a_mesh_multiplies_training_workers() -> None:
    mesh = {"replicas": 2, "data": 2, "tensor": 4, "context": 1}
    given = RuntimeSettings(kind="ray", num_training_workers=3, mesh=mesh, strategy="zero2")
    assert problems(given) == []
    assert (given.workers, given.replicas, given.width, given.ranks) == (12, 2, 4, 48)
    staged = RuntimeSettings(kind="ray", mesh={"data": 3, "pipeline": 2, "spans": 4, "tensor": 2})
    assert problems(staged) == []
    assert (staged.workers, staged.pipeline, staged.ranks) == (3, 2, 12)


def test_ranks_that_share_a_pass_see_the_same_rows() -> None:
    mesh = {"data": 2, "tensor": 2, "context": 3, "pipeline": 2, "spans": 2}
    given = RuntimeSettings(kind="ray", mesh=mesh)
    assert problems(given) == []
    assert (given.workers, given.width, given.ranks, given.axes) == (2, 6, 24, mesh)


def test_processes_of_a_rollout_worker_and_mirrors_are_no_ranks() -> None:
    given = RuntimeSettings(kind="ray", mesh={"rollout_tensor": 2, "mirrors": 1})
    assert problems(given) == []
    assert (given.rollout_width, given.width, given.ranks) == (2, 1, 1)


def test_servers_that_are_refused_are_none() -> None:
    given = RuntimeSettings(**SERVED, servers={"push": "int8", "quorum": 3})
    assert problems(given) == []
    assert given.served == Servers(push="int8", quorum=3)
    assert RuntimeSettings(**SERVED, servers={"push": 3}).served is None
    assert RuntimeSettings().served is None


def test_shards_of_ray_ranks_are_no_problem() -> None:
    given = RuntimeSettings(kind="ray", strategy="fsdp", offload=["weights"], num_training_workers=2)
    assert problems(given) == []


GPU = {"GPU": 1.0}
ON_GPUS = {"resources_per_worker": GPU, "resources_per_rollout_worker": GPU}
CPUS = "runtime.backend=nccl needs GPUs, and device=cpu keeps to CPUs: take gloo, or another device"
A_GPU_EACH = "runtime.backend=nccl needs a GPU for each process: set runtime.{}={{GPU: 1}}"


@pytest.mark.parametrize(
    ("given", "run", "told"),
    [
        ({"backend": "nccl", **ON_GPUS}, {}, []),
        ({"backend": "nccl", **ON_GPUS}, {"device": "cpu"}, [CPUS]),
        ({"backend": "nccl"}, {}, [A_GPU_EACH.format("resources_per_worker")]),
        ({"mesh": {"pipeline": 2}, **ON_GPUS}, {"device": "cuda"}, []),
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
def test_what_a_backend_cannot_do(given: dict[str, Any], run: dict[str, Any], told: list[str]) -> None:
    where = {"device": "auto", "samples": True, "shared": False} | run
    assert RuntimeSettings(kind="ray", **given).about_backend(**where) == told


def test_a_run_hears_of_it_before_anything_starts(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    recipe = make_recipe("grpo", tmp_path, runtime={"kind": "ray", "backend": "nccl"}, device="cpu")
    with pytest.raises(ValueError, match=r"runtime\.backend=nccl .*device=cpu"):
        load_settings(recipe)


def test_nccl_for_all_stages_takes_a_gpu_for_each_process() -> None:
    given: dict[str, Any] = {"cluster": {"runtime": "ray"}, "communication": {"backend": "nccl"}}
    with pytest.raises(ValueError, match=r"communication\.backend=nccl\b.*cluster\.gpus_per_worker=1"):
        recipe(given)
    given["cluster"]["gpus_per_worker"] = 1
    runtime = recipe(given)["runtime"]
    assert (runtime["backend"], runtime["resources_per_worker"]) == ("nccl", {"GPU": 1})


@pytest.mark.parametrize(("runtime", "expected"), [(None, {}), ("local", {"runtime": {"kind": "local"}})])
def test_the_file_for_all_stages_says_of_local_runs_that_they_are(
    runtime: str | None, expected: dict[str, Any]
) -> None:
    """Recipes that ask for Ray run here then, too."""
    assert recipe({"cluster": {"runtime": runtime}}) == expected


@pytest.mark.parametrize(
    ("backend", "gpus", "carries"),
    [("auto", True, "nccl"), ("auto", False, "gloo"), ("gloo", True, "gloo"), ("nccl", True, "nccl")],
)
def test_weights_travel_by_the_backend(backend: str, gpus: bool, carries: str) -> None:
    transport = transport_of(RuntimeSettings(kind="ray", weights="collective", backend=backend), gpus=gpus)
    assert isinstance(transport, Collective)
    assert transport.backend == carries


def test_the_file_for_all_stages_hands_its_strategy_and_way_of_weights_on() -> None:
    given: dict[str, Any] = {"strategy": {"name": "fsdp"}, "communication": {"weights": "collective"}}
    with pytest.raises(ValueError, match=r"communication\.weights=collective .*cluster\.runtime=ray"):
        recipe(given)
    given["cluster"] = {"runtime": "ray"}
    runtime = recipe(given)["runtime"]
    assert (runtime["strategy"], runtime["weights"]) == ("fsdp", "collective")
    given["communication"]["weights"] = "carrier pigeon"
    with pytest.raises(ValueError, match=r"carrier pigeon .*store, collective"):
        recipe(given)
