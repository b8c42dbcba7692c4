"""A tokenizer of single bytes plus one merge, small enough to work its tokens out by hand."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SHARED = Path(__file__).parents[3] / "shared" / "data"


def train_tokenizer(**special):
    """Byte-level BPE whose only merge is `ab`: one token for it, one for every other ASCII character."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    specials = list(dict.fromkeys(special.values()))
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials) + 1,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(["ab ab ab ab"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


@pytest.fixture(scope="session")
def make_tokenizer():
    """`train_tokenizer` for other special tokens."""
    return train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """Like GPT-2's: an end token, and no BOS in front of texts."""
    return train_tokenizer(eos_token="<eos>")
