from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from plaudit.compute.context import Packed
from plaudit.models.base import LanguageModel
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model, load_model, save_model
from plaudit.models.lora import add_lora
from plaudit.models.settings import LoraSettings

Tiny = Callable[..., dict[str, Any]]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 40}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_theta": 50_000.0, **LLAMA3}, "head_dim": 16}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 5, "tie_word_embeddings": True, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "rope_theta": 1_000_000.0}),
]


def _name(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *(key for key in variant[1])])


@pytest.fixture(params=VARIANTS, ids=[_name(variant) for variant in VARIANTS])
def keys(request: pytest.FixtureRequest, tiny: Tiny) -> dict[str, Any]:
    model_type, changes = request.param
    return tiny(model_type, **changes)


def _shake(model: torch.nn.Module) -> None:
    """Give biases and norms values of their own: at 0 and 1 a lost one would not show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _theirs(keys: dict[str, Any], auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    rest = {name: value for name, value in keys.items() if name != "model_type"}
    torch.manual_seed(3)
    model = auto.from_config(AutoConfig.for_model(keys["model_type"], **rest, **changes)).eval()
    _shake(model)
    return model


def _tokens(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(4, 40, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def _logits(model: LanguageModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    context = model.packed([len(row) for row in rows])
    return list(model.head(model(torch.cat(rows), context)).split(context.lengths))


def test_logits_equal_transformers_on_its_checkpoint(keys: dict[str, Any], tmp_path: Path) -> None:
    theirs = _theirs(keys)
    theirs.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path))
    assert isinstance(ours, Decoder)
    rows = _tokens(33, 7, 20)
    for row, logits in zip(rows, _logits(ours, rows), strict=True):
        with torch.no_grad():
            expected = theirs(row[None]).logits[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_transformers_logits_equal_ours_on_our_checkpoint(keys: dict[str, Any], tmp_path: Path) -> None:
    ours = fresh_model(keys, seed=1)
    _shake(ours)
    save_model(ours, tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    row = _tokens(33)
    with torch.no_grad():
        expected = theirs(row[0][None]).logits[0]
    torch.testing.assert_close(_logits(ours, row)[0], expected, rtol=0, atol=1e-4)
    again = load_model(str(tmp_path))
    assert torch.equal(_logits(again, row)[0], _logits(ours, row)[0])


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_scores_equal_transformers_on_its_classifier(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    keys = tiny(model_type)
    theirs = _theirs(keys, AutoModelForSequenceClassification, num_labels=1)
    theirs.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path), head="scalar")
    rows = _tokens(11, 4, 17)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    scores = torch.stack([row[-1, 0] for row in _logits(ours, rows)])
    with torch.no_grad():
        batch = theirs(padded, attention_mask=(padded != 3).long()).logits[:, 0]
        single = theirs(rows[0][None]).logits[0, 0]
    torch.testing.assert_close(scores, batch, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores[0], single, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_our_judge_scores_alike_in_transformers(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    ours = fresh_model(tiny(model_type), head="scalar", seed=2)
    save_model(ours, tmp_path)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.num_labels == 1
    rows = _tokens(9, 5)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    with torch.no_grad():
        expected = theirs(padded, attention_mask=(padded != 3).long()).logits[:, 0]
    scores = torch.stack([row[-1, 0] for row in _logits(ours, rows)])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
    again = load_model(str(tmp_path), head="scalar")
    assert torch.equal(_logits(again, rows)[0], _logits(ours, rows)[0])


def test_packing_changes_nothing(keys: dict[str, Any]) -> None:
    model = fresh_model(keys, seed=4)
    rows = _tokens(3, 30, 1, 30, 12)
    for row, packed in zip(rows, _logits(model, rows), strict=True):
        torch.testing.assert_close(packed, _logits(model, [row])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_gradients_reach_every_parameter(keys: dict[str, Any], head: Any) -> None:
    model = fresh_model(keys, head=head, seed=4)
    hidden = model(torch.arange(40), model.packed([40]))
    model.head(hidden).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name == "position_embedding.weight":
            assert (parameter.grad[:40].abs().sum(-1) > 0).all()
        elif parameter.dim() == 2:  # every row: each of query, key and value, of gate and up, every token
            assert (parameter.grad.abs().sum(-1) > 0).all(), name
        else:
            assert parameter.grad.abs().sum() > 0, name


def test_bfloat16_stays_near_float32(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("qwen3", initializer_range=0.02), seed=1), tmp_path)
    exact, rounded = load_model(str(tmp_path)), load_model(str(tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    row = _tokens(20)
    difference = _logits(rounded, row)[0].float() - _logits(exact, row)[0]
    assert 0 < difference.abs().max() < 0.02  # logits here are about 0.1, bfloat16 keeps 8 bits


def test_bfloat16_is_saved_as_such(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama"), dtype=torch.bfloat16), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == torch.bfloat16


def test_a_forgotten_window_is_refused(tiny: Tiny) -> None:
    model = fresh_model(tiny("mistral", sliding_window=5))
    with pytest.raises(ValueError, match=r"model window=5.*model\.packed"):
        model(torch.arange(8), Packed([8]))


def test_fresh_weights_depend_on_the_seed_alone(tiny: Tiny) -> None:
    torch.manual_seed(1)
    first = fresh_model(tiny("llama"), seed=7)
    torch.manual_seed(2)
    second, other = fresh_model(tiny("llama"), seed=7), fresh_model(tiny("llama"), seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_and_not_on_the_device(head: Any, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a meta parameter is given, which stands for a GPU's, is what the CPU's parameter is."""

    def begun(device: str) -> Decoder:
        model = fresh_model(tiny("llama"), head=head, seed=5, device=device)
        add_lora(model, LoraSettings(rank=2), seed=6)
        assert isinstance(model, Decoder)
        return model

    copy, given = torch.Tensor.copy_, list[torch.Tensor]()

    def copied(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if x.is_meta and not values.is_meta:
            given.append(values)
        return copy(x, values)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    begun("meta")
    left = [p for name, p in begun("cpu").named_parameters() if "norm" not in name and "lora_b" not in name]
    assert len(left) == 24  # embedding, head; of 2 layers 4 projections and the A of 7 adapters
    given = [values for values in given if values.any()]
    assert len(given) == 24 + 2 * 3  # query, key and value come apart, as they are stored; gate and up too
    assert sum(values.numel() for values in given) == sum(p.numel() for p in left)
    for values in given:
        rows = ((p, start) for p in left for start in range(len(p) - len(values) + 1) if p.shape[1] == values.shape[1])
        assert sum(torch.equal(values, p[start : start + len(values)]) for p, start in rows) == 1


def test_a_fresh_scalar_head_has_the_published_spread(tiny: Tiny) -> None:
    model = fresh_model(tiny("gpt2", n_embd=1024), head="scalar", seed=1)
    # N(0, 1 / (1024 + 1)): a standard deviation of 0.0312, estimated from 1024 draws to about 2 %.
    assert model.head.weight.std().item() == pytest.approx(0.0312, rel=0.1)
