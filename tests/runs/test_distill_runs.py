"""Whole runs of distillation: a small student comes nearer to a larger teacher, without any reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plaudit import Run, load_settings, run
from plaudit.models.load import load_model
from plaudit.monitor.sinks import read_jsonl

pytestmark = pytest.mark.slow


def distilled(make_recipe: Any, folder: Path, **more: Any) -> Run:
    rollout = {"prompts_per_step": 16, "max_tokens": 8}
    recipe = make_recipe("distill", folder, train={"steps": 30}, optimizer={"learning_rate": 0.01}, **more)
    return run(load_settings(recipe | {"rewards": []}, [f"rollout.{key}={value}" for key, value in rollout.items()]))


def test_a_student_comes_nearer_to_a_larger_teacher_without_a_reward(make_recipe: Any, tmp_path: Path) -> None:
    done = distilled(make_recipe, tmp_path, data={"validation": "20%"}, evaluate={"every": 29})
    teacher = load_model(load_settings(done.folder / "settings.yaml").reference.path or "")
    student = load_model(str(done.model))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (student, teacher)]
    assert sizes[1] > 2 * sizes[0] and teacher.vocab_size > student.vocab_size
    first, last = ([record[key] for key in ("kl/reference", "loss/policy")] for record in done.metrics[::29])
    assert last[0] < 0.85 * first[0] and last[1] < 0.85 * first[1]
    for record in done.metrics:
        assert record["reward/not_applicable"] == 1.0 and "reward/mean" not in record
        assert record["groups/dropped"] == 0.0 and "groups/equal" not in record
    assert "validation/length/mean" in done.metrics[28]
    samples = [one for one in read_jsonl(done.folder / "samples.jsonl") if one["kind"] == "train"]
    assert samples and all(one["reward"] is None and isinstance(one["advantage"], float) for one in samples)


def test_over_the_whole_vocabulary_it_comes_nearer_still(make_recipe: Any, tmp_path: Path) -> None:
    """From the same start, with the same seeds: no noise by which tokens were drawn."""
    sampled, whole = (
        distilled(make_recipe, tmp_path / str(on), algorithm={"whole_vocabulary": on}) for on in (False, True)
    )
    first, *_, last = whole.metrics
    assert first["kl/loss"] == first["loss/policy"] == pytest.approx(sampled.metrics[0]["loss/policy"], rel=0.3)
    assert last["kl/loss"] < 0.7 * first["kl/loss"]
    assert last["kl/reference"] < sampled.metrics[-1]["kl/reference"]
