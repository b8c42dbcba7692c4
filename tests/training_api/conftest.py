"""A service on a tiny model, and a tokenizer of as many words as it has tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from calling import Client, Do, Work, service


@pytest.fixture(scope="session")
def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<eos>": 0, **{f"w{number}": number for number in range(1, 60)}}
    fast = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>")


@pytest.fixture
def do(words: Any, tmp_path: Path) -> Do:
    """A service's folder is `tmp_path`."""

    def run(work: Work, **limits: Any) -> None:
        asyncio.run(work(Client(service(words, tmp_path, **limits))))  # type: ignore[arg-type]

    return run
