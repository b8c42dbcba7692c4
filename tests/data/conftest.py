"""A tokenizer of single bytes plus one merge, small enough to work its tokens out by hand."""

from pathlib import Path

import pytest
from chat_shapes import train_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def make_tokenizer():
    """`train_tokenizer` for other special tokens."""
    return train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """Like GPT-2's: an end token, and no BOS in front of texts."""
    return train_tokenizer(eos_token="<eos>")
