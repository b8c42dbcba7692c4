"""Whole runs with Ray processes on one GPU: who shares it, shards by NCCL, and workers that are lost there."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("no GPU: processes that share one", allow_module_level=True)

from faults import Kill, Killer

from plaudit import load_settings, run

Recipe = Callable[..., dict[str, Any]]
OWN = {"runtime": {"resources_per_worker": {"CPU": 1, "GPU": 1}, "strategy": "fsdp"}}
CASES: dict[str, dict[str, Any]] = {
    "in step": {"rollout": {"workers": 2}},
    "ahead": {"rollout": {"workers": 2, "max_lag": 1}},
    "by a collective": {"runtime": {"weights": "collective"}},
    "in turn": {"runtime": {"placement": {"generate": {"shares": "train"}}, "offload": ["reference"]}},
    "inside": {"runtime": {"placement": {"generate": {"inside": "train"}}}},
    "sharded": OWN,
    "sharded, inside": {"runtime": OWN["runtime"] | {"placement": {"generate": {"inside": "train"}}}},
    "half": {"learn": {"precision": "bfloat16"}, "runtime": {"offload": ["optimizer"]}},
}
METHOD: dict[str, Any] = {"algorithm": {"kl_in_loss": 0.1}}


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_what_the_cpu_does(case: str, make_recipe: Recipe, tmp_path: Path) -> None:
    """In its first step: later answers part where a random number falls between two roundings. What rollout workers
    answer with is always what the ranks have."""
    sections = CASES[case]
    more = METHOD | sections | {"runtime": sections.get("runtime", {}) | {"kind": "ray"}, "device": "cuda"}
    there = run(load_settings(make_recipe("grpo", tmp_path / "there", **more))).metrics
    [here, *_] = run(load_settings(make_recipe("grpo", tmp_path / "here", device="cpu", **METHOD))).metrics
    for key in ("loss/policy", "gradient_norm/policy"):
        assert there[0][key] == pytest.approx(here[key], rel=0.2, abs=0.05)
    assert len(there) == 4
    for step in there[: 1 if case == "ahead" else None]:
        assert step["kl/sampler"] == pytest.approx(0.0, abs=1e-2 if case == "half" else 1e-6)


@pytest.mark.parametrize("role", ["rollout", "rank"])
def test_a_run_goes_on_when_a_process_on_the_gpu_is_killed(role: str, make_recipe: Recipe, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "device": "cuda",
        "runtime": {"kind": "ray"},
        "rollout": {"workers": 2},
        "save": {"every": 1},
    }
    killer = Killer([Kill(role, "rollout" if role == "rollout" else "update", 2)])
    with killer.at_work():
        done = run(load_settings(make_recipe("grpo", tmp_path, **more)), hooks=[killer.hook])
    assert killer.survived
    assert [step["step"] for step in done.metrics] == [1, 2, 3, 4]
    assert all(abs(step["kl/sampler"]) < 1e-6 for step in done.metrics)
