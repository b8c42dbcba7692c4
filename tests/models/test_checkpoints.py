from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from plaudit.models.decoder import Decoder
from plaudit.models.described import check_scores
from plaudit.models.load import fresh_model, load_model, save_model

Tiny = Callable[..., dict[str, Any]]


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def _same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_state(first), _state(second), strict=True))


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_shards_hold_what_one_file_holds(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    model = fresh_model(tiny(model_type), seed=1)
    save_model(model, tmp_path / "one")
    save_model(model, tmp_path / "many", max_shard_bytes=12_000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one/model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in whole.values())
    assert _same(load_model(str(tmp_path / "many")), model)


def test_transformers_loads_our_shards_and_we_load_its(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = fresh_model(tiny("qwen3"), seed=1)
    save_model(model, tmp_path / "ours", max_shard_bytes=12_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=12_000)
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    assert _same(load_model(str(tmp_path / "theirs")), model)


def test_a_save_leaves_nothing_of_the_one_before(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama"), seed=1), tmp_path, max_shard_bytes=12_000)
    second = fresh_model(tiny("llama"), seed=2)
    save_model(second, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert _same(load_model(str(tmp_path)), second)


def test_a_tied_head_is_stored_once(tiny: Tiny, tmp_path: Path) -> None:
    model = fresh_model(tiny("llama", tie_word_embeddings=True))
    save_model(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path))
    assert isinstance(loaded, Decoder)
    assert loaded.head.weight is loaded.embedding.weight


def test_a_tied_checkpoint_that_stores_its_head_too_must_agree(tiny: Tiny, tmp_path: Path) -> None:
    model = fresh_model(tiny("llama", tie_word_embeddings=True))
    save_model(model, tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert _same(load_model(str(tmp_path)), model)
    _rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="tie_word_embeddings to false"):
        load_model(str(tmp_path))


def test_a_judge_starts_from_a_policy_with_a_fresh_head(tiny: Tiny, tmp_path: Path) -> None:
    policy = fresh_model(tiny("llama"), seed=1)
    save_model(policy, tmp_path)
    first, second = (load_model(str(tmp_path), head="scalar", seed=seed) for seed in (1, 2))
    assert first.head.weight.shape == (1, 32)
    assert not torch.equal(first.head.weight, second.head.weight)
    assert _same(first, load_model(str(tmp_path), head="scalar", seed=1))
    trunk = dict(policy.named_parameters())
    assert all(torch.equal(p, trunk[name]) for name, p in first.named_parameters() if name != "head.weight")


def test_a_judge_keeps_its_head(tiny: Tiny, tmp_path: Path) -> None:
    judge = fresh_model(tiny("gpt2"), head="scalar", seed=1)
    save_model(judge, tmp_path)
    assert _same(load_model(str(tmp_path), head="scalar", seed=9), judge)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2ForSequenceClassification"]
    assert not (tmp_path / "generation_config.json").exists()


def test_a_model_without_a_scalar_head_of_its_own_gives_no_scores(tiny: Tiny, tmp_path: Path) -> None:
    for model_type in ("gpt2", "llama"):
        policy, judge = tmp_path / f"{model_type}-policy", tmp_path / f"{model_type}-judge"
        save_model(fresh_model(tiny(model_type)), policy)
        save_model(fresh_model(tiny(model_type), head="scalar"), judge, max_shard_bytes=2e4)
        check_scores(str(judge))
        with pytest.raises(ValueError, match=r"policy .*scalar head.*plaudit reward"):
            check_scores(str(policy))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_judge_is_no_policy(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    """Not even where its head would be the token embedding: whoever gives it means another folder."""
    save_model(fresh_model(tiny(model_type), head="scalar"), tmp_path)
    with pytest.raises(ValueError, match="has no LM head"):
        load_model(str(tmp_path))


def test_a_trunk_without_the_prefix_and_with_buffers_loads(tiny: Tiny, tmp_path: Path) -> None:
    model = fresh_model(tiny("gpt2"), seed=1)
    save_model(model, tmp_path)

    def as_on_the_hub(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    _rewrite(tmp_path, as_on_the_hub)
    assert _same(load_model(str(tmp_path)), model)


def test_what_does_not_fit_is_named(tiny: Tiny, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    model = fresh_model(tiny("llama"))
    save_model(model, tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(5, 32)}))
    with pytest.raises(ValueError, match=rf"{name} .*\(5, 32\).*\(16, 32\)"):
        load_model(str(tmp_path))
    _rewrite(tmp_path, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load_model(str(tmp_path))
    save_model(model, tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    with pytest.raises(ValueError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(str(tmp_path))
    save_model(fresh_model(tiny("gpt2")), tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.update({"transformer.h.0.mlp.c_fc.weight": torch.zeros(128, 32)}))
    with pytest.raises(ValueError, match=r"\(128, 32\).*\(32, 128\)"):
        load_model(str(tmp_path))


def test_folders_that_hold_no_model_say_what_to_do(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_model(str(tmp_path))
    save_model(fresh_model(tiny("gpt2")), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="whole safetensors"):
        load_model(str(tmp_path))
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickles.*save_pretrained"):
        load_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        load_model(str(tmp_path))


def test_a_missing_shard_is_named(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path, max_shard_bytes=12_000)
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of"):
        load_model(str(tmp_path))


def test_a_hub_id_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="'nobody/nothing'"):
        load_model("nobody/nothing")


def test_saved_over_an_open_model_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama"), seed=1), tmp_path)
    loaded = load_model(str(tmp_path))
    before = [tensor.clone() for tensor in _state(loaded)]
    save_model(fresh_model(tiny("llama"), seed=2), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, _state(loaded), strict=True))


def test_end_tokens_of_the_generation_config_are_kept(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    model = load_model(str(tmp_path))
    assert model.special.eos == (2, 7)
    assert (model.special.bos, model.special.pad) == (1, 3)
    save_model(model, tmp_path / "again")
    assert load_model(str(tmp_path / "again")).special == model.special


def test_how_a_model_is_sampled_by_default_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    """Servers and `generate` go by it: a policy that is trained on would be sampled in another way than before."""
    save_model(fresh_model(tiny("llama")), tmp_path)
    given = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps({**given, "transformers_version": "4.37.0"}))
    save_model(load_model(str(tmp_path)), tmp_path / "again")
    saved = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert {name: saved[name] for name in given} == given
    assert saved["transformers_version"] == transformers.__version__


def test_a_fresh_model_takes_the_tokenizers_size(tiny: Tiny) -> None:
    keys = {name: value for name, value in tiny("gpt2").items() if name != "vocab_size"}
    assert fresh_model(keys, vocab_size=33).vocab_size == 33
    assert fresh_model({**keys, "vocab_size": 64}, vocab_size=33).vocab_size == 64
    with pytest.raises(ValueError, match=r"vocab_size=20 .* 33"):
        fresh_model({**keys, "vocab_size": 20}, vocab_size=33)


@pytest.mark.parametrize(("content", "told"), [("{bad", "is not JSON"), ("[]", "holds a list"), ("", "is not JSON")])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_of_keys_that_holds_none_is_named(
    name: str, content: str, told: str, tiny: Tiny, tmp_path: Path
) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path, max_shard_bytes=1000)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"/{name} {told}"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "", ".", "config.json", None, 3, ["x"]])
def test_an_index_names_files_beside_it(name: Any, tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path / "own", max_shard_bytes=1000)
    save_model(fresh_model(tiny("llama")), tmp_path)
    index = tmp_path / "own" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"lists .*beside it|lists no"):
        load_model(str(tmp_path / "own"))


@pytest.mark.parametrize("keys", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**7}, {"intermediate_size": 10**15}])
def test_sizes_that_no_file_has_are_refused_before_memory_is_asked_for(keys: Any, tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(ValueError, match=r"describes [\d,]+ parameters, .* holds [\d,]+\."):
        load_model(str(tmp_path))
    if 10**15 in keys.values():
        with pytest.raises(ValueError, match="no computer"):
            fresh_model(tiny("llama") | keys)


@pytest.mark.parametrize("eos", ["x", -1, 2**40, [2, None], {}, True])
def test_an_end_token_that_is_none_is_named(eos: Any, tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=r"eos_token_id is .* a token's number") if eos else nullcontext():
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(name: str, tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a FIFO"):
        load_model(str(tmp_path))


def test_json_that_is_nested_too_deeply_is_named(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_model(str(tmp_path))


def test_an_index_without_its_shards_names_is_named(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama")), tmp_path, max_shard_bytes=1000)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        load_model(str(tmp_path))
