"""The arithmetic of the floor, by hand on a model that fits on a line, and against real models' weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floor import Decoding, Peak, Size, passes, share, training_flops
from task import MODELS, VOCABULARY, vocabulary

from plaudit.models.load import fresh_model

# Two layers of width 8: Q, K, V, output 4 x 64 = 256; MLP 2 x 8 x 32 = 512; head 8 x 100.
HAND = Size.of({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2}, 100)
GROUPED = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}


def test_parameters_by_hand() -> None:
    assert HAND.parameters == 2 * (256 + 512) + 800
    # Q and output 2 x 64, K and V 2 x 8 x 2, a gated MLP 3 x 8 x 24.
    assert Size.of(GROUPED, 10).parameters == 3 * (128 + 32 + 576) + 80


@pytest.mark.parametrize("config", [MODELS["tiny"], MODELS["4M"], GROUPED], ids=["tiny", "4M", "grouped"])
def test_parameters_are_the_matrices_of_the_real_model(config: dict[str, Any]) -> None:
    decoder = fresh_model(config, seed=0, vocab_size=VOCABULARY)
    matrices = [module.weight.numel() for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    assert Size.of(config, VOCABULARY).parameters == sum(matrices)


def test_models_are_as_large_as_they_are_called() -> None:
    sizes = {name: Size.of(config, vocabulary(name)).parameters for name, config in MODELS.items()}
    assert sizes["4M"] == 6 * 12 * 224**2 + 224 * 768
    assert sizes["25M"] == 8 * (4 * 512**2 + 3 * 512 * 1376) + 512 * 768
    # Q and output 2 x 576, K and V 2 x 192: 1,536 rows of 576 a layer; the embedding is the head.
    assert sizes["135M-49k"] == 30 * (576 * 1536 + 3 * 576 * 1536) + 576 * 49_152 == 134_479_872
    assert sizes["25M-50k"] == sizes["25M"] + 512 * (50_257 - 768)


def test_passes() -> None:
    assert [passes(method) for method in ("sft", "reward", "dpo", "grpo", "rloo", "online-dpo")] == [
        6,
        6,
        8,
        10,
        10,
        10,
    ]
    assert passes("grpo-lora") == 8
    assert passes("ppo", 1) == 20
    assert passes("ppo", 4) == 56


def test_training_flops_by_hand() -> None:
    assert training_flops(HAND, "sft") == 6 * 2336
    # A row of 10 tokens: each looks at 5 on average, two products of 2 x 8 FLOPs each, two layers: 320 = 2 x 160.
    assert HAND.attended(10) == 160
    assert training_flops(HAND, "sft", attention_length=10) == 6 * (2336 + 160)


def test_attended_is_the_cost_of_causal_attention() -> None:
    """Over a row of L tokens: 4 x width x p FLOPs a layer at position p, and L(L + 1) / 2 is about L^2 / 2."""
    length = 1000
    exact = sum(4 * HAND.attention * position for position in range(1, length + 1)) * HAND.layers
    assert 2 * HAND.attended(length) * length == pytest.approx(exact, rel=2e-3)


def test_decoding_by_hand() -> None:
    decoding = Decoding(prompt_tokens=0.5, context=20, batch=4)
    assert decoding.flops(HAND) == 2 * 2336 * 1.5
    # A quarter of the weights, and keys and values of 20 tokens: 2 x 2 layers x 8 numbers each.
    assert decoding.bytes(HAND, "fp32") == 2336 * 4 / 4 + 20 * 32 * 4
    assert decoding.bytes(HAND, "bf16") == decoding.bytes(HAND, "fp32") / 2


def test_the_floor_is_the_slower_of_computing_and_reading() -> None:
    peak = Peak(flops=100.0, bandwidth=10.0)
    assert peak.seconds(50.0) == 0.5
    assert peak.seconds(50.0, read=20.0) == 2.0
    assert share(1.6, peak.seconds(50.0)) == pytest.approx(0.8)


def test_nothing_beats_the_floor() -> None:
    """A product at the peak's own rate reaches all of it, whatever its size."""
    a = torch.ones(4, 6) @ torch.ones(6, 5)
    flops = 2 * 4 * 6 * 5
    assert a.sum() == 120
    assert share(1000.0 / flops, Peak(flops=1000.0, bandwidth=1.0).seconds(flops)) == pytest.approx(1.0)
