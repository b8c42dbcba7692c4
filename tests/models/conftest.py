"""Tiny models of every family, as Hugging Face config keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Keys = dict[str, Any]


@pytest.fixture
def tiny() -> Callable[..., Keys]:
    """`tiny("llama", mlp_bias=True)`: the family's keys, with what the test changes."""

    def keys(model_type: str, **changes: Any) -> Keys:
        if model_type == "gpt2":
            sizes: Keys = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
            sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
        if model_type == "qwen3":
            sizes["head_dim"] = 16
        ids = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
        # A large spread of weights, so that a wrong position, bias or norm shows in the logits.
        return {"model_type": model_type, **sizes, **ids, "initializer_range": 0.2, **changes}

    return keys
