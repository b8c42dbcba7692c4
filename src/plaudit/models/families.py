"""Hugging Face's names for our decoder: config keys and tensor names of each dense family.

    config.json  <-> DecoderConfig        (read_config, write_config)

Which stored tensors make up which of our parameters is `parts.py`.

A key that would change the arithmetic in a way the decoder does not compute is refused by name (`UnsupportedError`),
and so is an unknown key: the caller then runs the model through transformers. Files are `load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.keys import Keys, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One dense family. Register your own with `register_family`.

    `names` maps our module ("layers.{}.mlp.up") to the stored modules it is the concatenation of (gate, then up; query,
    then key, then value). `transposed` lists our modules whose weights are stored (in, out).
    """

    model_type: str
    read: Callable[[Keys], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    names: Mapping[str, tuple[str, ...]]
    causal_class: str
    """Name of transformers' class with an LM head, written to config.json."""
    classifier_class: str
    """Name of transformers' class with a scalar head."""
    transposed: frozenset[str] = frozenset()
    lm_head: str = "lm_head"
    scalar_head: str = "score"
    base_prefix: str = "model."
    """Some checkpoints hold only the trunk, without this prefix."""
    ignored: str = r"\.rotary_emb\.inv_freq$"
    """Regular expression for stored buffers that are not parameters."""


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Make `family` known to `load_model` and `fresh_model`, in place of an earlier one of the same `model_type`."""
    FAMILIES[family.model_type] = family
    return family


def family_of(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"The native decoder does not know model_type={model_type!r} (known: {', '.join(FAMILIES)})."
        )
    return FAMILIES[model_type]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the `DecoderConfig` of a config.json's content. Raises UnsupportedError for keys that are not computed."""
    if "model_type" not in config:
        raise ValueError(f"The model config has no model_type. Add it (native: {', '.join(FAMILIES)}).")
    keys = Keys(config)
    decoder = family_of(keys.model_type).read(keys)
    keys.finish()
    return decoder


def write_config(config: DecoderConfig, *, head: HeadKind) -> dict[str, Any]:
    """Return config.json content that transformers reads as this decoder. Raises ValueError if no keys express it."""
    family = family_of(config.family)
    written = {"model_type": family.model_type, **family.write(config)}
    if read_config(written) != config:
        raise ValueError(f"A {config.family} config.json cannot express {config}. Change it to what the family has.")
    return {"architectures": [family.causal_class if head == "lm" else family.classifier_class], **written}


# GPT-2: learned positions, LayerNorm, a plain MLP, biases everywhere; weights stored (in, out).


def _read_gpt2(keys: Keys) -> DecoderConfig:
    for name, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        keys.expect(name, only)
    keys.expect("add_cross_attention", False)
    width, heads = keys.take("n_embd", 768), keys.take("n_head", 12)
    if width % max(heads, 1):
        raise ValueError(f"gpt2: n_embd={width} must be a multiple of n_head={heads}.")
    return DecoderConfig(
        family="gpt2",
        vocab_size=keys.take("vocab_size", 50257),
        width=width,
        layers=keys.take("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=width // max(heads, 1),
        mlp_width=keys.take("n_inner", 4 * width),
        max_positions=keys.take("n_positions", 1024),
        positions="learned",
        norm="layer",
        norm_eps=keys.take("layer_norm_epsilon", 1e-5),
        mlp="plain",
        activation=keys.activation("activation_function", "gelu_new"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=keys.take("tie_word_embeddings", True),
        init_std=keys.take("initializer_range", 0.02),
    )


def _write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp_width,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        # transformers' default is 0.1, which these weights were not trained with.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


GPT2_NAMES = {
    "embedding": ("transformer.wte",),
    "position_embedding": ("transformer.wpe",),
    "layers.{}.attention_norm": ("transformer.h.{}.ln_1",),
    "layers.{}.attention.qkv": ("transformer.h.{}.attn.c_attn",),
    "layers.{}.attention.output": ("transformer.h.{}.attn.c_proj",),
    "layers.{}.mlp_norm": ("transformer.h.{}.ln_2",),
    "layers.{}.mlp.up": ("transformer.h.{}.mlp.c_fc",),
    "layers.{}.mlp.down": ("transformer.h.{}.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
}

register_family(
    Family(
        model_type="gpt2",
        read=_read_gpt2,
        write=_write_gpt2,
        names=GPT2_NAMES,
        causal_class="GPT2LMHeadModel",
        classifier_class="GPT2ForSequenceClassification",
        transposed=frozenset(name for name in GPT2_NAMES if ".attention." in name or ".mlp." in name),
        base_prefix="transformer.",
        ignored=r"\.attn\.(bias|masked_bias)$",
    )
)


# Llama and its kin: rotary positions, RMSNorm, a gated MLP, grouped queries.


def _read_rotary(
    keys: Keys, *, qkv_bias: bool, output_bias: bool, sizes: Mapping[str, int], **own: Any
) -> DecoderConfig:
    """Read the keys that Llama, Mistral and Qwen share. `sizes` are transformers' defaults for absent keys."""
    width = keys.take("hidden_size", 4096)
    heads = keys.take("num_attention_heads", 32)
    max_positions = keys.take("max_position_embeddings", sizes["max_position_embeddings"])
    rope_theta, rope_scaling = keys.rope(max_positions)
    kv_heads = keys.nullable("num_key_value_heads", sizes.get("num_key_value_heads", heads))
    for name, only in (("is_causal", True), ("rope_interleaved", False), ("use_mrope", False)):
        keys.expect(name, only)
    return DecoderConfig(
        family=keys.model_type,
        vocab_size=keys.take("vocab_size", sizes["vocab_size"]),
        width=width,
        layers=keys.take("num_hidden_layers", 32),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,  # null means as many as heads
        head_dim=keys.take("head_dim", sizes.get("head_dim", width // max(heads, 1))),
        mlp_width=keys.take("intermediate_size", sizes["intermediate_size"]),
        max_positions=max_positions,
        positions="rotary",
        norm="rms",
        norm_eps=keys.take("rms_norm_eps", 1e-6),
        mlp="gated",
        activation=keys.activation("hidden_act", "silu"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        tied=keys.take("tie_word_embeddings", False),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        init_std=keys.take("initializer_range", 0.02),
        **own,
    )


def _write_rotary(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    stretch: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        stretch = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "attention_dropout": 0.0,
        # transformers 5 reads the first of these, 4 the other two.
        "rope_parameters": {"rope_theta": config.rope_theta, **stretch},
        "rope_theta": config.rope_theta,
        "rope_scaling": stretch if scaling is not None else None,
    }


def _read_llama(keys: Keys) -> DecoderConfig:
    width, heads = keys.peek("hidden_size", 4096), keys.peek("num_attention_heads", 32)
    if width % max(heads, 1):  # transformers would not load the saved model, even with head_dim
        raise ValueError(f"llama: hidden_size={width} must be a multiple of num_attention_heads={heads}.")
    bias = keys.take("attention_bias", False)
    mlp_bias = keys.take("mlp_bias", False)
    sizes = {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
    return _read_rotary(keys, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, sizes=sizes)


def _write_llama(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_rotary(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _read_mistral(keys: Keys) -> DecoderConfig:
    sizes = {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    }
    window = keys.nullable("sliding_window", 4096)
    return _read_rotary(keys, qkv_bias=False, output_bias=False, mlp_bias=False, window=window, sizes=sizes)


def _write_mistral(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_rotary(config), "sliding_window": config.window}


QWEN_SIZES = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}


def _qwen_window(keys: Keys) -> int | None:
    """Return the window of all layers, None for full attention. Raises UnsupportedError for a mix of both."""
    used = keys.take("use_sliding_window", False)
    window = keys.nullable("sliding_window", 4096) if used else keys.take("sliding_window") and None
    layers = keys.peek("num_hidden_layers", 32)
    first = keys.take("max_window_layers", 28)
    kinds = keys.take(
        "layer_types", ["full_attention" if not window or i < first else "sliding_attention" for i in range(layers)]
    )
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"} or window is None:
        keys.refuse("layer_types (or max_window_layers) that mix full and sliding attention")
    return int(window)


def _write_qwen_window(config: DecoderConfig) -> dict[str, Any]:
    if config.window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}


def _read_qwen2(keys: Keys) -> DecoderConfig:
    window = _qwen_window(keys)
    return _read_rotary(keys, qkv_bias=True, output_bias=False, mlp_bias=False, window=window, sizes=QWEN_SIZES)


def _write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_rotary(config), **_write_qwen_window(config)}


def _read_qwen3(keys: Keys) -> DecoderConfig:
    bias = keys.take("attention_bias", False)
    own = {"mlp_bias": False, "qk_norm": True, "window": _qwen_window(keys)}
    return _read_rotary(keys, qkv_bias=bias, output_bias=bias, sizes={**QWEN_SIZES, "head_dim": 128}, **own)


def _write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_qwen2(config), "attention_bias": config.qkv_bias}


LLAMA_NAMES = {
    "embedding": ("model.embed_tokens",),
    "layers.{}.attention_norm": ("model.layers.{}.input_layernorm",),
    "layers.{}.attention.qkv": tuple("model.layers.{}.self_attn." + name for name in ("q_proj", "k_proj", "v_proj")),
    "layers.{}.attention.output": ("model.layers.{}.self_attn.o_proj",),
    "layers.{}.attention.query_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.key_norm": ("model.layers.{}.self_attn.k_norm",),
    "layers.{}.mlp_norm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "layers.{}.mlp.down": ("model.layers.{}.mlp.down_proj",),
    "norm": ("model.norm",),
}

for _model_type, _name, _read, _write in (
    ("llama", "Llama", _read_llama, _write_llama),
    ("mistral", "Mistral", _read_mistral, _write_mistral),
    ("qwen2", "Qwen2", _read_qwen2, _write_qwen2),
    ("qwen3", "Qwen3", _read_qwen3, _write_qwen3),
):
    register_family(
        Family(
            model_type=_model_type,
            read=_read,
            write=_write,
            names=LLAMA_NAMES,
            causal_class=f"{_name}ForCausalLM",
            classifier_class=f"{_name}ForSequenceClassification",
        )
    )
