"""Ask a Ray cluster: for its head, for a function's result on a node, for nodes that are not there yet.

    address -> does a head of Ray answer there?
    node, function, arguments -> a task there, or a plain call if the node is this process's -> the result
    bundles -> the autoscaler, if the nodes cannot hold them -> nodes that can

Left out: reservations and processes (`ray.py`, `ray_worker.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from plaudit.runtime.ray_private import head_of_auto
from plaudit.runtime.resources import Resources, ResourcesError

CONNECT = 5.0
"""Seconds in which a cluster's head must accept a connection, and in which it must answer."""
SETTINGS = b"\x04"
"""Type of the frame with which an HTTP/2 server, and so gRPC's, answers `HELLO` (RFC 9113, section 3.4)."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + bytes(5)
Result = TypeVar("Result")


def this_node() -> str:
    """Return the id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def kill_process(pid: int, node: str) -> None:
    """Send SIGKILL to a process on a node, if both exist. It does not wait."""
    with contextlib.suppress(Exception):  # the process or its node is gone
        if node == this_node():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            _task(node, os.kill, pid, signal.SIGKILL)


async def on_node(node: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function returns on a node. Raises Ray's errors if the node is gone."""
    if node == this_node():
        return function(*arguments)
    found: Result = await _task(node, function, *arguments)
    return found


def _task(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a reference to the result."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*arguments)


@contextlib.asynccontextmanager
async def nodes_for(
    bundles: Sequence[Resources], check: Callable[[], None], *, timeout: float, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """While the nodes cannot hold the bundles (`check` raises ResourcesError), ask the cluster's autoscaler for more,
    and wait at most `timeout` seconds. Within, the nodes stay, used or not. Raises ResourcesError if they do not come;
    at once if `timeout` is 0."""
    try:
        check()
    except ResourcesError as short:
        if not timeout:
            raise
        missing = str(short).partition(": lower ")[0]
        say(f"waiting for nodes, at most {timeout:g} s (runtime.nodes_timeout): {missing}")
    else:
        yield
        return
    request_resources(bundles=[dict(bundle) for bundle in bundles])
    try:
        await _waited(check, timeout, missing)
        say("the nodes are there")
        yield
    finally:
        request_resources(bundles=[])


async def _waited(check: Callable[[], None], timeout: float, missing: str) -> None:
    try:
        async with asyncio.timeout(timeout):
            while True:
                with contextlib.suppress(ResourcesError):
                    return check()
                await asyncio.sleep(1.0)
    except TimeoutError:
        raise ResourcesError(
            f"{missing}, and no nodes that hold them came within {timeout:g} s (runtime.nodes_timeout). Has the "
            "cluster an autoscaler, and do its kinds of nodes and their most numbers suffice?"
        ) from None


def check_address(address: str) -> None:
    """Raise ValueError if no head answers at the address."""
    try:
        _answering(address)
    except ConnectionError as error:
        raise ValueError(
            f"runtime.address={address}: cannot connect to a cluster ({error}). Is one running (ray start --head)?"
        ) from error


def _answering(address: str) -> None:
    """Raise ConnectionError if no head answers. Ray itself would try for a quarter of an hour."""
    if address == "auto":
        address = head_of_auto()
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConnectionError(f"{address or 'nothing'} is not host:port")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT) as head:
            head.sendall(HELLO)
            answer = head.recv(9)
    except TimeoutError as error:
        raise ConnectionError(f"{address}: no answer within {CONNECT:g} s") from error
    except OSError as error:
        raise ConnectionError(f"{address}: {error.strerror or error}") from error
    except OverflowError as error:  # OverflowError: a port beyond 65535
        raise ConnectionError(f"{address}: {error}") from error
    if answer[3:4] != SETTINGS:
        raise ConnectionError(f"{address}: what answers there is no head of Ray")
