"""Whole runs of distillation: a small student comes nearer to a larger teacher, without any reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plaudit import Run, load_settings, run
from plaudit.models.load import fresh_model, load_model, load_tokenizer, save_model
from plaudit.monitor.sinks import read_jsonl
from plaudit.runs.pipeline import merged
from plaudit.support.fields import SettingsError

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


def test_each_source_learns_from_its_own_teacher(make_recipe: Any, tmp_path: Path) -> None:
    """The first step of each run draws the same answers. An answer's advantage is the one that it has in a run with its
    own teacher alone, and on two ranks the one that it has on one."""
    base = make_recipe("distill", tmp_path)
    rows = Path(base["data"]["train"]).read_text(encoding="utf-8").splitlines(keepends=True)
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(sources):
        path.write_text("".join(rows[number:40:2]), encoding="utf-8")
    other = tmp_path / "other"
    model = fresh_model(base["model"]["config"] | {"initializer_range": 0.3}, vocab_size=450, seed=9)
    save_model(model, other, tokenizer=load_tokenizer(base["model"]["tokenizer"]))

    def told(name: str, **more: Any) -> dict[tuple[str, str], float]:
        made = {"train": {"steps": 1}, "data": {"train": [str(path) for path in sources]}, "rollout": {"max_tokens": 8}}
        recipe = make_recipe("distill", tmp_path / name, **merged(made, more)) | {"rewards": []}
        done = run(load_settings(recipe, ["rollout.prompts_per_step=12"]))
        samples = [one for one in read_jsonl(done.folder / "samples.jsonl") if one["kind"] == "train"]
        return {(one["prompt"], one["completion"]): one["advantage"] for one in samples}

    first, second = told("first"), told("second", reference={"path": str(other)})
    both = told("both", algorithm={"teachers": {str(sources[1]): str(other)}})
    assert both.keys() == first.keys() == second.keys() and len(both) == 12
    of_second = {json.loads(row)["prompt"] for row in rows[1:40:2]}
    expected = {key: (second if key[0] in of_second else first)[key] for key in both}
    assert both == pytest.approx(expected, abs=1e-5)
    assert both != pytest.approx(first, abs=1e-2) and both != pytest.approx(second, abs=1e-2)
    ranks = {"kind": "ray", "num_training_workers": 2}
    there = told("ranks", algorithm={"teachers": {str(sources[1]): str(other)}}, runtime=ranks)
    assert there == pytest.approx(both, abs=1e-5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"algorithm": {"teachers": {"nowhere.jsonl": "x"}}}, "a teacher of 'nowhere.jsonl', which is no source"),
        ({"algorithm": {"teachers": {"{train}": "x"}, "whole_vocabulary": True}}, "compares with one teacher"),
        ({"algorithm": {"teachers": {"{train}": "x"}}, "reference": {"ema": 0.1}}, "moves one reference"),
    ],
)
def test_teachers_that_nothing_would_ask_are_refused(more: Any, says: str, make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("distill", tmp_path)
    text = json.dumps(more).replace("{train}", recipe["data"]["train"])
    with pytest.raises(SettingsError, match=says):
        load_settings(merged(recipe, json.loads(text)))


def test_over_the_whole_vocabulary_it_comes_nearer_still(make_recipe: Any, tmp_path: Path) -> None:
    """From the same start, with the same seeds: no noise by which tokens were drawn."""
    sampled, whole = (
        distilled(make_recipe, tmp_path / str(on), algorithm={"whole_vocabulary": on}) for on in (False, True)
    )
    first, *_, last = whole.metrics
    assert first["kl/loss"] == first["loss/policy"] == pytest.approx(sampled.metrics[0]["loss/policy"], rel=0.3)
    assert last["kl/loss"] < 0.7 * first["kl/loss"]
    assert last["kl/reference"] < sampled.metrics[-1]["kl/reference"]
