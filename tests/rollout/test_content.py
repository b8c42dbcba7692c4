"""Adapters alone are sent: they are few bytes, and the engine then computes on what full weights would have been."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from tiny_models import Letters, prompts

from plaudit.compute.digest import digest
from plaudit.models.decoder import Decoder
from plaudit.models.lora import adapter_names, add_lora, lora_of, merged_copy
from plaudit.models.settings import LoraSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.content import Adapters
from plaudit.rollout.engine import generate_all
from plaudit.rollout.worker import RolloutWorker
from plaudit.types import Completion, Sampling
from plaudit.weights.packed import PackedWeights, pack
from plaudit.weights.pieces import WeightsError

PLAN = [Sampling(max_tokens=12, seed=4), Sampling(max_tokens=12, seed=5)]
LORA = LoraSettings(rank=2)


def adapted(plain: Decoder, *, seed: int = 0) -> Decoder:
    return add_lora(copy.deepcopy(plain), LORA, seed=seed)


def trained(plain: Decoder) -> Decoder:
    """Adapters that change something."""
    model = adapted(plain)
    with torch.no_grad():
        for number, name in enumerate(adapter_names(model)):
            model.get_parameter(name).normal_(std=0.3, generator=torch.Generator().manual_seed(number))
    return model


def packed_of(model: Decoder, version: int) -> PackedWeights:
    parameters = dict(model.named_parameters())
    adapters = {name: parameters.pop(name) for name in adapter_names(model)}
    return pack(adapters, version, beneath=digest(parameters))


def answers(worker: RolloutWorker) -> list[list[Completion]]:
    return generate_all(worker.engine, prompts(5, 9), PLAN)


def worker_of(model: Decoder, letters: Letters, *, shared: bool) -> RolloutWorker:
    engine = build_engine(model if shared else merged_copy(model), letters, slots=4)
    return RolloutWorker(engine, Adapters(model, shared=shared))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_merged_here_they_are_the_full_weights_to_the_bit(pairs: Any, letters: Letters, kind: str) -> None:
    learner = trained(pairs(kind)[0])
    whole = pack(dict(learner.hf_tensors()), 1)
    packed = packed_of(learner, 1)
    assert packed.bytes < whole.bytes / 3, "rank 2 of 48"
    full = RolloutWorker(build_engine(merged_copy(adapted(pairs(kind)[0])), letters, slots=4))
    small = worker_of(adapted(pairs(kind)[0], seed=7), letters, shared=False)
    before = answers(small)
    for worker, sent in ((full, whole), (small, packed)):
        assert asyncio.run(worker.load(0, sent)) == (1, sent.digest)
    assert answers(small) == answers(full)
    assert answers(small) != before


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_apart_they_are_what_the_learner_computes_with_to_the_bit(pairs: Any, letters: Letters, kind: str) -> None:
    learner = trained(pairs(kind)[0])
    worker = worker_of(adapted(pairs(kind)[0], seed=7), letters, shared=True)
    asyncio.run(worker.load(0, packed_of(learner, 0)))
    assert answers(worker) == generate_all(build_engine(learner, letters, slots=4), prompts(5, 9), PLAN)


def test_adapters_of_another_model_are_refused_and_change_nothing(pairs: Any, letters: Letters) -> None:
    other = trained(pairs("gpt2")[0])
    with torch.no_grad():
        other.embedding.weight[3, 4] += 1e-6
    worker = worker_of(adapted(pairs("gpt2")[0]), letters, shared=True)
    before = answers(worker)
    with pytest.raises(WeightsError, match=r"digest .*model\.path"):
        asyncio.run(worker.load(0, packed_of(other, 1)))
    with pytest.raises(WeightsError, match="none"):
        asyncio.run(worker.load(0, pack(dict(other.hf_tensors()), 1)))
    assert answers(worker) == before
    plain = RolloutWorker(build_engine(pairs("gpt2")[0], letters, slots=4))
    with pytest.raises(WeightsError, match=r"model\.lora"):
        asyncio.run(plain.load(0, packed_of(other, 1)))


@pytest.mark.parametrize("shared", [True, False])
def test_a_model_beneath_that_changed_in_memory_is_found_with_the_next_adapters(
    pairs: Any, letters: Letters, shared: bool
) -> None:
    learner = trained(pairs("gpt2")[0])
    model = adapted(pairs("gpt2")[0])
    worker = worker_of(model, letters, shared=shared)
    asyncio.run(worker.load(0, packed_of(learner, 1)))
    with torch.no_grad():
        model.embedding.weight.view(torch.int32)[3, 4] ^= 1
    with pytest.raises(WeightsError, match="memory"):
        asyncio.run(worker.load(0, packed_of(learner, 2)))


def test_a_merged_copy_shares_what_has_no_adapters(pairs: Any) -> None:
    model = trained(pairs("llama")[0])
    plain = merged_copy(model)
    assert isinstance(plain, Decoder)
    assert lora_of(plain) is None
    assert lora_of(model) is not None
    assert plain.embedding.weight is model.embedding.weight
    merged = dict(model.hf_tensors())
    assert all(tensor.equal(merged[name]) for name, tensor in plain.hf_tensors())
    assert not set(adapter_names(model)) & {name for name, _ in plain.named_parameters()}
