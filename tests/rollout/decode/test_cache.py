import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.rollout.decode.cache import Cache, Decode, Joined, Prefill, ProductCache
from plaudit.rollout.decode.pages import PageCache

ROTARY = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "learned": {"model_type": "gpt2", "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "rotary": ROTARY | {"num_key_value_heads": 4},
    "grouped": ROTARY | {"num_key_value_heads": 2},
    "window": ROTARY | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5},
}


def decoder(kind: str) -> Decoder:
    model = fresh_model(CONFIGS[kind], seed=1)
    assert isinstance(model, Decoder)
    return model


CacheFor = Callable[[Decoder, int, int], Cache]


@pytest.fixture(params=[ProductCache, PageCache])
def cache_for(request: pytest.FixtureRequest) -> CacheFor:
    """A cache for a model, of so many slots and positions; every test here holds for both kinds."""
    if request.param is PageCache:
        request.getfixturevalue("kernels")
    return lambda model, slots, length: request.param(model.config, slots, length, dtype=torch.float32)


def texts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(50, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def whole(model: Decoder, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states of each sequence from one packed pass."""
    lengths = [len(sequence) for sequence in sequences]
    return list(model(torch.cat(sequences), model.packed(lengths)).split(lengths))


@torch.no_grad()
def decode_from(model: Decoder, cache: Cache, sequences: list[torch.Tensor], start: list[int]) -> list[torch.Tensor]:
    """Feed one token a step to every slot until the shortest sequence ends; hidden states (steps, width) each."""
    steps = min(len(sequence) - first for sequence, first in zip(sequences, start, strict=True))
    hidden = []
    for step in range(steps):
        positions = torch.tensor([first + step for first in start])
        tokens = torch.stack([sequence[first + step] for sequence, first in zip(sequences, start, strict=True)])
        hidden.append(model(tokens, Decode(cache, positions, int(positions.max()) + 1)))
    return list(torch.stack(hidden, dim=1))


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompt_and_steps_equal_one_packed_pass(kind: str, cache_for: CacheFor) -> None:
    model, sequences, prompts = decoder(kind), texts(15, 9, 12), [6, 1, 3]
    expected, cache = whole(model, sequences), cache_for(model, 4, 20)
    with torch.no_grad():
        heads = torch.cat([sequence[:size] for sequence, size in zip(sequences, prompts, strict=True)])
        prefilled = model(heads, Prefill(cache, [0, 1, 2], prompts)).split(prompts)
    decoded = decode_from(model, cache, sequences, prompts)
    for row, size in enumerate(prompts):
        torch.testing.assert_close(prefilled[row], expected[row][:size], atol=1e-5, rtol=0)
        torch.testing.assert_close(decoded[row], expected[row][size : size + 8], atol=1e-5, rtol=0)


def test_a_copied_prompt_serves_other_slots(cache_for: CacheFor) -> None:
    model = decoder("grouped")
    [prompt, *answers] = texts(7, 5, 5, 5)
    sequences = [torch.cat((prompt, answer)) for answer in answers]
    cache = cache_for(model, 3, 12)
    with torch.no_grad():
        model(prompt, Prefill(cache, [0], [7]))
    cache.copy([0, 0], [1, 2], 7)
    for decoded, expected in zip(decode_from(model, cache, sequences, [7] * 3), whole(model, sequences), strict=True):
        torch.testing.assert_close(decoded, expected[7:], atol=1e-5, rtol=0)


def test_what_a_slot_held_before_is_never_seen(cache_for: CacheFor) -> None:
    model, [old, new] = decoder("rotary"), texts(20, 6)
    cache = cache_for(model, 1, 20)
    with torch.no_grad():
        model(old, Prefill(cache, [0], [20]))
        model(new[:1], Prefill(cache, [0], [1]))
    # `longest` may be any bound on the positions: what lies past a slot's own position is masked.
    with torch.no_grad():
        steps = [model(new[i : i + 1], Decode(cache, torch.tensor([i]), 20)) for i in range(1, 6)]
    torch.testing.assert_close(torch.cat(steps), whole(model, [new])[0][1:], atol=1e-5, rtol=0)


def test_a_moved_slot_goes_on(cache_for: CacheFor) -> None:
    """Slot 0 ends, slot 2 takes its place, and the free one is written anew: each goes on as it was."""
    model, [first, second, third, new] = decoder("grouped"), texts(9, 9, 9, 9)
    cache = cache_for(model, 3, 12)
    with torch.no_grad():
        model(torch.cat((first[:4], second[:5], third[:6])), Prefill(cache, [0, 1, 2], [4, 5, 6]))
    cache.move([2], [0], 6)
    with torch.no_grad():
        model(new[:3], Prefill(cache, [2], [3]))
    cache.copy([2], [1], 3)
    cache = cache.grown(model.config, 40)
    decoded = decode_from(model, cache, [third, new, new], [6, 3, 3])
    for states, text, start in zip(decoded, (third, new, new), (6, 3, 3), strict=True):
        torch.testing.assert_close(states, whole(model, [text])[0][start : start + 3], atol=1e-5, rtol=0)


def test_growing_keeps_the_contents(cache_for: CacheFor) -> None:
    model, [text] = decoder("learned"), texts(10)
    cache = cache_for(model, 2, 4)
    with torch.no_grad():
        model(text[:4], Prefill(cache, [0], [4]))
    grown = cache.grown(model.config, 10)
    torch.testing.assert_close(
        decode_from(model, grown, [text], [4])[0], whole(model, [text])[0][4:], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_that_join_next_tokens_change_neither(kind: str, cache_for: CacheFor) -> None:
    model, [old, *new] = decoder(kind), texts(8, 5, 9)
    cache = cache_for(model, 3, 12)
    with torch.no_grad():
        model(old[:7], Prefill(cache, [0], [7]))
        joined = Joined(Decode(cache, torch.tensor([7]), 8), Prefill(cache, [1, 2], [5, 9]))
        hidden = model(torch.cat((old[7:], *new)), joined).split([1, 5, 9])
    expected = whole(model, [old, *new])
    torch.testing.assert_close(hidden[0], expected[0][7:], atol=1e-5, rtol=0)
    for prompt, states in zip(hidden[1:], expected[1:], strict=True):
        torch.testing.assert_close(prompt, states, atol=1e-5, rtol=0)
    longer = [torch.cat((text, torch.tensor([3, 4]))) for text in (old, *new)]
    decoded = decode_from(model, cache, longer, [8, 5, 9])  # what was written serves the steps that follow
    for states, full, start in zip(decoded, whole(model, longer), [8, 5, 9], strict=True):
        torch.testing.assert_close(states, full[start:], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["rotary", "grouped", "window"])
def test_both_kinds_hold_the_same(kind: str) -> None:
    model, sequences = decoder(kind), texts(70, 45)  # over several pages
    states = []
    for cache in (form(model.config, 2, 80, dtype=torch.float32) for form in (ProductCache, PageCache)):
        with torch.no_grad():
            model(torch.cat([sequence[:30] for sequence in sequences]), Prefill(cache, [0, 1], [30, 30]))
        states.append(torch.stack(decode_from(model, cache, sequences, [30, 30])))
    torch.testing.assert_close(states[0], states[1], atol=2e-6, rtol=0)


@pytest.mark.usefixtures("kernels")
def test_a_page_by_hand() -> None:
    """One head of two numbers: scores 2 and 4 over sqrt(2), weights their softmax, out the values' mean by those."""
    config = replace(decoder("rotary").config, layers=1, width=2, heads=1, kv_heads=1, head_dim=2)
    cache = PageCache(config, 1, 8, dtype=torch.float32)
    keys, values = torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    cache.write(0, cache.places(torch.tensor([0]), torch.tensor([0])), keys[:1], values[:1])
    out = cache.past(torch.tensor([1]), 2).attend(0, torch.tensor([[[2.0, 5.0]]]), keys[1:], values[1:])
    first = 1 / (1 + math.exp(2 / math.sqrt(2)))  # 1 / (1 + e^(s2 - s1))
    torch.testing.assert_close(out, torch.tensor([[first, 10 * (1 - first)]]))
