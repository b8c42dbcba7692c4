"""A run on one machine is for this machine and this user: who may reach its processes, while it goes on."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import from_elsewhere, listening

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("only Linux tells who listens", allow_module_level=True)

from faults import descendants

from plaudit import load_settings, run
from plaudit.learn.ranks import join
from plaudit.loop.progress import Moment
from plaudit.runtime.network import free_address, own_address
from plaudit.types import Stats

Recipe = Callable[..., dict[str, Any]]


def test_all_that_a_run_listens_on_is_loopback_and_its_folder_is_closed(make_recipe: Recipe, tmp_path: Path) -> None:
    """Two ranks and two rollout workers meet in gloo's groups, through torch's stores, below Ray's own processes."""
    seen: dict[tuple[str, int], int] = {}
    folders: list[Path] = []
    before = listening([os.getpid()])

    async def look(moment: Moment) -> Stats:
        seen.update(listening([os.getpid(), *descendants(os.getpid())]))
        import ray

        node: Any = ray._private.worker._global_node
        folders.append(Path(node.get_session_dir_path()))
        return {}

    runtime = {"kind": "ray", "num_training_workers": 2, "weights": "collective"}
    recipe = make_recipe("grpo", tmp_path, runtime=runtime, rollout={"workers": 2}, train={"steps": 2})
    run(load_settings(recipe), hooks=[look])
    assert len(seen) > 10, seen
    assert [place for place in seen.keys() - before.keys() if from_elsewhere(place[0])] == []
    closed = [stat.S_IMODE(above.stat().st_mode) for above in folders[0].parents if above.name.startswith("ray-")]
    assert closed == [0o700]


def test_a_store_listens_where_ranks_come_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = listening([os.getpid()])
    ranks = join(free_address(), 0, 1, device=torch.device("cpu"), timeout=10.0, always=True)
    try:
        opened = listening([os.getpid()]).keys() - before.keys()
    finally:
        torch.distributed.destroy_process_group()
    assert ranks.world == 1
    assert opened
    assert {address for address, _ in opened} == {own_address()}


def test_the_interface_that_gloo_is_told_is_that_of_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none such")
    assert own_address() in {info[4][0] for info in socket.getaddrinfo(own_address(), None)}


def test_a_folder_that_somebody_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from plaudit.runtime.ray import _own_folder

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert _own_folder() == tmp_path / f"ray-{os.geteuid()}" / "ray"
    _own_folder().parent.chmod(0o777)
    assert stat.S_IMODE(_own_folder().parent.stat().st_mode) == 0o700
    _own_folder().parent.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"ray-{os.geteuid()}").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="another user's"):
        _own_folder()
    assert ray.__version__
