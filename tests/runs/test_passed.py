"""Runs from Python: models, tokenizers, rows and functions instead of files; the same again, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from plaudit import Run, load_settings, run
from plaudit.monitor.sinks import read_jsonl
from plaudit.rewards.rules import RULES
from plaudit.rewards.settings import RewardSettings
from plaudit.runs import rows as rows_module
from plaudit.runs.passed import FOLDER
from plaudit.runs.rows import stored_rows
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


def test_paths_are_taken_wherever_texts_are(model: Any, tokenizer: Any, demo: DemoFiles, tmp_path: Path) -> None:
    """As `Run.model` and `Path.glob` give them."""
    first = run(recipe(tmp_path, name="first"), model=model, tokenizer=tokenizer, data=demo.sft)
    given = recipe(tmp_path, name="again", data={"train": [demo.sft]}) | {"output": tmp_path}
    again = run(given, model=first.model, tokenizer=demo.tokenizer)
    told = load_settings(again.folder / "settings.yaml")
    assert (told.model.path, told.data.train) == (str(first.model), [str(demo.sft)])


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


@pytest.mark.parametrize(
    "rows",
    [
        lambda: (row for row in ROWS),
        lambda: pd.DataFrame(ROWS, index=range(5, 17)),
        lambda: IterableDataset.from_generator(lambda: iter(ROWS)),
        lambda: Dataset.from_list(ROWS).with_format("numpy"),
    ],
    ids=["generator", "frame", "iterable dataset", "numpy dataset"],
)
def test_rows_in_any_form_are_the_same_file(rows: Any, tmp_path: Path) -> None:
    expected = stored_rows(ROWS, "train", tmp_path, print)
    assert stored_rows(rows(), "train", tmp_path, print) == expected
    assert read_jsonl(Path(expected)) == ROWS


def test_cells_of_a_frame_are_what_their_author_means(tmp_path: Path) -> None:
    """An int column with a missing cell has floats in pandas, and a struct of Parquet has the keys of all rows."""
    frame = pd.DataFrame(
        {
            "prompt": ["a", "b"],
            "answer": [72, None],
            "price": [0.5, None],
            "nullable": pd.array([7, None], dtype="Int64"),
            "many": [np.array([1, 2]), float("nan")],
            "at": [pd.Timestamp("2020-01-02 03:04"), pd.NaT],
            "struct": [{"k": None, "z": np.int64(3)}, None],
            "kind": pd.Categorical(["u", None]),
            "good": [True, False],
        }
    )
    full = {"prompt": "a", "answer": 72, "price": 0.5, "nullable": 7, "many": [1, 2], "at": "2020-01-02T03:04:00"}
    expected = [full | {"struct": {"z": 3}, "kind": "u", "good": True}, {"prompt": "b", "good": False}]
    found = read_jsonl(Path(stored_rows(frame, "train", tmp_path, print)))
    assert found == expected
    assert [type(found[0][name]) for name in ("answer", "price")] == [int, float]
    listed = [{"prompt": np.str_("a"), "n": np.int32(2), "gone": np.nan}]  # as DataFrame.to_dict("records") has them
    assert read_jsonl(Path(stored_rows(listed, "train", tmp_path, print))) == [{"prompt": "a", "n": 2}]


def test_rows_of_an_iterable_are_counted_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "TOLD", 5)
    said: list[str] = []
    stored_rows((row for row in ROWS), "train", tmp_path, said.append)
    assert said == ["data (train): 5 rows read so far", "data (train): 10 rows read so far"]  # of 12
    stored_rows(ROWS, "train", tmp_path, said.append)
    assert len(said) == 2


@pytest.mark.parametrize("kind", [dict, DatasetDict])
def test_splits_fill_data_and_validation(kind: Any, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    splits = {"train": ROWS, "validation": ROWS[:2]}
    if kind is DatasetDict:
        splits = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    done = run(recipe(tmp_path / "splits"), model=model, tokenizer=tokenizer, data=splits)
    apart = run(recipe(tmp_path / "two"), model=model, tokenizer=tokenizer, data=ROWS, validation=ROWS[:2])
    assert "validation/loss" in done.metrics[-1]
    assert done.metrics[-1]["validation/loss"] == apart.metrics[-1]["validation/loss"]


def test_rules_are_rewards_by_their_name(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    prompts = [{"prompt": "2 and 2", "answer": "4"}]
    rewards = [("gsm8k", 0.5), {"kind": "matches", "options": {"pattern": "e"}, "weight": 2}, (length, 3)]
    own = [{"kind": "exact_match", "weight": 0}]
    whole = {"model": {"path": "m"}, "data": {"train": "owner/name"}, "rewards": own}
    for number, given in enumerate(
        (recipe(tmp_path, "grpo"), load_settings(recipe(tmp_path / "typed", "grpo", **whole)))
    ):
        done = run(given, model=model, tokenizer=tokenizer, data=prompts, rewards=rewards)
        for record in done.samples:
            parts = record["parts"]
            assert set(parts) == {"gsm8k", "matches", "length", "exact_match"} - (
                {"exact_match"} if number == 0 else set()
            )
            assert record["score"] == pytest.approx(0.5 * parts["gsm8k"] + 2 * parts["matches"] + 3 * parts["length"])


def test_a_function_of_trl_gets_columns_of_any_name(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """`answer` is a number in the rows, and stays one; `level` is null in one row; `text` and `tokens` mean something
    else to functions of one completion."""
    rows = [{"prompt": "2 and 2", "ground_truth": "4", "answer": 4, "text": "t", "tokens": 7, "level": 1}]
    rows += [{"prompt": "2 and 3", "ground_truth": "5", "answer": 5, "text": "u", "tokens": 8, "level": None}]

    def trl(completions: Any, ground_truth: Any, level: Any, **kwargs: Any) -> list[float | None]:
        found = zip(kwargs["prompts"], completions, kwargs["completion_ids"], ground_truth, strict=True)
        assert all(isinstance(one, str) for asked, text, _, truth in found for one in (asked, text, truth))
        kwargs["log_metric"]("share", 0.25)
        kwargs["log_extra"]("first", ids := [ids[0] for ids in kwargs["completion_ids"]])
        assert kwargs["answer"] == [int(truth) for truth in ground_truth]
        return [
            None if one is None else tokens + one for one, tokens, _ in zip(level, kwargs["tokens"], ids, strict=True)
        ]

    done = run(recipe(tmp_path, "grpo"), model=model, tokenizer=tokenizer, data=rows, rewards=[trl])
    assert {record["prompt"] for record in done.samples} == {"2 and 2", "2 and 3"}
    for record in done.samples:
        assert record["score"] == (8.0 if record["prompt"] == "2 and 2" else None)  # 7 + 1
        assert record["parts"]["trl/share"] == 0.25
        assert record["parts"]["trl/first"] >= 0


def test_a_function_of_trl_gets_messages_of_chats(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    async def trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        (turn,) = prompts[0]
        return [
            len(turn["content"]) + len(one["content"]) / 1000 for (one,) in completions if one["role"] == "assistant"
        ]

    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": "the plot is"}]}]
    done = run(recipe(tmp_path, "grpo"), model=model, tokenizer=tokenizer, data=rows, rewards=[trl])
    for record in done.samples:
        assert record["score"] == pytest.approx(11 + len(record["completion"]) / 1000)  # "the plot is"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda completions, solution: [0.0], "'solution'.*there are: answer, level"),
        (lambda completions, trainer_state, **kwargs: [0.0], "only TRL's trainer has"),
        (lambda completion, solution: 0.0, "'solution'.*there are: answer, level"),
        (lambda level, completion: 0.0, "gets the prompt as 'level', by its position"),
        (lambda completions, **kwargs: [kwargs["trainer_state"].global_step], "only TRL's trainer has"),
    ],
)
def test_what_a_function_cannot_get_is_told_before_the_first_step(
    function: Any, told: str, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": "2 and 2", "answer": "4", "level": 1}]
    with pytest.raises(SettingsError, match=told):
        run(recipe(tmp_path, "grpo"), model=model, tokenizer=tokenizer, data=rows, rewards=[function])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


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
    ray, grpo = {"runtime": "ray"}, {"method": "grpo"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"model": torch.nn.Linear(2, 2)}, {}, "model is a Linear"),
        ({"tokenizer": None}, {}, "give tokenizer="),
        ({"tokenizer": 3}, {}, "tokenizer is a int"),
        ({"data": DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS))}, {}, "splits.'test'."),
        ({"data": {"validation": ROWS}}, {}, "splits validation: a run"),
        ({"data": {"train": ROWS, "validation": ROWS}, "validation": ROWS}, {}, "leave one of them"),
        ({"validation": {"train": ROWS, "test": ROWS}}, {}, "validation=splits.'test'."),
        ({"data": {"prompt": ["a"], "completion": ["b"]}}, {}, "columns prompt, completion"),
        ({"data": lambda: ROWS}, {}, "<lambda>.."),
        ({"data": 3}, {}, "is a int: give"),
        ({"data": (row for row in ())}, {}, "A generator has them once"),
        ({"data": pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"])}, {}, "two columns 'prompt'"),
        ({"data": ["a"]}, {}, "row 0 is a str"),
        ({"data": [{"prompt": "a", "completion": {1, 2}}]}, {}, "row 0 .*JSON"),
        ({"rewards": [3]}, {}, "rewards has 3"),
        ({"rewards": [length, length]}, {}, "'length' twice"),
        ({"rewards": ["gsm8"]}, grpo, "mean gsm8k"),
        ({"rewards": [{"knd": "gsm8k"}]}, grpo, "mean kind"),
        ({"rewards": "gsm8k"}, grpo, r"rewards=\['gsm8k'\]"),
        ({"rewards": length}, grpo, r"rewards=\[length\]"),
        ({"rewards": [(length, "much")]}, grpo, "weight 'much' for length"),
        ({"rewards": [torch.nn.Linear(2, 2)]}, grpo, "'kind': 'judge'"),
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
    with pytest.raises(Exception, match=rf"KeyError.*\(test_passed\.py, line {line}\)"):
        run(given, model=model, tokenizer=tokenizer, data=prompts, rewards=[broken])


def test_a_run_is_opened_by_its_name_and_gives_a_frame(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    done = run(recipe(tmp_path), model=model, tokenizer=tokenizer, data=ROWS)
    opened = Run(str(tmp_path / "run"))
    assert opened == done
    frame = opened.frame
    assert list(frame.index) == [1, 2]
    assert list(frame["loss/policy"]) == [record["loss/policy"] for record in done.metrics]
