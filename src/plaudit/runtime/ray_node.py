"""Call functions on a node of Ray's, beside its workers.

node, function, arguments -> a task there, or a plain call if the node is this process's -> the result
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
