"""The loop: same seed, same run; on-policy to the promised lag; what is not finite or not scored never trains."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import assert_same_run, timeless

from plaudit import ALGORITHMS, PolicyGradient, Run, Settings, executors, load_settings, run
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.policy_gradient import spread
from plaudit.batch import Batch
from plaudit.compute import products
from plaudit.learn.learner import Learner
from plaudit.loop import hooks
from plaudit.loop.finite import NonFiniteError
from plaudit.loop.outage import RewardFailureError
from plaudit.loop.progress import Moment
from plaudit.loop.train import Ending, _over_updates, update
from plaudit.monitor.health import Ledger
from plaudit.monitor.sinks import read_jsonl
from plaudit.types import Row, Stats

pytestmark = pytest.mark.slow

ONLINE = ("ppo", "grpo", "rloo", "remax", "reinforce", "distill", "online-dpo", "best-of-k")


def settings_of(make_recipe: Any, method: str, output: Path, **more: Any) -> Settings:
    return load_settings(make_recipe(method, output, **more))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def function(name: str) -> list[dict[str, Any]]:
    """Of this module: by its file another copy would be loaded, whose `calls` no test clears."""
    return [{"kind": "function", "function": f"{__name__}:{name}"}]


# --- repeatability and lag


def test_the_same_seed_gives_the_same_run_and_another_one_another(make_recipe: Any, tmp_path: Path) -> None:
    one, two, other = (
        run(settings_of(make_recipe, "ppo", tmp_path / name, seed=seed))
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )
    assert_same_run(one.folder, two.folder)
    assert one.samples[0]["completion"] != other.samples[0]["completion"]
    assert timeless(one.folder / "metrics.jsonl") != timeless(other.folder / "metrics.jsonl")


def test_minibatches_are_shuffled_by_any_seed(make_recipe: Any, tmp_path: Path) -> None:
    done = run(settings_of(make_recipe, "ppo", tmp_path, seed=2**64 - 1, train={"steps": 1}))
    assert done.metrics[0]["updates"] > 1


@pytest.mark.parametrize("method", ["ppo", "remax"])
def test_without_lag_every_token_is_of_the_newest_policy(method: str, make_recipe: Any, tmp_path: Path) -> None:
    done = run(settings_of(make_recipe, method, tmp_path))
    assert {(s["step"], *s["versions"]) for s in done.samples} == {(1, 0), (2, 1), (3, 2), (4, 3)}


def test_a_step_that_gives_up_replacing_groups_leaves_nothing_of_older_weights_to_the_next(
    make_recipe: Any, tmp_path: Path
) -> None:
    done = run(
        settings_of(
            make_recipe,
            "grpo",
            tmp_path,
            algorithm={"samples": 2, "dynamic_sampling": True},
            rewards=function("always_equal"),
        )
    )
    assert {(s["step"], *s["versions"]) for s in done.samples} == {(1, 0), (2, 1), (3, 2), (4, 3)}
    assert [m["groups/dropped"] for m in done.metrics] == [9] * 4  # three times the three prompts, none with a signal
    assert [m["empty"] for m in done.metrics] == [1, 1, 1, 1]
    assert [m["tokens"] for m in done.metrics] == [0, 0, 0, 0]


def test_a_run_that_learns_nothing_says_so_once(make_recipe: Any, tmp_path: Path) -> None:
    made: dict[str, Any] = {"algorithm": {"samples": 2, "dynamic_sampling": True}, "rewards": function("always_equal")}
    made |= {"log": {"quiet": True, "dismiss": ["unfinished"]}}
    done = run(settings_of(make_recipe, "grpo", tmp_path, train={"steps": 6}, **made))
    log = done.folder / "log.txt"
    words = "nothing was learned in 100% of the latest steps."
    said = [line.partition("health: ")[2] for line in log.read_text().splitlines() if words in line]
    assert said[0].startswith(f"Step 5: {words} All answers")
    assert f"health: steps 5 to 6: {words}\n" in log.read_text()
    entries = Ledger(read_jsonl(done.folder / "health.jsonl")).entries
    assert set(entries) == {"empty"}
    entry = entries["empty"]
    assert (entry["step"], entry["last"], entry["count"]) == (5, 6, 2)
    assert entry["numbers"]["now"] == 1.0
    assert entry["why"].startswith("All answers") and entry["advice"].startswith("Read some samples")
    assert "raise algorithm.samples (now 2)" in entry["advice"] and "dynamic_sampling" not in entry["advice"]
    again = settings_of(make_recipe, "grpo", tmp_path, train={"steps": 8}, resume="latest", **made)
    assert len(run(again).metrics) == 8
    entry = Ledger(read_jsonl(done.folder / "health.jsonl")).entries["empty"]
    assert (entry["step"], entry["last"], entry["count"]) == (5, 8, 4)
    assert log.read_text().count("health: Step ") == 1  # a resumed run remembers
    assert f"health: steps 5 to 8: {words}\n" in log.read_text()


def test_with_lag_samples_are_at_most_that_old_and_the_run_repeats(make_recipe: Any, tmp_path: Path) -> None:
    one, two = (
        run(
            settings_of(
                make_recipe,
                "grpo",
                tmp_path / name,
                algorithm={"samples": 2},
                rollout={"max_lag": 1, "slots": 4},
                train={"steps": 6},
            )
        )
        for name in ("one", "two")
    )
    ages = {s["step"] - 1 - version for s in one.samples for version in s["versions"]}
    assert ages == {0, 1}
    lag = one.metrics[-1]
    assert lag["lag/max"] == 1.0
    assert lag.get("lag/0", 0.0) + lag["lag/1"] == pytest.approx(1.0)
    assert lag["lag/mean"] == pytest.approx(lag["lag/1"])
    assert 0.0 < lag["correction/mean"] <= 2.0  # on by default where samples may be old
    assert "lag/0" in one.metrics[0]
    assert_same_run(one.folder, two.folder)


def always_equal() -> float:
    return 1.0


def test_figures_of_samples_leave_greedy_answers_out(make_recipe: Any, tmp_path: Path) -> None:
    done = run(settings_of(make_recipe, "remax", tmp_path, train={"steps": 2}))
    for figures in done.metrics:
        mine = [s for s in done.samples if s["step"] == figures["step"]]
        drawn, greedy = ([s for s in mine if s["greedy"] is whether] for whether in (False, True))
        assert len(drawn) == len(greedy) == 3
        assert all((s["advantage"] is None) is s["greedy"] for s in mine)
        assert figures["reward/mean"] == pytest.approx(sum(s["reward"] for s in drawn) / 3)
        assert figures["reward/greedy"] == pytest.approx(sum(s["reward"] for s in greedy) / 3)
        assert figures["length/mean"] == pytest.approx(sum(s["tokens"] for s in drawn) / 3)


# --- sampler against learner


@pytest.mark.parametrize("method", ONLINE)
def test_before_the_first_update_sampler_and_learner_agree(method: str, make_recipe: Any, tmp_path: Path) -> None:
    """The k3 estimate of the KL between them; it would not be zero if any column were off by one."""
    samples = {} if method in ("ppo", "remax", "reinforce", "distill") else {"samples": 3}
    one_update = {"minibatches": 1} if method == "ppo" else {}
    done = run(settings_of(make_recipe, method, tmp_path, algorithm=samples | one_update, train={"steps": 2}))
    assert [m["kl/sampler"] < 1e-9 for m in done.metrics] == [True, True]
    if method in ("online-dpo", "best-of-k"):  # no ratio
        return
    assert [abs(m["ratio/max"] - 1) < 1e-4 for m in done.metrics] == [True, True]


def test_temperature_is_the_same_on_both_sides(make_recipe: Any, tmp_path: Path) -> None:
    done = run(settings_of(make_recipe, "ppo", tmp_path, rollout={"temperature": 0.5}, train={"steps": 1}))
    assert done.metrics[0]["kl/sampler"] < 1e-9
    assert abs(done.metrics[0]["kl/reference"]) < 1e-4  # the reference is the policy that sampled


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_processor_without_bfloat16_learns_in_it_and_says_what_it_costs(
    precision: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, executors.local):
        monkeypatch.setattr(module, "slow_halves", lambda: True)
    found = run(settings_of(make_recipe, "grpo", tmp_path, learn={"precision": precision}, device="cpu"))
    assert len(found.metrics) == 4
    said = "this processor has no products of bfloat16" in (found.folder / "log.txt").read_text()
    assert said is (precision == "bfloat16")


def test_old_samples_are_told_from_new_ones(make_recipe: Any, tmp_path: Path) -> None:
    more = {"algorithm": {"samples": 2}, "optimizer": {"learning_rate": 0.01}, "train": {"steps": 3}}
    done = run(settings_of(make_recipe, "grpo", tmp_path, rollout={"max_lag": 1}, **more))
    assert done.metrics[0]["kl/sampler"] < 1e-9
    assert done.metrics[1]["kl/sampler"] > 1e-6
    fresh = run(settings_of(make_recipe, "grpo", tmp_path / "fresh", **more))
    assert all(record["lag/max"] == 0.0 and "correction/mean" not in record for record in fresh.metrics)
    assert all(record["lag/0"] == 1.0 for record in fresh.metrics)
    for record in done.metrics:  # the shares of tokens by age
        ages = {int(key[4:]): value for key, value in record.items() if key.startswith("lag/") and key[4:].isdigit()}
        assert sum(ages.values()) == pytest.approx(1.0)
        assert max(ages) == record["lag/max"] <= 1.0
        assert sum(age * share for age, share in ages.items()) == pytest.approx(record["lag/mean"])


# --- what is not finite


def poisoned(monkeypatch: pytest.MonkeyPatch, role: str, steps: set[int], *, update: int | None = None) -> None:
    """Make the loss of `role` infinite in these steps (0-based), or in one update of each."""
    original, counts = Learner.prepare, dict[int, int]()

    def prepare(self: Learner, batch: Any, step: int, rate: float) -> Any:
        loss = self.loss
        if self.role == role and step in steps:
            counts[step] = counts.get(step, -1) + 1
            if update in (None, counts[step]):
                self.loss = lambda output, part: ((found := loss(output, part))[0] * 1e38 * 1e38, found[1])
        try:
            return original(self, batch, step, rate)
        finally:
            self.loss = loss

    monkeypatch.setattr(Learner, "prepare", prepare)


def test_a_step_that_is_not_finite_is_skipped(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, "policy", {1, 2})
    done = run(settings_of(make_recipe, "sft", tmp_path, save={"every": 1, "keep": 0}))
    assert [m["skipped"] for m in done.metrics] == [0, 1, 1, 0]
    assert [m["updates"] for m in done.metrics] == [1, 0, 0, 1]
    folders = sorted((done.folder / "checkpoints/policy").iterdir(), key=lambda p: int(p.name.rpartition("step")[2]))
    first, second, third, fourth = (weights(folder) for folder in folders)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], third[name])
    assert any(not torch.equal(first[name], fourth[name]) for name in first)
    states = [load_file(done.folder / "checkpoints/state" / f.name / "policy.safetensors") for f in folders]
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])  # moments and their step count


def test_three_such_steps_in_a_row_end_the_run(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, "policy", {0, 2, 3, 4})
    with pytest.raises(NonFiniteError, match=r"3 steps .*step 5\)"):
        run(settings_of(make_recipe, "sft", tmp_path, train={"steps": 8}, learn={"rollback_rate": None}))
    assert [m["skipped"] for m in Run(tmp_path / "run").metrics] == [1, 0, 1, 1, 1]


def changes(done: Run) -> dict[str, list[bool]]:
    """By role: whether each step but the first changed the weights; under `state`: the moments."""
    found = {}
    for role in ("policy", "critic", "state"):
        folders = sorted(
            (done.folder / "checkpoints" / role).iterdir(), key=lambda p: int(p.name.rpartition("step")[2])
        )
        files = ("policy.safetensors", "critic.safetensors") if role == "state" else ("model.safetensors",)
        tensors = [
            {f"{file} {name}": tensor for file in files for name, tensor in load_file(folder / file).items()}
            for folder in folders
        ]
        found[role] = [any(not torch.equal(one[name], two[name]) for name in one) for one, two in pairwise(tensors)]
    return found


@pytest.mark.parametrize("more", [{"rollout": {"max_lag": 1}}, {"data": {"validation": "1%"}}, {}])
def test_a_policy_that_has_diverged_ends_the_run_with_what_to_do(
    more: dict[str, Any], make_recipe: Any, tmp_path: Path
) -> None:
    made: dict[str, Any] = {"optimizer": {"learning_rate": 1e20}, "train": {"steps": 6}, "evaluate": {"every": 1}}
    settings = settings_of(make_recipe, "grpo", tmp_path, **made, **more)
    with pytest.raises(NonFiniteError, match=r"step \d .*policy's logits.*learning rate"):
        run(settings)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_an_update_that_is_not_finite_in_one_model_is_made_in_none(
    role: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, role, {1})
    recipe = {"algorithm": {"minibatches": 1}, "save": {"every": 1, "keep": 0}}
    done = run(settings_of(make_recipe, "ppo", tmp_path, **recipe))
    assert [(m["skipped"], m["updates"]) for m in done.metrics] == [(0, 1), (1, 0), (0, 1), (0, 1)]
    assert changes(done) == {role: [False, True, True] for role in ("policy", "critic", "state")}


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_the_other_minibatches_of_the_step_are_made_in_both(
    role: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, role, {1, 2, 3}, update=1)
    recipe = {"algorithm": {"minibatches": 3}, "save": {"every": 1, "keep": 0}, "learn": {"rollback_rate": None}}
    with pytest.raises(NonFiniteError, match="any model"):
        run(settings_of(make_recipe, "ppo", tmp_path, **recipe))
    done = Run(tmp_path / "run")
    assert [(m["skipped"], m["updates"]) for m in done.metrics] == [(0, 3), (1, 2), (1, 2), (1, 2)]
    assert changes(done) == {role: [True, True, True] for role in ("policy", "critic", "state")}
    last = [weights(done.checkpoint(role)) for role in ("policy", "critic")]
    assert all(bool(tensor.isfinite().all()) for tensors in last for tensor in tensors.values())
    states = sorted((done.folder / "checkpoints/state").iterdir(), key=lambda p: int(p.name.rpartition("step")[2]))
    for state, steps in zip(states, (3, 5, 7, 9), strict=True):  # the optimizers have made the same number of steps
        for role in ("policy", "critic"):
            counts = {float(v) for k, v in load_file(state / f"{role}.safetensors").items() if k.startswith("step/")}
            assert counts == {steps}


def beyond_float32(tokens: tuple[int, ...]) -> float:
    """With a weight of 1e21 finite as Python's float, and infinite in the learner's, once."""
    calls.append(1)
    return 1e18 if len(calls) == 4 else sum(tokens) % 7 / 7 * 1e-21


def test_what_a_skipped_step_would_be_remembered_by_is_forgotten(make_recipe: Any, tmp_path: Path) -> None:
    calls.clear()
    done = run(
        settings_of(
            make_recipe,
            "ppo",
            tmp_path,
            algorithm={"normalise_values": True, "minibatches": 1, "kl_target": 1.0},
            rewards=[{**function("beyond_float32")[0], "weight": 1e21}],
            save={"every": 1, "keep": 0},
        )
    )
    assert [m["skipped"] > 0 for m in done.metrics] == [False, True, False, False]
    states = sorted((done.folder / "checkpoints/state").iterdir(), key=lambda p: int(p.name.rpartition("step")[2]))
    memories = [json.loads((folder / "values.json").read_text())["memory"] for folder in states]
    assert memories[0] == memories[1] != memories[2]
    assert all(math.isfinite(value) for memory in memories for value in memory.values())


@dataclass(frozen=True)
class Remembering(PolicyGradient):
    """Whatever torch gives is told and remembered as it is."""

    def credit(self, batch: Batch, memory: Any) -> tuple[Batch, Any]:
        assert batch.reward is not None
        memory["best"] = torch.maximum(batch.reward.max(), torch.tensor(memory.get("best", -1.0)))
        return batch.with_columns(advantages=spread(batch.reward, batch)), {"best": memory["best"]}


def test_figures_and_memory_of_a_method_may_be_tensors(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "remembering", Remembering)
    done = run(settings_of(make_recipe, "remembering", tmp_path, algorithm={}, rewards=function("by_tokens")))
    (state,) = (done.folder / "checkpoints/state").iterdir()
    assert json.loads((state / "values.json").read_text())["memory"] == {"best": done.metrics[-1]["best"]}


def by_tokens(tokens: tuple[int, ...]) -> float:
    return sum(tokens) % 7 / 7


def test_figures_over_updates() -> None:
    """Two updates of a step, the second one skipped: means, extremes by name, sums of what is counted."""
    taken = [
        {"loss/policy": 1.0, "ratio/max": 2.0, "x/min": 3.0, "kl/old": 0.0, "skipped": 0.0, "halted": 0.0},
        {"loss/policy": 3.0, "ratio/max": 5.0, "x/min": 1.0, "kl/old": 0.4, "skipped": 1.0, "halted": 0.0},
    ]
    merged = _over_updates(taken)
    assert (merged["loss/policy"], merged["ratio/max"], merged["x/min"]) == (2.0, 5.0, 1.0)
    assert (merged["kl/old"], merged["kl/sampler"]) == (0.2, 0.0)
    assert (merged["skipped"], merged["updates"]) == (1.0, 1.0)


@pytest.mark.parametrize(("parts", "shares"), [(1, [0.5]), (2, None), (4, [1.0, 1.0])])
def test_masked_answers_count_in_each_minibatch_and_are_not_computed(parts: int, shares: list[float] | None) -> None:
    """Of four answers two are masked: in one mini-batch the others are half of the mean; alone in one they are all of
    it, and one of only masked answers makes no step."""
    seen: list[Batch] = []

    class Taking:
        objective = GRPO(aggregation="sequence", minibatches=parts)

        async def prepare(self, mini: Batch, step: int) -> Any:
            seen.append(mini)
            return None, {"skipped": 0.0, "halted": 0.0}

        async def apply(self, prepared: None, take: bool) -> None:
            assert take

    batch = Batch.of([Row(tokens=(1, 2, 3), trainable=(False, k % 2 == 0, k % 2 == 0)) for k in range(4)])
    figures = asyncio.run(update(Taking(), batch, Ending(), step=0, seed=0))  # type: ignore[arg-type]
    assert figures["updates"] == len(seen)
    found = [float(mini.weight.sum()) for mini in seen]  # type: ignore[union-attr]
    assert sum(map(len, seen)) == 2
    assert found == pytest.approx(shares or [len(mini) / 2 for mini in seen])


# --- rewards that fail


calls: list[int] = []


def sometimes_nan(tokens: tuple[int, ...]) -> float:
    calls.append(1)
    return math.nan if len(calls) % 6 == 0 else float(len(tokens))


def raises_on_some(tokens: tuple[int, ...]) -> float:
    if sum(tokens) % 2:
        raise ValueError("odd")
    return 0.0


def test_failed_rewards_are_masked_and_counted(make_recipe: Any, tmp_path: Path) -> None:
    calls.clear()
    done = run(
        settings_of(
            make_recipe,
            "rloo",
            tmp_path,
            algorithm={"samples": 3},
            rewards=function("sometimes_nan"),
            rollout={"prompts_per_step": 2, "max_failed": 0.2},
        )
    )
    assert [m["reward/failed"] for m in done.metrics] == pytest.approx([1 / 6] * 4)
    failed = [s for s in done.samples if s["reward"] is None]
    assert len(failed) == 4
    assert {s["reason"] for s in failed} == {"sometimes_nan: function returned nan"}
    assert {s["advantage"] for s in failed} == {None}
    assert all(math.isfinite(m["loss/policy"]) for m in done.metrics)
    for m in done.metrics:  # the mean is over those that were scored: 0 never stands for a failure
        scored = [s["reward"] for s in done.samples if s["step"] == m["step"] and s["reward"] is not None]
        assert m["reward/mean"] == pytest.approx(sum(scored) / 5)


def of_even_lengths(completion: str) -> float | None:
    return None if len(completion) % 2 else float(len(completion))


def test_answers_that_no_reward_is_meant_for_are_masked_and_are_no_failures(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plaudit.loop.online.MAX_REDRAW", 1.0)
    asked = {
        "algorithm": {"samples": 3},
        "rewards": function("of_even_lengths"),
        "rollout": {"prompts_per_step": 4, "max_failed": 0.0},
    }
    done = run(settings_of(make_recipe, "rloo", tmp_path, **asked))
    for m in done.metrics:
        samples = [s for s in done.samples if s["step"] == m["step"]]
        without = [s for s in samples if len(s["completion"]) % 2]
        assert {(s["reward"], s["advantage"], s["reason"]) for s in without} <= {(None, None, "not applicable")}
        assert all(s["reward"] == len(s["completion"]) for s in samples if s not in without)
        assert (m["reward/failed"], m["reward/not_applicable"]) == (0, pytest.approx(len(without) / len(samples)))
    assert 0 < sum(m["reward/not_applicable"] for m in done.metrics) < len(done.metrics)


def test_where_no_answer_has_a_reward_no_figure_says_0(make_recipe: Any, tmp_path: Path) -> None:
    made = {"shaping": {"unfinished": "mask"}, "rollout": {"max_tokens": 1}, "train": {"steps": 2}}
    done = run(settings_of(make_recipe, "grpo", tmp_path, data={"validation": "1%"}, **made))
    for m in done.metrics:
        assert (m["unfinished"], m["reward/failed"]) == (1, 0)
        assert not [name for name in m if name.endswith(("reward/mean", "reward/std"))]


def test_too_many_failed_rewards_end_the_run_with_their_reasons(make_recipe: Any, tmp_path: Path) -> None:
    settings = settings_of(
        make_recipe,
        "rloo",
        tmp_path,
        algorithm={"samples": 2},
        rewards=function("raises_on_some"),
        rollout={"max_failed": 0.1},
    )
    with pytest.raises(RewardFailureError, match=r"\d\d% .* 10% .*ValueError: odd \(test_train\.py, line \d+\)'\]"):
        run(settings)


away = {"calls": 0}


def sometimes_away(tokens: tuple[int, ...]) -> float:
    if away["calls"]:
        away["calls"] -= 1
        raise ConnectionError("the grader is away")
    return float(len(set(tokens)))


def test_an_evaluation_waits_for_its_rewards_too(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which checkpoint is the best does not depend on a server that was away meanwhile."""
    evaluate = hooks.Evaluate.__call__

    async def disturbed(self: hooks.Evaluate, moment: Moment) -> Stats:
        away["calls"] = 6 if moment.progress.step == 2 else 0
        return await evaluate(self, moment)

    def evaluated(name: str) -> list[dict[str, Any]]:
        more = {"data": {"validation": "30%"}, "evaluate": {"every": 1, "best": "reward/mean", "limit": 4}}
        done = run(settings_of(make_recipe, "rloo", tmp_path / name, rewards=function("sometimes_away"), **more))
        return [{key: row[key] for key in row if key.startswith(("validation/", "reward/"))} for row in done.metrics]

    whole = evaluated("whole")
    monkeypatch.setattr(hooks.Evaluate, "__call__", disturbed)
    assert evaluated("disturbed") == whole
    assert "rewards work again" in (tmp_path / "disturbed/run/log.txt").read_text()


# --- a moving reference, an early stop


def test_early_stop_by_ratio_halts_the_rest_of_the_batch(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plaudit.loop.online.MAX_REDRAW", 1.0)

    def updates(limit: float | None) -> list[float]:
        done = run(
            settings_of(
                make_recipe,
                "grpo",
                tmp_path / str(limit),
                algorithm={"samples": 2, "epochs": 4, "early_stop_ratio": limit},
                optimizer={"learning_rate": 0.02, "schedule": "constant"},
                train={"steps": 2},
            )
        )
        assert [m["halted"] for m in done.metrics] == [float(limit is not None)] * 2
        return [m["updates"] for m in done.metrics]

    assert updates(None) == [4, 4]
    assert all(1 <= taken < 4 for taken in updates(1.0001))  # the first one never stops: its ratio is 1
