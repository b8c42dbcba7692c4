"""The package tinker itself against `plaudit serve-training` in a process of its own."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import tiny
from listening import free_port

from plaudit.models.load import save_model

tinker = pytest.importorskip("tinker", reason="pip install tinker==0.38.0, in an environment of its own")
pytestmark = pytest.mark.slow

KEY = "tml-0123456789abcdef"
ROW = [3, 9, 27, 21, 3, 40]
ADAM = tinker.AdamParams(learning_rate=0.01, eps=1e-8)


class Server:
    """`plaudit serve-training` on a port that stays the same over restarts."""

    def __init__(self, model: Path, folder: Path, environment: dict[str, str]):
        self.port, self.environment = free_port(), environment | {"POLICY_KEY": KEY}
        self.words = [
            "serve-training",
            str(model),
            "--folder",
            str(folder),
            "--token-env",
            "POLICY_KEY",
            "--models",
            "2",
        ]
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "plaudit", *self.words, "--port", str(self.port)]
        self.process = subprocess.Popen(words, env=self.environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = ""
        while "serving" not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def client(self, key: str = KEY) -> Any:
        return tinker.ServiceClient(base_url=f"http://127.0.0.1:{self.port}", api_key=key)


@pytest.fixture(scope="module")
def server(words: Any, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("training")
    save_model(tiny(), folder / "tiny", tokenizer=words)
    one = Server(folder / "tiny", folder / "served", environment)
    yield one
    one.kill()


def datum(row: list[int], **inputs: Any) -> Any:
    columns = {"target_tokens": row[1:], **{name: torch.tensor(one) for name, one in inputs.items()}}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=columns)


def logprobs(output: Any) -> torch.Tensor:
    return torch.tensor(output.loss_fn_outputs[0]["logprobs"].tolist())


def test_a_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(tinker.AuthenticationError, match="Authorization: Bearer"):
        server.client("tml-wrong").create_lora_training_client("tiny")


@pytest.fixture
def service(server: Server) -> Iterator[Any]:
    with server.client() as one:
        yield one


def test_a_loop_learns_a_row_and_samples_it(service: Any) -> None:
    training = service.create_lora_training_client("tiny", rank=8, seed=1).result()
    assert (training.get_info().model_data.model_name, training.get_info().lora_rank) == ("tiny", 8)
    one, losses = datum(ROW, weights=[1.0] * 5), []
    for _ in range(40):
        passed, stepped = training.forward_backward([one, one], "cross_entropy"), training.optim_step(ADAM)
        assert passed.result().metrics["loss:sum"] == pytest.approx(
            -2 * float(logprobs(passed.result()).sum()), rel=1e-5
        )
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["gradient_norm"] > 0
    assert losses[-1] < losses[0] / 10
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(ROW[:2])
    greedy = tinker.SamplingParams(max_tokens=4, temperature=0.0)
    answer = sampler.sample(prompt, 1, greedy, include_prompt_logprobs=True).result()
    assert answer.sequences[0].tokens == ROW[2:] and answer.sequences[0].stop_reason == "length"
    now = logprobs(training.forward([one], "cross_entropy").result())
    assert answer.prompt_logprobs == [None, pytest.approx(float(now[0]), abs=1e-4)]
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(ROW)).result()
    assert scored[1:] == pytest.approx(now.tolist(), abs=1e-4)
    drawn = tinker.SamplingParams(max_tokens=5, seed=3)
    three = sampler.sample(prompt, 3, drawn).result().sequences
    assert [len(one.tokens) for one in three] == [len(one.logprobs) for one in three]
    assert len({one.sequence_id for one in three}) == 3


LOSSES = {
    "importance_sampling": (None, lambda ratio, now, a: -ratio * a),
    "ppo": ({"clip_low_threshold": 0.9}, lambda ratio, now, a: -torch.minimum(ratio * a, ratio.clamp(0.9, 1.2) * a)),
    "cispo": (None, lambda ratio, now, a: -ratio.detach().clamp(0.8, 1.2) * now * a),
    "dro": ({"beta": 0.3}, lambda ratio, now, a: 0.15 * ratio.log().square() - now * a),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_one_that_a_client_would_compute(service: Any, name: str) -> None:
    """Also its gradient: the step of a built-in loss is that of the same loss as the client's own."""
    old, advantages = [-4.0, -4.3, -3.9, -4.2, -4.1], [1.0, -1.0, 0.5, 0.0, -2.0]
    config, formula = LOSSES[name]
    one = datum(ROW, logprobs=old, advantages=advantages)
    plain = datum(ROW, weights=[1.0] * 5)

    def own(data: Any, columns: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        ratio = (columns[0] - torch.tensor(old)).exp()
        loss = formula(ratio, columns[0], torch.tensor(advantages)).sum()
        return loss, {"own:sum": loss.item()}

    after = []
    for built_in in (True, False):
        training = service.create_lora_training_client("tiny", rank=4, seed=2).result()
        if built_in:
            found = training.forward_backward([one], name, config).result().metrics["loss:sum"]
        else:
            metrics = training.forward_backward_custom([plain], own).result().metrics
            assert metrics["loss:sum"] == metrics["own:sum"] == pytest.approx(found, rel=1e-5)
        norm = training.optim_step(ADAM).result().metrics["gradient_norm"]
        after.append((norm, logprobs(training.forward([plain], "cross_entropy").result())))
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-4) and after[0][0] > 0
    assert torch.allclose(after[0][1], after[1][1], atol=1e-3)


def test_what_is_not_served_raises_in_the_client(service: Any) -> None:
    training = service.create_lora_training_client("tiny", rank=4).result()
    one = datum(ROW, logprobs=[-4.0] * 5, advantages=[1.0] * 5)
    with pytest.raises(tinker.BadRequestError, match=r"gspo.* is not served"):
        training.forward_backward([one], "gspo").result()
    with pytest.raises(tinker.NotFoundError, match="no base model 'other'"):
        service.create_lora_training_client("other").result()


def test_a_client_outlives_a_killed_server(server: Server, service: Any) -> None:
    """Its model continues from the last save, and the client learns how many steps were lost. Others can load it."""
    training = service.create_lora_training_client("tiny", rank=4, seed=5).result()
    one = datum(ROW, weights=[1.0] * 5)

    def step() -> tuple[float, dict[str, float]]:
        passed, stepped = training.forward_backward([one], "cross_entropy"), training.optim_step(ADAM)
        return passed.result().metrics["loss:sum"], stepped.result().metrics

    step()
    path = training.save_state("one").result().path
    lost = [step()[0], step()[0]]
    server.kill()
    server.start()
    assert f"goes on from {path} (step 1); 2 later steps are lost" in server.said
    loss, metrics = step()
    assert loss == lost[0] and metrics["steps_lost"] == 2
    other = service.create_training_client_from_state_with_optimizer(path).result()
    assert other.forward_backward([one], "cross_entropy").result().metrics["loss:sum"] == lost[0]
    other.optim_step(ADAM).result()
    assert other.forward([one], "cross_entropy").result().metrics["loss:sum"] == pytest.approx(lost[1], rel=1e-5)
    sampler = service.create_sampling_client(model_path=path).result()
    assert math.isfinite(sum(sampler.compute_logprobs(tinker.ModelInput.from_ints(ROW)).result()[1:]))
