"""Two ranks learn what one learns, whole or in shards, and go on from each other's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_at_work import Job, at_work, do, figures, furthest, of_gradient
from tiny import GPT2

from plaudit import load_settings
from plaudit.batch import Batch
from plaudit.executors.base import Plan
from plaudit.executors.trainer import Trainer
from plaudit.learn.ranks import Alone, join
from plaudit.learn.readout import policy_output
from plaudit.learn.sharding import recompute_layers
from plaudit.learn.shards import Sharded, _shard
from plaudit.models.load import fresh_model
from plaudit.models.settings import Longest
from plaudit.runtime.network import free_address
from plaudit.settings.tree import SettingsError

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 126,  # large enough for oneDNN's products
    "intermediate_size": 181,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
NEOX = {"model_type": "gpt_neox", "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 16}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"learn": {"activation_checkpointing": True}},
    "dpo": {},
    "reward": {},
    "grpo": {"reference": {"ema": 0.1}, "algorithm": {"kl_in_loss": 0.1}},
    "ppo": {"critic": {"learning_rate": 0.003}, "algorithm": {"minibatches": 2}},
    "lora": {"model": {"lora": {"rank": 3, "alpha": 6.0}}, "algorithm": {"kl_in_loss": 0.1}},
    "half": {"learn": {"precision": "bfloat16"}},
}
METHOD = {"lora": "grpo", "half": "sft"}
ON_TWO = [
    *((case, "replicate") for case in ("dpo", "reward", "ppo", "half")),
    *((case, "fsdp") for case in CASES),
    *((case, "zero2") for case in ("grpo", "lora")),
    *((case, "zero1") for case in ("sft", "ppo", "half")),
]
ON_ONE = [("grpo", "fsdp"), ("ppo", "replicate"), ("lora", "fsdp"), ("half", "fsdp")]
FROM_ONE = [("sft", "fsdp"), ("ppo", "replicate")]
ON_THREE = [("grpo", "fsdp"), ("ppo", "zero1"), ("ppo", "replicate")]
ON_FOUR = [("grpo", "fsdp")]
AGAIN = [("ppo", "fsdp"), ("half", "fsdp"), ("ppo", "replicate"), ("half", "zero1"), ("grpo", "zero2")]
"""Cases that are resumed on as many ranks as before."""
GRADIENTS = [
    *(("sft", how) for how in ("replicate", "zero1", "zero2", "fsdp")),
    *(("grpo", how) for how in ("zero1", "fsdp")),
    *(("ppo", how) for how in ("replicate", "zero2", "fsdp")),
]
SHARDS = {"kind": "ray", "strategy": "fsdp"}
SAVED = "epoch1epochstep1globalstep1"


@pytest.fixture(scope="module")
def done(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Folders of finished jobs, <case>/<how>: on one rank, on two, and resumed on one, two and three."""
    root = tmp_path_factory.mktemp("ranks")

    def job(case: str, how: str, strategy: str | None = None, **more: Any) -> Job:
        sections = dict(CASES[case])
        sections["learn"] = {"micro_tokens": 40} | sections.get("learn", {})
        # eps of the size of the gradients: Adam's first step is g / (|g| + eps), a sign where g is rounding alone
        sections["optimizer"] = {"eps": 1e-3, "schedule": "constant"}
        if strategy is not None:
            sections["runtime"] = {"kind": "ray", "strategy": strategy}
        recipe = make_recipe(METHOD.get(case, case), root / "unused", **sections)
        if case == "dpo":
            recipe["model"]["config"] = LLAMA
        return {
            "recipe": recipe,
            "folder": str(root / case / how),
            "steps": (0, 3),
            "out": str(root / case / how),
            **more,
        }

    def resumed(case: str, how: str, on: str, strategy: str | None = None) -> Job:
        folder = str(root / case / how)
        found = job(case, f"{how} on {on}", strategy, steps=(1, 3), resume=SAVED)
        return {**found, "folder": folder}

    def one_step(case: str, how: str, strategy: str | None = None) -> Job:
        return of_gradient(job(case, f"gradient {how}", strategy, steps=(0, 1)))

    for case in CASES:
        do(job(case, "alone", save=1), 0, 1, "")
    for case in {case for case, _ in GRADIENTS}:
        do(one_step(case, "alone"), 0, 1, "")
    jobs = [job(case, how, how, save=1) for case, how in ON_TWO]
    jobs += [one_step(case, how, how) for case, how in GRADIENTS]
    jobs += [resumed(case, "alone", "two", how) for case, how in FROM_ONE]
    jobs += [resumed(case, how, "two", how) for case, how in AGAIN]
    at_work(jobs, 2, root / "two", environment)
    at_work([resumed(case, how, "three", how) for case, how in ON_THREE], 3, root / "three", environment)
    at_work([resumed(case, how, "four", how) for case, how in ON_FOUR], 4, root / "four", environment)
    for case, how in ON_ONE:
        do(resumed(case, how, "one"), 0, 1, "")
    return root


def tolerance(case: str) -> float:
    return 2e-3 if case == "half" else 1e-6  # the next bfloat16 is 1/128 of a number away, at most


@pytest.mark.parametrize(("case", "how"), ON_TWO)
def test_two_ranks_learn_what_one_learns(case: str, how: str, done: Path) -> None:
    """Weights of every model, and every figure: the norm among them, which clipping would hide from the weights."""
    assert furthest(done / case / "alone", done / case / how) < tolerance(case)
    alone, two = figures(done / case / "alone"), figures(done / case / how)
    for mine, theirs in zip(alone["steps"], two["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-2 if case == "half" else 1e-5), name
    share = two["kept"] / alone["kept"]
    assert share == 1.0 if how == "replicate" else 0.5 <= share < 0.51


@pytest.mark.parametrize(("case", "how"), GRADIENTS)
def test_two_ranks_have_the_gradient_of_one(case: str, how: str, done: Path) -> None:
    """No moments between the gradient and the weights, and no clipping."""
    alone, two = done / case / "gradient alone", done / case / f"gradient {how}"
    (step,) = (step for step in figures(alone)["steps"] if "gradient_norm/policy" in step)
    assert step["gradient_norm/policy"] > 0.1
    assert furthest(alone, two) < 1e-6


def test_a_stage_is_how_often_weights_are_gathered_and_gradients_summed(done: Path) -> None:
    """In a step of several passes, and an evaluation after it, of two layers and the rest."""
    units = 3
    zero1, zero2, zero3 = (
        figures(done / "sft" / f"gradient {how}")["collectives"] for how in ("zero1", "zero2", "fsdp")
    )
    passes = zero3["foreach_reduce"] // units
    assert passes > 1
    assert zero1 == {"foreach_all_gather": 2 * units, "foreach_reduce": units}
    assert zero2 == {"foreach_all_gather": 2 * units, "foreach_reduce": passes * units}
    assert zero3["foreach_all_gather"] > passes * (2 * units - 1)


@pytest.mark.parametrize(
    ("case", "how", "world"),
    [*((*p, "one") for p in ON_ONE), *((*p, "three") for p in ON_THREE), *((*p, "four") for p in ON_FOUR)],
)
def test_a_checkpoint_of_two_ranks_goes_on_on_any_number(case: str, how: str, world: str, done: Path) -> None:
    assert furthest(done / case / how, done / case / f"{how} on {world}") < tolerance(case)


@pytest.mark.parametrize(("case", "how"), AGAIN)
def test_it_goes_on_bit_for_bit_on_the_same_number(case: str, how: str, done: Path) -> None:
    one, other = done / case / how, done / case / f"{how} on two"
    assert furthest(one, other) == 0.0
    assert figures(one)["steps"][1:] == figures(other)["steps"]


@pytest.mark.parametrize(("case", "how"), FROM_ONE)
def test_a_checkpoint_of_one_rank_goes_on_on_two(case: str, how: str, done: Path) -> None:
    assert furthest(done / case / "alone", done / case / "alone on two") < tolerance(case)


@pytest.mark.parametrize(("device", "offload"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_one_rank_learns_in_shards_what_the_cpu_does_without(
    device: str, offload: bool, make_recipe: Recipe, tmp_path: Path, environment: dict[str, str]
) -> None:
    """On a GPU by NCCL, also with parameters and moments that wait in host memory."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: a rank of NCCL computes on one")
    sections = {"optimizer": {"eps": 1e-3, "schedule": "constant"}, "algorithm": {"kl_in_loss": 0.1}}
    jobs: dict[str, Job] = {}
    for name, more in (
        ("whole", {"device": "cpu"}),
        ("sharded", {"device": device, "runtime": SHARDS | ({"offload": ["weights"]} if offload else {})}),
    ):
        recipe = make_recipe("grpo", tmp_path / "unused", **sections, **more)
        out = str(tmp_path / name)
        jobs[name] = {"recipe": recipe, "folder": out, "steps": (0, 3), "out": out, "save": 2}
    do(jobs["whole"], 0, 1, "")
    at_work([jobs["sharded"]], 1, tmp_path / "rank", environment)
    assert furthest(tmp_path / "whole", tmp_path / "sharded") < (1e-6 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_recomputed_layers_have_the_same_gradient_bit_for_bit(config: dict[str, Any], batch: Batch) -> None:
    found = []
    for recompute in (False, True):
        model = fresh_model(config, seed=0, vocab_size=50)
        calls: list[int] = []
        model.blocks[1].get_submodule("mlp").register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if recompute:
            recompute_layers(model)
        output = policy_output(model, batch, 1.0)
        assert output.logprobs is not None
        gradients = torch.autograd.grad(output.logprobs.sum(), list(model.parameters()))
        with torch.no_grad():
            policy_output(model, batch, 1.0)
        assert len(calls) == (3 if recompute else 2)
        found.append(gradients)
    assert all(plain.any() and torch.equal(plain, again) for plain, again in zip(*found, strict=True))


def test_a_rank_without_a_gpu_joins_no_group_of_nccl() -> None:
    with pytest.raises(ValueError, match=r"runtime\.backend=nccl.* cpu"):
        join(free_address(held=False), 0, 1, device=torch.device("cpu"), timeout=10.0, backend="nccl")


@pytest.mark.parametrize(("device", "waits"), [("cuda", "1"), ("cpu", None)])
def test_a_group_of_nccl_is_made_to_raise_its_time_outs(
    device: str, waits: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an environment variable that the installed torch knows. The group itself takes two GPUs."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.setenv(name, "given back afterwards")
    monkeypatch.delenv(name)
    assert name in str(torch.distributed.init_process_group.__doc__)

    def made(*given: Any, **named: Any) -> None:
        raise InterruptedError(os.environ.get(name))

    monkeypatch.setattr(torch.distributed, "init_process_group", made)
    with pytest.raises(InterruptedError) as found:
        join(free_address(), 0, 2, device=torch.device(device), timeout=1.0)
    assert found.value.args == (waits,)


@pytest.mark.parametrize("everyone", [False, True])
def test_gathered_parameters_are_on_the_cpu(everyone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that packs them may have no GPU. Meta tensors stand for those on a GPU."""
    place = object.__new__(Sharded)
    place.shards = place.copies = Alone()
    place.rows, place.dtypes = {"weight": 3}, {"weight": torch.bfloat16}
    place.model = torch.nn.Linear(2, 3, device="meta")
    here = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: torch.empty_like(x, device="cpu") if x.is_meta else here(x))
    (found,) = place.parameters(["weight"], everyone=everyone).values()
    assert (str(found.device), found.shape, found.dtype) == ("cpu", (3, 2), torch.bfloat16)


def test_offloading_to_the_cpu_from_the_cpu_is_refused(make_recipe: Recipe, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, runtime=SHARDS | {"offload": ["weights"]})
    ranks = join(free_address(), 0, 1, device=torch.device("cpu"), timeout=10.0, always=True)
    try:
        with pytest.raises(SettingsError, match="on the CPU"):
            Trainer(load_settings(recipe), Plan(tmp_path, None, 1, Longest(8, "a row")), ranks)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_whose_passes_go_by_its_rows_is_not_sharded() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 21, "long_factor": [2.0] * 21, "factor": 2.0}
    rope |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 8}
    model = fresh_model({**LLAMA, "num_hidden_layers": 1, "rope_parameters": rope}, vocab_size=10)
    with pytest.raises(ValueError, match=r"longrope.*strategy=replicate"):
        _shard(model, None, compute=None, cpu_offload=False)


def test_before_torch_2_13_native_models_are_sharded_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That torch cannot sum what some ranks did not use: the native decoder uses all of it in every pass."""
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
    native = fresh_model({**LLAMA, "num_hidden_layers": 1}, vocab_size=10)
    other = fresh_model({**NEOX, "num_hidden_layers": 1}, vocab_size=10)
    ranks = join(free_address(), 0, 1, device=torch.device("cpu"), timeout=10.0, always=True)
    try:
        place = Sharded(native, ranks, device=torch.device("cpu"))
        native(torch.arange(4), native.packed([4])).sum().backward()
        assert all(p.grad is not None for name, p in native.named_parameters() if name != "head.weight")
        assert place.whole() is not None
        with pytest.raises(ValueError, match=r"torch 2\.13 .*runtime\.strategy=replicate"):
            Sharded(other, ranks, device=torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()
