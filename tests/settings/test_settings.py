"""What contradicts what, told all at once and before anything starts; and the tree as a file that loads back."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from told import says

from plaudit.algorithms import ALGORITHMS, DPO, PPO, SFT
from plaudit.rewards.rules import RULES
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.settings import RolloutSettings
from plaudit.settings.checks import _installed, check
from plaudit.settings.recipes import completed, defaults, load_settings
from plaudit.settings.tree import Settings, SettingsError, resolved, to_plain, unused
from plaudit.support.fields import leaves

pytestmark = pytest.mark.slow

SHARDS = ["runtime=ray", "runtime.strategy=fsdp", "runtime.num_training_workers=2"]
CUT = ["runtime=ray", "runtime.mesh.tensor=5", "model.path=null", "model.tokenizer=some/tokenizer"]
SPREAD = ["runtime=ray", "runtime.mesh.context=5", "model.path=null", "model.tokenizer=some/tokenizer"]
GROUPED = "{model_type: llama, num_key_value_heads: 2, vocab_size: 100}"
SHARED = ["runtime=ray", "runtime.mesh.rollout_tensor=5", "model.path=null", "model.tokenizer=some/tokenizer"]
TURNS = "runtime.placement={generate: {shares: train}}"
INSIDE = "runtime.placement={generate: {inside: train}}"
APART = "runtime.placement={{{}: {{workers: 1}}}}"
WHOLE = ["reference.path=a", "algorithm.whole_vocabulary=true"]
DYNAMIC = ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_part=right/x"]
VALID: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"train": "some/data"},
    "rewards": [{"kind": "length", "options": {"target": 5}}],
}


def problems_of(method: str, overrides: list[str]) -> str:
    recipe = VALID if ALGORITHMS[method]().data == "prompts" else {k: v for k, v in VALID.items() if k != "rewards"}
    with pytest.raises(SettingsError) as caught:
        load_settings(recipe, overrides, method=method)
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "overrides", "told"),
    [
        ("sft", ["model.path=null"], "no model: .. model.path, or model.config"),
        ("sft", ["model.config={model_type: gpt2}"], "model.path=some/model and model.config"),
        ("sft", ["model.path=null", "model.config={model_type: gpt2}"], "needs model.tokenizer"),
        (
            "sft",
            ["model.path=null", "model.config={model_type: gpt2, n_emdb: 64}"],
            "n_emdb=64; .. n_embd",
        ),
        ("sft", ["model.path=null", 'model.config={model_type: gpt2, n_embd: "64"}'], "n_embd='64' .. whole"),
        ("sft", ["model.path=null", "model.config={n_embd: 64}"], "model.config: .. no model_type"),
        ("sft", ["data.train=null"], "data.train is empty"),
        ("sft", ["data.train=nowhere.jsonl"], "no nowhere.jsonl"),
        ("sft", ["data.validation=./nowhere"], "no ./nowhere"),
        ("sft", ["data.validation=200%"], "data.validation=200%"),
        ("sft", ["data.train='~no such user/x.jsonl'"], "no ~no such user/x.jsonl"),
        ("ppo", ["rewards=[{kind: function, function: '~no such user/x.py:f'}]"], "there is no file"),
        ("sft", ["rewards=[{kind: length}]"], "sft .. no rewards"),
        ("ppo", ["rewards=[]"], "ppo needs a reward"),
        ("distill", [], "distill needs a teacher: set reference.path"),
        ("distill", [*WHOLE, "runtime=ray", "runtime.mesh.tensor=2"], "runtime.mesh={'tensor': 2}: .. whole"),
        ("distill", [*WHOLE, *SHARDS], "whole_vocabulary=true .. runtime.strategy=fsdp"),
        ("distill", [*WHOLE, "runtime=ray", APART.format("reference")], "with runtime.placement.reference"),
        ("distill", [*WHOLE, "runtime.offload=[reference]"], "with runtime.offload=['reference']"),
        (
            "distill",
            ["rewards=[]", "reference.path=a", "algorithm.samples=2", "algorithm.reward_weight=0.5"],
            "distill needs a reward",
        ),
        (
            "distill",
            ["rewards=[]", "reference.path=a", "evaluate.every=1", "evaluate.best=reward/mean", "data.validation=5%"],
            "evaluate.best=reward/mean .. rewards .. none",
        ),
        ("grpo", ["shaping.unfinished=bootstrap"], "grpo has no critic"),
        ("ppo", ["shaping.unfinished=mask_loss"], "ppo with these settings"),
        ("reinforce", ["shaping.unfinished=mask_loss"], "reinforce with these settings"),
        (
            "grpo",
            ["algorithm.dynamic_sampling_part=length"],
            "dynamic_sampling=true",
        ),
        (
            "grpo",
            DYNAMIC,
            "dynamic_sampling_part=right/x .. length",
        ),
        ("grpo", [*DYNAMIC, "rewards=[{kind: judge, path: x, name: right}]"], "_part=right/x .. right, and"),
        ("ppo", ["rewards=[{kind: judge}]"], "rewards.0: .. judge .. path"),
        (
            "ppo",
            ["rewards=[{kind: lenth}]"],
            "rewards.0: .. 'lenth'; .. length",
        ),
        ("ppo", ["rewards.0.options={tarket: 5}"], "'tarket'"),
        ("ppo", ["rewards=[{kind: function, function: 'math:sqr'}]"], "rewards.0: 'math:sqr': .. 'sqr'"),
        ("ppo", ["rewards=[{kind: function, function: 'none.py:f'}]"], "rewards.0: 'none.py:f': .. no file"),
        ("ppo", ["rewards=[{kind: judge, path: a}, {kind: judge, path: b}]"], "rewards .. 'judge'"),
        ("ppo", ["rewards.0.name=failed"], "'failed' .. reward/failed"),
        ("ppo", ["rollout.temperature=0"], "rollout.temperature=0.0 "),
        ("ppo", ["rollout.temperature=inf"], "rollout.temperature=inf must be"),
        ("ppo", ["rollout.top_p=0.9"], "rollout.top_p=0.9 .. ppo's ratios"),
        ("grpo", ["rollout.top_k=5"], "set top_p=1 top_k=0"),
        ("rloo", ["rollout.min_tokens=3"], "set algorithm.recompute_old=true"),
        ("best-of-k", ["rollout.min_tokens=9", "rollout.max_tokens=8"], "min_tokens=9 "),
        ("sft", ["reference.ema=0.1"], "reference.ema=0.1 .. no reference"),
        ("grpo", ["reference.ema=0.1"], "reference.ema=0.1 .. no reference"),
        ("sft", ["data.stream=8"], "data.stream=8 .. train.steps"),
        (
            "grpo",
            ["reference.path=a"],
            "reference.path=a .. grpo .. no reference",
        ),
        ("rloo", ["critic.path=a"], "critic.path=a .. rloo .. no critic"),
        ("sft", ["runtime.offload=[reference]"], "runtime.offload .. sft"),
        ("ppo", ["runtime.offload=[reference]", "model.lora.rank=4"], "runtime.offload .. adapters off"),
        ("dpo", [*SHARDS, "runtime.offload=[weights, reference]"], "runtime.offload .. all models"),
        ("ppo", ["rewards=[{kind: length, offload: true}]"], "offload=True .. 'judge' only"),
        ("sft", ["train.batch_size=0"], "train.batch_size=0 must be"),
        ("sft", ["save.every=0"], "save.every=0 must be"),
        ("sft", ["evaluate.every=-1 seconds"], "evaluate.every=-1 seconds .. steps"),
        ("ppo", ["log.samples_megabytes=-1"], "log.samples_megabytes=-1.0 must be"),
        ("sft", ["seed=-1"], "seed=-1 must be"),
        ("sft", [f"seed={2**64}"], "seed=18446744073709551616 must be"),
        ("sft", ["train.steps=0"], "train.steps=0 must be"),
        ("sft", ["train.epochs=inf"], "train.epochs=inf"),
        ("sft", ["optimizer.learning_rate=nan"], "optimizer.learning_rate=nan must be"),
        ("ppo", ["optimizer.schedule=cosin"], "optimizer.schedule=cosin must be"),
        ("sft", ["optimizer.eps=0"], "optimizer.eps=0.0 "),
        ("sft", ["optimizer.betas=[0.9,1.5]"], "optimizer.betas=[0.9, 1.5]"),
        ("ppo", ["rollout.max_lag=-1"], "rollout.max_lag=-1"),
        ("sft", ["device=tpu"], "device=tpu must be"),
        ("sft", ["runtime=slurm"], "runtime.kind=slurm must be"),
        ("ppo", ["rollout.workers=2"], "rollout.workers=2 .. runtime=ray"),
        ("ppo", ["runtime=ray", "rollout.workers=0"], "rollout.workers=0 must be"),
        ("sft", ["runtime.num_training_workers=2"], "runtime.num_training_workers=2 .. runtime=ray"),
        ("sft", ["runtime=ray", "runtime.nodes_timeout=60"], "runtime.nodes_timeout=60 .. autoscaler .. set address"),
        (
            "sft",
            ["runtime=ray", "runtime.resources_per_worker={CPU: -1}"],
            "resources_per_worker={'CPU': -1.0} must be",
        ),
        (
            "sft",
            [*CUT, "model.config={model_type: gpt2}"],
            "mesh={'tensor': 5} .. model: tensor=5",
        ),
        ("sft", [*CUT, "model.config={model_type: gpt2}"], "divide 12 attention heads"),
        (
            "sft",
            [*CUT, "runtime.mesh={tensor: 1, pipeline: 5}", "model.config={model_type: gpt2}"],
            "for the model: pipeline=5 does not fit this gpt2: pipeline=5 does not divide 12 layers. Take ",
        ),
        (
            "sft",
            [*CUT, "runtime.mesh={tensor: 1, pipeline: 2, spans: 4}", "model.config={model_type: gpt2}"],
            "pipeline=2 times spans=4 does not divide 12 layers. Take pipeline=2.",
        ),
        ("sft", [*CUT, "model.config={model_type: bloom}"], "tensor=5 cuts the families that the native decoder"),
        ("sft", [*SPREAD, "model.config={model_type: gpt2}"], "context=5 does not divide 12 attention heads"),
        ("sft", [*SPREAD, "model.config={model_type: bloom}"], "context=5 cuts the families that the native decoder"),
        (
            "sft",
            [*SPREAD, "runtime.mesh={tensor: 2, context: 2}", f"model.config={GROUPED}"],
            "tensor=2 times context=2 does not divide 2 key-value heads. Take data=2 context=2.",
        ),
        (
            "grpo",
            [*SHARED, "model.config={model_type: gpt2}"],
            "mesh={'rollout_tensor': 5} for rollout workers: tensor=5 does not fit this gpt2: tensor=5 does not divide",
        ),
        ("grpo", [*SHARED, "model.config={model_type: gpt2}"], "12 attention heads; tensor=5 does not divide"),
        ("grpo", [*SHARED, "model.config={model_type: gpt2}"], "3072 channels of the MLP. Take 6."),
        ("grpo", [*SHARED, "model.config={model_type: bloom}"], "tensor=5 cuts the families that the native decoder"),
        ("sft", SHARED[:2], "runtime.mesh.rollout_tensor=5 has no effect: sft learns from data"),
        ("ppo", ["rewards=[{kind: judge, path: some/judge, tensor: 2}]"], "rewards.0.tensor=2 .. workers=1"),
        ("ppo", ["rewards=[{kind: length, tensor: 2}]"], "rewards.0.tensor=2 is read for kind 'judge' only"),
        ("ppo", [*SHARED[:2], TURNS], "placement.generate .. rollout_tensor=5"),
        ("ppo", [TURNS, "rollout.max_lag=1"], "placement.generate .. rollout.max_lag=1"),
        ("ppo", [*SHARED[:1], TURNS, "rollout.workers=[1, 4]"], "placement.generate .. rollout.workers=[1, 4]"),
        ("sft", [TURNS], "placement.generate .. sft"),
        ("rloo", [APART.format("critic")], "placement.critic .. rloo .. critic"),
        ("ppo", ["runtime.placement={critic: {workers: 1}}"], "placement .. runtime=ray"),
        ("ppo", [APART.format("train")], "placement .. train .. runtime.mesh"),
        ("ppo", [APART.format("judge")], "placement .. judge .. rewards.N.workers"),
        ("ppo", [APART.format("refrence")], "placement .. refrence .. reference"),
        ("ppo", ["runtime.placement=3"], "runtime.placement=3 .. mapping"),
        ("ppo", ["runtime.placement={critic: 2}"], "placement.critic=2 must be"),
        ("ppo", ["runtime.placement={critic: {worker: 2}}"], "placement.critic .. worker .. workers"),
        ("ppo", ["runtime.placement={critic: {workers: 0}}"], "placement.critic.workers=0 must be"),
        ("ppo", ["runtime.placement={critic: {mesh: {mirrors: 1}}}"], "placement.critic.mesh .. tensor"),
        ("ppo", ["runtime.placement={critic: {mesh: {replicas: 2}}}"], "placement.critic.mesh .. replicas=2"),
        ("ppo", ["runtime.placement={critic: {resources: {CPU: many}}}"], "placement.critic.resources"),
        ("ppo", ["runtime.placement={critic: {inside: reference}}"], "placement.critic.inside=reference .. train"),
        ("ppo", ["runtime.placement={critic: {inside: train, workers: 2}}"], "placement.critic .. inside"),
        ("ppo", ["runtime.placement={generate: {inside: critic}}"], "placement.generate.inside=critic .. train"),
        ("ppo", [INSIDE, "rollout.workers=2"], "placement.generate .. rollout.workers=2"),
        ("ppo", [INSIDE, "rollout.engine=vllm"], "placement.generate .. rollout.engine=vllm"),
        (
            "ppo",
            [CUT[0], *CUT[2:], "runtime.placement={critic: {mesh: {tensor: 5}}}", "model.config={model_type: gpt2}"],
            "critic: tensor=5 .. 12 attention heads",
        ),
        ("ppo", SHARED[1:2], "mesh={'rollout_tensor': 5} needs runtime=ray"),
        ("sft", ["runtime.start_timeout=60"], "runtime.start_timeout=60.0 needs runtime=ray"),
        ("sft", [*SHARDS, "runtime.offload=[weights]", "device=cpu"], "weights has no effect with device=cpu"),
        ("sft", ["evaluate.patience=2"], "evaluate.patience=2 counts evaluations: set evaluate.best"),
        ("sft", ["evaluate.patience=0"], "evaluate.patience=0 must be"),
        ("sft", ["evaluate.best=loss"], "evaluate.best=loss .. data.validation"),
        ("sft", ["evaluate.best=loss"], "evaluate.best=loss .. evaluate.every"),
        ("sft", ["evaluate.best=accuracy"], "evaluate.best=accuracy .. sft .. loss"),
        ("dpo", ["evaluate.best=acc"], "evaluate.best=acc .. dpo .. loss, accuracy, margin"),
        ("grpo", ["evaluate.best=loss"], "evaluate.best=loss: grpo .. reward/mean or"),
        (
            "grpo",
            ["evaluate.best=reward/lenght"],
            "best=reward/lenght .. reward/mean, reward/len",
        ),
        (
            "grpo",
            ["evaluate.best=reward/lengths"],
            "evaluate.best=reward/lengths .. reward/mean",
        ),
        ("grpo", ["evaluate.best=reward/mean", "rollout.replay=x"], "reward/mean: .. replay"),
        ("sft", ["runtime=ray", "runtime.heartbeat_timeout=0"], "runtime.heartbeat_timeout=0.0 "),
    ],
)
def test_contradictions_are_refused_by_name(method: str, overrides: list[str], told: str) -> None:
    assert says(problems_of(method, overrides), told)


@pytest.mark.parametrize("place", ["./rows.py", "/rows.py", "~/rows.py", "rows.py"])
def test_a_function_of_rows_may_be_named_by_any_path(place: str) -> None:
    offline = {k: v for k, v in VALID.items() if k != "rewards"}
    assert load_settings({**offline, "method": "sft", "data": {"train": f"{place}:rows"}}).data.train == f"{place}:rows"


ONE_OR_MORE = [
    "train.batch_size",
    "train.log_every",
    "train.steps",
    "threads",
    "evaluate.limit",
    *("save.every", "evaluate.every"),
    "rollout.prompts_per_step",
    "rollout.max_tokens",
    "rollout.slots",
    "rollout.workers",
    "learn.micro_tokens",
]
NONE_OR_MORE = [
    "seed",
    "save.keep",
    "log.samples_megabytes",
    "rollout.min_tokens",
    "rollout.top_k",
    "rollout.max_failed",
    "rollout.reward_patience",
    "rollout.max_lag",
    "model.lora.rank",
    "critic.lora_rank",
]


@pytest.mark.parametrize(
    ("key", "refused", "allowed"),
    [
        *((key, "0", "1") for key in ONE_OR_MORE),
        *((key, "-1", "0") for key in NONE_OR_MORE),
        ("seed", f"{2**64}", f"{2**64 - 1}"),
        ("train.epochs", "0", "0.1"),
        ("model.lora.alpha", "0", "0.1"),
        ("reference.ema", "1.1", "1"),
        ("reference.ema", "-0.1", "0"),
        ("rollout.top_p", "0", "0.1"),
        ("rollout.top_p", "1.1", "1"),
        ("critic.learning_rate", "0", "1e-9"),
        *(
            (f"optimizer.{key}", refused, allowed)
            for key, refused, allowed in (
                ("learning_rate", "0", "1e-9"),
                ("warmup", "1", "0.99"),
                ("warmup", "-0.1", "0"),
                ("betas", "[0.9,1.0]", "[0,0]"),
                ("betas", "[-0.1,0.9]", "[0,0.9]"),
                ("eps", "0", "1e-12"),
                ("weight_decay", "-0.1", "0"),
                ("min_ratio", "-0.1", "0"),
                ("max_gradient_norm", "-1", "0"),
            )
        ),
    ],
)
def test_numbers_are_refused_beyond_their_bounds_and_taken_at_them(key: str, refused: str, allowed: str) -> None:
    lines = problems_of("online-dpo", [f"{key}={refused}"]).splitlines()[1:]
    assert [line.partition("=")[0] for line in lines] == [f"  - {key}"]
    load_settings(VALID, [f"{key}={allowed}"], method="online-dpo")


def test_settings_that_are_fine_together() -> None:
    given = {key: value for key, value in VALID.items() if key != "rewards"}
    load_settings(given, ["reference.ema=0.1", "reference.path=a", "runtime.offload=[reference]"], method="dpo")
    load_settings(given, [*SHARDS, "runtime.offload=[weights]", "device=cuda"], method="sft")
    load_settings(VALID, ["critic.path=a", "rollout.workers=1"], method="ppo")
    load_settings(
        VALID, ["reference.path=a", "runtime.offload=[reference, optimizer]", "model.lora.rank=4"], method="ppo"
    )
    held_out = ["data.validation=5%", "evaluate.every=1 epoch", "evaluate.patience=1"]
    load_settings(given, [*held_out, "evaluate.best=accuracy"], method="dpo")
    for figure in ("mean", "length", "length/part"):  # what parts a function has shows when it is called
        load_settings(VALID, [*held_out, f"evaluate.best=reward/{figure}"], method="grpo")
    load_settings(VALID, [*DYNAMIC, "algorithm.dynamic_sampling_part=length/part"], method="grpo")
    load_settings(VALID, ["rollout.min_tokens=8", "rollout.max_tokens=8"], method="best-of-k")
    load_settings(VALID, ["rollout.workers=[2,2]", "runtime=ray"], method="grpo")
    load_settings(VALID, ["runtime=ray", APART.format("reference"), "reference.ema=0.1"], method="ppo")
    for several in ([INSIDE, *SHARDS], SHARED[:2]):
        load_settings(VALID, ["runtime=ray", *several, "model.lora.rank=4"], method="ppo")


def test_cut_distributions_are_fine_where_no_ratio_is_taken() -> None:
    settings = load_settings(VALID, ["rollout.top_p=0.9", "rollout.min_tokens=3"], method="best-of-k")
    assert settings.rollout.top_p == 0.9
    load_settings(VALID, ["rollout.min_tokens=3", "algorithm.recompute_old=true"], method="ppo")


def test_all_contradictions_are_listed_at_once() -> None:
    told = problems_of("ppo", ["model.path=null", "rollout.temperature=0", "train.batch_size=-2", "seed=-1"])
    lines = told.splitlines()
    assert lines[0] == "the settings cannot be used:"
    told = {line.split()[1].partition("=")[0] for line in lines[1:]}
    assert told == {"no", "a", "rollout.temperature", "train.batch_size", "seed"}


@pytest.mark.parametrize("method", ALGORITHMS)
def test_the_saved_tree_loads_back_equal(method: str, tmp_path: Path) -> None:
    given = VALID if ALGORITHMS[method]().data == "prompts" else dict(list(VALID.items())[:2])
    teacher = {"reference": {"path": "some/teacher"}} if ALGORITHMS[method]().has_teacher else {}
    settings = load_settings(given | teacher, method=method)
    changed = dataclasses.replace(settings, seed=7, name="a b", threads=2)
    changed.optimizer.betas = (0.5, 0.75)
    changed.rollout.stop = ["\n", "null", "1.0"]
    (tmp_path / "settings.yaml").write_text(resolved(changed))
    assert load_settings(tmp_path / "settings.yaml") == changed


@pytest.mark.parametrize("method", ALGORITHMS)
def test_defaults_are_those_of_the_method(method: str) -> None:
    assert defaults(method).algorithm == ALGORITHMS[method]()


def test_typed_settings_are_completed_by_their_method() -> None:
    assert completed(Settings(method="ppo")).algorithm == PPO()
    assert completed(Settings(method="dpo", algorithm=DPO(beta=0.3))).algorithm == DPO(beta=0.3)
    with pytest.raises(SettingsError, match=r"method=sft .* not PPO"):
        completed(Settings(method="sft", algorithm=PPO()))
    with pytest.raises(SettingsError, match=r"'ppoo'.* ppo"):
        completed(Settings(method="ppoo"))
    with pytest.raises(SettingsError, match="no model"):
        check(completed(Settings(algorithm=SFT())))


def test_the_method_follows_the_lag_that_a_run_has_in_the_end() -> None:
    settings = completed(Settings(method="ppo"))
    assert settings.objective == PPO(recompute_old=False)
    again = load_settings({**VALID, "algorithm": to_plain(settings.algorithm)}, ["rollout.max_lag=1"], method="ppo")
    assert again.objective == PPO(recompute_old=True)  # from the settings that a run has saved
    settings.rollout.max_lag = 1
    assert settings.objective == PPO(recompute_old=True)
    assert Settings(algorithm=PPO(recompute_old=False), rollout=RolloutSettings(max_lag=1)).objective == PPO(
        recompute_old=False
    )


def test_ray_that_is_not_installed_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "runtime=ray needs Ray, which is not installed: pip install -e '.[ray]' in Plaudit's folder" in problems_of(
        "sft", ["runtime=ray"]
    )


@pytest.mark.parametrize(("plugins", "module"), [([], "__main__"), ([], "helpers"), (["my.py"], "__main__")])
def test_what_other_processes_would_not_know_is_refused_before_they_start(plugins: list[str], module: str) -> None:
    """What a script, a notebook or a module of theirs registers: they run the plugins alone."""

    def vowels(completion: str) -> float:
        return float(sum(letter in "aeiou" for letter in completion))

    mine: Any = type("Mine", (PPO,), {"__module__": module})
    vowels.__module__ = module
    settings = load_settings(VALID, method="ppo")
    settings.method, settings.algorithm, settings.plugins = "mine", mine(), plugins
    settings.rewards = [RewardSettings(kind="vowels"), RewardSettings(kind="function", function="json:dumps")]
    settings.rewards[1].options = {"obj": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "vowels", vowels)
        check(settings)
        settings.runtime.kind = "ray"
        with pytest.raises(SettingsError) as caught:
            check(settings)
    told = "is known to this process alone, not to those of runtime=ray: put it into a file that `plugins` names"
    assert [line[4:] for line in str(caught.value).splitlines()[1:]] == [
        f"rewards.0: vowels {told}",
        f"method=mine {told}",
    ]


def test_a_package_within_one_that_is_absent_is_absent() -> None:
    assert _installed("importlib.util")
    assert not _installed("no_such_package")
    assert not _installed("no_such_package.exporter.prometheus")


def test_vllm_that_is_not_installed_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster elsewhere may have it where the driver has not."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = "rollout.engine=vllm needs vLLM, which is not installed: pip install -e '.[vllm]' in Plaudit's folder"
    assert told in problems_of("ppo", ["rollout.engine=vllm"])
    assert told not in problems_of("ppo", ["rollout.engine=vllm", "runtime=ray", "runtime.address=there:6379"])


def test_what_a_method_does_not_read_is_named() -> None:
    offline = [
        "rollout.temperature=0.5",
        "rollout.vllm.memory=0.3",
        "shaping.clip=2",
        "critic.learning_rate=0.5",
    ]
    given = {key: value for key, value in VALID.items() if key != "rewards"}
    assert unused(load_settings(given, [*offline, "train.batch_size=8"], method="dpo")) == [
        "critic.learning_rate=0.5",
        "rollout.temperature=0.5",
        "rollout.vllm.memory=0.3",
        "shaping.clip=2.0",
    ]
    assert unused(load_settings(VALID, [*offline, "train.batch_size=8"], method="ppo")) == ["train.batch_size=8"]
    given |= {"reference": {"path": "some/teacher"}}
    assert unused(load_settings(given, ["shaping.clip=2"], method="distill")) == ["shaping.clip=2.0"], "no rewards"
    for method in ALGORITHMS:
        assert unused(defaults(method)) == [], method


HUGE = "1" + "0" * 309
ODD = (HUGE, f"-{HUGE}", f"[{HUGE}]", "1" + "0" * 5000, "1e400", "nan", "[[[1]]]", "[]", "{a: {b: 1}}", "{}", "null")
ODD += ("true", "''", "-1", "${oc.env:HOME}", "[${oc.env:HOME}]", "${nothing}", "???", "\x1b[2J")


@pytest.mark.parametrize("method", ["ppo", "dpo"])
def test_no_value_of_any_setting_is_met_by_another_error(method: str) -> None:
    """Each setting gets two odd values: numbers of 309 and 5,000 digits, lists for numbers, texts for lists ..."""
    recipe = {**VALID, "rewards": VALID["rewards"] * (method == "ppo")}
    generator = random.Random(method)
    refused = 0
    for path in [
        *(leaf.key for leaf in leaves(defaults(method))),
        "rewards.0.weight",
        "runtime.resources_per_worker.CPU",
    ]:
        for value in generator.sample(ODD, 2):
            try:
                load_settings(recipe, [f"{path}={value}"], method=method)
            except SettingsError:
                refused += 1
    assert refused > 140


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"optimizer.learning_rate={HUGE}", "optimizer.learning_rate .. too large"),
        (f"train.steps={HUGE}", "train.steps=1.000e+309 .. 64 bits"),
        ("train.steps=1" + "0" * 5000, "key.sub=value: .. limit"),
        (f"algorithm.samples={HUGE}", "algorithm.samples=1.000e+309 must be"),
        ("optimizer.betas=[[1]]", "optimizer.betas"),
        ("runtime.resources_per_worker={CPU: {a: 1}}", "runtime.resources_per_worker={'CPU': {'a': 1}} "),
        ("rewards=${oc.env:HOME}", "rewards .. list"),
        ("runtime.resources_per_worker=${oc.env:HOME}", "runtime.resources_per_worker .. dict"),
    ],
)
def test_what_no_setting_holds_is_refused(override: str, told: str) -> None:
    assert says(problems_of("grpo", [override]), told)
