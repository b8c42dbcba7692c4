from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plaudit.models import families
from plaudit.models.config import RopeScaling
from plaudit.models.families import FAMILIES, Family, read_config, register_family, write_config
from plaudit.models.keys import Keys, UnknownKeyError, UnsupportedError
from plaudit.models.load import fresh_model, load_model, save_model
from plaudit.models.parts import parts_of

Tiny = Callable[..., dict[str, Any]]


def test_llama_reads_the_old_and_the_new_place_of_theta(tiny: Tiny) -> None:
    old = read_config(tiny("llama", rope_theta=5e5))
    new = read_config(tiny("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    assert old == new
    assert old.rope_theta == 5e5


def test_llama3_scaling_is_read_and_written(tiny: Tiny) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read_config(tiny("llama", rope_theta=5e5, rope_scaling=scaling))
    # Where the original length is not named, transformers takes max_position_embeddings.
    expected = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=64)
    assert config.rope_scaling == expected
    written = write_config(config, head="lm")
    only_new = {name: value for name, value in written.items() if name not in ("rope_theta", "rope_scaling")}
    only_old = {name: value for name, value in written.items() if name != "rope_parameters"}
    assert read_config(only_new) == read_config(only_old) == config


def test_a_default_config_of_transformers_is_read_alike() -> None:
    for model_type in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        theirs = AutoConfig.for_model(model_type).to_dict()
        assert read_config({"model_type": model_type}) == read_config(theirs), model_type


LLAMA_3_1 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
"vocab_size": 128256}"""
QWEN_2_5 = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
"eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
"intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
"num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
"vocab_size": 151936}"""
GPT2 = """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
"n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
"summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
"task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257}"""


def test_configs_as_older_transformers_wrote_them_stay_native() -> None:
    llama, qwen, gpt2 = (read_config(json.loads(text)) for text in (LLAMA_3_1, QWEN_2_5, GPT2))
    assert (llama.head_dim, llama.kv_heads, llama.rope_theta, llama.tied) == (128, 8, 500_000.0, False)
    assert llama.rope_scaling is not None
    assert llama.rope_scaling.original_positions == 8192
    assert (qwen.head_dim, qwen.window, qwen.qkv_bias, qwen.tied) == (64, None, True, True)
    assert gpt2 == read_config({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation_function='quick_gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"is_causal": False}, "is_causal=False"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("mistral", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mamba", {}, "model_type='mamba'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(model_type: str, changes: Any, named: str, tiny: Tiny) -> None:
    with pytest.raises(UnsupportedError, match=named):
        read_config(tiny(model_type, **changes))


def test_what_is_off_is_not_refused(tiny: Tiny) -> None:
    off = {"attn_logit_softcapping": None, "rope_scaling": None, "use_cache": True, "attention_dropout": 0.1}
    assert read_config(tiny("llama", **off)) == read_config(tiny("llama"))


def test_a_slip_in_the_settings_names_the_nearest_key(tiny: Tiny) -> None:
    with pytest.raises(UnknownKeyError, match=r"n_emdb=64.* n_embd"):
        fresh_model(tiny("gpt2", n_emdb=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"4 attention .* 3 key-value"),
        ({"head_dim": 7}, "7 channels"),
        ({"num_hidden_layers": 0}, "layers=0"),
        ({"num_attention_heads": 0}, "heads=0"),
        ({"hidden_size": 33}, r"hidden_size=33 .*num_attention_heads=4"),
        ({"rope_theta": 0}, "rope_theta=0.0"),
        ({"initializer_range": -0.1}, "initializer_range=-0.1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: Any, message: str, tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(tiny("llama", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\]"),
        ({"rope_theta": "x"}, "rope_theta='x'"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
    ],
)
def test_values_of_another_type_are_refused_by_name(changes: Any, message: str, tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_config(tiny("llama", **changes))
    assert not isinstance(raised.value, UnsupportedError)  # transformers is not asked


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_no_number_of_key_value_heads_is_one_for_each_head(model_type: str, tiny: Tiny) -> None:
    assert read_config(tiny(model_type, num_key_value_heads=None)).kv_heads == 4


def test_a_config_that_the_family_cannot_write_is_refused(tiny: Tiny) -> None:
    from dataclasses import replace

    config = replace(read_config(tiny("mistral")), qkv_bias=True)
    with pytest.raises(ValueError, match=r"mistral config\.json"):
        write_config(config, head="lm")


def test_the_fused_rows_by_hand(tiny: Tiny) -> None:
    parts = parts_of(read_config(tiny("llama")), "lm", ["layers.1.attention.qkv.weight", "head.weight"])
    # 4 query heads and 2 key-value heads of 8 channels: rows 0-31, 32-47, 48-63.
    rows = {name: (part.start, part.size) for name, part in parts.items()}
    prefix = "model.layers.1.self_attn."
    assert rows == {
        f"{prefix}q_proj.weight": (0, 32),
        f"{prefix}k_proj.weight": (32, 16),
        f"{prefix}v_proj.weight": (48, 16),
        "lm_head.weight": (0, None),
    }


def test_a_family_of_ones_own(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", dict(FAMILIES))
    llama = FAMILIES["llama"]

    def read(keys: Keys) -> Any:
        keys.expect("residual_scale", 1.0)
        return llama.read(keys)

    own = Family(
        model_type="alpaca",
        read=read,
        write=llama.write,
        names={ours: tuple(name.replace("model.", "body.") for name in names) for ours, names in llama.names.items()},
        causal_class="AlpacaForCausalLM",
        classifier_class="AlpacaForSequenceClassification",
        lm_head="out",
    )
    assert register_family(own) is own
    model = fresh_model(tiny("alpaca"), seed=1)
    save_model(model, tmp_path)
    names = dict(model.hf_tensors())
    assert {"out.weight", "body.layers.0.mlp.gate_proj.weight"} <= set(names)
    loaded = load_model(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(UnsupportedError, match=r"residual_scale=2\.0"):
        read_config(tiny("alpaca", residual_scale=2.0))
