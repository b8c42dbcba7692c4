"""A model family of your own: StarCoder2 has rotary positions like Llama, but LayerNorm and a plain MLP like GPT-2."""

from __future__ import annotations

from typing import Any

from plaudit import register_family
from plaudit.models.config import DecoderConfig
from plaudit.models.families import LLAMA_NAMES, Family
from plaudit.models.keys import Keys

OURS = {"hidden_size": "width", "intermediate_size": "mlp_width", "num_hidden_layers": "layers"}
OURS |= {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "vocab_size": "vocab_size"}
OURS |= {"max_position_embeddings": "max_positions", "norm_epsilon": "norm_eps", "tie_word_embeddings": "tied"}
OURS |= {"initializer_range": "init_std"}
DEFAULTS = {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30}
DEFAULTS |= {"num_attention_heads": 24, "num_key_value_heads": 2, "max_position_embeddings": 4096}
DEFAULTS |= {"initializer_range": 0.018042, "norm_epsilon": 1e-5, "tie_word_embeddings": True}
FIXED: Any = {"positions": "rotary", "norm": "layer", "mlp": "plain", "activation": "gelu_tanh"}
MLP = {"layers.{}.mlp.up": ("model.layers.{}.mlp.c_fc",), "layers.{}.mlp.down": ("model.layers.{}.mlp.c_proj",)}


def read(keys: Keys) -> DecoderConfig:
    """A value that would change the arithmetic is refused by `expect`, a key that nobody takes by its caller."""
    for name, only in {"hidden_act": "gelu_pytorch_tanh", "norm_type": "layer_norm", "mlp_type": "default"}.items():
        keys.expect(name, only)
    for dropout in ("embedding_dropout", "residual_dropout"):
        keys.take(dropout)  # trained without
    sizes = {ours: keys.take(theirs, DEFAULTS[theirs]) for theirs, ours in OURS.items()}
    own = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), keys.take("use_bias", True))
    own |= {"rope_theta": keys.rope(sizes["max_positions"])[0], "window": keys.take("sliding_window")}
    return DecoderConfig(family="starcoder2", head_dim=sizes["width"] // sizes["heads"], **sizes, **own, **FIXED)


def write(config: DecoderConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    own = {"use_bias": config.mlp_bias, "sliding_window": config.window, "rope_parameters": rope}
    return {theirs: getattr(config, ours) for theirs, ours in OURS.items()} | own


NAMES = {**LLAMA_NAMES, **MLP}
CLASSES = {"causal_class": "Starcoder2ForCausalLM", "classifier_class": "Starcoder2ForSequenceClassification"}
register_family(Family(model_type="starcoder2", read=read, write=write, names=NAMES, **CLASSES))
