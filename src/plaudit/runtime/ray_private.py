"""What Ray's public functions do not offer: every use of its private modules (`ray._private`).

A context each, in which Ray starts otherwise than it does of itself; the nodes that will end; where `auto` leads to.
`make compat` tests the oldest and the newest Ray that are supported.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray


def head_of_auto() -> str:
    """Return host:port of RAY_ADDRESS, or of the cluster that was started last on this machine; "" if there is none."""
    return str(ray._private.services.canonicalize_bootstrap_address("auto") or "")


def draining() -> set[str]:
    """Return ids of draining nodes, such as an autoscaler takes back; none if this Ray cannot tell."""
    return set(getattr(ray._private.state.state, "get_draining_nodes", tuple)())


@contextlib.contextmanager
def sigterm_left_alone() -> Iterator[None]:
    """Keep Python's handler of SIGTERM. Ray's would end the run with a traceback while Ray starts, and unsaved later;
    the handler of Ray's C++ is replaced again."""
    try:
        with _replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None):
            yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread: then Ray has set none either
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def processes_apart() -> Iterator[None]:
    """Let Ray start its processes in a separate process group, on Linux. A SIGTERM to this group (`timeout`, many
    service managers) then reaches only this process, which saves and ends the others. Otherwise Ray would end at once,
    and the run with it. Elsewhere the processes can only end with this process's group."""
    services: Any = ray._private.services
    apart = {"process_group": 0} if sys.platform == "linux" else {}
    with _replaced(services, "ConsolePopen", partial(services.ConsolePopen, **apart)):
        yield


@contextlib.contextmanager
def nothing_unused() -> Iterator[None]:
    """Let Ray start without its autoscaler, its log reader and the rest of its page. A run on this machine does not
    need them, and they cost seconds at its start and one at its end."""
    unused = ["start_monitor", "start_log_monitor"]
    if ray._private.utils.get_dashboard_dependency_error() is not None:
        unused.append("start_api_server")  # ray[default]: a node's agent would look for the API server forever
    with contextlib.ExitStack() as stack:
        for name in unused:
            stack.enter_context(_replaced(ray._private.node.Node, name, lambda node, **more: None))
        yield


def on_loopback() -> contextlib.AbstractContextManager[None]:
    """Let Ray listen on the loopback interface only, as it always does on macOS."""
    services: Any = ray._private.services
    return _replaced(services.ray_constants, "ENABLE_RAY_CLUSTER", False)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
