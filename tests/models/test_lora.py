"""Adapters: what they change, what they leave alone, and what they are on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model, load_model, save_model
from plaudit.models.lora import add_lora, load_lora, lora_of, merge_lora, restore_lora, save_lora
from plaudit.models.lowrank import LoraLinear, adapted_layers, adapters_off
from plaudit.models.settings import LoraSettings

TOKENS = torch.tensor([5, 6, 7, 8, 9, 11])
FAMILIES = ("gpt2", "llama", "qwen3")


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model.head(model(tokens, model.packed([len(tokens)])))  # type: ignore[no-any-return]


def stir(model: Any, seed: int = 7) -> None:
    """Adapters as if they had been trained: B is no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1, generator=generator)


def test_one_row_worked_by_hand() -> None:
    """W is 0, A = (1, 2), B = (3,) on the middle row of three, alpha / rank = 4 / 1: x = (1, 1) gives 4 * 3 * 3."""
    base = nn.Linear(2, 3, bias=False)
    nn.init.zeros_(base.weight)
    layer = LoraLinear(base, {"k": (1, 1)}, rank=1, alpha=4.0)
    with torch.no_grad():
        layer.lora_a["k"].copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_b["k"].copy_(torch.tensor([[3.0]]))
    assert layer(torch.ones(1, 2)).tolist() == [[0.0, 36.0, 0.0]]
    assert layer.merged_weight().tolist() == [[0.0, 0.0], [12.0, 24.0], [0.0, 0.0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_adapters_change_nothing(family: str, tiny: Any) -> None:
    model = fresh_model(tiny(family))
    before = logits(model)
    add_lora(model, LoraSettings(rank=4), seed=1)
    assert torch.equal(logits(model), before)
    stir(model)
    assert not torch.allclose(logits(model), before, atol=1e-3)
    with adapters_off(model):
        assert torch.equal(logits(model), before)
    assert not torch.equal(logits(model), before)


def test_adapters_come_back_after_an_error(tiny: Any) -> None:
    model = add_lora(fresh_model(tiny("llama")), LoraSettings(rank=2))
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        raise ZeroDivisionError
    assert all(layer.active for _, layer in adapted_layers(model))


def test_an_adapter_of_the_query_changes_the_querys_rows_alone(tiny: Any) -> None:
    """4 query heads and 2 + 2 of key and value, 8 channels each: rows 0..31 of 64."""
    model = add_lora(fresh_model(tiny("llama")), LoraSettings(rank=2, alpha=6.0, targets=["q_proj"]))
    stir(model)
    layers = dict(adapted_layers(model))
    assert set(layers) == {"layers.0.attention.qkv", "layers.1.attention.qkv"}
    layer, x = layers["layers.1.attention.qkv"], torch.randn(4, 32)
    with torch.no_grad():
        change = layer(x) - nn.functional.linear(x, layer.weight)
        expected = 3.0 * x @ layer.lora_a["q_proj"].T @ layer.lora_b["q_proj"].T  # alpha / rank = 3
    assert torch.equal(change[:, 32:], torch.zeros(4, 32))
    assert torch.allclose(change[:, :32], expected, atol=1e-5)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_only_adapters_and_a_scalar_head_learn(head: Any, tiny: Any) -> None:
    model = add_lora(fresh_model(tiny("gpt2"), head=head), LoraSettings(rank=2))
    stir(model)
    model.head(model(TOKENS, model.packed([len(TOKENS)]))).square().sum().backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    kinds = {"head" if name == "head.weight" else name.split(".")[-2] for name in learned}
    assert kinds == {"lora_a", "lora_b"} | ({"head"} if head == "scalar" else set())
    assert len(learned - {"head.weight"}) == 2 * 2 * 4  # A and B, of 2 layers, of c_attn, c_proj, c_fc, c_proj
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("family", "targets"),
    [*((family, []) for family in FAMILIES), ("gpt2", ["c_attn"]), ("llama", ["k_proj", "up_proj"])],
)
def test_merged_is_the_same_model(family: str, targets: list[str], tiny: Any, tmp_path: Path) -> None:
    model = add_lora(fresh_model(tiny(family)), LoraSettings(rank=3, targets=targets))
    stir(model)
    before = logits(model)
    save_model(model, tmp_path)
    assert torch.allclose(logits(load_model(str(tmp_path))), before, atol=1e-5)
    published = {name: tensor.clone() for name, tensor in model.hf_tensors()}
    merge_lora(model)
    assert lora_of(model) is None and not list(adapted_layers(model))
    assert torch.allclose(logits(model), before, atol=1e-5)
    assert all(torch.equal(tensor, published[name]) for name, tensor in model.hf_tensors())


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_bit_for_bit(family: str, head: Any, tiny: Any, tmp_path: Path) -> None:
    plain = fresh_model(tiny(family), head=head, seed=3)
    model = add_lora(copy.deepcopy(plain), LoraSettings(rank=2, alpha=5.0), seed=4)
    stir(model)
    save_lora(model, tmp_path, base="somewhere/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is (family == "gpt2")
    assert config["base_model_name_or_path"] == "somewhere/base"
    other = add_lora(copy.deepcopy(plain), LoraSettings(rank=2, alpha=5.0), seed=5)
    for target in (other, copy.deepcopy(plain)):  # with adapters of its own, and without
        loaded = load_lora(target, tmp_path)
        assert torch.equal(logits(loaded), logits(model))
        assert lora_of(loaded) == lora_of(model)
        trained = {name: p for name, p in loaded.named_parameters() if p.requires_grad}
        assert trained.keys() == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_checkpoint_belongs_to_the_model_it_grew_on(tiny: Any, tmp_path: Path) -> None:
    settings = LoraSettings(rank=2)
    model = add_lora(fresh_model(tiny("llama"), seed=1), settings)
    stir(model)
    save_model(model, tmp_path)
    save_lora(model, tmp_path / "adapter")
    again = restore_lora(add_lora(fresh_model(tiny("llama"), seed=1), settings), tmp_path)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match="another model"):
        restore_lora(add_lora(fresh_model(tiny("llama"), seed=2), settings), tmp_path)


def test_what_does_not_fit_is_refused(tiny: Any, tmp_path: Path) -> None:
    model = fresh_model(tiny("llama"))
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ValueError, match=rf"c_attn, .* {names}"):
        add_lora(model, LoraSettings(rank=2, targets=["q_proj", "c_attn"]))
    with pytest.raises(ValueError, match="at least 1"):
        add_lora(model, LoraSettings())
    with pytest.raises(ValueError, match="no adapters"):
        save_lora(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="lacks adapter_config"):
        load_lora(model, tmp_path)
    add_lora(model, LoraSettings(rank=2))
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(model, LoraSettings(rank=2))
    save_lora(model, tmp_path)
    with pytest.raises(ValueError, match=r"Set model\.lora"):
        load_lora(add_lora(fresh_model(tiny("llama")), LoraSettings(rank=3)), tmp_path)
    with pytest.raises(ValueError, match="another model"):
        load_lora(fresh_model(tiny("llama", intermediate_size=64)), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 2}),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),  # peft takes the first adapters off the weights beneath
        ("init_lora_weights", "olora"),
        ("alora_invocation_tokens", [5, 6]),  # the adapters act behind these tokens alone
        ("kasa_config", {"beta": 1e-4}),
        ("of_a_newer_peft", 3),
        ("modules_to_save", ["lm_head"]),
    ],
)
def test_what_peft_would_compute_otherwise_is_refused(key: str, value: Any, tiny: Any, tmp_path: Path) -> None:
    save_lora(add_lora(fresh_model(tiny("llama")), LoraSettings(rank=2)), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"{key}=.* peft"):
        load_lora(fresh_model(tiny("llama")), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_peft_reads_our_adapters_and_we_read_its(family: str, head: Any, tiny: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft compares our adapter files with peft's")
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = fresh_model(tiny(family), head=head, seed=3)
    save_model(model, tmp_path / "base")
    add_lora(model, LoraSettings(rank=2, alpha=5.0), seed=4)
    stir(model)
    save_lora(model, tmp_path / "ours", base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "ours").eval()
    with torch.no_grad():
        output = theirs(TOKENS[None]).logits[0]
    mine = logits(model)
    assert torch.allclose(output, mine if head == "lm" else mine[-1], atol=1e-5)

    theirs.save_pretrained(tmp_path / "theirs")
    plain = load_model(str(tmp_path / "base"), head=head)
    assert isinstance(plain, Decoder)
    assert torch.equal(logits(load_lora(plain, tmp_path / "theirs")), mine)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.slow
def test_rank_stabilised_adapters_of_peft(family: str, rank: int, tiny: Any, tmp_path: Path) -> None:
    """Scaled by alpha / sqrt(rank). What is written of them peft reads as the same model, and so do we."""
    peft = pytest.importorskip("peft", reason="pip install peft compares our adapter files with peft's")
    from transformers import AutoModelForCausalLM

    save_model(fresh_model(tiny(family), seed=3), tmp_path / "base")
    base = lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # noqa: E731
    settings = peft.LoraConfig(
        r=rank, lora_alpha=3, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(base(), settings).eval()
    stir(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_lora(load_model(str(tmp_path / "base")), tmp_path / "theirs")
    save_lora(model, tmp_path / "ours", base=str(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    assert torch.equal(logits(load_lora(load_model(str(tmp_path / "base")), tmp_path / "ours")), logits(model))
    with torch.no_grad():
        expected = theirs(TOKENS[None]).logits[0]
        assert not torch.allclose(base()(TOKENS[None]).logits[0], expected, atol=1e-3)
        assert torch.allclose(logits(model), expected, atol=1e-5)
        assert torch.allclose(again(TOKENS[None]).logits[0], expected, atol=1e-5)
    merge_lora(model)
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_an_adapter_config_that_is_none_is_named(tiny: Any, tmp_path: Path) -> None:
    model = add_lora(fresh_model(tiny("llama")), LoraSettings(rank=2))
    save_lora(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 2,')
    with pytest.raises(ValueError, match=r"adapter_config\.json .*JSON"):
        load_lora(model, tmp_path)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"target_modules": r".*layers\.0\..*q_proj"}, r"target_modules='.*layers.*layers\.1\.self_attn\.q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"target_modules=\[.*'lm_head'.*at lm_head\."),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"target_modules=\[.*at model\.embed_tokens\."),
        (
            {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1.*"},
            r"exclude_modules='.*\.1\.self_attn\.q_proj",
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, r"layers_to_transform=\[0\]"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "trainable_token_indices="),
    ],
)
def test_modules_that_only_peft_trains_are_refused_by_the_key_that_names_them(
    asked: dict[str, Any], told: str, tiny: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft compares our adapter files with peft's")
    from transformers import AutoModelForCausalLM

    base = fresh_model(tiny("llama"), seed=3)
    save_model(base, tmp_path / "base")
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **asked)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"adapter_config\.json has .*{told}") as raised:
        load_lora(base, tmp_path)
    assert "lora_A" not in str(raised.value)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", ["self_attn.o_proj"]])
def test_targets_that_peft_names_otherwise(targets: Any, tiny: Any, tmp_path: Path) -> None:
    """A word that peft writes out as every module, a pattern, the end of a path: the tensors' names tell."""
    peft = pytest.importorskip("peft", reason="pip install peft compares our adapter files with peft's")
    from transformers import AutoModelForCausalLM

    base = fresh_model(tiny("llama"), seed=3)
    save_model(base, tmp_path / "base")
    settings = peft.LoraConfig(r=2, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings).eval()
    stir(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(TOKENS[None]).logits[0]
    assert not torch.allclose(logits(base), expected, atol=1e-3)
    assert torch.allclose(logits(load_lora(base, tmp_path / "theirs")), expected, atol=1e-5)
