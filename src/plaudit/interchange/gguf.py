"""Map names between GGUF files and Hugging Face folders, for both directions.

    llama.attention.head_count <-> num_attention_heads;  blk.0.attn_q.weight <-> model.layers.0.self_attn.q_proj.weight

The names of tensors are those of the package `gguf`, llama.cpp's own. Left out: experts, multimodal
parts, and architectures other than Llama's, Qwen2's and Qwen3's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plaudit.models.families import family_of


class GGUFError(ValueError):
    """A GGUF file cannot be read exactly, or a model cannot be written as one."""


ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture that are read and written; Hugging Face's model_type is the same word."""

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""{GGUF key without "ARCHITECTURE.": key of config.json}."""
HEAD_DIM = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""GGUF keys that must all equal the size of a head."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens (tokenizer.ggml.token_type)."""

LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How a byte-level tokenizer normalises a text and splits it into words, before it merges bytes."""

    words: str | None
    """Regular expression of a word; None: GPT-2's, which `tokenizers` has built in."""
    digits: bool = False
    """True if each digit is a word of its own."""
    nfc: bool = False
    """True if the text is first normalised to Unicode's form NFC."""
    whole: bool = False
    """True if a word that is in the vocabulary becomes that token without merges."""
    begins: bool = False
    """True if a text begins with the BOS token, unless the file says otherwise."""


SPLITTINGS = {
    "gpt-2": Splitting(words=None),
    "smollm": Splitting(words=None, digits=True),
    "llama-bpe": Splitting(words=LETTERS + r"\p{N}{1,3}" + REST, whole=True, begins=True),
    "qwen2": Splitting(words=LETTERS + r"\p{N}" + REST, nfc=True),
}
"""{tokenizer.ggml.pre: how it splits}. Expressions are those of tokenizer.json of GPT-2, SmolLM2, Llama 3, Qwen2."""

LLAMA3_STRETCHES = (8.0, 32.0)
"""Factors of Llama 3.1 and 3.2. A GGUF file has only the resulting frequencies."""
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def library() -> Any:
    """Import the package `gguf`. Raises GGUFError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise GGUFError(
            "GGUF files need the package gguf, which is not installed: pip install -e '.[gguf]' in Plaudit's folder"
        ) from error
    return gguf


def tensor_names(architecture: str, layers: int) -> dict[str, str]:
    """Return {name in Hugging Face's form: name in a GGUF file} of all weights and biases that there may be."""
    gguf = library()
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    family = family_of(architecture)
    modules = [name for names in family.names.values() for name in names] + [family.lm_head]
    found = {}
    for module in modules:
        for number in range(layers if "{}" in module else 1):
            for kind in (".weight", ".bias"):
                stored = module.format(number) + kind
                if (name := known.get_name(stored, try_suffixes=(kind,))) is not None:
                    found[stored] = name
    return found


def paired(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return query or key rows (heads x head_dim, ...) in GGUF's order for Llama, where the two numbers that a rotation
    turns are neighbours. Hugging Face has all first numbers of a head, then all second ones."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo `paired`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def turned(name: str, config: Mapping[str, Any]) -> int | None:
    """Return how many heads a tensor's rows have whose order differs between the two forms; None if it has none."""
    if config["model_type"] != "llama":
        return None
    kind = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return config[kind] if kind else None


def stretches(scaling: Mapping[str, Any], theta: float, head_dim: int) -> NDArray[np.float32]:
    """Return llama3 scaling's divisor of each rotary frequency, (head_dim / 2,): GGUF's `rope_freqs.weight`."""
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = np.clip((old / lengths - low) / (high - low), 0.0, 1.0)
    found: NDArray[np.float32] = (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
    return found
