"""Whole runs whose memory runs out: they go on in smaller passes, or end saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import assert_same_run, stopped_copy

from plaudit import Run, load_settings, run
from plaudit.algorithms import Output
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.passes import UnitTooLong
from plaudit.rollout import native
from plaudit.rollout.decode import table
from plaudit.runtime.memory import OutOfMemory

pytestmark = pytest.mark.slow


def too_much(*given: Any, **named: Any) -> None:
    """What torch raises on the CPU, by an allocation that no machine has room for."""
    torch.empty(1 << 55, dtype=torch.uint8)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_run_says_and_remembers_it_and_a_resumed_one_ends_alike(
    method: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step alone memory does not hold the whole batch."""
    original, first, steps = Learner._loss, Learner.prepare, list[int]()

    def prepare(self: Learner, batch: Batch, step: int, rate: float) -> Any:
        steps.append(step)
        return first(self, batch, step, rate)

    def loss(self: Learner, output: Output, part: Batch) -> Any:
        if steps[-1] == 1 and len(part) > 2:
            too_much()
        return original(self, output, part)

    monkeypatch.setattr(Learner, "prepare", prepare)
    monkeypatch.setattr(Learner, "_loss", loss)
    more: dict[str, Any] = {"save": {"every": 1, "keep": 0}}
    if method == "grpo":
        more["algorithm"] = {"samples": 4}
    full = run(load_settings(make_recipe(method, tmp_path / "full", **more)))
    said = [record.get("micro_tokens/min") for record in full.metrics]
    assert said[0] is None
    assert said[1] == said[2] == said[3] is not None
    log = (full.folder / "log.txt").read_text()
    assert "health: Step 2: a pass of the size in the settings did not fit in memory" in log
    assert f"(micro_tokens={said[1]:.0f}). The step was repeated" in log
    for step in (1, 2, 3):
        folder = tmp_path / f"after{step}"
        name = stopped_copy(full, step, folder / "run")
        run(load_settings(make_recipe(method, folder, **more, resume=name)))
        assert_same_run(folder / "run", full.folder)


def test_a_row_that_does_not_fit_ends_a_run_saved(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Learner.prepare

    def prepare(self: Learner, batch: Batch, step: int, rate: float) -> Any:
        if step == 2:
            monkeypatch.setattr(Learner, "_loss", lambda self, output, part: too_much())
        return original(self, batch, step, rate)

    monkeypatch.setattr(Learner, "prepare", prepare)
    with pytest.raises(UnitTooLong, match=r"one unit of \d") as e:
        run(load_settings(make_recipe("sft", tmp_path)))
    assert e.value.status == 4
    assert "The newest whole checkpoint is epoch1epochstep2globalstep2: resume=latest" in str(e.value)
    assert len(Run(tmp_path / "run").metrics) == 2


LIMITED = """
import resource, sys
from pathlib import Path
import plaudit, plaudit.runs.start, plaudit.executors.local, transformers
from plaudit.learn.learner import Learner

def prepare(self, batch, step, rate, original=Learner.prepare):
    # From the first step on the process may take {room} MB more than it has.
    if step == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + {room} * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return original(self, batch, step, rate)

Learner.prepare = prepare
plaudit.run(plaudit.load_settings(sys.argv[1]))
"""


def test_a_limit_of_the_system_is_kept_to(make_recipe: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    """A pass over all of a batch takes more than the system gives; a run without the limit ends alike. Each row has a
    prompt of its own: those of one prompt would stay together in a pass."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"We saw {number}", "completion": " the film ." * 75} for number in range(96)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    more = {
        "data": {"train": str(data), "max_tokens": 512},
        "model": {"config": {"n_embd": 128, "n_head": 4, "n_positions": 512}},
        "train": {"steps": 2, "batch_size": 96},
        "learn": {"micro_tokens": 100_000},
    }
    whole = run(load_settings(make_recipe("sft", tmp_path / "whole", **more)))
    folder = tmp_path / "limited"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(make_recipe("sft", folder, **more)))
    # The limit is one of address space, of which a heap that keeps what is freed gives nothing back.
    variables = environment | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    command = [sys.executable, "-c", LIMITED.format(room=350), str(folder / "recipe.json")]
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    limited = Run(folder / "run")
    assert [m["step"] for m in limited.metrics] == [1, 2]
    assert limited.metrics[0]["micro_tokens/min"] < 100_000
    assert "Memory ran out in a pass over" in ended.stderr
    for mine, theirs in zip(limited.metrics, whole.metrics, strict=True):
        assert mine["gradient_norm/policy"] == pytest.approx(theirs["gradient_norm/policy"], rel=1e-5)


@pytest.mark.usefixtures("kernels")
def test_answers_are_the_same_from_fewer_slots(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache of eight slots does not fit; later on, the sampling of more than two answers."""
    more = {"algorithm": {"samples": 4}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    make_cache, sample, calls = table.make_cache, native.sample, list[int]()

    def cache(config: Any, slots: int, *given: Any, **named: Any) -> Any:
        return too_much() if slots > 4 else make_cache(config, slots, *given, **named)

    def drawn(logits: Any, *given: Any, **named: Any) -> Any:
        calls.append(1)
        return too_much() if len(calls) > 5 and len(logits) > 2 else sample(logits, *given, **named)

    monkeypatch.setattr(table, "make_cache", cache)
    monkeypatch.setattr(native, "sample", drawn)
    done = run(load_settings(make_recipe("grpo", tmp_path / "fewer", **more)))
    assert "8 answers were decoded. Now 4" in caplog.text
    assert "4 answers were decoded. Now 2" in caplog.text
    assert_same_run(done.folder, whole.folder)


def test_an_answer_that_does_not_fit_ends_the_run_saved(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def after_two(moment: Any) -> None:
        if moment.progress.step == 2:
            monkeypatch.setattr(native, "sample", too_much)

    with pytest.raises(OutOfMemory, match="one answer") as e:
        run(load_settings(make_recipe("grpo", tmp_path)), hooks=[after_two])
    assert "The newest whole checkpoint is epoch1epochstep2globalstep2: resume=latest" in str(e.value)
