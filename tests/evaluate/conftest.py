"""The demo's files at a tiny size, and fresh models for them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from plaudit.evaluate.policy import Policy
from plaudit.models.load import fresh_model, load_tokenizer, save_model
from plaudit.tasks.demo import DemoFiles, DemoSize, make_demo

SMALL = DemoSize(sft=300, sft_validation=12, pairs=60, pairs_validation=16, prompts=10, prompts_test=10, vocabulary=400)
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 160, "initializer_range": 0.3}


@dataclass(frozen=True)
class Task:
    """Where everything lies."""

    files: DemoFiles
    first: str
    second: str
    judge: str

    def policy(self) -> Policy:
        return Policy.load(self.first)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("evaluate")
    files = make_demo(folder / "data", seed=1, size=SMALL)
    tokenizer = load_tokenizer(str(files.tokenizer))
    for seed, name in enumerate(("first", "second", "judge")):
        head = "scalar" if name == "judge" else "lm"
        save_model(
            fresh_model(GPT2, head=head, seed=seed, vocab_size=len(tokenizer)), folder / name, tokenizer=tokenizer
        )
    return Task(files, *(str(folder / name) for name in ("first", "second", "judge")))
