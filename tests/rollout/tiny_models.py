"""Tiny random models in transformers' own classes, what those answer, and a tokenizer of single letters."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plaudit.types import Completion, Sampling
from plaudit.weights.pieces import WeightsError

VOCAB = 300

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "llama": {"num_key_value_heads": 2, "max_position_embeddings": 96},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96},
    "mistral": {"num_key_value_heads": 2, "max_position_embeddings": 96, "sliding_window": 6},
}
ROTARY = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = {
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class Letters:
    """Token i is the i-th letter (and round again); nothing ends a text unless a test says so."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def transformers_model(kind: str, **config: Any) -> Any:
    """A random model in transformers' own class, lively enough that greedy answers do not repeat one token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = CONFIGS.get(kind, {})
    keys = (ROTARY if kind not in ("gpt2", "opt", "gpt_neox", "bloom") else {}) | shape | config
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCAB, **keys, **ends))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def greedy_reference(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """What transformers' own `generate` answers."""
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


class Shaky(dict[str, torch.Tensor]):
    """Weights that change while they are copied: every tensor once it was read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        weights = super().__getitem__(name)
        self[name] = weights + 0.001
        return weights


def refuses_shaky_weights(engine: Any) -> None:
    with pytest.raises(WeightsError, match="tensors"):
        engine.load(Shaky(engine.model.hf_tensors()), 1)
    assert engine.version == 0
    engine.load({name: tensor.clone() for name, tensor in engine.model.hf_tensors()}, 1)
    assert engine.version == 1


OBSERVED = [[40, 41, 42], [43], [44, 45, 46, 47, 48]]
"""What an environment says after each turn but the last."""
STOP = tuple("aeiouqt")
"""Turns end by a stop text: random models seldom draw an end token."""


async def played(engine: Any, prompt: Sequence[int], seed: int, *, wait: int = 0) -> list[Completion]:
    """Play four turns; the environment answers after `wait` rounds of the event loop."""
    context, turns = list(prompt), list[Completion]()
    for number in range(len(OBSERVED) + 1):
        sampling = Sampling(seed=seed + 100 * number, max_tokens=9, stop=STOP, episode=seed, first=len(prompt))
        (turn,) = await engine.generate(context, [sampling])
        turns.append(turn)
        if not turn.finished or number == len(OBSERVED):
            break
        context += [*turn.tokens, *OBSERVED[number]]
        for _ in range(wait):
            await asyncio.sleep(0)
    return turns


def episodes(engine: Any, questions: Sequence[Sequence[int]], *, wait: int = 0) -> list[list[Completion]]:
    async def all_of_them() -> list[list[Completion]]:
        seeds = [(question, seed) for seed, question in enumerate(questions)]
        return await asyncio.gather(*(played(engine, question, seed, wait=wait * seed) for question, seed in seeds))

    return asyncio.run(all_of_them())
