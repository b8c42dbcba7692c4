"""Whole runs on a device that is not the CPU's: nothing mixes the two, and every method comes to the same figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Away, elsewhere, moved, unseen, waits
from tiny import GPT2
from torch.utils import _foreach_utils

from plaudit import Run, load_settings, run
from plaudit.executors.local import LocalExecutor
from plaudit.models.load import fresh_model, load_model
from plaudit.rollout.engine import generate_all
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.sampler import invert
from plaudit.runs.pipeline import merged
from plaudit.types import Sampling

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
LORA = {"model": {"lora": {"rank": 2}}, "algorithm": {"kl_in_loss": 0.1}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "reward": ("reward", {"runtime": {"offload": ["optimizer"]}}),
    "dpo": ("dpo", {"evaluate": {"every": 2}, "learn": {"micro_tokens": 200, "activation_checkpointing": True}}),
    "ppo": ("ppo", {"algorithm": {"minibatches": 2}, "evaluate": {"every": 2}}),
    "grpo": ("grpo", {"algorithm": {"kl_in_loss": 0.1}, "reference": {"ema": 0.1}}),
    "half": (
        "grpo",
        {
            "learn": {"precision": "bfloat16"},
            "algorithm": {"kl_in_loss": 0.1},
            "runtime": {"offload": ["optimizer"]},
        },
    ),
    "lora": ("grpo", LORA),
    "cut": ("online-dpo", {"rollout": {"top_p": 0.8, "min_tokens": 2, "stop": ["e"], "slots": 4, "max_lag": 1}}),
}


class Words:
    """A tokenizer of which no token ends a text, and none makes an e."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "a" * len(token_ids)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[LocalExecutor]:
    """Runs compute elsewhere; their executors."""
    executors: list[LocalExecutor] = []
    begin = LocalExecutor.__init__
    listed = _foreach_utils._get_foreach_kernels_supported_devices

    def made(make: Callable[..., Any]) -> Callable[..., Any]:
        def on_the_cpu(*given: Any, **named: Any) -> Any:
            with unseen():
                return moved(make(*given, **named | {"device": "cpu"}))

        return on_the_cpu

    def begun(executor: LocalExecutor, *given: Any) -> None:
        begin(executor, *given)
        executors.append(executor)

    monkeypatch.setattr(LocalExecutor, "__init__", begun)
    monkeypatch.setattr("plaudit.executors.trainer.device_of", lambda name: "meta")
    monkeypatch.setattr("plaudit.executors.processes.device_of", lambda name: "meta")
    monkeypatch.setattr("plaudit.executors.trainer.load_model", made(load_model))
    monkeypatch.setattr("plaudit.executors.initial.load_model", made(load_model))
    monkeypatch.setattr("plaudit.executors.initial.fresh_model", made(fresh_model))
    monkeypatch.setattr("plaudit.evaluate.judge.load_model", made(load_model))
    monkeypatch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: [*listed(), "meta"])
    return executors


Do = Callable[..., Run]


@pytest.fixture
def do(make_recipe: Recipe, judge: Path, tmp_path: Path) -> Do:
    """do(case, where, **sections): a run of two steps."""

    def done(case: str, where: str, **more: Any) -> Run:
        method, sections = CASES[case]
        if method == "ppo":
            sections = sections | {"rewards": [{"kind": "judge", "path": str(judge), **more.pop("judge", {})}]}
        recipe = merged(make_recipe(method, tmp_path / where, **sections, train={"steps": 2}), more)
        return run(load_settings(recipe))

    return done


@pytest.mark.parametrize("case", CASES)
def test_a_run_elsewhere(case: str, apart: list[LocalExecutor], do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere():
        there = do(case, "there")
    assert all(isinstance(p, Away) for model in apart[0].trainer.models.values() for p in model.parameters())
    monkeypatch.undo()
    here = do(case, "here")
    for mine, theirs in zip(there.metrics, here.metrics, strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("loss/policy", "loss/judge", "gradient_norm/policy"):
            if key in mine and case != "half":
                assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4)
    if case != "half":
        assert [s["completion"] for s in there.samples] == [s["completion"] for s in here.samples]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: whole runs on one")
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_cuda(case: str, do: Do, caplog: pytest.LogCaptureFixture) -> None:
    """With everything that only a GPU has. Answers part where a random number falls between two roundings, so the first
    step is compared alone, and loosely."""
    more: dict[str, Any] = {"device": "cuda"}
    if case in ("grpo", "half"):
        more["runtime"] = {"offload": ["reference", "optimizer"]}
    if case in ("grpo", "lora"):
        more["runtime"] = more.get("runtime", {}) | {"placement": {"generate": {"shares": "train"}}}
    if case == "ppo":
        more["judge"] = {"offload": True}
    there, here = do(case, "there", **more), do(case, "here", device="cpu")
    assert not [message for message in caplog.messages if "CUDA graphs" in message]
    mine, theirs = there.metrics[0], here.metrics[0]
    assert mine.keys() == theirs.keys()
    for key in ("loss/policy", "loss/judge", "gradient_norm/policy"):
        if key in mine:
            assert mine[key] == pytest.approx(theirs[key], rel=0.2, abs=0.05)
    if case in ("grpo", "lora", "ppo"):
        assert mine["kl/sampler"] == pytest.approx(0.0, abs=1e-6)
    if case == "half":
        assert mine["kl/sampler"] == pytest.approx(0.0, abs=1e-2)


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_a_step_of_decoding_waits_once(stop: tuple[str, ...]) -> None:
    """For the newest tokens, and who ended: a longer answer takes as many waits more as tokens."""
    model = moved(fresh_model(GPT2, vocab_size=50))
    found = []
    for length in (10, 25):
        waits.clear()
        with elsewhere():
            engine = NativeEngine(model, Words(), slots=8, ends=())  # type: ignore[arg-type]
            plan = [Sampling(seed=seed, max_tokens=length, stop=stop, temperature=0.5) for seed in range(3)]
            generate_all(engine, [[1, 2, 3], [4, 5]], plan)
        found.append(len(waits))
    assert found[1] - found[0] == 15


def test_nothing_is_drawn_that_has_no_mass_where_sums_move_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators add in parallel, so that a sum may differ where nothing was added; here by more than a bit."""
    added = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: Away(added(x.inner, dim) + torch.tensor([0, 0.1, 0, 0])))
    weights, uniform = torch.tensor([[1.0, 0.0, 3.0, 0.0]] * 3), torch.tensor([0.2, 0.26, 0.3])
    assert invert(Away(weights), Away(uniform)).tolist() == [0, 2, 2]


def test_a_mix_is_refused() -> None:
    """As on a GPU: by everything but copies, numbers without dimensions, and indices."""
    with elsewhere():
        there, here = torch.ones(3, device="meta"), torch.ones(3)
        with pytest.raises(AssertionError, match=r"aten\.add\.Tensor .*two devices"):
            there + here
        assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3
        assert there[torch.tensor([0, 2])].tolist() == [1.0] * 2
        assert isinstance(here.to("meta") + there, Away)
        assert not isinstance(there.cpu(), Away)
        there.copy_(torch.zeros(3))
        assert float(there.sum()) == 0.0
