"""Generation by a model with adapters: on its own parameters, and on a copy that published weights are loaded into."""

from __future__ import annotations

import copy as copying
from typing import Any

import pytest
import torch
from tiny_models import Letters, prompts

from plaudit.models.lora import add_lora
from plaudit.models.settings import LoraSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import generate_all
from plaudit.types import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=15)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_lagging_copy_takes_the_adapters_once(pairs: Any, letters: Letters, kind: str) -> None:
    model = add_lora(copying.deepcopy(pairs(kind)[0]), LoraSettings(rank=2))
    shared, copy = (build_engine(model, letters, slots=4, copy=apart) for apart in (False, True))
    questions = prompts(5, 9)
    before = generate_all(copy, questions, [GREEDY])
    assert [a.tokens for [a] in before] == [a.tokens for [a] in generate_all(shared, questions, [GREEDY])]
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        stale = generate_all(copy, questions, [GREEDY])
        copy.load(dict(model.hf_tensors()), version)
        answers, expected = (generate_all(engine, questions, [GREEDY]) for engine in (copy, shared))
        assert [a.tokens for [a] in answers] == [e.tokens for [e] in expected]
        assert [a.tokens for [a] in answers] != [s.tokens for [s] in stale]
        for [answer], [other] in zip(answers, expected, strict=True):
            torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)


def test_merged_weights_are_not_loaded_beneath_adapters(pairs: Any, letters: Letters) -> None:
    model = add_lora(copying.deepcopy(pairs("llama")[0]), LoraSettings(rank=2))
    with pytest.raises(ValueError, match="merge_lora"):
        build_engine(model, letters, slots=4).load(dict(model.hf_tensors()), 1)
