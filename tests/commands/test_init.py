"""`plaudit init`: recipes that load, suit rows and model, and overwrite nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tiny import GPT2
from told import says

from plaudit.commands.cli import main
from plaudit.commands.options import METHODS
from plaudit.models.load import fresh_model, load_tokenizer, save_model
from plaudit.settings.recipes import load_settings


def init(*words: str) -> Any:
    return CliRunner().invoke(main, ["init", *words])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder with 300 rows of their own."""
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": f"{number} and two?", "completion": f" Größe {number}."} for number in range(300))
    (tmp_path / "sft.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    row = {"prompt": "Two and two?", "chosen": " Four.", "rejected": " Five."}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 300)
    return tmp_path


def test_a_recipe_from_nothing_reads_few_rows_often_with_a_tokenizer_of_its_own(here: Path) -> None:
    """300 rows, 32 a step: 22 passes would make 200 steps, and 20 are the most. Each has 9 steps of the 270 rows that
    are left for training."""
    done = init("sft", "data.train=sft.jsonl")
    assert done.exit_code == 0, done.output
    assert "300 rows: 20 passes make about 180 steps" in done.output
    settings = load_settings(here / "sft.yaml")
    assert (settings.name, settings.train.epochs, settings.data.validation) == ("sft", 20, "10%")
    tokenizer = load_tokenizer(str(settings.model.tokenizer))
    text = "100 and two? Größe 100."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(" Größe")["input_ids"]) == 1, "a word of all rows is one token"
    text = (here / "sft.yaml").read_text()
    assert set(yaml.safe_load(text)) == {"method", "name", "model", "data", "optimizer", "train", "evaluate"}
    assert "  # Passes over the data.\n  epochs: 20.0\n" in text
    again = init("sft", "data.train=pairs.jsonl")
    assert again.exit_code == 2
    assert "sft.yaml exists already" in again.output
    assert (here / "sft.yaml").read_text() == text


def test_what_is_given_stays_as_it_is_and_pretrained_models_read_few_rows_less_often(here: Path, demo: Any) -> None:
    given = [f"model.tokenizer={demo.tokenizer}", "train.epochs=2"]
    done = init("sft", "data.train=sft.jsonl", *given)
    assert "passes" not in done.output
    assert load_settings(here / "sft.yaml").train.epochs == 2
    assert not (here / "sft-tokenizer").exists(), "another tokenizer was named"
    assert (
        init(
            "sft", "data.train=sft.jsonl", "model.path=owner/name", "model.tokenizer=''", "--output=own.yaml"
        ).exit_code
        == 0
    )
    done = init("sft", "data.train=sft.jsonl", "model.path=owner/name", "train.batch_size=8", "--output=large.yaml")
    assert "300 rows: 3 passes make about 102 steps" in done.output, "3 * 34"
    assert load_settings(here / "large.yaml").train.epochs == 3


@pytest.mark.parametrize("method", METHODS)
def test_recipes_of_every_method_load(method: str, here: Path) -> None:
    assert init(method, "data.train=pairs.jsonl", "--output=new/mine.yaml").exit_code == 0
    assert load_settings(here / "new/mine.yaml", method=method).name == "mine"


@pytest.mark.slow
def test_lengths_and_rates_suit_the_model(here: Path, demo: Any) -> None:
    tokenizer = load_tokenizer(str(demo.tokenizer))
    model = fresh_model({**GPT2, "n_layer": 1, "n_positions": 128}, vocab_size=len(tokenizer))
    save_model(model, here / "small", tokenizer=tokenizer)
    assert "the model in small, 0." in init("grpo", "model.path=small", "data.train=pairs.jsonl").output
    small = load_settings(here / "grpo.yaml")
    assert small.data.max_prompt_tokens + small.rollout.max_tokens == 128
    assert init("grpo", "model.path=owner/name", "data.train=pairs.jsonl", "--output=large.yaml").exit_code == 0
    large = load_settings(here / "large.yaml")
    assert small.optimizer.learning_rate == 3e-4
    assert (large.optimizer.learning_rate, large.learn.precision) == (1e-6, "bfloat16")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sft"], "a model from nothing .. data.train=FILE"),
        (["sft", "data.trian=x"], "data.trian .. mean data.train"),
        (["sftt"], "'sftt'"),
        (["sft", "--epochs", "3"], "here train.epochs=3"),
        (["sft", "data.train=absent.jsonl"], "absent.jsonl"),
    ],
)
def test_what_cannot_be_written_is_told_and_nothing_is(words: list[str], told: str, here: Path) -> None:
    done = init(*words)
    assert done.exit_code == 2
    assert says(done.output, told)
    assert not (here / "sft.yaml").exists()
