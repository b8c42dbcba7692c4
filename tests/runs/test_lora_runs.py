"""Whole runs that train adapters: the model beneath stays as it is, and is the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plaudit import SettingsError, load_settings, run
from plaudit.models.load import load_model
from plaudit.models.lora import load_lora
from plaudit.runs.pipeline import merged

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {},
    "dpo": {"data": {"limit": 8}},
    "ppo": {"model": {"lora": {"targets": ["c_attn"]}}},
    "grpo": {"algorithm": {"samples": 3, "kl_in_loss": 0.1}},
    "rloo": {"algorithm": {"samples": 3}},
    "remax": {},
    "reinforce": {},
    "distill": {},
    "online-dpo": {"algorithm": {"samples": 3}},
    "best-of-k": {"algorithm": {"samples": 3}},
}
STEPS = 3


@pytest.fixture(scope="module")
def base(make_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to start from."""
    return run(load_settings(make_recipe("sft", tmp_path_factory.mktemp("base"), train={"steps": 1}))).model


def recipe_of(method: str, make_recipe: Any, folder: Path, base: Path, **more: Any) -> dict[str, Any]:
    recipe = make_recipe(method, folder, save={"every": 1, "keep": 0}, train={"steps": STEPS}, **more)
    recipe["model"] = {"path": str(base), "lora": {"rank": 2}}
    return merged(recipe, CASES[method])


def timeless(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time") and k != "tokens_per_second"} for r in records]


@pytest.mark.parametrize("method", CASES)
def test_only_adapters_are_trained_and_a_resumed_run_is_the_same(
    method: str, make_recipe: Any, base: Path, tmp_path: Path
) -> None:
    done = run(load_settings(recipe_of(method, make_recipe, tmp_path / "full", base)))
    head = "scalar" if method == "reward" else "lm"
    role = "judge" if method == "reward" else "policy"
    before, after = load_file(base / "model.safetensors"), load_file(done.model / "model.safetensors")
    adapters = load_file(done.model / "adapter" / "adapter_model.safetensors")
    adapted = {
        name.removeprefix("base_model.model.").removesuffix(".lora_B.weight") + ".weight"
        for name, tensor in adapters.items()
        if name.endswith("lora_B.weight") and tensor.any()
    }
    changed = {name for name in after if name in before and not torch.equal(before[name], after[name])}
    assert changed == adapted
    assert len(changed) == (2 if method == "ppo" else 8)

    again = load_lora(load_model(str(base), head=head), done.model / "adapter")  # type: ignore[arg-type]
    assert all(torch.equal(tensor, after[name]) for name, tensor in again.hf_tensors())

    first = sorted((done.folder / "checkpoints/state").iterdir())[0].name
    shutil.copytree(done.folder, tmp_path / "again" / "run")
    for later in (tmp_path / "again" / "run" / "checkpoints").glob("*/*"):
        if later.name != first:
            shutil.rmtree(later)
    resumed = run(load_settings(recipe_of(method, make_recipe, tmp_path / "again", base, resume=first)))
    assert timeless(resumed.folder / "metrics.jsonl") == timeless(done.folder / "metrics.jsonl")
    name = done.model.name
    files = [f"{role}/{name}/model.safetensors", f"{role}/{name}/adapter/adapter_model.safetensors"]
    for file in [*files, *(f"state/{name}/{part}.safetensors" for part in ("tensors", role))]:
        ours, theirs = (load_file(folder / "checkpoints" / file) for folder in (resumed.folder, done.folder))
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == [], file


def test_the_reference_is_the_model_with_its_adapters_off(make_recipe: Any, base: Path, tmp_path: Path) -> None:
    """The same figures as of a run whose reference is a second model."""
    # Recomputed, for the sampler's own log-probs may differ in the last digit.
    more: dict[str, Any] = {"algorithm": {"recompute_old": True}}
    own = run(load_settings(merged(recipe_of("grpo", make_recipe, tmp_path / "own", base), more)))
    more["reference"] = {"path": str(base)}
    other = merged(recipe_of("grpo", make_recipe, tmp_path / "other", base), more)
    assert own.metrics[0]["kl/reference"] == 0.0
    assert own.metrics[0]["kl/loss"] == pytest.approx(0.0, abs=1e-9)  # with gradients, products are other kernels'
    assert own.metrics[-1]["kl/loss"] > 0.0
    assert timeless(own.folder / "metrics.jsonl") == timeless(run(load_settings(other)).folder / "metrics.jsonl")


def test_a_critic_is_trained_whole(make_recipe: Any, base: Path, tmp_path: Path) -> None:
    done = run(load_settings(recipe_of("ppo", make_recipe, tmp_path, base)))
    assert not (done.checkpoint("critic") / "adapter").exists()
    before, after = load_file(base / "model.safetensors"), load_file(done.checkpoint("critic") / "model.safetensors")
    name = "transformer.wte.weight"
    assert not torch.equal(before[name], after[name])


@pytest.mark.parametrize("start", ["policy", "judge"])
def test_a_critic_with_adapters_leaves_the_model_beneath_and_is_resumed(
    start: str, make_recipe: Any, base: Path, judge: Path, tmp_path: Path
) -> None:
    """Its scalar head is trained with them: a fresh one on the policy's model, or the judge's own."""
    begins = base if start == "policy" else judge
    critic = {"critic": {"lora_rank": 3}}
    if start == "judge":
        critic["rewards"] = [{"kind": "judge", "path": str(judge)}]
    done = run(load_settings(recipe_of("ppo", make_recipe, tmp_path / "full", base, **critic)))
    trained = done.checkpoint("critic")
    before, after = load_file(begins / "model.safetensors"), load_file(trained / "model.safetensors")
    adapters = load_file(trained / "adapter" / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in adapters.items() if name.endswith("lora_A.weight")} == {3}
    changed = {name for name in after if name not in before or not torch.equal(before[name], after[name])}
    assert changed - {"score.weight"} == {
        name.removeprefix("base_model.model.").removesuffix(".lora_B.weight") + ".weight"
        for name, tensor in adapters.items()
        if name.endswith("lora_B.weight") and tensor.any()
    }
    assert "score.weight" in changed
    assert json.loads((trained / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        begins
    )

    first = sorted((done.folder / "checkpoints/state").iterdir())[0].name
    shutil.copytree(done.folder, tmp_path / "again" / "run")
    for later in (tmp_path / "again" / "run" / "checkpoints").glob("*/*"):
        if later.name != first:
            shutil.rmtree(later)
    again = run(load_settings(recipe_of("ppo", make_recipe, tmp_path / "again", base, resume=first, **critic)))
    resumed = load_file(again.checkpoint("critic") / "model.safetensors")
    assert [name for name in after if not torch.equal(after[name], resumed[name])] == []
    assert timeless(again.folder / "metrics.jsonl") == timeless(done.folder / "metrics.jsonl")


def test_samples_that_lag_come_from_the_adapted_policy(make_recipe: Any, base: Path, tmp_path: Path) -> None:
    recipe = recipe_of("grpo", make_recipe, tmp_path, base)
    done = run(load_settings(merged(recipe, {"rollout": {"max_lag": 1}, "algorithm": {"kl_in_loss": 0.0}})))
    assert len(done.metrics) == STEPS
    versions = [record["versions"] for record in done.samples]
    assert max(max(each) for each in versions) > 0


def test_a_checkpoint_goes_on_in_transformers_and_as_the_next_stage(
    make_recipe: Any, base: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    done = run(load_settings(recipe_of("sft", make_recipe, tmp_path / "first", base)))
    tokens = torch.tensor([4, 5, 6, 7])
    model = load_model(str(done.model))
    with torch.no_grad():
        ours = model.head(model(tokens, model.packed([4])))
        theirs = AutoModelForCausalLM.from_pretrained(done.model)(tokens[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    second = recipe_of("sft", make_recipe, tmp_path / "second", done.folder)
    assert len(run(load_settings(second)).metrics) == STEPS


def test_contradictions_are_told(make_recipe: Any, base: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"reference\.ema=0\.1"):
        load_settings(merged(recipe_of("dpo", make_recipe, tmp_path, base), {"reference": {"ema": 0.1}}))
    with pytest.raises(SettingsError, match=r"model\.lora\.rank=-1"):
        load_settings(merged(recipe_of("sft", make_recipe, tmp_path, base), {"model": {"lora": {"rank": -1}}}))
    with pytest.raises(SettingsError, match=r"model\.lora\.alpha=0"):
        load_settings(merged(recipe_of("sft", make_recipe, tmp_path, base), {"model": {"lora": {"alpha": 0}}}))


def test_adapters_that_do_not_fit_are_refused_before_anything_is_read(
    make_recipe: Any, base: Path, tmp_path: Path
) -> None:
    """By the configuration alone: neither data nor weights need to be there."""
    of_path = recipe_of("sft", make_recipe, tmp_path, base)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((base / "config.json").read_text())
    of_path["model"] |= {"path": str(alone), "lora": {"rank": 2, "targets": ["c_attn", "q_proj"]}}
    small = {"model_type": "gpt2", "n_embd": 32, "n_head": 2}
    fresh = merged(of_path, {"model": {"path": None, "config": small, "tokenizer": str(base)}})
    for recipe in (of_path, fresh):
        with pytest.raises(SettingsError, match=r"q_proj, .*gpt2.*: c_attn, c_fc, c_proj"):
            load_settings(recipe)
        assert load_settings(merged(recipe, {"model": {"lora": {"targets": ["c_attn"]}}})).model.lora.rank == 2
    other = merged(fresh, {"model": {"config": {"model_type": "gpt_neox"}, "lora": {"targets": []}}})
    with pytest.raises(SettingsError, match=r"LoRA .*native decoder"):
        load_settings(other)
    hub = merged(of_path, {"model": {"path": "someone/model"}})
    assert load_settings(hub).model.lora.targets == ["c_attn", "q_proj"]  # unknown until it is there


def test_a_run_without_adapters_is_not_resumed_with_them(make_recipe: Any, base: Path, tmp_path: Path) -> None:
    recipe = recipe_of("sft", make_recipe, tmp_path, base)
    run(load_settings(merged(recipe, {"model": {"lora": {"rank": 0}}})))
    with pytest.raises(SettingsError, match=r"  - model\.lora\.rank: 0 there, 2 here"):
        run(load_settings({**recipe, "resume": "latest"}))
