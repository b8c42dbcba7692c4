"""Whole runs with real Ray processes: the same settings and loop, workers elsewhere, and what a loss of each does."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from waiting import until

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD, HEADER, PHASES, WORKERS, Kill, Killer, descendants
from killed_at import At
from kills import Task, lasting, same_weights, summary, survive
from rounds import ROUNDS

from plaudit import Run, load_settings, run
from plaudit.runs.pipeline import merged
from plaudit.runtime.worker import TooManyFailures
from plaudit.tasks.demo import DemoFiles

Recipe = Callable[..., dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]
RAY = {"kind": "ray", "heartbeat_timeout": 10.0}
OF_PPO = replace(ROUNDS["ppo"], cold=0)
KILLS = {
    "few": OF_PPO.deal(4, 3, first=0),
    "grpo": ROUNDS["grpo"].deal(0, 10, first=0),
    "ppo": OF_PPO.deal(0, 8, first=10),
    "lag": ROUNDS["lag"].deal(6, 2, first=0),
    "ranks": ROUNDS["ranks"].deal(4, 1, first=0),
    "sharded": ROUNDS["sharded"].deal(11, 2, first=0),
    "cut": ROUNDS["cut"].deal(3, 2, first=0),
    "square": ROUNDS["square"].deal(5, 2, first=0),
    "drivers": ROUNDS["drivers"].deal(0, 1, first=0),
    "nodes": ROUNDS["nodes"].deal(2, 2, first=0),
}
"""A few, which `make test` makes; each worker in each phase once; a few of each other kind. `make kills` does 200."""


@pytest.fixture(scope="module")
def killed(pytestconfig: pytest.Config) -> Iterator[list[Kill]]:
    """What was killed in this file's tests: a table at the end."""
    kills: list[Kill] = []
    yield kills
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():  # type: ignore[union-attr]
        print("\n".join(["", HEADER, *(kill.row() for kill in kills), summary(kills)]))


def test_sft_on_two_ranks_learns_what_one_learns(make_recipe: Recipe, tmp_path: Path) -> None:
    alone = run(load_settings(make_recipe("sft", tmp_path / "local")))
    runtime = {**RAY, "num_training_workers": 2, "backend": "gloo"}
    pair = run(load_settings(make_recipe("sft", tmp_path / "ray", runtime=runtime)))
    for mine, theirs in zip(alone.metrics, pair.metrics, strict=True):
        assert mine["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-5)
        assert mine["gradient_norm/policy"] == pytest.approx(theirs["gradient_norm/policy"], rel=1e-4)


def test_grpo_with_two_rollout_workers(make_recipe: Recipe, tmp_path: Path) -> None:
    found = {}
    for kind, more in (("local", {}), ("ray", {"runtime": RAY, "rollout": {"workers": 2}})):
        found[kind] = run(load_settings(make_recipe("grpo", tmp_path / kind, **more)))
    assert [s["completion"] for s in found["local"].samples] == [s["completion"] for s in found["ray"].samples]
    assert same_weights(found["local"], found["ray"])


def test_with_lag_generation_overlaps_and_the_run_can_be_replayed(make_recipe: Recipe, tmp_path: Path) -> None:
    """Old samples are told; without interruption each is of one version; a replay needs neither workers nor Ray."""
    rollout = {"workers": 2, "max_lag": 1, "interrupt": False, "record": True}
    more: dict[str, Any] = {"runtime": RAY, "rollout": rollout, "train": {"steps": 6}}
    done = run(load_settings(make_recipe("grpo", tmp_path / "ray", **more)))
    assert len(done.metrics) == 6
    assert all(record["lag/max"] <= 1.0 for record in done.metrics)
    assert any(record["lag/max"] == 1.0 for record in done.metrics)
    assert all("correction/mean" in record for record in done.metrics)
    page = (done.folder / "page.html").read_text()
    assert "Step 6 of 6, done" in page
    assert "lag, largest" in page
    rows = re.findall("<tr><td>(.*?)</td><td>node [0-9a-f]{8}, process [0-9]+</td><td>(.*?)</td></tr>", page)
    sampling = [(f"rollout worker {number}", "samples with version 6") for number in range(2)]
    assert rows == [*sampling, ("training rank 0", "is ready")]
    steps = [json.loads(line) for line in (done.folder / "groups.jsonl").read_bytes().splitlines()[1:]]
    answers = [answer for step in steps for group in step["groups"] for answer in group["responses"]]
    assert {len(answer["versions"]) for answer in answers} == {1}
    more |= {"runtime": {"kind": "local"}, "rollout": rollout | {"replay": str(done.folder)}}
    again = run(load_settings(make_recipe("grpo", tmp_path / "again", **more)))
    assert same_weights(done, again)
    assert [m["gradient_norm/policy"] for m in done.metrics] == [m["gradient_norm/policy"] for m in again.metrics]


def test_new_weights_take_over_answers_under_way(make_recipe: Recipe, tmp_path: Path) -> None:
    """A step's answers, two at a time, take several times as long as its update: weights come while some are drawn."""
    more: dict[str, Any] = {"rollout": {"max_lag": 1, "max_tokens": 64, "slots": 2, "record": True}}
    done = run(load_settings(make_recipe("grpo", tmp_path, runtime=RAY, train={"steps": 6}, **more)))
    assert all(record["lag/max"] <= 1.0 for record in done.metrics)
    steps = [json.loads(line) for line in (done.folder / "groups.jsonl").read_bytes().splitlines()[1:]]
    answers = [answer for step in steps for group in step["groups"] for answer in group["responses"]]
    drawn = [[version for version, _ in answer["versions"]] for answer in answers]
    assert all(versions == sorted(set(versions)) for versions in drawn), "versions only grow"
    assert all(sum(n for _, n in answer["versions"]) == len(answer["tokens"]) for answer in answers)
    mixed = {tuple(versions) for versions in drawn if len(versions) > 1}
    assert len(mixed) > 1, "more than one update came into answers under way"


SPREAD: dict[str, dict[str, Any]] = {
    "cluster": {
        "runtime": "ray",
        "address": None,  # told when it is there
        "num_workers": 2,
        "num_rollout_workers": 1,
        "max_rollout_workers": 2,
        "cpus_per_worker": 1,
        "gpus_per_worker": 0,
    },
    "strategy": {"name": "fsdp", "micro_tokens": 64},
    "fault_tolerance": {"checkpoint_interval": 1, "resume": True, "max_failures": 0, "timeout": 20.0},
    "communication": {"backend": "gloo", "weights": "collective", "timeout": 60.0},
}
"""For `--dist_config`: a value for every key."""


def test_a_stage_of_the_scripts_pipeline_goes_on_with_distributed_settings(
    make_recipe: Recipe, demo: DemoFiles, tmp_path: Path
) -> None:
    """Begun in this process, on a cluster from the second step on: its figures are those of one that stays here."""
    from ray.cluster_utils import Cluster

    shipped = yaml.safe_load((ROOT / "configs" / "distributed.yaml").read_text())
    assert {key: set(keys) for key, keys in SPREAD.items()} == {key: set(keys) for key, keys in shipped.items()}
    script = importlib.import_module("train").main
    steady = {"optimizer": {"schedule": "constant", "eps": 1e-3}}
    recipe = make_recipe("ppo", tmp_path, **steady)
    del recipe["name"], recipe["output"]
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"stages": {"rlhf": recipe}}))

    def train(folder: str, steps: int, *more: str) -> Run:
        words = ["--config", str(tmp_path / "pipeline.yaml"), "--output_dir", str(tmp_path / folder), *more]
        done = CliRunner().invoke(script, [*words, f"rlhf.train.steps={steps}"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return Run(tmp_path / folder / "logs" / "rlhf")

    whole = train("whole", 3)
    train("spread", 1)
    cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"num_cpus": 3})
    try:
        given = merged(SPREAD, {"cluster": {"address": cluster.address}})
        (tmp_path / "spread.yaml").write_text(yaml.safe_dump(given))
        spread = train("spread", 3, "--dist_config", str(tmp_path / "spread.yaml"))
    finally:
        cluster.shutdown()
    said = (spread.folder / "log.txt").read_text()
    assert "1 node: 3 CPU" in said
    assert "2 training and 1 rollout workers are ready" in said
    assert "resumed epoch1epochstep1globalstep1: step 1 of 3" in said
    states = [path.name[-1] for path in (spread.folder / "checkpoints" / "state").iterdir()]
    assert sorted(states) == ["2", "3"], "one a step"
    for mine, theirs in zip(whole.metrics, spread.metrics, strict=True):
        for name in ("reward/mean", "loss/policy", "gradient_norm/policy", "gradient_norm/critic"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("kind", KILLS)
def test_kills_at_random_moments_change_nothing(
    kind: str, killed: list[Kill], judge: Path, demo: DemoFiles, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks, rollout workers, judges, nodes and drivers, in any phase: the run ends by itself (a driver's by one
    command), names who was lost, and has the same weights to the bit, unless samples may be old."""
    kills = KILLS[kind]
    survive(kills, Task(demo, tmp_path, judge=judge))
    killed += kills
    assert all(kill.survived and kill.fine for kill in kills), "\n".join([HEADER, *(kill.row() for kill in kills)])
    printed = capfd.readouterr()
    assert "(raylet)" not in printed.out + printed.err, "Ray tells of a loss in its own way too"


def test_every_worker_is_killed_in_every_phase() -> None:
    kills = [kill for kind in KILLS.values() for kill in kind]
    assert {kill.role for kill in kills} == {"rank", "rollout", "judge", "node", "driver"}
    workers = {(kill.role, kill.phase) for kill in kills if kill.role in WORKERS}
    assert workers == set(itertools.product(WORKERS, PHASES))


def test_the_rank_and_the_only_rollout_worker_are_lost_together(make_recipe: Recipe, tmp_path: Path) -> None:
    """Nobody asks the rank anything then, and the worker's successor waits for weights that only the rank has."""
    more: dict[str, Any] = {"train": {"steps": 6}, "save": {"every": 2}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    both = At(("rank", "rollout"), lambda killer, method: killer.steps == 3 and method == "generate")
    runtime = {**RAY, "weights": "collective", "start_timeout": 60.0}
    settings = load_settings(make_recipe("grpo", tmp_path / "killed", runtime=runtime, **more))
    with both.at_work():
        done = run(settings, hooks=(hook for hook in [both.hook]))
    assert both.hit == ["training rank 0", "rollout worker 0"]
    assert both.steps == 6, "the hooks stay where all go back to a checkpoint"
    assert same_weights(whole, done)


def test_a_rank_that_is_lost_before_it_went_on_goes_on_from_the_checkpoint_that_was_named(
    make_recipe: Recipe, tmp_path: Path
) -> None:
    def on_from_the_second(runtime: dict[str, Any]) -> Any:
        more = {"train": {"steps": 4}, "save": {"every": 1, "keep": 4}}
        run(load_settings(make_recipe("sft", tmp_path / runtime["kind"], **more)))
        named = sorted(path.name for path in (tmp_path / runtime["kind"] / "run/checkpoints/state").iterdir())[1]
        more |= {"runtime": runtime, "resume": named}
        return load_settings(make_recipe("sft", tmp_path / runtime["kind"], **more))

    whole = run(on_from_the_second({"kind": "local"}))
    settings = on_from_the_second(RAY)
    killer = At(("rank",), lambda _, method: method == "restore")
    with killer.at_work():
        done = run(settings, hooks=[killer.hook])
    said = (done.folder / "log.txt").read_text()
    assert killer.hit == ["training rank 0"]
    assert f"continuing from {settings.resume}" in said
    assert f"resumed {settings.resume}: step 2 of 4" in said
    assert same_weights(whole, done)


def test_a_wrong_address_is_refused_before_anything_is_read(
    make_recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = load_settings(make_recipe("sft", tmp_path, runtime={"kind": "ray", "address": address}))
        with pytest.raises(ValueError, match=rf"^runtime\.address={address}: .*refused"):
            run(settings)
    assert capfd.readouterr().out == ""
    assert not (Path(settings.output) / str(settings.name)).exists()


def test_a_run_that_keeps_failing_ends_with_the_reason(make_recipe: Recipe, tmp_path: Path) -> None:
    more = {"runtime": {**RAY, "max_failures_per_hour": 1}, "rollout": {"workers": 2}, "train": {"steps": 8}}
    killer = Killer([Kill("rollout", "rollout", 1), Kill("rollout", "rollout", 2, which=1)])
    with (
        killer.at_work(),
        pytest.raises(TooManyFailures, match=r"^2 workers .*runtime\.max_failures_per_hour=1 .*: ") as e,
    ):
        run(load_settings(make_recipe("grpo", tmp_path, **more)), hooks=[killer.hook])
    assert "rollout worker 0: " in str(e.value)
    assert "resume=latest" in str(e.value)


@pytest.mark.parametrize(("send", "then"), [(os.kill, "ray"), (os.killpg, "local")])
def test_a_driver_that_is_asked_to_stop_saves_and_leaves_nothing_behind(
    send: Callable[[int, int], None], then: str, make_recipe: Recipe, tmp_path: Path, environment: dict[str, str]
) -> None:
    """It alone, or with all of its group, as `timeout` and service managers do. Goes on there, or in this process."""
    more: dict[str, Any] = {"train": {"steps": 20}, "save": {"every": 2}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    recipe = make_recipe("grpo", tmp_path / "killed", runtime=RAY, **more)
    recipe["rewards"] = [{"kind": "function", "function": f"{Path(__file__).parents[1] / 'tiny.py'}:slow"}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with driver(tmp_path, environment) as first:
        until(lambda: len(checkpoints(tmp_path)) >= 1)
        started = descendants(first.pid)
        assert len(started) >= 4, "raylet, GCS, a rank, a rollout worker"
        send(first.pid, signal.SIGTERM)
        assert first.wait(timeout=60) == 128 + signal.SIGTERM
        until(lambda: not lasting(started), seconds=60)
    if then == "ray":
        with driver(tmp_path, environment, "resume=latest") as second:
            assert second.wait(timeout=120) == 0
    else:
        run(load_settings(recipe | {"runtime": {"kind": then}, "resume": "latest"}))
    assert same_weights(whole, Run(tmp_path / "killed" / "run"))


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "killed" / "run" / "checkpoints" / "state").glob("epoch*"))


@contextmanager
def driver(folder: Path, environment: dict[str, str], *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "plaudit.commands.cli",
        "grpo",
        str(folder / "recipe.yaml"),
        "runtime=ray",
        *overrides,
    ]
    with (folder / "driver.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
