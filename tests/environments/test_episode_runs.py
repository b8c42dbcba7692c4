"""Runs whose answers are episodes: they learn, replay to the last bit, survive kills, and do the same on Ray."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

import worlds
from killed_at import At
from kills import same_weights

from plaudit import Run, load_settings, run
from plaudit.data.settings import DataSettings
from plaudit.environments.settings import EnvironmentSettings
from plaudit.evaluate.evaluation import evaluate
from plaudit.evaluate.settings import EvaluationSettings, SamplingSettings
from plaudit.monitor.sinks import read_jsonl
from plaudit.rewards.settings import RewardSettings
from plaudit.support.fields import SettingsError

pytestmark = pytest.mark.slow
WORLDS = Path(worlds.__file__)
AGENCY = Path(__file__).with_name("agency.py")
RAY = {"kind": "ray", "heartbeat_timeout": 10.0}
Recipe = Callable[..., dict[str, Any]]


@pytest.fixture
def episodes(make_recipe: Recipe, tmp_path: Path) -> Recipe:
    """episodes(method, name, **sections): a recipe whose turns end at a letter e."""

    def make(method: str, name: str, **more: Any) -> dict[str, Any]:
        recipe = make_recipe(
            method,
            tmp_path / name,
            data={"chat_template": "default", "as_chat": True, "max_prompt_tokens": 60},
            environment={"function": f"{WORLDS}:Letters", "max_turns": 4, "max_tokens": 150},
            train={"steps": 3},
        )
        recipe["model"]["config"]["n_positions"] = 256
        recipe["rollout"] |= {"stop": ["e", "a", "t"], "max_tokens": 30} | more.pop("rollout", {})
        recipe["rewards"] = [{"kind": "environment"}]
        return recipe | more

    return make


def figures(done: Run) -> list[dict[str, Any]]:
    passing = ("time", "tokens_per_second")
    return [{name: value for name, value in one.items() if not name.startswith(passing)} for one in done.metrics]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_episodes_are_learned_recorded_and_replayed(method: str, episodes: Recipe) -> None:
    done = run(load_settings(episodes(method, "run", rollout={"record": True})))
    last = done.metrics[-1]
    assert 1.5 < last["episode/turns"] <= 3.0
    assert last["kl/sampler"] < 1e-9, "the sampler's log-probs are the learner's, behind every observation"
    trained = [one for one in done.samples if one["kind"] == "train"]
    several = [one for one in trained if len(one["turns"]) > 1]
    assert several and all(len(one["ids"]) > one["tokens"] for one in several)
    assert all(one["advantage"] is not None for one in several)
    replay = {"replay": str(done.folder), "record": False}
    again = run(load_settings(episodes(method, "again", rollout=replay)))
    assert figures(again) == figures(done)
    assert same_weights(again, done)


def test_a_run_on_ray_learns_the_same(episodes: Recipe) -> None:
    local = run(load_settings(episodes("grpo", "local")))
    there = run(load_settings(episodes("grpo", "ray", runtime=RAY, rollout={"workers": 2})))
    assert local.samples == there.samples
    assert same_weights(local, there)
    for done in (local, there):
        stretches = [one for one in read_jsonl(done.folder / "events.jsonl") if one["phase"] == "samples"]
        assert stretches and all(one["turns"] for one in stretches), "the lanes mark where turns ended"


def test_an_agents_run_replays_and_is_the_same_on_ray(episodes: Recipe) -> None:
    """Its requests come over HTTP; some episodes have two branches."""
    agent = {"kind": "agent", "function": f"{AGENCY}:letters", "max_tokens": 150}
    done = run(load_settings(episodes("grpo", "run", environment=agent, rollout={"record": True})))
    last = done.metrics[-1]
    assert 1.0 < last["episode/branches"] < 2.0 and last["kl/sampler"] < 1e-9
    replay = {"replay": str(done.folder), "record": False}
    again = run(load_settings(episodes("grpo", "again", environment=agent, rollout=replay)))
    assert figures(again) == figures(done) and same_weights(again, done)
    there = run(load_settings(episodes("grpo", "ray", environment=agent, runtime=RAY, rollout={"workers": 2})))
    assert there.samples == done.samples and same_weights(there, done)


@pytest.mark.parametrize("kind", ["class", "agent"])
def test_a_lost_worker_leaves_no_trace_in_episodes(kind: str, episodes: Recipe) -> None:
    """It is killed within an episode, in the second step; what it had under way is drawn again, and the same."""
    agent = {"kind": "agent", "function": f"{AGENCY}:letters", "max_tokens": 150}
    more: dict[str, Any] = {"environment": agent} if kind == "agent" else {}
    whole = run(load_settings(episodes("grpo", "whole", **more)))
    turns = itertools.count()
    killer = At(("rollout",), lambda own, method: own.steps == 1 and method == "generate" and next(turns) == 7)
    settings = load_settings(episodes("grpo", "lost", runtime=RAY, rollout={"workers": 2}, **more))
    with killer.at_work():
        done = run(settings, hooks=[killer.hook])
    assert len(killer.hit) == 1
    assert done.samples == whole.samples and same_weights(done, whole)


@pytest.mark.parametrize("kind", ["class", "agent"])
def test_environments_in_processes_of_their_own_are_the_same_when_one_is_killed(kind: str, episodes: Recipe) -> None:
    """It is killed within episodes, in the second step; one that waits for room on any node is another's neighbour."""
    agent = {"kind": "agent", "function": f"{AGENCY}:letters"}
    own = {"function": f"{WORLDS}:Letters", "max_turns": 4, "max_tokens": 150, **(agent if kind == "agent" else {})}
    whole = run(load_settings(episodes("grpo", "whole", environment=own)))
    turns = itertools.count()
    killer = At(("environment",), lambda own, method: own.steps == 1 and method == "generate" and next(turns) == 7)
    apart = {**own, "workers": 2, "resources": {"CPU": 0.25} if kind == "agent" else {}}
    settings = load_settings(episodes("grpo", "lost", runtime=RAY, rollout={"workers": 2}, environment=apart))
    with killer.at_work():
        done = run(settings, hooks=[killer.hook])
    assert len(killer.hit) == 1 and f"lost {killer.hit[0]}" in (done.folder / "log.txt").read_text()
    assert done.samples == whole.samples and same_weights(done, whole)


def test_episodes_of_older_weights_are_learned_and_replayed(episodes: Recipe) -> None:
    """Turns of one episode may be of several versions, each token with its own."""
    ahead = {"record": True, "max_lag": 2, "workers": 2}
    done = run(load_settings(episodes("grpo", "run", runtime=RAY, rollout=ahead, train={"steps": 4})))
    assert any(one["lag/max"] for one in done.metrics) and done.metrics[-1]["step"] == 4
    replay = {"replay": str(done.folder), "max_lag": 2}
    again = run(load_settings(episodes("grpo", "again", rollout=replay, train={"steps": 4})))
    assert same_weights(again, done)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"rewards": [{"kind": "judge", "path": "x"}]}, "kind judge reads no episodes"),
        ({"environment": {}}, "kind environment is what a class"),
        ({"data": {"as_chat": False}}, "as_chat=false"),
        ({"environment": {"function": f"{WORLDS}:Nothing"}}, "neither a method step"),
        ({"environment": {"kind": "agent", "function": f"{AGENCY}:asks_nothing"}}, "asks nothing"),
        ({"environment": {"kind": "agent", "function": f"{AGENCY}:lacks"}}, "asks for 'colour'"),
        ({"environment": {"function": f"{WORLDS}:Sums", "tools": [f"{WORLDS}:untold"]}}, "schema can be made"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(more: dict[str, Any], says: str, episodes: Recipe) -> None:
    recipe = episodes("grpo", "run")
    for section, own in more.items():
        recipe[section] = {**recipe[section], **own} if section == "data" else own
    with pytest.raises((SettingsError, ValueError), match=says):
        run(load_settings(recipe))


def test_a_checkpoint_is_evaluated_by_its_episodes(episodes: Recipe, tmp_path: Path) -> None:
    """Their rewards are those of a run's validation: the same seeds, prompts and environment."""
    recipe = episodes("grpo", "run", train={"steps": 2})
    recipe["data"]["validation"] = recipe["data"]["train"]
    recipe["evaluate"] = {"limit": 6}
    done = run(load_settings(recipe))
    settings = EvaluationSettings(
        model=str(done.checkpoint("policy")),
        reference=str(done.checkpoint("policy")),
        prompts=recipe["data"]["train"],
        limit=6,
        data=DataSettings(chat_template="default", as_chat=True, max_prompt_tokens=60),
        environment=EnvironmentSettings(**recipe["environment"]),
        rewards=[RewardSettings(kind="environment")],
        sampling=SamplingSettings(stop=recipe["rollout"]["stop"], max_tokens=recipe["rollout"]["max_tokens"]),
        seed=1,  # the run's, and 1
        output=str(tmp_path / "evaluation"),
    )
    found = evaluate(settings).figures
    last = {name.removeprefix("validation/"): value for name, value in done.metrics[-1].items()}
    assert found["reward/environment"].value == pytest.approx(last["reward/mean"])
    assert found["turns"].value == pytest.approx(last["episode/turns"])
    assert found["kl"].value == pytest.approx(0.0, abs=1e-6), "of the policy to itself, over sampled tokens"
