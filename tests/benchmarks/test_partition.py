"""What holds of an island before a run is on it. Cutting one off is `tests/runs/test_partition_runs.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import partition
import pytest
from partition import Island, call, end, is_agent, joined, missing

isolated = pytest.mark.skipif(bool(reason := missing()), reason=f"a network partition {reason}")


@pytest.fixture
def cluster() -> Any:
    """Of one node, which no other one joins."""
    return SimpleNamespace(global_state=SimpleNamespace(node_table=lambda: [{"Alive": True}, {"Alive": False}]))


def test_a_node_that_ends_instead_of_joining_is_not_waited_for(cluster: Any) -> None:
    with subprocess.Popen(["sh", "-c", "exit 7"]) as node, pytest.raises(ChildProcessError, match="exit status 7"):
        joined(cluster, 2, SimpleNamespace(node=node))


def test_a_node_that_does_not_join_is_not_waited_for_without_end(cluster: Any) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as node:
        joined(cluster, 1, SimpleNamespace(node=node))
        with pytest.raises(TimeoutError, match=r"0\.1 s: 1, not 2"):
            joined(cluster, 2, SimpleNamespace(node=node), within=0.1)


PATH = "/ray/dashboard/agent.py"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells command lines in files")
@pytest.mark.parametrize(
    ("program", "arguments", "agent"),
    [
        ("ray::DashboardAgent", ["", ""], True),
        ("ray::RuntimeEnvAgent", [""], True),
        ("python", ["-u", PATH, "--listen-port=1"], True),
        ("python", ["-u", "/ray/_private/runtime_env/agent/main.py"], True),
        ("/ray/core/src/ray/raylet/raylet", [f"--dashboard_agent_command=python {PATH} --listen-port=1"], False),
        ("/ray/core/src/ray/raylet/raylet", [f"--dashboard_agent_command=python {PATH}"], False),
        ("ray::Host.call", [""], False),
    ],
)
def test_an_agent_is_known_by_what_runs(program: str, arguments: Sequence[str], agent: bool) -> None:
    waits, pipe = [program, "-c", "echo; read line", *arguments], subprocess.PIPE
    with subprocess.Popen(waits, executable="/bin/sh", stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # it runs: before that it has no command line
        assert is_agent(process.pid) is agent
    assert is_agent(process.pid), "it has ended"


def test_a_command_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(OSError, match=r"exit 3.*: no room"):
        call("sh", "-c", "echo no room >&2; exit 3")
    with pytest.raises(OSError, match=r"`false` .*1"):
        call("false")


@isolated
def test_all_islands_end_also_where_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    islands = [Island("127.0.0.1:9", 1) for _ in range(2)]
    kept = islands[1]
    with monkeypatch.context() as stuck:
        stuck.setattr(partition, "ENDS", 0.0)
        stuck.setattr(Island, "processes", lambda island: {island.node.pid} if island is kept else set())
        islands[0].node.kill()
        with pytest.raises(TimeoutError, match=rf"0 s: .{kept.node.pid}"):
            end(islands)
    assert islands[0].node.returncode is not None
    kept.end()
    assert kept.node.returncode is not None
    assert not kept.processes()


@isolated
def test_an_island_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*command: str) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(partition, "call", fails)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="no such device"):
        Island("127.0.0.1:6379", 1)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
