"""What real vLLM takes: models that it runs by transformers' own classes, and what is refused at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ROTARY, Letters, prompts, transformers_model

from plaudit.models.base import LanguageModel, SpecialTokens
from plaudit.models.load import load_model
from plaudit.rollout.engine import generate_all
from plaudit.rollout.settings import VllmStart
from plaudit.rollout.vllm import VllmEngine
from plaudit.types import Sampling

pytestmark = pytest.mark.vllm

MIXED = {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def made(folder: Path, kind: str, **config: Any) -> LanguageModel:
    shape = ROTARY | {"hidden_size": 128, "max_position_embeddings": 96}
    transformers_model(kind, **shape | config).save_pretrained(folder)
    return load_model(str(folder))


def logprobs(model: LanguageModel, question: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    read = torch.tensor([*question, *tokens])
    with torch.no_grad():
        full = model.head(model(read, model.packed([len(read)]))).log_softmax(-1)
    return full[len(question) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_a_model_that_vllm_runs_by_transformers_class_is_still_the_learners(tmp_path: Path, letters: Letters) -> None:
    """vLLM rewrites that class, of which the learner's model, and a judge that is loaded later, are too."""
    model = made(tmp_path, "gpt_neox")
    engine = VllmEngine.of(model, letters, slots=4)
    other = load_model(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.05
    engine.load(dict(model.hf_tensors()), 1)
    [question] = prompts(20)
    [[answer]] = generate_all(engine, [question], [Sampling(max_tokens=8, seed=1)])
    engine.close()
    torch.testing.assert_close(
        torch.tensor(answer.logprobs), logprobs(model, question, answer.tokens), atol=1e-4, rtol=0
    )
    assert not torch.equal(logprobs(other, question, answer.tokens), logprobs(model, question, answer.tokens))


def test_an_end_token_outside_the_vocabulary_ends_nothing(tmp_path: Path, letters: Letters) -> None:
    """Such as a family's default in the config.json of a model with a smaller vocabulary; natively it does no harm."""
    model = made(tmp_path, "llama")
    model.special = SpecialTokens(eos=(7, 50256))
    engine = VllmEngine.of(model, letters, slots=4)
    [[answer]] = generate_all(engine, [[1]], [Sampling(max_tokens=4, seed=1)])
    engine.close()
    assert engine.ends == {7}
    assert answer.tokens


@pytest.mark.parametrize(
    ("kind", "config", "gib", "message"),
    [
        ("qwen3_moe", EXPERTS, 0.25, r"4 experts.*rollout\.engine=native"),
        ("qwen2", MIXED, 0.25, r"max_window_layers.*rollout\.engine=native"),
        ("llama", {}, 1e-9, r"VLLM_CPU_KVCACHE_SPACE, .*data\.max_prompt_tokens \+ rollout\.max"),
        ("llama", {}, 1e-4, r"VLLM_CPU_KVCACHE_SPACE, .*data\.max_prompt_tokens \+ rollout\.max"),
        ("llama", {}, 1e6, r"VLLM_CPU_KVCACHE_SPACE, .*data\.max_prompt_tokens \+ rollout\.max"),
    ],
)
def test_what_vllm_cannot_do_is_refused_in_the_words_of_the_settings(
    tmp_path: Path,
    letters: Letters,
    kind: str,
    config: dict[str, Any],
    gib: float,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plaudit.rollout.vllm_library.CPU_CACHE_GIB", gib)
    model = made(tmp_path, kind, **config)
    with pytest.raises(ValueError, match=message):
        VllmEngine.of(model, letters, slots=4)


def test_the_context_is_that_of_the_settings_and_no_longer_than_the_models(tmp_path: Path, letters: Letters) -> None:
    model = made(tmp_path, "llama")
    for asked, found in ((40, 40), (97, 96), (None, 96)):
        engine = VllmEngine.of(model, letters, slots=4, settings=VllmStart(max_length=asked))
        engine.close()
        assert engine.max_length == found
