"""A judge as an application of Ray Serve (deploy/reward_service.py), as a run asks it. Needs ray[serve]: `make
test-trackers`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from listening import free_port
from waiting import until

from plaudit.evaluate.judge import Judge
from plaudit.rewards.protocol import vocabulary_digest
from plaudit.rewards.remote import HttpReward, check_servers
from plaudit.rewards.settings import RewardSettings
from plaudit.types import Completion, Finish, Prompt

if find_spec("ray") is None or find_spec("fastapi") is None:
    pytest.skip("ray[serve] is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TOKEN = "a token of at least sixteen characters"


@pytest.mark.slow
def test_a_judge_of_ray_serve_scores_as_in_this_process(
    judge: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, port = tempfile.mkdtemp(dir="/tmp", prefix="serve"), free_port()
    (tmp_path / "serve.yaml").write_text(
        f"http_options: {{port: {port}}}\n"
        "applications: [{name: judge, import_path: 'deploy.reward_service:app', route_prefix: /,\n"
        "                deployments: [{name: judge, ray_actor_options: {num_cpus: 1}}]}]\n"
    )
    given = {"REWARD_MODEL": str(judge), "REWARD_TOKEN": TOKEN, "RAY_TMPDIR": own, "RAY_NUM_CPUS": "2"}
    path = f"{ROOT}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(tmp_path / "serve.yaml")]
    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen(
            command,
            env={**environment, **given, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            start_new_session=True,
        )
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    asked = RewardSettings(kind="http", urls=[f"http://127.0.0.1:{port}"], token_env="REWARD_TOKEN")

    def ready() -> bool:
        assert served.poll() is None, (tmp_path / "log").read_text()
        with suppress(OSError):
            request = urllib.request.Request(f"{asked.urls[0]}/health", headers={"Authorization": f"Bearer {TOKEN}"})
            return bool(urllib.request.urlopen(request, timeout=5).status == 200)
        return False

    here = Judge.load(str(judge))
    tokens = tuple(here.tokenizer("It is four.")["input_ids"])
    prompt = Prompt(id="p", text="2 + 2 =", tokens=tuple(here.tokenizer("2 + 2 =")["input_ids"]))
    answers = [
        Completion(tokens=tokens[:n], logprobs=(0.0,) * n, versions=(0,) * n, text="", finish=Finish.LENGTH)
        for n in range(1, len(tokens))
    ]
    try:
        until(ready, "an application that answers")
        assert asyncio.run(check_servers(asked)) == []
        digest = vocabulary_digest(here.tokenizer.get_vocab())
        scores = asyncio.run(HttpReward(asked, vocabulary=digest).score(prompt, answers))
        monkeypatch.setenv("REWARD_TOKEN", TOKEN[::-1])
        (refused,) = asyncio.run(HttpReward(asked).score(prompt, answers[:1]))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(served.pid, signal.SIGINT)
        try:
            served.wait(60)
        except subprocess.TimeoutExpired:  # it takes long to end where both cores are busy
            os.killpg(served.pid, signal.SIGKILL)
            served.wait(60)
    local: Any = here.reward(here.tokenizer)
    assert scores == asyncio.run(local.score(prompt, answers))
    assert len({one.value for one in scores}) > 1
    assert refused.value is None and "401" in refused.reason
