"""`plaudit serve-reward` as its own process: the same scores as in this one, and runs that outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import html
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from listening import free_port
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.commands import listening
from plaudit.commands.serve import JudgeService, token_of
from plaudit.evaluate.judge import Judge, JudgeInput
from plaudit.loop.outage import RewardFailureError
from plaudit.rewards import remote
from plaudit.rewards.protocol import RewardItem, vocabulary_digest
from plaudit.rewards.remote import HttpReward, RewardServerError
from plaudit.rewards.settings import RewardSettings
from plaudit.support.errors import Stopped
from plaudit.types import Completion, Finish, Prompt, Score

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
TOKEN = "0123456789abcdef0123"


class Server:
    """A server process on a port that stays the same over restarts."""

    def __init__(self, judge: Path, environment: dict[str, str]):
        self.judge, self.environment = judge, environment | {"JUDGE_TOKEN": TOKEN}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        words = [
            "serve-reward",
            str(self.judge),
            "--port",
            str(self.port),
            "--token-env",
            "JUDGE_TOKEN",
            "--threads",
            "1",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "plaudit.commands.cli", *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 120)[0], "the server said nothing for two minutes"
        line = self.process.stdout.readline()
        assert line == f"serving {self.judge} on {self.url}, with a token\n", line

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(240)


@pytest.fixture(scope="module")
def server(judge: Path, environment: dict[str, str]) -> Iterator[Server]:
    server = Server(judge, environment)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)


def rewards(server: Server, **more: Any) -> list[dict[str, Any]]:
    given = {"kind": "http", "name": "judge", "urls": [server.url], "token_env": "JUDGE_TOKEN"}
    return [given | more]


def answers(tokenizer: Any) -> list[tuple[Prompt, list[Completion]]]:
    """Of many lengths, ended and not, some of tokens that no tokenizer would make of the text."""
    found = []
    for g in range(12):
        words = " ".join(f"word{k}" for k in range(g % 5 + 1))
        tokens = tuple(tokenizer(words)["input_ids"])
        prompt = Prompt(id=str(g), text=words, tokens=tokens)
        group = []
        for k in range(4):
            made = tuple((7 * g + 3 * k + i) % 300 + 4 for i in range(1 + (g * 5 + k) % 17))
            finish = (Finish.EOS, Finish.LENGTH, Finish.STOP)[k % 3]
            if finish is Finish.EOS:
                made = (*made, tokenizer.eos_token_id)
            text = tokenizer.decode(made, skip_special_tokens=True)
            zeros = (0.0,) * len(made)
            group.append(Completion(tokens=made, logprobs=zeros, versions=(0,) * len(made), text=text, finish=finish))
        found.append((prompt, group))
    return found


def scored(reward: Any, groups: list[tuple[Prompt, list[Completion]]]) -> list[list[Score]]:
    async def run() -> list[list[Score]]:
        return list(await asyncio.gather(*(reward.score(*group) for group in groups)))

    return asyncio.run(run())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("same", [True, False])
def test_scores_are_those_of_this_process_to_the_bit(same: bool, server: Server, judge: Path) -> None:
    here = Judge.load(str(judge))
    tokenizer = here.tokenizer
    settings = RewardSettings(**rewards(server, batch=5, concurrency=3)[0])
    digest = vocabulary_digest(tokenizer.get_vocab()) if same else "another"
    local: Any = here.reward(tokenizer)
    if not same:
        local.encode = partial(local.encode.func, sampled=False)
    groups = answers(tokenizer)
    mine, theirs = scored(local, groups), scored(HttpReward(settings, vocabulary=digest), groups)
    assert mine == theirs
    assert len({score.value for group in mine for score in group}) > 20


def test_what_comes_together_is_one_batch(judge: Path) -> None:
    sizes: list[int] = []

    class Counted(Judge):
        def of_sequences(self, sequences: list[tuple[int, ...]]) -> list[float]:
            sizes.append(len(sequences))
            return super().of_sequences(sequences)

    loaded = Judge.load(str(judge))
    groups = answers(loaded.tokenizer)
    service = JudgeService(Counted(loaded.model, loaded.tokenizer))

    async def run() -> list[list[Score]]:
        asked = [
            [RewardItem(prompt=prompt, completion=completion, same_vocabulary=True) for completion in group]
            for prompt, group in groups
        ]
        return list(await asyncio.gather(*(service(questions) for questions in asked)))

    assert asyncio.run(run()) == scored(loaded.reward(loaded.tokenizer), groups)
    assert sizes == [48], "twelve requests of four, in one pass of the model"


def test_a_long_text_holds_nobody_up(judge: Path) -> None:
    """JudgeInput the texts of a full request takes seconds, in which others get their answers."""
    loaded = Judge.load(str(judge))
    reading, go_on = threading.Event(), threading.Event()

    class Slow(JudgeInput):
        def sequence(self, prompt: Prompt, completion: Completion, *, sampled: bool) -> tuple[int, ...]:
            if not sampled:
                reading.set()
                assert go_on.wait(240), "the loop waits for the reader"
            return super().sequence(prompt, completion, sampled=sampled)

    service = JudgeService(loaded)
    service._reading = Slow(loaded.tokenizer, ())
    (prompt, (completion, *_)), *_ = answers(loaded.tokenizer)

    async def run() -> tuple[list[Score], list[Score]]:
        texts = asyncio.ensure_future(
            service([RewardItem(prompt=prompt, completion=completion, same_vocabulary=False)])
        )
        while not reading.is_set():
            await asyncio.sleep(0.001)
        tokens = await service([RewardItem(prompt=prompt, completion=completion, same_vocabulary=True)])
        assert not texts.done()
        go_on.set()
        return await texts, tokens

    texts, tokens = asyncio.run(run())
    assert texts[0].value is not None
    assert tokens[0].value is not None


def test_a_port_that_is_taken_is_said_in_a_line(server: Server, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "plaudit.commands.cli", "serve-reward", "judge", "--port", str(server.port)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {server.port}: Address already in use")


def test_what_the_judge_cannot_read_gets_a_reason_and_the_rest_a_score(server: Server, judge: Path) -> None:
    tokenizer = Judge.load(str(judge)).tokenizer
    reward = HttpReward(RewardSettings(**rewards(server)[0]), vocabulary=vocabulary_digest(tokenizer.get_vocab()))

    def completion(*tokens: int) -> Completion:
        n = len(tokens)
        return Completion(tokens=tokens, logprobs=(0.0,) * n, versions=(0,) * n, text="t", finish=Finish.LENGTH)

    group = [completion(5), completion(*[5] * 500), completion(10**9), completion(6)]
    (scores,) = scored(reward, [(Prompt(id="p", text="p", tokens=(4,)), group)])
    assert [score.value is None for score in scores] == [False, True, True, False]
    assert [s.reason for s in scores if s.value is None] == [
        "not scored by the server: 502 tokens, the judge reads 1 to 128",
        "not scored by the server: token 1000000000 is not in the vocabulary",
    ]


def test_noise_on_the_wire_gets_no_score_and_harms_nobody(server: Server, judge: Path) -> None:
    generator = random.Random(0)
    given = ("host: localhost", f"authorization: Bearer {TOKEN}", "content-type: application/json")
    head = "\r\n".join(["POST /score HTTP/1.1", *given, ""])
    body = b'{"version": 1, "items": [{"prompt": "a", "completion": "b"}]}'
    whole = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(100):
        sent = bytearray(whole)
        for _ in range(generator.randint(1, 8)):
            sent[generator.randrange(len(head))] = generator.randrange(256)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                connection.recv(100)
    here = Judge.load(str(judge))
    groups = answers(here.tokenizer)[:1]
    there = HttpReward(RewardSettings(**rewards(server)[0]), vocabulary=vocabulary_digest(here.tokenizer.get_vocab()))
    assert scored(there, groups) == scored(here.reward(here.tokenizer), groups)
    assert server.process.poll() is None


def refused_or_ended(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return not connection.recv(100)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_600_heads_that_are_sent_by_half_keep_nobody_out(server: Server, judge: Path) -> None:
    here = Judge.load(str(judge))
    groups = answers(here.tokenizer)[:1]
    there = HttpReward(
        RewardSettings(**rewards(server, retries=0)[0]), vocabulary=vocabulary_digest(here.tokenizer.get_vocab())
    )
    half = b"POST /score HTTP/1.1\r\nhost: localhost\r\nx-slow: "
    with contextlib.ExitStack() as open_ones:
        connections = []
        for number in range(600):
            one = open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            one.sendall(half[: 1 + number % len(half)])
            connections.append(one)
        assert scored(there, groups) == scored(here.reward(here.tokenizer), groups), "at once, without another attempt"
        assert sum(map(refused_or_ended, connections)) >= 600 - listening.OF_ONE_PEER
        began = time.monotonic()
        while not all(map(refused_or_ended, connections)):
            assert time.monotonic() < began + 2 * listening.HEADER_SECONDS, "heads have a deadline"
            for one in connections:
                with contextlib.suppress(OSError):  # a letter at a time earns no longer one
                    one.send(b"a")
            time.sleep(0.5)
    assert server.process.poll() is None


def test_a_second_head_on_a_connection_has_a_deadline_and_a_long_request_none(server: Server) -> None:
    body = b'{"version": 1, "items": [{"prompt": "a", "completion": "b"}]}'
    given = (f"authorization: Bearer {TOKEN}", "content-type: application/json", f"content-length: {len(body)}")
    head = "\r\n".join(["POST /score HTTP/1.1", "host: localhost", *given, "", ""]).encode()
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=240) as slow, socket.create_connection(address, timeout=60) as half:
        slow.sendall(head)
        half.sendall(head + body)
        got = b""
        while b'"reasons"' not in got:  # the head and the body come apart
            got += half.recv(10000)
        half.sendall(b"POST")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            assert half.recv(100) == b""
        assert 0.5 * listening.HEADER_SECONDS < time.monotonic() - began < 2 * listening.HEADER_SECONDS
        slow.sendall(body)  # later than a head may be: a body has 30 seconds
        assert slow.recv(10000).startswith(b"HTTP/1.1 200")


def same_weights(a: Run, b: Run) -> bool:
    first, second = (load_file(found.model / "model.safetensors") for found in (a, b))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@pytest.mark.usefixtures("kernels")
def test_grpo_learns_from_the_server_what_it_learns_from_the_judge(
    server: Server, judge: Path, make_recipe: Recipe, tmp_path: Path
) -> None:
    found = []
    for name, given in (("here", [{"kind": "judge", "path": str(judge)}]), ("there", rewards(server))):
        recipe = make_recipe("grpo", tmp_path / name)
        found.append(run(load_settings(recipe | {"rewards": given})))
    here, there = found
    assert [sample["score"] for sample in here.samples] == [sample["score"] for sample in there.samples]
    assert [row["reward/judge"] for row in here.metrics] == [row["reward/judge"] for row in there.metrics]
    assert same_weights(here, there)


@pytest.mark.usefixtures("kernels")
def test_a_run_outlives_its_server(server: Server, judge: Path, make_recipe: Recipe, tmp_path: Path) -> None:
    """kill -9 in the middle of a run, and a new one on the same port: asked again, and nothing is lost."""
    more = {"train": {"steps": 6}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more) | {"rewards": rewards(server)}))
    restart = threading.Timer(1.0, server.start)
    killed = []

    async def kill(moment: Any) -> dict[str, float]:
        if moment.progress.step == 3:
            server.end(signal.SIGKILL)
            killed.append(time.monotonic())
            restart.start()
        return {}

    recipe = make_recipe("grpo", tmp_path / "killed", **more) | {"rewards": rewards(server, retries=20)}
    disturbed = run(load_settings(recipe), hooks=[kill])
    restart.join()
    assert killed
    assert [row["reward/failed"] for row in disturbed.metrics] == [0.0] * 6
    assert same_weights(whole, disturbed)


@pytest.mark.usefixtures("kernels")
def test_a_run_outlives_a_server_that_dies_with_its_questions(
    server: Server, make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, holds a request, and is killed before it answers: all of it is asked again of the next one."""
    more = {"train": {"steps": 6}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more) | {"rewards": rewards(server)}))
    stopped, held, failures = threading.Event(), threading.Event(), list[str]()
    exchanged = remote.exchanged

    async def watched(*request: Any) -> Any:
        if stopped.is_set():
            asyncio.get_running_loop().call_later(0.3, held.set)  # sent by then, and nobody there to answer
        try:
            return await exchanged(*request)
        except Exception as failed:
            failures.append(str(failed))
            raise

    def die() -> None:
        assert held.wait(240)
        server.end(signal.SIGKILL)
        server.start()

    monkeypatch.setattr(remote, "exchanged", watched)
    death = threading.Thread(target=die)

    async def stop(moment: Any) -> dict[str, float]:
        if moment.progress.step == 3:
            server.process.send_signal(signal.SIGSTOP)
            stopped.set()
            death.start()
        return {}

    recipe = make_recipe("grpo", tmp_path / "killed", **more) | {"rewards": rewards(server, retries=20)}
    disturbed = run(load_settings(recipe), hooks=[stop])
    death.join()
    assert failures[0].startswith(("ReadError", "RemoteProtocolError")), "under way, not refused"
    assert [row["reward/failed"] for row in disturbed.metrics] == [0.0] * 6
    assert [row["reward/judge"] for row in disturbed.metrics] == [row["reward/judge"] for row in whole.metrics]
    assert same_weights(whole, disturbed)


class Away:
    """A hook that kills the server after a step, and a thread that starts it again once the run's page says that it
    waits."""

    def __init__(self, server: Server, folder: Path, *, after: int):
        self.server, self.folder, self.after = server, folder, after
        self.page = ""
        self.thread = threading.Thread(target=self._back)

    async def hook(self, moment: Any) -> dict[str, float]:
        if moment.progress.step == self.after:
            self.server.end(signal.SIGKILL)
            self.thread.start()
        return {}

    def _back(self) -> None:
        until = time.monotonic() + 60
        while "next try in 2 s" not in self.page and time.monotonic() < until:
            self.page = (self.folder / "page.html").read_text()
            time.sleep(0.05)
        self.server.start()


CASES: dict[str, dict[str, Any]] = {
    "rloo with evaluations": {"data": {"validation": "20%"}, "evaluate": {"every": 1}},
    "grpo with dynamic sampling": {
        "algorithm": {"samples": 2, "dynamic_sampling": True},
        "shaping": {"unfinished": "penalty"},  # most groups agree
        "rollout": {"prompts_per_step": 4, "max_tokens": 60},
    },
    "grpo on Ray": {
        "runtime": {"kind": "ray", "max_failures_per_hour": 0},
        "rollout": {"workers": 2},
    },
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES)
def test_a_run_pauses_while_its_server_is_away_and_ends_as_if_it_had_not_been(
    case: str, server: Server, make_recipe: Recipe, tmp_path: Path
) -> None:
    """Gone for longer than a request is repeated: no answer is masked, and nobody is lost meanwhile."""
    method, *_ = case.split()
    more = {"train": {"steps": 6}, **CASES[case]}
    if "runtime" in more:
        pytest.importorskip("ray")
    whole = run(load_settings(make_recipe(method, tmp_path / "whole", **more) | {"rewards": rewards(server)}))
    away = Away(server, tmp_path / "away" / "run", after=3)
    recipe = make_recipe(method, tmp_path / "away", **more) | {"rewards": rewards(server, retries=0)}
    disturbed = run(load_settings(recipe), hooks=[away.hook])
    away.thread.join()
    assert re.search(
        r"Step 3 of 6, paused: rewards have failed for 0:\d\d \(judge: http://127\.0\.0\.1:\d+: ConnectError: .*\): "
        r"next try in 2 s, patience 30:00 ",
        html.unescape(away.page),
    )
    log = (disturbed.folder / "log.txt").read_text()
    assert "rewards work again, after 0:" in log
    assert "health: Step 4: the step waited" in log
    assert "paused" not in (disturbed.folder / "page.html").read_text()
    assert [row["time/outage"] > 2 for row in disturbed.metrics] == [row["step"] == 4 for row in disturbed.metrics]
    assert [row["reward/failed"] for row in disturbed.metrics] == [0.0] * 6
    for name in ("reward/judge", "groups/dropped", "validation/reward/mean"):
        assert [row.get(name) for row in disturbed.metrics] == [row.get(name) for row in whole.metrics]
    if "dynamic sampling" in case:
        assert len({row["groups/dropped"] for row in whole.metrics}) > 2, "groups are replaced"
    assert same_weights(whole, disturbed)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_that_waits_for_its_server(
    number: signal.Signals, server: Server, make_recipe: Recipe, tmp_path: Path
) -> None:
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole") | {"rewards": rewards(server)}))
    log = tmp_path / "run/log.txt"

    def send() -> None:
        until = time.monotonic() + 60
        while "next try in 4 s" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    async def end(moment: Any) -> dict[str, float]:
        if moment.progress.step == 2:
            server.end(signal.SIGKILL)
            threading.Thread(target=send).start()
        return {}

    recipe = make_recipe("grpo", tmp_path) | {"rewards": rewards(server, retries=0)}
    with pytest.raises(Stopped, match=f"{number.name} .*step 2.*resume=latest"):
        run(load_settings(recipe), hooks=[end])
    assert "next try in 8 s" not in log.read_text(), "it does not wait for its next try"
    server.start()
    assert same_weights(whole, run(load_settings(recipe | {"resume": "latest"})))


@pytest.mark.usefixtures("kernels")
def test_a_run_ends_by_itself_where_the_server_stays_away(
    server: Server, make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved, though no checkpoint was due: once the server is back, the run goes on as if nothing had been."""
    monkeypatch.setattr(remote, "LONGEST_REST", 0.2)
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole") | {"rewards": rewards(server)}))
    ended = []

    async def end(moment: Any) -> dict[str, float]:
        if moment.progress.step == 2:
            ended.append(server.end())
        return {}

    recipe = make_recipe("grpo", tmp_path, rollout={"reward_patience": 2.0})
    recipe |= {"rewards": rewards(server, retries=1)}
    with pytest.raises(
        RewardFailureError,
        match=r"100% .*127\.0\.0\.1.* 2 s .*reward_patience.*epoch\depochstep\dglobalstep2.*resume=latest",
    ):
        run(load_settings(recipe), hooks=[end])
    assert ended == [-signal.SIGTERM]
    with pytest.raises(RewardServerError, match="'judge'"):
        run(load_settings(recipe | {"name": "later"}))
    assert not (tmp_path / "later").exists()
    server.start()
    assert same_weights(whole, run(load_settings(recipe | {"resume": "latest"})))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "judge.example"])
def test_other_addresses_need_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give --token-env NAME"):
        token_of(host)
    for short in ("", "short", "ü" * 20):
        monkeypatch.setenv("JUDGE_TOKEN", short)
        with pytest.raises(ValueError, match="16 or more"):
            token_of(host, "JUDGE_TOKEN")
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    assert token_of(host, "JUDGE_TOKEN") == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert token_of(host) is None
