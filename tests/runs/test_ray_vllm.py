"""vLLM on Ray rollout workers, for real: live updates, sleep and wake, and a worker that is killed and replaced."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import Kill, Killer, descendants

from plaudit import Run, load_settings, run
from plaudit.loop.progress import Moment
from plaudit.types import Stats

pytestmark = pytest.mark.vllm
Recipe = Callable[..., dict[str, Any]]
MODEL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}


def killed(
    recipe: Recipe, folder: Path, *, lora: int, weights: str, devices: int = 1, shares: str = "", **rollout: Any
) -> tuple[Run, Killer]:
    """A run whose rollout worker 0 is killed while it takes the weights of version 2."""
    more: dict[str, Any] = {"model": {"config": MODEL, "lora": {"rank": lora}}, "algorithm": {"samples": 4}}
    more["rollout"] = {"engine": "vllm", **rollout}
    more["runtime"] = {"kind": "ray", "weights": weights}
    more["runtime"] |= {"mesh": {"rollout_tensor": devices}} if devices > 1 else {}
    more["runtime"] |= {"placement": {"generate": {"shares": shares}}} if shares else {}
    killer = Killer([Kill("rollout", "publish", 2)])
    with killer.at_work():
        done = run(load_settings(recipe("grpo", folder, log={"quiet": False}, **more)), hooks=[killer.hook])
    assert killer.survived
    assert len(done.metrics) == 4
    assert all(record["gradient_norm/policy"] > 0 for record in done.metrics)
    return done, killer


def test_a_run_goes_on_when_its_vllm_is_killed(
    make_recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One worker, which sleeps while the learner works. The run waits for the one in its place, which must hold the
    newest weights: in every step the log-probs of what it drew are the learner's, and tokens of the newest version."""
    done, killer = killed(make_recipe, tmp_path, lora=0, weights="store", shares="train")
    assert len(killer.workers) == 3, "a rank, a rollout worker and the one in its place"
    for record in done.metrics:
        assert abs(record["kl/sampler"]) < 1e-9
        assert record["lag/max"] == 0.0
    assert [sample["versions"] for sample in done.samples[::12]] == [[0], [1], [2], [3]]
    printed = capfd.readouterr().out
    for line in ("imports vLLM", "starts vLLM 0.32", "has started vLLM, whose cache holds "):
        assert f"rollout worker 0 {line}" in printed
    assert "lost rollout worker 0" in printed
    assert "1 training and 1 rollout workers are ready\n" in printed, "no same bits as a local run's are promised"


def test_and_so_apart_from_the_learner(make_recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two workers that sample while the learner works, and take adapters by a collective, whose group breaks. The other
    one goes on at once: nothing waits for the one in the lost one's place."""
    done, killer = killed(make_recipe, tmp_path, lora=2, weights="collective", workers=2, max_lag=1)
    assert len(killer.workers) >= 3, "a rank and two rollout workers"
    assert abs(done.metrics[0]["kl/sampler"]) < 1e-9
    assert any(record["kl/sampler"] > 1e-6 for record in done.metrics[1:])  # the samples are older than the weights
    assert max(record["lag/max"] for record in done.metrics) == 1.0
    assert "lost rollout worker 0" in capfd.readouterr().out


def test_and_so_does_one_whose_vllm_shares_each_matrix(make_recipe: Recipe, tmp_path: Path) -> None:
    """Two processes of vLLM, which end with the one that drives them."""
    done, killer = killed(make_recipe, tmp_path, lora=2, weights="store", devices=2)
    assert len(killer.workers) == 3, "a rank, a rollout worker and the one in its place"
    assert all(abs(record["kl/sampler"]) < 1e-6 for record in done.metrics)
    assert [sample["versions"] for sample in done.samples[::12]] == [[0], [1], [2], [3]]


def test_a_process_of_vllm_that_is_lost_costs_its_worker(
    make_recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"model": {"config": MODEL}, "rollout": {"engine": "vllm"}, "train": {"steps": 3}}
    more["runtime"] = {"kind": "ray", "mesh": {"rollout_tensor": 2}}
    killer = Killer([])
    hit: list[int] = []

    async def hook(moment: Moment) -> Stats:
        if not hit:
            (worker,) = (one for one in killer.workers if one.name == "rollout worker 0")
            hit.extend(pid for pid in descendants(worker.pid) if "VLLM" in Path(f"/proc/{pid}/comm").read_text())
            os.kill(hit[-1], signal.SIGKILL)
        return {}

    with killer.at_work():
        done = run(load_settings(make_recipe("grpo", tmp_path, log={"quiet": False}, **more)), hooks=[hook])
    assert len(hit) == 2
    assert len(done.metrics) == 3
    assert all(abs(record["kl/sampler"]) < 1e-6 for record in done.metrics)
    assert "lost rollout worker 0: a process of vLLM failed (" in capfd.readouterr().out


def test_a_node_without_vllm_is_named_with_what_to_install(
    make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers find a vLLM there that does not import."""
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    more = {"rollout": {"engine": "vllm"}, "runtime": {"kind": "ray"}}
    with pytest.raises(ImportError, match=r" \S+ \(libcudart\.so\.13: .*'\.\[vllm\]'") as e:
        run(load_settings(make_recipe("grpo", tmp_path, **more)))
    assert socket.gethostname() in str(e.value)
