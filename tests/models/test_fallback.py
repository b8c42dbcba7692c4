from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from plaudit.batch import Batch
from plaudit.compute import logprobs
from plaudit.learn.readout import policy_output
from plaudit.models.decoder import Decoder
from plaudit.models.described import check_scores, positions
from plaudit.models.fallback import Fallback, _warn_slower
from plaudit.models.families import read_config
from plaudit.models.load import fresh_model, load_model, save_model
from plaudit.rollout.decode.cache import Prefill, ProductCache
from plaudit.types import Row

Tiny = Callable[..., dict[str, Any]]

IDS = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
NEOX = {"model_type": "gpt_neox", **SIZES, "intermediate_size": 48, **IDS, "attention_dropout": 0.5}
OPT = {"model_type": "opt", **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, **IDS, "dropout": 0.5}
PHI = {"model_type": "phi", **SIZES, "intermediate_size": 48, **IDS, "resid_pdrop": 0.5}
GEMMA = {
    "model_type": "gemma2",
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "final_logit_softcapping": 0.5,
    **IDS,
}
OTHERS = [NEOX, OPT, PHI, GEMMA]


def _rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 40, (length,), generator=generator) for length in (9, 3, 14)]


@pytest.mark.parametrize("keys", OTHERS, ids=lambda keys: keys["model_type"])
def test_logits_and_files_are_those_of_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    model = fresh_model(keys, seed=1)
    assert isinstance(model, Fallback)
    model.train()
    rows = _rows()
    context = model.packed([9, 3, 14])
    hidden = model(torch.cat(rows), context)
    assert hidden.shape == (26, 32)
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again = load_model(str(tmp_path))
    assert isinstance(again, Fallback)
    with torch.no_grad():
        ours = model.head(hidden).split(context.lengths)
        for row, logits in zip(rows, ours, strict=True):
            torch.testing.assert_close(logits, theirs(row[None]).logits[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(again(torch.cat(rows), context), hidden, rtol=0, atol=1e-6)
    assert (model.vocab_size, model.max_positions, positions(str(tmp_path))) == (40, 64, 64)
    assert again.special == model.special


@pytest.mark.parametrize("keys", OTHERS, ids=lambda keys: keys["model_type"])
def test_gradients_reach_the_trunk_and_each_name_is_listed_once(keys: dict[str, Any]) -> None:
    model = fresh_model(keys, seed=1)
    rows = _rows()
    model.head(model(torch.cat(rows), model.packed([9, 3, 14]))).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    names = [name for name, _ in model.hf_tensors()]
    known = set(model.inner.state_dict()) if isinstance(model, Fallback) else set()
    assert len(names) == len(set(names))
    assert set(names) <= known


@pytest.mark.parametrize("keys", OTHERS, ids=lambda keys: keys["model_type"])
def test_a_policy_is_trained_as_transformers_says(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a few tokens, beside the full logits of transformers' own model."""
    monkeypatch.setattr(logprobs, "LEAST_ROWS", 5)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1)
    model = fresh_model(keys, seed=1)
    assert isinstance(model, Fallback)
    rows = [Row(tokens=tuple(row.tolist()), trainable=(False, False, *[True] * (len(row) - 2))) for row in _rows()]
    batch = Batch.of(rows)
    found = policy_output(model, batch, 0.7)
    assert found.logprobs is not None and found.entropy is not None
    (found.logprobs.sum() + 0.1 * found.entropy.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    columns = []
    for row in _rows():
        logp = (model.inner(row[None]).logits[0, 1:-1] / 0.7).log_softmax(dim=-1)  # what emits token 2 and those after
        columns.append((logp.gather(1, row[2:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)))
    chosen, entropy = (torch.cat(column) for column in zip(*columns, strict=True))
    torch.testing.assert_close(found.logprobs[batch.trainable], chosen, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy[batch.trainable], entropy, rtol=0, atol=1e-5)
    (chosen.sum() + 0.1 * entropy.sum()).backward()
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(policy_output(model, batch, 0.7).logprobs, found.logprobs, rtol=0, atol=1e-5)


CAPPED = {**GEMMA, "attn_logit_softcapping": 0.5, "initializer_range": 0.3}
SUNK = {
    "model_type": "gpt_oss",
    **SIZES,
    **IDS,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("keys", [CAPPED, {**CAPPED, "model_type": "vaultgemma"}, SUNK], ids=lambda k: k["model_type"])
def test_attention_keeps_what_sdpa_leaves_out(keys: dict[str, Any], tmp_path: Path) -> None:
    """A soft cap, or sinks: the logits are those of eager attention, of fresh and of loaded models."""
    fresh = fresh_model(keys, seed=1)
    save_model(fresh, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    rows = _rows()
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
        for model in (fresh, load_model(str(tmp_path))):
            found = model.head(model(torch.cat(rows), model.packed([9, 3, 14])))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_judge_keeps_its_soft_cap(tmp_path: Path) -> None:
    save_model(fresh_model(CAPPED, head="scalar", seed=1), tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    judge, rows = load_model(str(tmp_path), head="scalar"), _rows()
    context = judge.packed([9, 3, 14])
    with torch.no_grad():
        scores = judge.head(judge(torch.cat(rows), context)[context.ends])
        torch.testing.assert_close(scores, torch.cat([theirs(row[None]).logits for row in rows]), rtol=0, atol=1e-5)


def test_a_model_that_asks_for_no_more_keeps_sdpa() -> None:
    for keys in (GEMMA | {"attn_logit_softcapping": None}, PHI):
        model = fresh_model(keys, seed=1)
        assert isinstance(model, Fallback)
        if type(model.inner)._supports_sdpa:
            assert model.inner.config._attn_implementation == "sdpa"


def test_what_attention_of_a_time_to_come_asks_for_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that nobody here has heard of: SDPA takes it and does nothing with it."""
    from transformers.models.phi.modeling_phi import PhiAttention

    forward = PhiAttention.forward
    monkeypatch.setattr(PhiAttention, "forward", lambda self, *a, **named: forward(self, *a, **named, tilt=0.5))
    model = fresh_model(PHI, seed=1)
    assert isinstance(model, Fallback)
    assert model.inner.config._attn_implementation == "eager"
    assert fresh_model(NEOX, seed=1).inner.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.parametrize("keys", [NEOX, OPT, PHI], ids=lambda keys: keys["model_type"])
def test_a_judge_scores_alike_in_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    save_model(fresh_model(keys, seed=1), tmp_path / "policy")
    judge = load_model(str(tmp_path / "policy"), head="scalar", seed=1)
    other = load_model(str(tmp_path / "policy"), head="scalar", seed=2)
    assert not torch.equal(next(judge.head.parameters()), next(other.head.parameters()))
    save_model(judge, tmp_path / "judge")
    check_scores(str(tmp_path / "judge"))
    with pytest.raises(ValueError, match="scalar head"):
        check_scores(str(tmp_path / "policy"))
    rows = _rows()
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    context = judge.packed([9, 3, 14])
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge").eval()
    again = load_model(str(tmp_path / "judge"), head="scalar", seed=3)
    with torch.no_grad():
        scores = judge.head(judge(torch.cat(rows), context)[context.ends])
        expected = theirs(padded, attention_mask=(padded != 3).long()).logits
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(again.head(again(torch.cat(rows), context)[context.ends]), scores)


def test_a_config_that_the_decoder_refuses_goes_through_transformers(tiny: Tiny, caplog: Any) -> None:
    _warn_slower.cache_clear()
    keys = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    with caplog.at_level(logging.WARNING):
        model = fresh_model(keys, seed=1)
        fresh_model(keys, seed=1)
    assert isinstance(model, Fallback)
    warnings = [record.getMessage() for record in caplog.records if record.name == "plaudit.models.fallback"]
    assert len(warnings) == 1
    assert "slower" in warnings[0]
    assert "scale_attn_by_inverse_layer_idx=True" in warnings[0]


def test_an_unknown_key_of_a_checkpoint_goes_through_transformers(tiny: Tiny, tmp_path: Path) -> None:
    import json

    save_model(fresh_model(tiny("llama")), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "brand_new_feature": 3}))
    assert isinstance(load_model(str(tmp_path)), Fallback)


def test_both_ways_compute_the_same(tiny: Tiny, tmp_path: Path) -> None:
    from plaudit.models.fallback import load_fallback

    native = fresh_model(tiny("qwen3"), seed=1)
    assert isinstance(native, Decoder)
    save_model(native, tmp_path)
    other = load_fallback(tmp_path, head="lm", dtype=torch.float32, reason="Asked for.", seed=0)
    rows = torch.cat(_rows())
    context = native.packed([9, 3, 14])
    torch.testing.assert_close(native(rows, context), other(rows, context), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_a_long_row_does_not_stretch_the_others(model_type: str, tiny: Tiny) -> None:
    """With longrope transformers rotates all rows as the longest one needs; each is computed as if it were alone."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 2.0}
    rope |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 8}
    own = {"original_max_position_embeddings": 8} if model_type == "phi3" else {}
    model = fresh_model(tiny(model_type, rope_parameters=rope, **own))
    assert isinstance(model, Fallback)
    rows = _rows()
    lengths = [len(row) for row in rows]
    with torch.no_grad():
        together = model(torch.cat(rows), model.packed(lengths)).split(lengths)
        for row, hidden in zip(rows, together, strict=True):
            theirs = model.inner.base_model(row[None], use_cache=False).last_hidden_state[0]
            assert torch.allclose(hidden, theirs, atol=1e-5)
        assert not torch.allclose(together[2][:3], model(rows[2][:3], model.packed([3])), atol=1e-3)


STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **IDS}
MAMBA2 = {"model_type": "mamba2", **STATES, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
MAMBAS = [MAMBA2, {"model_type": "mamba", **STATES}, {"model_type": "falcon_mamba", **STATES}]


@pytest.mark.parametrize("keys", MAMBAS, ids=lambda keys: keys["model_type"])
def test_residuals_in_float32_do_not_reach_a_head_in_bfloat16(keys: dict[str, Any], tmp_path: Path) -> None:
    """Saved in bfloat16, loaded, and each row by itself as transformers computes it."""
    fresh = fresh_model(keys, seed=1)
    assert isinstance(fresh, Fallback)
    fresh.inner.bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    logits = model.head(model(torch.cat(_rows()), model.packed([9, 3, 14])))
    assert logits.dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = torch.cat([theirs(row[None]).logits[0] for row in _rows()])
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.05)
    row = Row(tokens=tuple(range(9)), trainable=(False, *[True] * 8))
    found = policy_output(model, Batch.of([row]), 1.0)
    assert found.logprobs is not None
    found.logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_sizes_that_no_file_has_are_refused_before_memory_is_asked_for(key: str, tmp_path: Path) -> None:
    save_model(fresh_model(NEOX), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 10**12}))
    with pytest.raises(ValueError, match=f"{key}=1,000,000,000,000"):
        load_model(str(tmp_path))


def test_a_cache_is_refused(tiny: Tiny) -> None:
    model = fresh_model(NEOX)
    cache = ProductCache(read_config(tiny("llama")), 1, 8, dtype=torch.float32)
    with pytest.raises(TypeError, match="not Prefill"):
        model(torch.arange(4), Prefill(cache, [0], [4]))


def test_what_is_no_causal_model_is_refused() -> None:
    bert = {"model_type": "bert", **SIZES, "intermediate_size": 48, **IDS}
    with pytest.raises(ValueError, match="not causal"):
        fresh_model(bert)
    with pytest.raises(ValueError, match="nothing_of_the_kind"):
        fresh_model({"model_type": "nothing_of_the_kind"})
    with pytest.raises(ValueError, match=r"hiden_size.* hidden_size"):
        fresh_model({**NEOX, "hiden_size": 3})


def test_a_judge_is_no_policy(tmp_path: Path) -> None:
    save_model(fresh_model(NEOX, head="scalar"), tmp_path)
    with pytest.raises(ValueError, match="LM head"):
        load_model(str(tmp_path))
