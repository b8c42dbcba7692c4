"""vLLM on Ray rollout workers, for real: live updates, sleep and wake, and a worker that is killed and replaced."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None or find_spec("vllm") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray and vllm are not both installed: docs/vllm.md", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from faults import Kill, Killer

from assent import load_settings, run

Recipe = Callable[..., dict[str, Any]]
MODEL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}


@pytest.mark.parametrize(("weights", "rank"), [("store", 0), ("collective", 2)], ids=["whole", "adapters"])
def test_a_run_goes_on_when_its_vllm_is_killed(
    weights: str, rank: int, make_recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One worker, which sleeps while the learner works. The run waits for the one in its place, which must hold the
    newest weights: in every step the log-probs of what it drew are the learner's, and tokens of the newest version."""
    rollout = {"engine": "vllm", "workers": 1, "share_devices": True, "vllm": {"cpu_cache_gib": 1 / 16}}
    more: dict[str, Any] = {"model": {"config": MODEL, "lora": {"rank": rank}}, "rollout": rollout}
    more |= {"algorithm": {"samples": 4}, "log": {"quiet": False}}
    more["runtime"] = {"kind": "ray", "object_store_mb": 100, "weights": weights}
    killer = Killer([Kill("rollout", "publish", 2)])
    with killer.at_work():
        done = run(load_settings(make_recipe("grpo", tmp_path, **more)), hooks=[killer.hook])
    assert killer.survived
    assert len(killer.workers) == 3, "a rank, a rollout worker and the one in its place"
    assert len(done.metrics) == 4
    for record in done.metrics:
        assert abs(record["kl/sampler"]) < 1e-9
        assert record["lag/max"] == 0.0
        assert record["gradient_norm/policy"] > 0
    assert [sample["versions"] for sample in done.samples[::4]] == [[0], [1], [2], [3]]
    printed = capfd.readouterr().out
    for line in ("rollout worker 0 imports vLLM", "rollout worker 0 starts vLLM 0.32", "lost rollout worker 0"):
        assert line in printed


def test_a_node_without_vllm_is_named_with_what_to_install(
    make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers find a vLLM there that does not import."""
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    more = {"rollout": {"engine": "vllm"}, "runtime": {"kind": "ray", "object_store_mb": 100}}
    with pytest.raises(ImportError, match=r"on \S+ \(libcudart\.so\.13: .*pip install 'assent\[vllm\]'") as e:
        run(load_settings(make_recipe("grpo", tmp_path, **more)))
    assert socket.gethostname() in str(e.value)
