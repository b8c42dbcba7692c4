"""Processes behind handles, on one real cluster: what is refused, what is raised, how a loss is noticed and named."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.token import prepare

SETTINGS = RuntimeSettings(kind="ray", heartbeat_timeout=2.0, start_timeout=60.0)
prepare(SETTINGS)  # before ray is imported
import ray  # noqa: E402

from plaudit.runtime import stage  # noqa: E402
from plaudit.runtime.ray import RayRuntime  # noqa: E402
from plaudit.runtime.ray_node import check_address  # noqa: E402
from plaudit.runtime.ray_worker import RayWorker, _cause  # noqa: E402
from plaudit.runtime.ray_worker_group import RayWorkerGroup  # noqa: E402
from plaudit.runtime.resources import ResourcesError  # noqa: E402
from plaudit.runtime.worker import SenderLost, WorkerLost  # noqa: E402

FOLDERS = (str(Path(__file__).parent), str(Path(__file__).parents[1]))
"""Where workers find this module and what it imports."""
Runtime = tuple[RayRuntime, Callable[[Coroutine[Any, Any, Any]], Any]]


class Clerk:
    """A worker that loads nothing heavy."""

    def __init__(self, mood: str = "well"):
        if mood == "ill":
            raise ValueError("a clerk must be well")
        if mood == "slow":
            stage.enter("looks for a pen")
            time.sleep(1.5)
            stage.enter("has found 2 pens")

    def answer(self, question: str) -> str:
        return question.upper()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self) -> None:
        raise KeyError("no such file")

    def die(self, how: str) -> None:
        print("the pen is empty", file=sys.stderr, flush=True)
        if how == "leaves":
            sys.exit(4)
        if how == "crashes":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def work(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        raise RuntimeError("[gloo] Connection closed by peer")

    async def ponder(self, seconds: float) -> int:
        """Holds its event loop."""
        time.sleep(seconds)
        return os.getpid()

    async def chat(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    def letter(self) -> tuple[bytes, str]:
        return b"x" * 200_000, "x"

    def weigh(self, letter: bytes) -> int:
        return len(letter)


class Adder:
    """A rank that adds numbers up with the others."""

    def address(self) -> str:
        from plaudit.runtime.network import free_address

        return free_address()

    def meet(self, address: str, rank: int, world: int, timeout: float) -> None:
        import torch

        from plaudit.learn.ranks import join

        self.ranks = join(address, rank, world, device=torch.device("cpu"), timeout=timeout)

    def add(self, number: float) -> float:
        return self.ranks.total(number)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """A cluster, and the one event loop that its handles live in."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*FOLDERS, before)))
    handler = signal.getsignal(signal.SIGTERM)
    loop = asyncio.new_event_loop()
    os.environ.pop("RAY_prestart_worker_first_driver", None)
    runtime = RayRuntime(SETTINGS)
    assert runtime.start().startswith("Ray ")
    assert signal.getsignal(signal.SIGTERM) is handler, "ray's own handler would end a run unsaved"
    yield runtime, loop.run_until_complete
    loop.close()
    runtime.close()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(autouse=True)
def nobody_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a worker leaves less room for the next one, whichever that is."""
    yield
    if "runtime" in request.fixturenames:
        cluster, do = request.getfixturevalue("runtime")

        async def end() -> None:
            cluster.end_workers()

        do(end())


async def clerks(runtime: RayRuntime, count: int, kind: str = "Clerk") -> list[RayWorker]:
    group = runtime.reserve([{"CPU": 0.01}] * count)
    assert await runtime.placed(group, within=30.0)
    starts = [
        runtime.spawn(getattr(sys.modules[__name__], kind), name=f"clerk {place}", group=group, place=place, threads=1)
        for place in range(count)
    ]
    return list(await asyncio.gather(*starts))


def test_what_never_fits_is_refused_with_the_sum(runtime: Runtime) -> None:
    cluster, run = runtime
    asked = int(cluster.resources()["CPU"]) + 1

    async def steps() -> None:
        bundles = [{"CPU": 1.0, "GPU": 1.0}, {"CPU": asked - 1.0, "GPU": 1.0}]
        with pytest.raises(ResourcesError, match=rf"{asked} CPU, 2 GPU .*cluster has "):
            async with cluster.nodes_for(bundles, what="two clerks"):
                raise AssertionError

    run(steps())


def test_who_has_not_the_token_is_not_let_in(runtime: Runtime) -> None:
    """And what waits for room is a demand that Ray's autoscaler sees."""
    cluster, do = runtime
    address = ray.get_runtime_context().gcs_address
    asked = cluster.resources()["CPU"] + 1
    code = f"""
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.ray import RayRuntime
from ray.autoscaler.v2.sdk import get_cluster_status
print(RayRuntime(RuntimeSettings(kind="ray", address="{address}")).start())
demand = get_cluster_status("{address}").resource_demands.placement_group_demand
print([dict(group.bundles_by_count[0].bundle) for group in demand])
"""
    secrets = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    assert all(name in os.environ for name in secrets)
    friend = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # looks on the loopback interface
    stranger = {name: value for name, value in friend.items() if name not in secrets}
    stranger["RAY_NUM_REDIS_GET_RETRIES"] = "1"

    async def steps() -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        group = cluster.reserve([{"CPU": asked}])
        assert not await cluster.placed(group, within=1.0)
        ask = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
        found = ask(env=stranger), ask(env=friend)
        cluster.end_workers()
        return found

    refused, taken = do(steps())
    assert refused.returncode != 0
    assert "this run cannot join it" in refused.stderr
    assert not refused.stdout
    assert taken.returncode == 0, taken.stderr
    assert f"[{{'CPU': {asked}}}]" in taken.stdout


def test_what_is_taken_is_waited_for_in_time(runtime: Runtime) -> None:
    cluster, do = runtime

    async def steps() -> None:
        assert await cluster.placed(cluster.reserve([{"CPU": cluster.resources()["CPU"]}]), within=20.0)
        assert not await cluster.placed(cluster.reserve([{"CPU": 1.0}]), within=0.5)

    do(steps())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
def test_nothing_is_started_that_nobody_uses(runtime: Runtime) -> None:
    cluster, do = runtime

    def children(process: int) -> list[str]:
        return " ".join(file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")).split()

    def commands(processes: list[str]) -> list[str]:
        return [Path(f"/proc/{process}/cmdline").read_bytes().decode() for process in processes]

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        raylet = int(Path(f"/proc/{clerk.pid}/stat").read_text().rpartition(")")[2].split()[1])
        names = commands(children(raylet))
        assert any("ray::Host" in name for name in names)
        assert not any("ray::IDLE" in name for name in names), names
        names = commands(children(os.getpid()))
        assert any("gcs_server" in name for name in names)
        page = ["dashboard.py"] if ray._private.utils.get_dashboard_dependency_error() else []  # ray[default] has it
        assert not any(unused in name for name in names for unused in ["monitor.py", *page]), names
        cluster.end_workers()

    do(steps())


@pytest.mark.parametrize(
    ("threads", "sharers", "set_by_user", "found"),
    [(1, 1, None, None), (2, 1, None, "PASSIVE"), (1, 2, None, "PASSIVE"), (2, 1, "ACTIVE", "ACTIVE")],
)
def test_threads_spin_where_their_cores_are_their_own(
    threads: int,
    sharers: int,
    set_by_user: str | None,
    found: str | None,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, do = runtime
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_by_user)

    async def steps() -> None:
        group = cluster.reserve([{"CPU": 1.0}])
        assert await cluster.placed(group, within=30.0)
        make = sys.modules[__name__].Clerk
        clerk = await cluster.spawn(make, name="clerk", group=group, place=0, threads=threads, sharers=sharers)
        assert await clerk.call(Clerk.variable, "OMP_WAIT_POLICY") == found
        assert await clerk.call(Clerk.variable, "OMP_NUM_THREADS") == str(threads)
        cluster.end_workers()

    do(steps())


def test_answers_and_exceptions_are_the_workers_own(runtime: Runtime) -> None:
    cluster, do = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        assert await clerk.call(Clerk.answer, "yes") == "YES"
        with pytest.raises(KeyError, match="no such file"):
            await clerk.call(Clerk.fail)
        first, second = await asyncio.gather(clerk.call(Clerk.work, 0.3), clerk.call(Clerk.chat, 0.0))
        assert first == second == clerk.pid != os.getpid()
        group = cluster.reserve([{"CPU": 0.01}])
        with pytest.raises(ValueError, match="must be well"):
            await cluster.spawn(sys.modules[__name__].Clerk, "ill", name="ill", group=group, place=0, threads=1)

    do(steps())


@pytest.mark.parametrize(
    ("how", "reason"),
    [("crashes", "ended by SIGSEGV in string_at (__init__.py:"), ("is killed", "ended at once, as by SIGKILL")],
)
def test_how_a_process_ended_is_said_with_its_last_lines(how: str, reason: str, runtime: Runtime) -> None:
    cluster, run = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        with pytest.raises(WorkerLost) as lost:
            await clerk.call(Clerk.die, how)
        assert lost.value.reason.startswith(reason)
        assert lost.value.reason.endswith("; its stderr ends: the pen is empty")

    run(steps())


def test_a_worker_that_calls_exit_raises_it_and_lives(runtime: Runtime) -> None:
    cluster, run = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        with pytest.raises(RuntimeError, match=r"SystemExit\(4\)"):
            await clerk.call(Clerk.die, "leaves")
        assert await clerk.call(Clerk.answer, "well?") == "WELL?"

    run(steps())


def test_what_a_worker_does_while_it_starts_is_told_to_the_end(runtime: Runtime) -> None:
    """Also what it comes to in the moment in which it is ready."""
    cluster, do = runtime
    told: list[str] = []

    async def steps() -> None:
        group = cluster.reserve([{"CPU": 0.01}])
        kind = sys.modules[__name__].Clerk
        await cluster.spawn(kind, "slow", name="clerk", group=group, place=0, threads=1, say=told.append)

    do(steps())
    assert told == ["clerk looks for a pen", "clerk has found 2 pens"]


@pytest.mark.parametrize("method", ["work", "chat"])
def test_a_frozen_process_is_found_by_its_heart(method: str, runtime: Runtime) -> None:
    """In the worker's thread or on its event loop, as a rank's calls and a rollout worker's are."""
    cluster, do = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        answer = asyncio.ensure_future(clerk.call(getattr(Clerk, method), 60.0))
        await asyncio.sleep(0.2)
        os.kill(clerk.pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"clerk 0: .* 2 s .*heartbeat_timeout"):
            await answer
        await eventually(lambda: not Path(f"/proc/{clerk.pid}").exists(), "a frozen process is killed")

    do(steps())


def test_a_worker_whose_event_loop_is_busy_for_long_is_well(runtime: Runtime) -> None:
    """A step of a large model, or its weights, may hold it for longer than a heartbeat may take."""
    cluster, do = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        assert await clerk.call(Clerk.ponder, 3.0) == clerk.pid
        assert clerk.alive

    do(steps())


HUNGRY = """
import asyncio
from plaudit.runtime.ray import RayRuntime
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import WorkerLost
from test_ray import Clerk

async def steps():
    group = cluster.reserve([{"CPU": 0.01}])
    await cluster.placed(group, within=30.0)
    try:
        clerk = await cluster.spawn(Clerk, name="clerk", group=group, place=0, threads=1)
        try:
            await clerk.call(Clerk.chat, 30.0)
        finally:
            print(not clerk.alive, await asyncio.wait_for(clerk.gone(), 1.0))
    except WorkerLost as lost:
        print(lost)

cluster = RayRuntime(RuntimeSettings(kind="ray", start_timeout=60.0))
cluster.start()
try:
    asyncio.run(steps())
finally:
    cluster.close()
"""


def test_a_process_that_is_ended_for_its_memory_is_lost(environment: dict[str, str]) -> None:
    """By Ray's memory monitor, to which here every process is too much."""
    more = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    more["PYTHONPATH"] = ":".join((environment["PYTHONPATH"], *FOLDERS))
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY], env=environment | more, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "clerk: " in done.stdout and "memory" in done.stdout, done.stdout


JOB = """
import asyncio
from plaudit.runtime.ray import RayRuntime
from plaudit.runtime.settings import RuntimeSettings
from test_ray import Clerk, clerks

async def steps():
    (clerk,) = await clerks(cluster, 1)
    for name in ("OF_THE_JOB", "TOKENIZERS_PARALLELISM", "PYTHONPATH"):
        print(name, await clerk.call(Clerk.variable, name))

cluster = RayRuntime(RuntimeSettings(kind="ray", start_timeout=60.0))
cluster.start()
try:
    asyncio.run(steps())
finally:
    cluster.close()
"""


def test_the_variables_of_a_submitted_job_are_joined_with_ours(environment: dict[str, str]) -> None:
    """As `ray job submit --runtime-env-json` starts its driver: with the variables set, and all of it as JSON. Ray
    refuses names that both sides set."""
    path = ":".join((environment["PYTHONPATH"], *FOLDERS))
    own = {"PYTHONPATH": path, "OF_THE_JOB": "yes", "TOKENIZERS_PARALLELISM": "true"}
    job = json.dumps({"runtime_env": {"env_vars": own}, "metadata": {"job_name": "one"}})
    more = {**own, "RAY_JOB_CONFIG_JSON_ENV_VAR": job}
    done = subprocess.run(
        [sys.executable, "-c", JOB], env=environment | more, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert (found["OF_THE_JOB"], found["TOKENIZERS_PARALLELISM"]) == ("yes", "true")
    assert set(path.split(":")) <= set(found["PYTHONPATH"].split(":"))


def test_a_connection_that_is_not_ours_is_refused_and_left_alone(runtime: Runtime) -> None:
    """Of a notebook that called ray.init: Ray spoke of a second one, and the first was gone."""
    for settings in (SETTINGS, RuntimeSettings(kind="ray", address="auto")):
        another = RayRuntime(settings)
        with pytest.raises(ValueError, match=r"ray\.init.*ray\.shutdown"):
            another.start()
        another.close()
        assert ray.is_initialized()


def test_an_address_where_no_cluster_is_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # as in a process of its own
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"runtime.address={address}: .*refused"):
            RayRuntime(RuntimeSettings(kind="ray", address=address)).start()
    with pytest.raises(ValueError, match=r"runtime\.address=nonsense: .*host:port"):
        RayRuntime(RuntimeSettings(kind="ray", address="nonsense")).start()


@pytest.mark.parametrize(
    ("answer", "said"),
    [(None, "no answer within 0.3 s"), (b"HTTP/1.1 400 Bad\r\n\r\n", "is no head of Ray"), (b"", "no head")],
)
def test_what_listens_and_is_no_head_is_given_up(
    answer: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait for a head that accepts connections and says nothing, as a stopped one does."""
    monkeypatch.setattr("plaudit.runtime.ray_node.CONNECT", 0.3)
    held = list[socket.socket]()

    def accept(server: socket.socket) -> None:
        held.append(server.accept()[0])
        if answer is not None:
            held[0].recv(100)
            held[0].sendall(answer)
            held[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=[server], daemon=True).start()
        with pytest.raises(ValueError, match=said):
            check_address(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_process_that_cannot_be_reached_is_named_without_codes_of_rays_calls() -> None:
    raised = ray.exceptions.ActorUnavailableError("RpcError: RPC Error message: Socket closed; rpc_code: 14", None)
    assert "rpc_code" in str(raised)
    assert _cause(raised) == "its process cannot be reached, so it counts as lost"


def test_a_token_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}

    def accept(server: socket.socket) -> None:
        """Answer as an HTTP/2 server, and no more."""
        while True:
            held.append(server.accept()[0])
            held[-1].sendall(b"\0\0\0\x04" + bytes(5))

    held = list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=[server], daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code = f"""
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.ray import RayRuntime
RayRuntime(RuntimeSettings(kind="ray", address="{address}")).start()
"""
        command = [sys.executable, "-c", code]
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert f"ValueError: runtime.address={address}: the cluster answers" in refused.stderr
    assert "cannot join it (Token authentication" in refused.stderr
    assert "export RAY_AUTH_MODE=token, with its token in ~/.ray/auth_token or RAY_AUTH_TOKEN" in refused.stderr


@pytest.mark.parametrize("folder", ["file", 80 * "x"])
def test_where_ray_cannot_have_its_files_is_said(folder: str, tmp_path: Path) -> None:
    """It may not write there (a file is in the way, which holds for root too), or its sockets' names are too long."""
    (tmp_path / "file").touch()
    code = """
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.ray import RayRuntime
RayRuntime(RuntimeSettings(kind="ray")).start()
"""
    environment = os.environ | {"RAY_TMPDIR": str(tmp_path / folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "\nValueError: Ray cannot start here (" in done.stderr, done.stderr
    assert "RAY_TMPDIR" in done.stderr.splitlines()[-1]


def test_a_driver_that_stood_still_loses_nobody(runtime: Runtime) -> None:
    """In a reward function, for example: signs came, and were not heard."""
    cluster, do = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        clerk.heartbeat_timeout = 0.5
        asked = asyncio.ensure_future(clerk.found())
        await asyncio.sleep(0)  # the question is on its way
        time.sleep(1.0)
        assert await asked is None
        os.kill(clerk.pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(clerk.found())
        await asyncio.sleep(0)
        time.sleep(1.0)
        assert "gave no sign" in str(await asked)

    do(steps())


def test_the_rank_that_died_is_named_not_the_one_that_noticed(runtime: Runtime) -> None:
    cluster, do = runtime

    async def steps() -> None:
        pair = await clerks(cluster, 2)
        call = asyncio.ensure_future(RayWorkerGroup(pair).each(Clerk.wait, 0.3))
        await asyncio.sleep(0.1)
        os.kill(pair[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="clerk 1"):
            await call

    do(steps())


def test_the_rank_that_is_stuck_is_named_not_the_one_that_waited_for_it(runtime: Runtime) -> None:
    """Its process is well and answers heartbeats; only its work does not end."""
    cluster, do = runtime

    async def steps() -> None:
        worker_group = RayWorkerGroup(await clerks(cluster, 2))
        with pytest.raises(WorkerLost, match=r"clerk 1: .*Connection closed"):
            await worker_group.scatter(Clerk.wait, [(0.0,), (60.0,)])

    do(steps())


@pytest.mark.parametrize(
    ("heartbeat", "collective", "named"),
    [
        (1.0, 60.0, r"clerk 1: .* 1 s \(runtime.heartbeat_timeout"),
        (60.0, 5.0, r"clerk 1: .*never came .*(?i:time)"),
    ],
)
def test_a_rank_that_is_stopped_in_a_collective_is_named(
    heartbeat: float, collective: float, named: str, runtime: Runtime
) -> None:
    """Two real ranks on gloo: the collective's own time-out ends it where signs may take longer, or the heartbeat does
    where that is sooner; neither waits for the other."""
    cluster, do = runtime

    async def steps() -> None:
        pair = await clerks(cluster, 2, "Adder")
        worker_group = RayWorkerGroup(pair, patience=collective)
        for rank in pair:
            rank.heartbeat_timeout = 60.0
        address, _ = await worker_group.each(
            Adder.address
        )  # all import torch now, which may take longer than they have to meet
        await worker_group.scatter(Adder.meet, [(address, rank, 2, collective) for rank in range(2)], starts=True)
        assert await worker_group.scatter(Adder.add, [(1.0,), (2.0,)]) == [3.0, 3.0]
        for rank in pair:
            rank.heartbeat_timeout = heartbeat
        os.kill(pair[1].pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=named):
            await worker_group.scatter(Adder.add, [(1.0,), (2.0,)])
        cluster.end_workers()
        await eventually(lambda: not Path(f"/proc/{pair[1].pid}").exists(), "a stopped process is killed")

    do(steps())


@pytest.mark.parametrize("method", ["work", "chat"])
def test_a_call_that_does_not_end_is_a_loss(method: str, runtime: Runtime) -> None:
    cluster, do = runtime

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        clerk._call_timeout = 0.5
        with pytest.raises(WorkerLost, match=rf"clerk 0: .* {method} .* 0\.5 s \(one call"):
            await clerk.call(getattr(Clerk, method), 60.0)
        with pytest.raises(WorkerLost, match=r"clerk 0: .*did not end"):
            await clerk.call(Clerk.answer, "yes")
        await eventually(lambda: not Path(f"/proc/{clerk.pid}").exists(), "a stuck process is killed")

    do(steps())


def test_ranks_that_do_not_load_in_time_are_lost_before_a_call_would_be(runtime: Runtime) -> None:
    """What they are told first is a part of starting, however long calls may take afterwards."""
    cluster, do = runtime

    async def steps() -> None:
        pair = await clerks(cluster, 2)
        pair[1]._start_timeout = 0.5
        with pytest.raises(WorkerLost, match=r"clerk 1: .* work .* 0\.5 s .*runtime\.start_timeout"):
            await RayWorkerGroup(pair).scatter(Clerk.work, [(0.0,), (60.0,)], starts=True)

    do(steps())


def test_a_broken_collective_is_a_loss_and_a_mistake_is_not(runtime: Runtime) -> None:
    cluster, do = runtime

    async def steps() -> None:
        worker_group = RayWorkerGroup(await clerks(cluster, 2))
        with pytest.raises(WorkerLost, match=r"clerk 0: .*collective .*Connection closed"):
            await worker_group.each(Clerk.wait, 0.0)
        with pytest.raises(KeyError):
            await worker_group.each(Clerk.fail)

    do(steps())


def test_what_was_sent_by_a_lost_worker_is_not_the_receivers_fault(runtime: Runtime) -> None:
    cluster, do = runtime

    async def steps() -> None:
        sender, receiver = await clerks(cluster, 2)
        letter, _ = sender.references(Clerk.letter, parts=2)
        assert await receiver.call(Clerk.weigh, letter) == 200_000
        assert await sender.fetched(letter) == b"x" * 200_000
        os.kill(sender.pid, signal.SIGKILL)
        lost, stamp = sender.references(Clerk.letter, parts=2)
        with pytest.raises(SenderLost):
            await receiver.call(Clerk.weigh, lost)
        with pytest.raises(WorkerLost, match="clerk 0: "):
            await sender.fetched(stamp)
        assert await receiver.found() is None
        assert await receiver.call(Clerk.answer, "yes") == "YES"

    do(steps())


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_worker_returned_is_lost_with_its_node(
    apart: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is large stays in the node's store until it is fetched: without it the worker is lost, not a sender."""
    cluster, do = runtime

    async def gone(reference: Any) -> Any:
        """What Ray says once the object's node is gone."""
        raise ray.exceptions.ObjectReconstructionFailedError(reference.hex(), reference.owner_address(), "")

    async def steps() -> None:
        (clerk,) = await clerks(cluster, 1)
        monkeypatch.setattr("plaudit.runtime.ray_worker._plain", gone)
        with pytest.raises(WorkerLost, match=r"clerk 0: .*ObjectReconstructionFailedError") as lost:
            await (clerk.fetched(clerk.references(Clerk.letter, parts=2)[0]) if apart else clerk.call(Clerk.letter))
        assert not isinstance(lost.value, SenderLost) and not clerk.alive

    do(steps())
