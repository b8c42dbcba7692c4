"""Trains a byte-level BPE tokenizer on texts and saves it as a folder that `AutoTokenizer.from_pretrained` loads.

Nothing is normalised and every byte is in the alphabet, so decode(encode(text)) == text for any text. Words are split
before their space: a prompt without a space at its end and a completion that begins with one encode the same apart as
together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


def train_tokenizer(texts: Iterable[str], folder: Path, *, vocabulary: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: `END_OF_TEXT` has id 0, `PAD` id 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # True would remove the space of " ." in decoding
        "model_max_length": 1_000_000,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
