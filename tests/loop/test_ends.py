"""Runs end saved, and nothing that is not finite is published or saved: each cause, in each phase, by each method."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import assert_same_run, timeless
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from plaudit import Run, load_settings, run
from plaudit.executors.local import LocalExecutor
from plaudit.learn.learner import Learner
from plaudit.learn.optim import Optimizer
from plaudit.loop.checkpoint import Store
from plaudit.loop.finite import NonFiniteError
from plaudit.loop.hooks import Evaluate, RecordMetrics
from plaudit.loop.outage import RewardFailureError
from plaudit.rollout.native import NativeEngine
from plaudit.runtime.worker import NoWorkersError, TooManyFailures

pytestmark = pytest.mark.slow

OFFLINE = ("sft", "reward", "dpo", "kto", "orpo", "simpo")
ONLINE = ("ppo", "grpo", "rloo", "remax", "reinforce", "distill", "online-dpo", "best-of-k")
SEVERAL = {"samples": 2}
ALGORITHM = {"rloo": SEVERAL, "grpo": SEVERAL, "online-dpo": SEVERAL, "best-of-k": SEVERAL}


def recipe_of(make_recipe: Any, method: str, folder: Path, **more: Any) -> dict[str, Any]:
    algorithm = {"algorithm": ALGORITHM[method]} if method in ALGORITHM else {}
    return make_recipe(method, folder, **algorithm | more)  # type: ignore[no-any-return]


def names(folder: Path) -> list[int]:
    """Steps of the checkpoints that verify."""
    store = Store(folder / "checkpoints")
    for name in store.names():
        store.verify(name)
    return [int(name.rpartition("step")[2]) for name in store.names()]


def assert_finite(folder: Path) -> None:
    """Every number of every checkpoint."""
    files = list((folder / "checkpoints").rglob("*.safetensors"))
    assert files
    for file in files:
        for name, tensor in load_file(file).items():
            assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), (file, name)
    for file in (folder / "checkpoints/state").rglob("values.json"):
        assert all(map(math.isfinite, json.loads(file.read_text())["memory"].values()))


# --- values that are not finite


def spoilt(monkeypatch: pytest.MonkeyPatch, when: Callable[[Optimizer], bool], kind: str = "weights") -> None:
    """A number is NaN after an optimizer step, as by a flipped bit."""
    original = Optimizer.step

    def step(self: Optimizer) -> None:
        original(self)
        if when(self):
            parameter, moments = list(self.parameters.values())[1], list(self.moments.values())[1]
            with torch.no_grad():
                (parameter if kind == "weights" else moments["exp_avg"]).view(-1)[3] = math.nan

    monkeypatch.setattr(Optimizer, "step", step)


def taken(optimizer: Optimizer) -> int:
    return int(next(iter(optimizer.moments.values()))["step"])


@pytest.mark.parametrize("method", ["sft", "ppo"])
@pytest.mark.parametrize("kind", ["weights", "moments"])
def test_a_nan_is_never_saved_and_the_run_goes_back_once_with_half_the_rate(
    method: str, kind: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was saved three times, and pruned what was sound."""
    per_step = 3 if method == "ppo" else 1
    once: list[int] = []

    def third(optimizer: Optimizer) -> bool:
        return taken(optimizer) == 3 * per_step and not once and once.append(1) is None

    spoilt(monkeypatch, third, kind)
    more = {"save": {"every": 1, "keep": 2}, "train": {"steps": 5}, "optimizer": {"schedule": "constant"}}
    done = run(load_settings(recipe_of(make_recipe, method, tmp_path, **more)))
    assert [m["step"] for m in done.metrics] == [1, 2, 3, 4, 5]
    assert [m["learning_rate/policy"] for m in done.metrics] == pytest.approx([0.003, 0.003, 0.0015, 0.0015, 0.0015])
    assert [m.get("rollbacks") for m in done.metrics] == [None, None, 1, 1, 1]
    assert names(done.folder) == [4, 5]
    assert_finite(done.folder)
    log = (done.folder / "log.txt").read_text()
    what = "weights are not finite" if kind == "weights" else "weights or moments are not finite"
    assert f"{what} after step 3" in log
    assert "continuing from epoch1epochstep2globalstep2 with learning rates times 0.5" in log


def test_the_second_time_it_ends_with_what_is_sound(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, lambda optimizer: taken(optimizer) >= 3)
    with pytest.raises(NonFiniteError) as e:
        run(load_settings(recipe_of(make_recipe, "sft", tmp_path, save={"every": 1, "keep": 1})))
    newest = "epoch1epochstep2globalstep2"
    assert str(e.value) == (
        "weights are not finite after step 3, so they were neither published nor saved. Lower the learning rate. "
        f"The newest checkpoint before that is {newest}: resume={newest} continues from there"
    )
    assert e.value.status == 6
    assert names(tmp_path / "run") == [2]
    assert_finite(tmp_path / "run")
    monkeypatch.undo()
    done = run(load_settings(recipe_of(make_recipe, "sft", tmp_path, resume=newest)))
    assert [m["step"] for m in done.metrics] == [1, 2, 3, 4]


def test_without_a_checkpoint_it_goes_back_to_the_start(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once: list[int] = []
    spoilt(monkeypatch, lambda optimizer: taken(optimizer) == 2 and not once and once.append(1) is None)
    done = run(load_settings(recipe_of(make_recipe, "grpo", tmp_path / "spoilt")))
    assert "continuing from the start with learning rates times 0.5" in (done.folder / "log.txt").read_text()
    assert [m["step"] for m in done.metrics] == [1, 2, 3, 4]
    slow = run(load_settings(recipe_of(make_recipe, "grpo", tmp_path / "slow", optimizer={"learning_rate": 0.0015})))
    without = [{k: v for k, v in m.items() if k != "rollbacks"} for m in timeless(done.folder / "metrics.jsonl")]
    assert without == timeless(slow.folder / "metrics.jsonl")


def skipping(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Gradients that are not finite in these steps (0-based), until the rate is lowered."""
    original = Learner.prepare

    def prepare(self: Learner, batch: Any, step: int, rate: float) -> Any:
        stats = original(self, batch, step, rate)
        return stats | {"skipped": 1.0} if step in steps and rate == 1.0 else stats

    monkeypatch.setattr(Learner, "prepare", prepare)


ROLLS_BACK = {"save": {"every": 1, "keep": 2}, "train": {"steps": 8}}


@pytest.mark.parametrize("method", ["sft", "ppo", "reward"])
def test_three_skipped_steps_go_back_before_the_weights_that_caused_them(
    method: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3's weights may have made steps 4 to 6 fail; step 2's have been learned from. A resumed run ends as this."""
    skipping(monkeypatch, {3, 4, 5})
    full = run(load_settings(recipe_of(make_recipe, method, tmp_path / "full", **ROLLS_BACK)))
    assert [m["skipped"] for m in full.metrics] == [0] * 8
    assert [m.get("rollbacks") for m in full.metrics] == [None, None, *[1] * 6]
    log = (full.folder / "log.txt").read_text()
    assert "in 3 steps in a row (up to step 6)" in log
    assert "continuing from epoch1epochstep2globalstep2 with" in log
    again = run(
        load_settings(
            recipe_of(make_recipe, method, tmp_path / "kept", **ROLLS_BACK | {"save": {"every": 1, "keep": 0}})
        )
    )
    assert_same_run(again.folder, full.folder)
    for step in (2, 5):  # killed just after it went back, or later
        folder = tmp_path / f"after{step}"
        steps = {int(n.rpartition("step")[2]): n for n in Store(again.folder / "checkpoints").names()}
        name = copied_until(again.folder, folder / "run", steps, step)
        run(load_settings(recipe_of(make_recipe, method, folder, **ROLLS_BACK, resume=name)))
        assert_same_run(folder / "run", full.folder)


def copied_until(source: Path, target: Path, steps: dict[int, str], step: int) -> str:
    shutil.copytree(source, target)
    for later, name in steps.items():
        if later > step:
            for path in (target / "checkpoints").glob(f"*/{name}"):
                shutil.rmtree(path)
    return steps[step]


def test_skipped_steps_end_the_run_saved_where_it_may_not_go_back(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipping(monkeypatch, {2, 3, 4})
    more = {"save": {"every": 2, "keep": 1}, "learn": {"rollback_rate": None}, "train": {"steps": 8}}
    with pytest.raises(NonFiniteError, match=r"3 steps .*step 5\).* before 2"):
        run(load_settings(recipe_of(make_recipe, "sft", tmp_path, **more)))
    assert names(tmp_path / "run") == [2, 4, 5]
    assert [m["skipped"] for m in Run(tmp_path / "run").metrics] == [0, 0, 1, 1, 1]
    assert_finite(tmp_path / "run")


def test_weights_that_were_not_finite_to_begin_with_are_refused(make_recipe: Any, tmp_path: Path) -> None:
    start = run(load_settings(recipe_of(make_recipe, "sft", tmp_path / "start"))).model
    tensors = load_file(start / "model.safetensors")
    tensors[min(tensors)].view(-1)[0] = math.inf
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    recipe = recipe_of(make_recipe, "sft", tmp_path / "next") | {"model": {"path": str(start)}}
    with pytest.raises(ValueError, match="not finite"):
        run(load_settings(recipe))


# --- every controlled end saves


class Fault:
    """Raises `error` when a function is called for the `number`-th time; before that it does what it does."""

    def __init__(self, error: BaseException, number: int):
        self.error, self.number, self.count = error, number, 0

    def hit(self) -> None:
        self.count += 1
        if self.count == self.number:
            raise self.error


class Later(Fault):
    """Lets another fault hit soon after its second call."""

    def __init__(self, other: Fault):
        self.other, self.count = other, 0

    def hit(self) -> None:
        self.count += 1
        if self.count == 2:
            self.other.number = self.other.count + 3


def around(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Fault) -> None:
    original = getattr(owner, name)
    if inspect.iscoroutinefunction(original):

        async def waits(self: Any, *given: Any, **named: Any) -> Any:
            fault.hit()
            return await original(self, *given, **named)

        monkeypatch.setattr(owner, name, waits)
    else:

        @functools.wraps(original)  # a call finds the method by its name
        def acts(self: Any, *given: Any, **named: Any) -> Any:
            fault.hit()
            return original(self, *given, **named)

        monkeypatch.setattr(owner, name, acts)


PHASES: dict[str, tuple[type, str, int, int]] = {
    # what fails, at which of its calls (that is in step 3), and the step that is saved
    "rollout": (NativeEngine, "generate", 7, 2),  # three prompts a step
    "update": (Learner, "prepare", 3, 2),
    "publish": (LocalExecutor, "publish", 4, 3),  # once before the first step
    "evaluate": (Evaluate, "__call__", 3, 3),
    "record": (RecordMetrics, "__call__", 3, 3),
}
CAUSES: list[Exception] = [
    RewardFailureError("80% of the rewards of this step failed"),
    MemoryError("an allocation failed"),
    NoWorkersError("no rollout worker became ready"),
    TooManyFailures("4 workers were lost"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    ZeroDivisionError("in a reward of the user's"),
]


@pytest.mark.parametrize("method", [*OFFLINE, *ONLINE])
def test_each_cause_in_each_phase_leaves_the_last_finished_step(
    method: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minibatches = 3 if method == "ppo" else 1
    more = {"data": {"validation": "20%"}, "evaluate": {"every": 100}}
    full = run(load_settings(recipe_of(make_recipe, method, tmp_path / "full", **more)))
    causes = iter(CAUSES * 3)
    for phase, (owner, name, number, expected) in PHASES.items():
        if phase == "rollout" and method in OFFLINE:
            continue
        if phase == "update" and method == "ppo":
            number = 2 * 2 * minibatches + 1  # policy and critic
        error, folder = next(causes), tmp_path / phase
        with monkeypatch.context() as patch:
            around(patch, owner, name, Fault(error, number))
            with pytest.raises(type(error)) as e:
                run(load_settings(recipe_of(make_recipe, method, folder, **more)))
        assert names(folder / "run") == [expected], phase
        assert_finite(folder / "run")
        (newest,) = Store(folder / "run/checkpoints").names()
        assert f"The newest whole checkpoint is {newest}: resume=latest continues from there" in " ".join(
            e.value.__notes__
        )
        if phase not in ("evaluate", "record"):  # of which a figure, or a line, is gone
            run(load_settings(recipe_of(make_recipe, method, folder, **more, resume="latest")))
            assert_same_run(folder / "run", full.folder)


def test_a_step_that_fails_after_some_of_its_updates_counts_with_these(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around(monkeypatch, Learner, "prepare", Fault(MemoryError("too much"), 2 * (3 + 1) + 2))  # the critic's
    more = {"reference": {"ema": 0.1}}
    with pytest.raises(MemoryError):
        run(load_settings(recipe_of(make_recipe, "ppo", tmp_path, **more)))
    done = Run(tmp_path / "run")
    assert [m["updates"] for m in done.metrics] == [3, 1]
    assert names(done.folder) == [2]
    assert_finite(done.folder)
    again = run(load_settings(recipe_of(make_recipe, "ppo", tmp_path, **more, resume="latest")))
    assert [m["updates"] for m in again.metrics] == [3, 1, 3, 3]


class PanicException(BaseException):
    """As Rust's, which is no Exception."""


def test_a_panic_of_the_tokenizer_ends_the_run_saved(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"train": {"steps": 4}, "log": {"samples_megabytes": 0}}
    full = run(load_settings(recipe_of(make_recipe, "grpo", tmp_path / "full", **more)))
    with monkeypatch.context() as patch:
        fault = Fault(PanicException("index out of bounds"), 10**9)
        around(patch, TokenizersBackend, "decode", fault)
        around(patch, Optimizer, "step", Later(fault))
        with pytest.raises(ValueError, match="the tokenizer fails: index") as e:
            run(load_settings(recipe_of(make_recipe, "grpo", tmp_path / "hit", **more)))
    (newest,) = names(tmp_path / "hit" / "run")
    assert 0 < newest < 4
    assert "resume=latest continues from there" in " ".join(e.value.__notes__)
    run(load_settings(recipe_of(make_recipe, "grpo", tmp_path / "hit", **more, resume="latest")))
    assert_same_run(tmp_path / "hit" / "run", full.folder)


def test_an_update_that_fails_halfway_is_not_saved(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has moved and its critic has not: only what was committed before is sound."""
    around(monkeypatch, Optimizer, "step", Fault(MemoryError("too much"), 2 * 2 * 3 + 2))
    with pytest.raises(MemoryError) as e:
        run(load_settings(recipe_of(make_recipe, "ppo", tmp_path, save={"every": 1})))
    assert names(tmp_path / "run") == [1, 2]
    assert "The newest whole checkpoint is epoch1epochstep2globalstep2: resume=latest" in " ".join(e.value.__notes__)


def test_storage_that_is_full_as_the_run_ends_leaves_the_checkpoint_before(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around(monkeypatch, Learner, "prepare", Fault(RewardFailureError("the server is gone"), 3))
    original = Store.write

    def write(self: Store, name: str, *given: Any, **named: Any) -> None:
        if name.endswith("globalstep2"):
            with self.writing(self.folder):
                raise OSError(errno.ENOSPC, "No space left on device")
        original(self, name, *given, **named)

    monkeypatch.setattr(Store, "write", write)
    with pytest.raises(RewardFailureError) as e:
        run(
            load_settings(
                recipe_of(make_recipe, "sft", tmp_path, save={"every": 1, "keep": 2}) | {"save": {"every": "9 epochs"}}
            )
        )
    assert "Step 2 could not be saved: " in str(e.value)
    assert "No space left on device" in str(e.value)
    assert "has no whole checkpoint" in str(e.value)
