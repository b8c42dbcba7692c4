"""A service whose learner is several ranks on Ray: the numbers of one process, and models that outlive a rank."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calling import DATA, NAME, Client, logprobs_of, loss_of, sampled, tiny
from safetensors.torch import load_file

from plaudit.models.load import save_model
from plaudit.support.fields import SettingsError
from plaudit.training_api.opening import opened
from plaudit.training_api.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")]

TWO = "runtime.num_training_workers=2"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "name": "", "models": 4, "heartbeat": 60.0}
GRADIENT = {"learning_rate": 1e4, "eps": 1e6}
"""An update by these is -0.01 times the gradient, since the second moment is small beside eps."""


@asynccontextmanager
async def client(words: Any, folder: Path, *settings: str, said: list[str] | None = None) -> AsyncIterator[Client]:
    if not (folder / NAME).exists():
        save_model(tiny(), folder / NAME, tokenizer=words)
    say = (said if said is not None else []).append
    service = opened(str(folder / NAME), settings, folder=folder / "served", say=say, **OPTIONS)
    try:
        await service.open()
        yield Client(service)
    finally:
        service.group.close()


async def figures(one: Client) -> dict[str, Any]:
    """Losses, log-probs, the gradient and a sampler's figures of some requests, and of the model after a save."""
    name, found = await one.model(seed=3), dict[str, Any]()
    credit = {"logprobs": [-4.0] * 4, "advantages": [1.0, -1.0, 0.5, 2.0]}
    rated = [(row, {"target_tokens": inputs["target_tokens"]} | credit) for row, inputs in DATA if len(row) == 4]
    first = await one.trained(name, 1, DATA)  # more rows than ranks
    second = await one.trained(name, 2, rated, "importance_sampling")  # fewer
    found["losses"] = [loss_of(first), loss_of(second)]
    found["logprobs"] = np.concatenate([*logprobs_of(first), *logprobs_of(second)])
    found["norm"] = (await one.step(name, 3, **GRADIENT))["metrics"]["gradient_norm"]
    path = (await one.result("save_weights", {"model_id": name, "seq_id": 4, "path": "one"}))["path"]
    folder = one.served.folder / path.removeprefix("tinker://")
    found |= load_file(folder / "adapter_model.safetensors")
    means = load_file(folder / "optimizer.safetensors")  # after one step, 0.1 times the gradient
    found |= {key: mean for key, mean in means.items() if key.startswith("exp_avg/")}
    await one.trained(name, 5, DATA)
    await one.step(name, 6)
    body = {"model_id": name, "seq_id": 7, "path": path, "optimizer": True}
    assert "error" not in await one.result("load_weights", body)
    forward = await one.trained(name, 8, DATA, forward=True)
    found["loaded"] = [loss_of(forward), *np.concatenate(logprobs_of(forward))]
    session = {"session_id": name.partition(":")[0], "sampling_session_seq_id": 1}
    made = await one.result("save_weights_for_sampler", session | {"model_id": name, "seq_id": 9})
    tokens, logprobs, prompt = await sampled(one, made["sampling_session_id"], 0)
    found |= {"tokens": np.concatenate(tokens), "sampled": np.concatenate(logprobs), "prompt": prompt[1:]}
    return found


@pytest.mark.parametrize("ranks", [TWO, "runtime.mesh={tensor: 2}"])
def test_several_ranks_compute_what_one_computes(words: Any, tmp_path: Path, ranks: str) -> None:
    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        async with client(words, tmp_path) as one:
            expected = await figures(one)
        async with client(words, tmp_path, "runtime=ray", ranks) as several:
            return expected, await figures(several)

    expected, found = asyncio.run(both())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        mine, theirs = (torch.as_tensor(np.asarray(one), dtype=torch.float64) for one in (found[key], value))
        assert (mine - theirs).abs().max() <= 1e-6 * max(1.0, theirs.abs().max()), key


def kill_one(client: Client) -> None:
    group = client.served.group
    assert isinstance(group, Ranks) and group._ranks is not None
    os.kill(group._ranks.workers[1].pid, signal.SIGKILL)


def test_models_go_on_after_a_rank_is_lost(words: Any, tmp_path: Path) -> None:
    said: list[str] = []

    async def work() -> None:
        async with client(words, tmp_path, "runtime=ray", TWO, "runtime.max_failures_per_hour=1", said=said) as one:
            saved, never = await one.model(), await one.model(seed=9)
            for name in (saved, never):
                await one.trained(name, 1, DATA)
                await one.step(name, 2)
            path = (await one.result("save_weights", {"model_id": saved, "seq_id": 3, "path": "one"}))["path"]
            expected = loss_of(await one.trained(saved, 4, DATA))
            await one.step(saved, 5)
            kill_one(one)
            both = await asyncio.gather(one.trained(saved, 6, DATA), one.step(saved, 7))
            assert all(told["category"] == "server" and "last save" in told["error"] for told in both)
            assert "training rank" in both[0]["error"]
            assert loss_of(await one.trained(saved, 8, DATA)) == pytest.approx(expected, rel=1e-6)
            assert (await one.step(saved, 9))["metrics"]["steps_lost"] == 1
            assert "steps_lost" not in (await one.step(saved, 10))["metrics"]
            assert (await one.step(never, 3))["metrics"]["steps_lost"] == 1
            assert f"{saved} goes on from {path} (step 1); 1 later steps are lost" in said
            assert f"{never} goes on from its start, as it was never saved (step 0); 1 later steps are lost" in said
            kill_one(one)
            for number in (11, 12):
                told = await one.trained(saved, number, DATA)
                assert told["category"] == "server" and "max_failures_per_hour=1" in told["error"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["runtime=ray", "runtime.strategy=fsdp"], "runtime.strategy is not read by serve-training"),
        (["runtime=ray", "runtime.mesh={context: 2}"], "runtime.mesh.context"),
        ([TWO], "needs runtime=ray"),
        (["learn.precision=bfloat16"], "learn.precision is not read"),
        (["runtime.kimd=ray"], "did you mean runtime.kind"),
    ],
)
def test_settings_that_are_not_read_are_refused(settings: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        opened(
            "absent",
            settings,
            device="cpu",
            dtype="float32",
            folder=tmp_path,
            name="",
            models=1,
            heartbeat=60,
            say=print,
        )


def test_a_mesh_that_does_not_fit_is_refused(words: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with client(words, tmp_path, "runtime=ray", "runtime.mesh={tensor: 3}"):
            raise AssertionError("it was opened")

    with pytest.raises(ValueError, match="tensor=3 does not divide 2 attention heads"):
        asyncio.run(work())
