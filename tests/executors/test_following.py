"""What a rank of a moving reference takes of its policy's weights. A run of it is in `test_placement_runs.py`."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from plaudit.compute.axis import Axis
from plaudit.executors.following import Followed, part_of
from plaudit.learn.scorer import Scorer
from plaudit.learn.sharding import Whole
from plaudit.models.base import LanguageModel
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.settings.tree import Settings, SettingsError
from plaudit.types import Role
from plaudit.weights.packed import PackedWeights, pack, unpack
from plaudit.weights.pieces import WeightsError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40},
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "vocab_size": 40},
}


def decoder(kind: str, *, seed: int, axis: Axis | None = None) -> Decoder:
    model = fresh_model(CONFIGS[kind], seed=seed, axis=axis or Axis())
    assert isinstance(model, Decoder)
    return model


def sent(policy: Decoder) -> PackedWeights:
    return pack(dict(policy.hf_tensors()), 1)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_takes_its_own_part_of_each_parameter(kind: str, size: int) -> None:
    """As one that trains the policy on the same mesh has it."""
    weights = unpack(sent(decoder(kind, seed=1)))
    for rank in range(size):
        mine, theirs = (decoder(kind, seed=seed, axis=Axis(rank, size)) for seed in (0, 1))
        for name, parameter in theirs.named_parameters():
            assert torch.equal(part_of(mine.held(), name, weights), parameter), name


def rank_of(reference: LanguageModel) -> Followed:
    rank = Followed()
    rank.placements = {Role.REFERENCE: Whole(reference)}
    rank.members = {Role.REFERENCE: Scorer(reference, Role.REFERENCE)}
    return rank


def test_it_moves_as_beside_its_policy_to_the_bit() -> None:
    policy, apart, beside = (decoder("gpt2", seed=seed) for seed in (1, 0, 0))
    rank_of(apart).follow(0.1, sent(policy))
    Scorer(beside, Role.REFERENCE, leader=policy).follow(0.1)
    start = decoder("gpt2", seed=0)
    for name, parameter in beside.named_parameters():
        assert torch.equal(apart.get_parameter(name), parameter), name
    assert not torch.equal(apart.embedding.weight, start.embedding.weight)


def test_weights_that_changed_on_the_way_move_nothing() -> None:
    reference, packed = decoder("gpt2", seed=0), sent(decoder("gpt2", seed=1))
    packed.buckets[0][100] ^= 1
    with pytest.raises(WeightsError, match="resume=latest"):
        rank_of(reference).follow(0.1, packed)
    start = decoder("gpt2", seed=0)
    assert all(torch.equal(p, start.get_parameter(name)) for name, p in reference.named_parameters())


@pytest.mark.parametrize(("ema", "refused"), [(0.3, True), (0.0, False)])
def test_what_runs_through_transformers_does_not_follow_from_afar(ema: float, refused: bool) -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    model = fresh_model({"model_type": "opt", "word_embed_proj_dim": 16, **sizes}, seed=0)
    rank = rank_of(model)
    rank.models = {Role.REFERENCE: model}
    rank.settings = cast(Settings, SimpleNamespace(reference=SimpleNamespace(ema=ema)))
    message = r"reference\.ema=0\.3.*Leave the placement out"
    with pytest.raises(SettingsError, match=message) if refused else nullcontext():
        rank.check_follows()
    rank.models[Role.POLICY] = decoder("gpt2", seed=0)
    rank.check_follows()  # beside its policy it may move
