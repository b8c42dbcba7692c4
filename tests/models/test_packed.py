import platform
from typing import Any

import pytest
import torch

from plaudit import models
from plaudit.maths import products
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.lora import add_lora
from plaudit.models.lowrank import LoraLinear
from plaudit.models.packed import PackedLinear, PanelLinear, packed, stamp
from plaudit.models.settings import LoraSettings

GPT2 = {"model_type": "gpt2", "vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "biased": LLAMA | {"mlp_bias": True, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8},
}
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"),
    reason="nothing is packed for this processor",
)


def decoder(kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    model = fresh_model(CONFIGS[kind], seed=3)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms of their own, which fresh ones are not
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


@torch.no_grad()
def logits(model: Decoder, like: Decoder, count: int = 11) -> torch.Tensor:
    tokens = torch.arange(count) * 7 % 90
    return model.head(model(tokens, like.packed([count - 4, 4]))).float()


@pytest.fixture(params=["as it is", "no bfloat16", "matrices of bfloat16"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one, one that cannot multiply bfloat16, and one with registers for it."""
    if request.param == "as it is":
        return
    for module in (products, models.packed):
        monkeypatch.setattr(module, "slow_halves", lambda: request.param == "no bfloat16")
    if request.param == "matrices of bfloat16":
        request.getfixturevalue("played")("matrices")


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_packed_decoder_computes_the_same(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model = decoder(kind, dtype)
    twin = packed(model)
    own = dtype is torch.bfloat16 and products.matrices_present()
    assert any(type(module) is (PanelLinear if own else PackedLinear) for module in twin.modules())
    expected = logits(model, model)
    torch.testing.assert_close(logits(twin, model), expected, atol=tolerance * float(expected.abs().max()), rtol=0)


def test_the_stamp_tells_when_weights_were_written() -> None:
    model = decoder("llama")
    before = stamp(tuple(model.parameters()))
    assert stamp(tuple(model.parameters())) == before
    twin, old = packed(model), logits(packed(model), model)
    with torch.no_grad():
        model.layers[0].mlp.up.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    assert stamp(tuple(model.parameters())) != before
    assert torch.equal(logits(twin, model), old)  # a packed decoder keeps the weights it was made of
    torch.testing.assert_close(logits(packed(model), model), logits(model, model), atol=1e-5, rtol=0)


def test_layers_with_adapters_stay_as_they_are() -> None:
    model = decoder("llama")
    add_lora(model, LoraSettings(rank=2), seed=0)
    twin = packed(model)
    assert any(isinstance(module, LoraLinear) for module in twin.modules())
    torch.testing.assert_close(logits(twin, model), logits(model, model), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    model = decoder(kind, dtype)
    twin = packed(model)
    mlp, head = twin.layers[0].mlp, twin.head  # type: ignore[union-attr]
    x = torch.randn(300, 32, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for compute in (mlp, head):
            whole = compute(x)  # type: ignore[operator]
            for count in (*range(1, 40), 64, 100, 257):
                assert torch.equal(compute(x[7 : 7 + count]), whole[7 : 7 + count]), count  # type: ignore[operator]
