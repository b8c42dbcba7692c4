"""Runs from Python: models, tokenizers, rows and functions instead of files; the same again, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from plaudit import Run, load_settings, run
from plaudit.rewards.rules import RULES
from plaudit.rewards.settings import RewardSettings
from plaudit.runs.given import FOLDER
from plaudit.settings.tree import Settings, SettingsError
from plaudit.tasks.demo import DemoFiles

ROWS = [{"prompt": f"The plot of number {n} is", "completion": f" good, {n} times ."} for n in range(12)]


def length(completion: str) -> float:
    return len(completion) / 100


def gold_and_length(completion: str) -> float:
    return len(completion) / 100 + 1


@pytest.fixture(scope="module")
def tokenizer(demo: DemoFiles) -> Any:
    return AutoTokenizer.from_pretrained(demo.tokenizer)


@pytest.fixture
def model(tokenizer: Any) -> GPT2LMHeadModel:
    torch.manual_seed(7)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, vocab_size=len(tokenizer), **ids)
    )


def recipe(tmp_path: Path, method: str = "sft", **more: Any) -> dict[str, Any]:
    small: dict[str, Any] = {"method": method, "name": "run", "output": str(tmp_path), "threads": 1}
    small |= {"train": {"steps": 2, "batch_size": 4}, "log": {"quiet": True}}
    small |= {"optimizer": {"learning_rate": 0.01, "schedule": "constant"}}
    if method == "grpo":
        small["rollout"] = {"prompts_per_step": 2, "max_tokens": 6, "slots": 8}
        small["algorithm"] = {"samples": 2}
    return small | more


def weights(done: Run) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(done.checkpoint()).state_dict()


def same(one: Run, other: Run) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_objects_train_as_files_do(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = run(recipe(tmp_path / "objects"), model=model, tokenizer=tokenizer, data=ROWS, validation=ROWS[:2])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    named = {"model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "rows.jsonl")}}
    assert same(done, run(load_settings(recipe(tmp_path / "files", **named))))
    assert not same(done, run(recipe(tmp_path / "other"), model=model, tokenizer=tokenizer, data=ROWS[:6]))


def test_a_dataset_and_typed_settings_do_too(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    done = run(recipe(tmp_path / "list"), model=model, tokenizer=tokenizer, data=ROWS)
    settings = load_settings(recipe(tmp_path / "set", model={"path": "m"}, data={"train": "owner/name"}))
    assert isinstance(settings, Settings)
    assert same(done, run(settings, model=model, tokenizer=tokenizer, data=Dataset.from_list(ROWS)))


def test_functions_are_rewards_by_name_and_weight(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    prompts = [{"prompt": row["prompt"]} for row in ROWS]
    rewards = [length, (functools.partial(scaled, by=3), 0.5), RewardSettings(kind="matches", options={"pattern": "e"})]
    before = dict(RULES)
    done = run(recipe(tmp_path, "grpo"), model=model, tokenizer=tokenizer, data=prompts, rewards=rewards)
    assert before == RULES, "they are no rules after the run"
    for record in done.samples:
        own, parts = len(record["completion"]), record["parts"]
        assert set(parts) == {"length", "scaled", "matches"}
        assert (parts["length"], parts["scaled"]) == pytest.approx((own / 100, 3 * own))
        assert record["score"] == pytest.approx(parts["length"] + 0.5 * parts["scaled"] + parts["matches"])


def test_a_tracker_gets_figures_and_answers(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = recipe(tmp_path, "grpo", log={"quiet": True, "trackers": {"tensorboard": "tensorboard"}})
    done = run(given, model=model, tokenizer=tokenizer, data=[{"prompt": "one"}], rewards=[length])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("reward/mean")] == [1, 2]
    told = events.Tensors("answers/text_summary")[0].tensor_proto.string_val[0].decode()
    first = [one for one in done.samples if one["step"] == 1 and one["group"] == 0]
    assert told.startswith("prompt: one")
    assert told.count("reward ") == len(first) == 2


def scaled(completion: str, by: int) -> float:
    return by * len(completion)


@pytest.mark.slow
def test_a_resume_with_the_same_objects_is_exact_and_with_others_refused(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    prompts = [{"prompt": row["prompt"]} for row in ROWS]
    given: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "data": prompts, "rewards": [length]}
    whole = run(recipe(tmp_path / "whole", "grpo", train={"steps": 4}), **given)
    run(recipe(tmp_path / "twice", "grpo"), **given)
    more = recipe(tmp_path / "twice", "grpo", train={"steps": 4}, resume="latest")
    others = [
        ({"data": prompts[:8]}, "data has other rows"),
        ({"rewards": [gold_and_length]}, "the reward gold_and_length differs"),
        ({"rewards": [lambda completion: len(completion) / 100]}, "the reward length is missing"),
        ({"rewards": [AnObject()]}, "is not a plain function"),
    ]
    for changes, told in others:
        with pytest.raises(SettingsError, match=told):
            run(more, **{**given, **changes})
    weight = model.transformer.wte.weight
    before = weight.data.clone()
    weight.data[0, 0] += 1
    with pytest.raises(SettingsError, match=r"model\.path: "):
        run(more, **given)
    weight.data.copy_(before)
    assert same(whole, run(more, **given))


class AnObject:
    def __call__(self, completion: str) -> float:
        return 1.0


def test_what_cannot_be_stored_is_refused_at_once(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    class Own(GPT2LMHeadModel):
        pass

    good: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "data": ROWS}
    ray = {"runtime": "ray"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"model": torch.nn.Linear(2, 2)}, {}, "model is a Linear"),
        ({"tokenizer": None}, {}, "give tokenizer="),
        ({"tokenizer": 3}, {}, "tokenizer is a int"),
        ({"data": DatasetDict(train=Dataset.from_list(ROWS))}, {}, "data .train. is splits train"),
        ({"data": iter(ROWS)}, {}, "give a list of dicts"),
        ({"data": ["a"]}, {}, "row 0 is a str"),
        ({"data": [{"prompt": "a", "completion": {1, 2}}]}, {}, "row 0 .*JSON"),
        ({"rewards": [3]}, {}, "rewards has 3"),
        ({"rewards": [length, length]}, {}, "'length' twice"),
        ({"model": Own(model.config)}, ray, "Own .* which processes on Ray cannot load"),
    ]
    for changes, more, told in cases:
        with pytest.raises(SettingsError, match=told):
            run(recipe(tmp_path, **more), **{**good, **changes})
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(f"{FOLDER}/.part-*"))


def test_a_reward_that_fails_shows_its_file_and_line(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        return {"a": 1.0}[completion]

    line = broken.__code__.co_firstlineno + 1
    prompts = [{"prompt": row["prompt"]} for row in ROWS]
    given = recipe(tmp_path, "grpo", train={"steps": 1})
    given["rollout"]["reward_patience"] = 0
    with pytest.raises(Exception, match=rf"KeyError.*\(test_given\.py, line {line}\)"):
        run(given, model=model, tokenizer=tokenizer, data=prompts, rewards=[broken])


def test_a_run_is_opened_by_its_name_and_gives_a_frame(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    done = run(recipe(tmp_path), model=model, tokenizer=tokenizer, data=ROWS)
    opened = Run(str(tmp_path / "run"))
    assert opened == done
    frame = opened.frame
    assert list(frame.index) == [1, 2]
    assert list(frame["loss/policy"]) == [record["loss/policy"] for record in done.metrics]
