"""Decoding by one kernel gives what the decoder gives operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.lora import add_lora
from plaudit.models.lowrank import adapted_layers
from plaudit.models.settings import LoraSettings
from plaudit.rollout.decode.cache import Decode, Prefill
from plaudit.rollout.decode.pages import PageCache
from plaudit.rollout.decode.steps import Steps, can_step, stamp

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]

Tiny = Callable[..., dict[str, Any]]
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 36},
    "gpt2 with exact gelu": {"activation_function": "gelu"},
    "llama": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"intermediate_size": 50, "vocab_size": 43},
    "qwen3 with one key head": {"num_key_value_heads": 1},
}


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 by pairs", "bfloat16 by matrices"])
def dtype(request: pytest.FixtureRequest, played: Callable[[str], None]) -> torch.dtype:
    """Also as on processors that have products of pairs, or of matrices, of bfloat16."""
    name, _, by = request.param.partition(" by ")
    if by:
        played(by)
    found: torch.dtype = getattr(torch, name)
    return found


def decoder(keys: dict[str, Any], dtype: torch.dtype = torch.float32) -> Decoder:
    """With biases and norms that are neither 0 nor 1."""
    model = fresh_model(keys, seed=1)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def started(model: Decoder, dtype: torch.dtype) -> PageCache:
    """A cache of three slots that hold prompts of 7, 13 and 1 tokens."""
    cache = PageCache(model.config, 3, 64, dtype=dtype)
    with torch.no_grad():
        model(torch.arange(21) % 40, Prefill(cache, [0, 1, 2], [7, 13, 1]))
    return cache


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_the_decoders(kind: str, threads: int, dtype: torch.dtype, tiny: Tiny) -> None:
    compare(decoder(tiny(kind.split()[0], **CONFIGS[kind]), dtype), dtype, threads)


@pytest.mark.parametrize("targets", [[], ["q_proj", "up_proj"], ["o_proj", "down_proj", "k_proj"]])
def test_logits_of_adapters_are_the_decoders(targets: list[str], dtype: torch.dtype, tiny: Tiny) -> None:
    model = add_lora(decoder(tiny("llama"), dtype), LoraSettings(rank=5, alpha=5.0, targets=targets))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            for half in layer.lora_b.values():
                half.copy_(0.1 * torch.randn(half.shape, generator=generator))
    compare(model, dtype, threads=2)


def compare(model: Decoder, dtype: torch.dtype, threads: int) -> None:
    """30 tokens by the kernel and operation by operation."""
    assert can_step(model)
    ours, theirs, steps, before = started(model, dtype), started(model, dtype), Steps(model), torch.get_num_threads()
    tokens, positions = torch.tensor([3, 4, 5]), torch.tensor([7, 13, 1])
    # In bfloat16 an operation of torch's may round to the neighbour.
    close = {"atol": 3e-5, "rtol": 0.0} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.0}
    try:
        torch.set_num_threads(threads)
        for _ in range(30):  # over several pages
            with torch.no_grad():
                hidden = model(tokens, Decode(theirs, positions, int(positions.max()) + 1))
                expected = model.head(hidden).float()
            found = steps.logits(ours, tokens, positions)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, **close)
            tokens, positions = expected.argmax(dim=-1), positions + 1
    finally:
        torch.set_num_threads(before)
    for mine, other in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True):
        torch.testing.assert_close(mine, other, **close)


def test_a_rows_bits_do_not_depend_on_the_others(dtype: torch.dtype, tiny: Tiny) -> None:
    model = decoder(tiny("qwen3"), dtype)
    steps, tokens, positions = Steps(model), torch.tensor([3, 4, 5]), torch.tensor([7, 13, 1])
    whole = steps.logits(started(model, dtype), tokens, positions)
    for count in (1, 2):
        assert torch.equal(steps.logits(started(model, dtype), tokens[:count], positions[:count]), whole[:count])
    cache = started(model, dtype)
    cache.move([2], [0], 1)
    assert torch.equal(steps.logits(cache, tokens[2:], positions[2:]), whole[2:])


def test_many_rows(dtype: torch.dtype, tiny: Tiny) -> None:
    """More than one block of them, of which each is as if alone."""
    model = decoder(tiny("llama"), dtype)
    count = 211
    cache, tokens = PageCache(model.config, count, 16, dtype=dtype), torch.arange(count) % 40
    steps, nowhere = Steps(model), torch.zeros(count, dtype=torch.int64)
    whole = steps.logits(cache, tokens, nowhere)
    for row in (0, 95, 96, 100, 210):
        alone = steps.logits(PageCache(model.config, 1, 16, dtype=dtype), tokens[row : row + 1], nowhere[:1])
        assert torch.equal(alone[0], whole[row])


def test_what_no_kernel_computes(tiny: Tiny, without_kernels: None) -> None:
    assert not can_step(decoder(tiny("llama")))


def test_what_this_kernel_does_not_compute(tiny: Tiny) -> None:
    assert not can_step(decoder(tiny("gpt2"), torch.float64))


@pytest.mark.parametrize("dtype", ["bfloat16 by pairs", "bfloat16 by matrices"], indirect=True)
def test_pairs_need_even_widths(dtype: torch.dtype, tiny: Tiny) -> None:
    odd = tiny("llama", intermediate_size=51)
    assert not can_step(decoder(odd, dtype))
    assert can_step(decoder(odd))


def test_one_precision_for_all(tiny: Tiny) -> None:
    model = decoder(tiny("gpt2"), torch.bfloat16)
    model.norm.float()
    assert not can_step(model)


def test_the_stamp_differs_when_weights_were_written(tiny: Tiny) -> None:
    model = decoder(tiny("llama"))
    before = stamp(tuple(model.parameters()))
    assert stamp(tuple(model.parameters())) == before
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    assert stamp(tuple(model.parameters())) != before
