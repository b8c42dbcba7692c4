"""What `plaudit check` finds: everything at once, each with its key, by the functions that a run refuses by."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from told import says

from plaudit.data.byte_pairs import train_tokenizer
from plaudit.learn.settings import ReferenceSettings
from plaudit.models.config import DecoderConfig
from plaudit.models.families import read_config
from plaudit.models.load import load_model, load_tokenizer, save_model
from plaudit.preflight import machine, needs
from plaudit.preflight.check import Preflight, preflights
from plaudit.settings.recipes import load_settings

SFT = {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}}


def found(recipe: dict[str, Any], *overrides: str) -> Preflight:
    (one,) = preflights(recipe, overrides, method=None)
    return one


def told(one: Preflight, *, problem: bool = True) -> list[tuple[str, str]]:
    return [(finding.key, finding.text) for finding in one.findings if finding.problem is problem]


@pytest.fixture
def recipe(demo: Any, tmp_path: Path) -> dict[str, Any]:
    model = {**SFT, "tokenizer": str(demo.tokenizer)}
    data = {"train": str(demo.sft), "max_tokens": 128, "max_prompt_tokens": 64}
    return {"method": "sft", "name": "one", "output": str(tmp_path / "runs"), "model": model, "data": data}


def test_a_sound_recipe_has_no_problem_and_three_rendered_rows(recipe: dict[str, Any]) -> None:
    one = found(recipe, "train.steps=3")
    assert (told(one), told(one, problem=False)) == ([], [])
    (preview,) = one.previews
    assert len(preview.rows) == 3
    for (row,) in preview.rows:
        assert [trained for _, trained in row] == [False, True]
        assert row[1][0].endswith("<|endoftext|>")
    written = json.loads(Path(recipe["data"]["train"]).read_text().splitlines()[0])
    assert preview.rows[0][0][0][0] == written["prompt"]
    assert not Path(recipe["output"]).exists(), "a check writes nothing"


def test_an_offline_run_of_few_steps_is_doubtful(recipe: dict[str, Any], tmp_path: Path) -> None:
    """270 of 300 rows, 32 a step: 9 steps a pass. 100 steps take 12 passes, and 30 steps are enough not to ask."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": " b"}\n' * 300)
    recipe["data"] |= {"train": str(rows), "validation": "10%"}
    (few,) = told(found(recipe), problem=False)
    assert few[0] == "train.epochs"
    assert says(few[1], "9 steps .. train.epochs=12")
    assert told(found(recipe, "train.epochs=3"), problem=False) != []
    for enough in ("train.epochs=4", "train.steps=9"):
        assert told(found(recipe, enough), problem=False) == []


def test_validation_rows_of_the_recipe_beside_other_train_rows_are_doubtful(recipe: dict[str, Any], demo: Any) -> None:
    recipe["data"]["validation"] = str(demo.sft)
    given = ("train.steps=3", f"data.train={demo.sft}")
    ((key, text),) = told(found(recipe, *given), problem=False)
    assert key == "data.validation"
    assert says(text, "still the recipe's .. data.validation=10%")
    assert told(found(recipe, *given, "data.validation=10%"), problem=False) == []
    assert told(found(recipe, "train.steps=3"), problem=False) == []


def test_everything_is_found_at_once_with_its_key(recipe: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": " b"}\n{"promt": "a"}\n')
    recipe["data"] |= {"train": [recipe["data"]["train"], str(rows), "absent.jsonl"], "overlong": "cut"}
    recipe |= {"optimizer": {"lr": 1, "warmup": 5}, "train": {"epochs": "many", "batch_sise": 4}, "threads": 4096}
    one = found(recipe, "train.step=3", "rollout.temperature=0.5")
    for key, part in (
        ("optimizer.lr", "here it is optimizer.learning_rate"),
        ("optimizer.warmup", "must be at least 0 and below 1"),
        ("train.epochs", "Value 'many'"),
        ("train.batch_sise", "did you mean train.batch_size?"),
        ("train.step", "did you mean train.steps?"),
        ("data.overlong", "must be one of truncate, drop, error"),
        ("", "there is no absent.jsonl"),
        ("data.train", "rows.jsonl:2: the columns promt are not a known dialect of demonstrations. Name its columns: "),
    ):
        assert [text for own, text in told(one) if own == key and part in text], (key, part, told(one))
    assert len(told(one)) == 8
    assert [key for key, _ in told(one, problem=False)] == ["rollout.temperature", "threads"]


def test_a_judge_is_no_policy(recipe: dict[str, Any], judge: Path, demo: Any) -> None:
    recipe["model"] = {"path": str(judge)}
    assert ("model.path", f"model.path={judge} is a reward or value model: give its policy") in told(found(recipe))
    recipe |= {"method": "reward", "data": recipe["data"] | {"train": str(demo.preferences)}}
    assert told(found(recipe)) == []


def test_a_teacher_of_another_tokenizer_is_found_and_one_of_the_same_counts_by_its_size(
    recipe: dict[str, Any], make_recipe: Any, tmp_path: Path
) -> None:
    recipe = make_recipe("distill", tmp_path / "runs", name="one")
    one = found(recipe)
    assert told(one) == []
    settings, config = one.settings, read_config({**one.config, "vocab_size": one.vocab_size})
    teacher = load_model(recipe["reference"]["path"])
    assert needs.memory(config, settings)["reference"] == 4 * sum(p.numel() for p in teacher.parameters())
    assert (
        needs.memory(config, replace(settings, reference=ReferenceSettings(path="owner/model")))["reference"]
        == 4 * config.parameters
    )
    rows = ({"prompt": f"{number}: ÄÖÜ", "completion": "äöü" * number} for number in range(9))
    train_tokenizer((row["prompt"] + row["completion"] for row in rows), tmp_path / "words", vocabulary=300)
    save_model(teacher, tmp_path / "other", tokenizer=load_tokenizer(str(tmp_path / "words")))
    recipe["reference"]["path"] = str(tmp_path / "other")
    ((key, text),) = told(found(recipe))
    assert key == "reference.path"
    assert says(text, "another tokenizer .. ids differ, the first is .. to the policy .. Give a model")


def test_what_does_not_fit_the_model_is_found(recipe: dict[str, Any]) -> None:
    recipe["model"]["config"] = {**SFT["config"], "n_positions": 16, "vocab_size": 20}
    problems = dict(told(found(recipe)))
    assert "the model has room for 16" in problems["data.max_tokens"]
    assert "vocab_size is 20" in problems["model.tokenizer"]
    longest = max(preview.longest for preview in found(recipe).previews)
    recipe["model"]["config"] = {**SFT["config"], "n_positions": longest}
    doubts = dict(told(found(recipe), problem=False))
    assert f"up to 128 tokens by these settings, and the model has room for {longest}" in doubts["data.max_tokens"]
    rule = {"kind": "length", "options": {"target": 3}}
    online = {"method": "grpo", "rewards": [rule], "rollout": {"max_tokens": 64}}
    assert "data.max_prompt_tokens" in dict(told(found(recipe | online), problem=False))


def test_paths_and_a_run_that_is_there_are_found(recipe: dict[str, Any]) -> None:
    (Path(recipe["output"]) / "one").mkdir(parents=True)
    (Path(recipe["output"]) / "one" / "metrics.jsonl").write_text("")
    recipe["model"] = {"path": f"{recipe['output']}/sft", "tokenizer": recipe["model"]["tokenizer"]}
    recipe["rewards"] = [{"kind": "judge", "path": "/nowhere/judge"}]
    recipe["method"] = "ppo"
    problems = dict(told(found(recipe)))
    assert "holds a run already" in problems["name"]
    assert f"there is no folder {recipe['output']}/sft" in problems["model.path"]
    assert "there is no folder /nowhere/judge" in problems["rewards.0.path"]
    assert found(recipe).previews, "rows are rendered with the tokenizer that is there"


def test_a_model_in_an_output_that_is_not_there_is_no_hub_id(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe["model"] = {"path": "out/sft", "tokenizer": recipe["model"]["tokenizer"]}
    assert "the run will fetch it" in dict(told(found(recipe | {"output": "other"}), problem=False))["model.path"]
    assert "there is no folder out/sft" in dict(told(found(recipe | {"output": "out"})))["model.path"]


@pytest.mark.slow
def test_reward_functions_are_called_before_a_run(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the references as answers, which a function should be able to read."""
    (tmp_path / "mine.py").write_text(
        "def right(completion, answer):\n    return float(completion == answer)\n"
        "def broken(completion):\n    return float(completion == answre)\n"
        "def some(completion):\n    return float(completion)\n"
        "def away(completion):\n    raise ConnectionError('nobody')\n"
        "def slow(completion):\n    import time\n    time.sleep(60)\n"
        "def tokens_too(completion, tokens):\n    print('hello')\n    return tokens[-1] / len(completion.split())\n"
        "def column(completions, level, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": "4"}\n{"prompt": "r", "answer": "four"}\n')
    recipe |= {"method": "grpo", "data": {"train": str(rows)}}

    def said(name: str, *, problem: bool) -> str:
        one = found(recipe | {"rewards": [f"{tmp_path}/mine.py:{name}"]})
        return "".join(text for key, text in told(one, problem=problem) if key == "rewards.0")

    assert says(said("broken", problem=True), "broken fails for 2 of 2 .. answre .. line 4")
    assert says(said("column", problem=True), "level")
    assert says(said("some", problem=False), "some fails for 1 of 2 prompts .. 'four'")
    assert says(said("away", problem=False), "nobody"), "a server may be up later"
    assert [said(name, problem=True) for name in ("right", "some", "away", "slow", "tokens_too")] == [""] * 5
    assert [said(name, problem=False) for name in ("right", "slow", "tokens_too")] == [""] * 3
    ((_, absent),) = told(found(recipe | {"rewards": [f"{tmp_path}/mine.py:absent"]}))
    assert says(absent, "rewards.0 .. absent"), "and the report goes on"
    assert "hello" not in capsys.readouterr().out
    rows.write_text('{"prompt": "q"}\n')
    assert says(said("right", problem=False), "right asks for `answer`, and no row has one")


def test_an_empty_file_is_told_once(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    recipe["data"] |= {"train": str(tmp_path / "rows.jsonl")}
    assert [text.count("has no rows") for _, text in told(found(recipe))] == [1]


def test_an_answer_that_its_reward_can_compare_nothing_with_is_found(recipe: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "#### 4"}, {"prompt": "r", "answer": "4/3"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe |= {"method": "grpo", "rewards": [{"kind": "gsm8k"}]}
    recipe["data"]["train"] = str(tmp_path / "rows.jsonl")
    assert "rows.jsonl:2: " in dict(told(found(recipe)))["data.train"]
    recipe["data"]["bad_rows"] = 1
    assert "data.train" not in dict(told(found(recipe)))


def test_a_name_of_the_hub_is_a_doubt_and_its_rows_are_not_fetched(recipe: dict[str, Any]) -> None:
    recipe["data"]["train"] = "owner/rows"
    one = found(recipe, "reference.path=owner/model", "method=dpo")
    keys = dict(told(one, problem=False))
    assert "the run will fetch it" in keys["reference.path"]
    assert "owner/rows is not a file here" in keys["data"]


def test_machine_disk_and_cluster_are_asked(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_there", lambda *, gpu: 1e5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 10})())
    problems = told(found(recipe, "device=cuda:9"))
    assert [key for key, _ in problems] == ["model", "save.keep", "device"]
    for (_, text), part in zip(problems, ("memory: models", "disk: checkpoints", "device=cuda:9"), strict=True):
        assert text.startswith(part)
    monkeypatch.undo()
    pytest.importorskip("ray")
    closed = told(found(recipe, "runtime=ray", "runtime.address=127.0.0.1:9"))
    assert [key for key, _ in closed] == ["runtime.address"]
    assert "cannot connect to a cluster" in closed[0][1]


def test_reward_servers_are_asked(recipe: dict[str, Any], demo: Any) -> None:
    rewards = [{"kind": "http", "urls": ["http://127.0.0.1:9"]}]
    recipe["data"] |= {"train": str(demo.prompts)}
    problems = dict(told(found(recipe | {"method": "grpo", "rewards": rewards})))
    assert "no server of reward 'http' " in problems["rewards.0.urls"]


def test_every_stage_of_a_pipeline_is_checked_with_the_models_of_those_before(
    recipe: dict[str, Any], demo: Any
) -> None:
    pipeline = {
        "output": recipe["output"],
        "shared": {"data": {"max_tokens": 128, "max_prompt_tokens": 64}},
        "stages": {
            "sft": {"model": recipe["model"], "data": {"train": str(demo.sft)}, "optimizer": {"lr": 1}},
            "reward": {"data": {"train": str(demo.preferences)}},
            "rlhf": {"method": "ppo", "rewards": [{"kind": "judge"}], "data": {"train": "absent.jsonl"}},
        },
    }
    sft, reward, rlhf = preflights(pipeline, (), method=None)
    assert [one.stage for one in (sft, reward, rlhf)] == ["sft", "reward", "rlhf"]
    assert [key for key, _ in told(sft)] == ["optimizer.lr"]
    assert told(reward) == []
    assert len(reward.previews[0].rows[0]) == 2, "chosen and rejected"
    assert [text for _, text in told(rlhf)] == ["data: there is no absent.jsonl"]
    assert rlhf.needs["parameters"] == sft.needs["parameters"]


def test_memory_and_disk_by_hand(recipe: dict[str, Any]) -> None:
    """4 bytes a weight in float32, 12 more where it is trained; checkpoints hold weights and moments."""
    config = read_config({**SFT["config"], "vocab_size": 100})
    weights = 100 * 32 + 128 * 32 + 2 * (4 * 32 * 32 + 4 * 32 + 2 * 4 * 32 * 32 + 5 * 32 + 4 * 32) + 2 * 32
    assert config.parameters == weights
    settings = load_settings(recipe)
    parts = needs.memory(config, settings)
    assert parts == {"trained": 16.0 * weights, "activations": 8192.0 * 2 * 4 * (20 * 32 + 3 * 128)}
    assert needs.disk(config, settings) == 12 * weights * 3
    half = load_settings(recipe, ["learn.precision=bfloat16", "save.keep=1"])
    assert needs.memory(config, half)["trained"] == 18.0 * weights
    assert needs.disk(config, half) == 14 * weights * 2


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_positions": 64, "tie_word_embeddings": False},
        {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        {
            "model_type": "qwen2",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ],
)
def test_parameters_are_counted_as_they_are_made(keys: dict[str, Any]) -> None:
    from plaudit.models.decoder import Decoder

    layers = {"n_layer": 2} if keys["model_type"] == "gpt2" else {"num_hidden_layers": 2, "intermediate_size": 48}
    config: DecoderConfig = read_config(keys | layers | {"vocab_size": 64})
    assert config.parameters == sum(
        p.numel() for p in Decoder.empty(config, head="lm", dtype=torch.float32, device="meta").parameters()
    )
