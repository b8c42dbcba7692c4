"""A node of a Ray cluster that can be cut off: in a network namespace of its own, behind a link of its own.

    Island(address, cpus) -> a raylet that joins -> cut: packets are dropped both ways, and nobody is told -> heal

Namespace, link and addresses are gone once the last of the node's processes has ended, also where this one was killed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from plaudit.runtime.network import own_address

DROP = ("root", "bfifo", "limit", "1")
"""A queue that no packet fits into."""
MEMORY = 100 << 20
"""Bytes of a node's object store."""


ALONE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
"""Seconds without the head after which a node ends by itself once it notices; Ray's own are 60."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "/dashboard/agent.py", "/runtime_env/agent/main.py")
"""How words of their command lines end: what they call themselves, and before that what was started."""
JOINS = 120.0
"""Seconds in which a node must have joined its cluster."""
ENDS = 30.0
"""Seconds in which its processes must have ended that were killed."""


def missing() -> str | None:
    """Why no island can be made here."""
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"needs {', '.join(tools)}"
    tried = f"ip link add near type veth peer name far && tc qdisc add dev near {' '.join(DROP)}"
    try:
        call("unshare", "--net", "sh", "-c", tried)
    except OSError as error:
        return f"needs root, who may make network namespaces and links ({error})"
    return "needs an address in a network" if own_address() == "127.0.0.1" else None


class Island:
    """Its namespace and link are made at once; the raylet joins the cluster at `head` some seconds later. The caller
    promises to end it."""

    def __init__(self, head: str, cpus: float, **resources: float):
        self.head, self.cpus, self.resources = head, cpus, resources
        self.namespace = new_namespace()
        self.link = f"isle{os.getpid()}.{self.namespace}"
        self.address = ""
        try:
            self._wire()
            self.node = self._joining()
        except BaseException:
            os.close(self.namespace)
            raise

    def _joining(self) -> subprocess.Popen[bytes]:
        amounts = [f"--num-cpus={self.cpus}", f"--resources={json.dumps(self.resources)}"]
        amounts += [f"--object-store-memory={MEMORY}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self.head}", *amounts, "--block"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"} | ALONE
        return subprocess.Popen(self._inside(*ray), env=environment, **quiet)

    def another(self) -> Island:
        """Like this one."""
        return Island(self.head, self.cpus, **self.resources)

    def _wire(self) -> None:
        """A pair of ends, a network of their own, and all that is not on the island beyond the near end."""
        call("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self._path)
        number = 4 * int(Path(f"/sys/class/net/{self.link}/ifindex").read_text())  # no two links of a machine share it
        near, self.address = (f"198.18.{(number + end) >> 8}.{(number + end) & 255}" for end in (1, 2))
        call("ip", "address", "add", f"{near}/30", "dev", self.link)
        call("ip", "link", "set", self.link, "up")
        call(*self._inside("ip", "address", "add", f"{self.address}/30", "dev", "eth0"))
        for device in ("eth0", "lo"):
            call(*self._inside("ip", "link", "set", device, "up"))
        call(*self._inside("ip", "route", "add", "default", "via", near))
        for server in re.findall(r"^nameserver (\d[\d.]+)$", Path("/etc/resolv.conf").read_text(), re.MULTILINE):
            call(*self._inside("ip", "route", "add", "unreachable", server))  # else asking it for a name takes 10 s

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.namespace}"

    def _inside(self, *command: str) -> Sequence[str]:
        return "nsenter", f"--net={self._path}", *command

    def cut(self) -> None:
        call("tc", "qdisc", "add", "dev", self.link, *DROP)
        call(*self._inside("tc", "qdisc", "add", "dev", "eth0", *DROP))

    def heal(self) -> None:
        call("tc", "qdisc", "delete", "dev", self.link, "root")
        call(*self._inside("tc", "qdisc", "delete", "dev", "eth0", "root"))

    def processes(self) -> set[int]:
        """Those that run on it."""
        return {int(process.name) for process in Path("/proc").glob("[0-9]*") if self._is_home_of(process)}

    def _is_home_of(self, process: Path) -> bool:
        with suppress(OSError):  # it has ended
            return (process / "ns" / "net").stat().st_ino == os.fstat(self.namespace).st_ino
        return False

    def empties(self, seconds: float) -> bool:
        """Whether all of its processes end by themselves, in so many seconds. Left out are Ray's two agents, which may
        take a minute longer: so long they try to tell their cluster."""
        until = time.monotonic() + seconds
        while not all(is_agent(pid) for pid in self.processes()):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def end(self) -> None:
        """Raises TimeoutError where some of its processes stay."""
        until = time.monotonic() + ENDS
        while left := self.processes():
            if time.monotonic() > until:
                raise TimeoutError(f"processes of an island were killed and are there after {ENDS:g} s: {sorted(left)}")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.node.wait()
        os.close(self.namespace)


def end(islands: Sequence[Island]) -> None:
    """All of them, also where one cannot be ended: that is raised behind the last one."""
    with ExitStack() as ends:
        for island in islands:
            ends.callback(island.end)


def is_agent(pid: int) -> bool:
    """Whether it is one of Ray's two agents of a node; also where it has ended. A raylet, which is told how to start
    them, is none."""
    with suppress(OSError):
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
        return not program.endswith("/raylet") and any(word.endswith(AGENTS) for word in (program, *arguments))
    return True


def joined(cluster: Any, nodes: int, island: Island, *, within: float = JOINS) -> None:
    """Wait until so many nodes are in a cluster (of `ray.cluster_utils`), neither fewer nor more. Raises where the
    last of them, `island`, ends instead, and where it takes longer than `within` seconds."""
    until = time.monotonic() + within
    while (there := sum(node["Alive"] for node in cluster.global_state.node_table())) != nodes:
        if (status := island.node.poll()) is not None:
            raise ChildProcessError(f"an island's node ended with exit status {status} and did not join the cluster")
        if time.monotonic() > until:
            raise TimeoutError(f"nodes in the cluster after {within:g} s: {there}, not {nodes}")
        time.sleep(0.1)


def new_namespace() -> int:
    """A handle that keeps it."""
    mine = Path("/proc/self/ns/net").stat().st_ino
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as holder:
        its = Path(f"/proc/{holder.pid}/ns/net")
        while its.stat().st_ino == mine:
            if holder.poll() is not None:
                raise OSError(f"no network namespace can be made: this {missing()}")
            time.sleep(0.01)
        return os.open(its, os.O_RDONLY)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"`{shlex.join(command)}` failed: {' '.join(done.stderr.split()) or f'status {done.returncode}'}")
