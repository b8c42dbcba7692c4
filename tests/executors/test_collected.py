"""Pieces of files: what several disks have in part is the whole file, whatever the order; holes do not travel."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from plaudit.executors import collected
from plaudit.executors.collected import Node, merge, pieces_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "PIECE_BYTES", 1 << 16)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_parts_of_a_file_on_two_disks_are_the_whole_file(tmp_path: Path) -> None:
    """Each wrote bytes of the same block."""
    whole = os.urandom(1_000_000)
    for name, ranges in (
        ("one", [(0, 300_001), (600_000, 600_007)]),
        ("other", [(300_001, 600_000), (600_007, 10**6)]),
    ):
        (tmp_path / name / "inner").mkdir(parents=True)
        with (tmp_path / name / "inner" / "weights").open("wb") as file:
            file.truncate(len(whole))
            for start, stop in ranges:
                file.seek(start)
                file.write(whole[start:stop])
    (tmp_path / "one" / "empty").touch()
    (tmp_path / "one" / "config.json").write_text("{}")
    for name in ("other", "one", "one"):  # twice is once
        for piece in pieces_of(tmp_path / name):
            assert len(piece[-1]) <= collected.PIECE_BYTES
            merge(tmp_path / "here", [piece])
    assert content(tmp_path / "here") == {"inner/weights": whole, "empty": b"", "config.json": b"{}"}


def test_holes_do_not_travel(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"head")
        file.truncate(64 << 20)
    if (tmp_path / "sparse").stat().st_blocks > 1000:
        pytest.skip("this file system has no holes")
    pieces = list(pieces_of(tmp_path))
    assert sum(len(piece[-1]) for piece in pieces) < 1 << 20
    assert {piece[1] for piece in pieces} == {64 << 20}


@pytest.mark.parametrize("seen", [True, False])
def test_a_rank_gives_what_the_driver_does_not_see_and_keeps_nothing(seen: bool, tmp_path: Path) -> None:
    folder, mine = tmp_path / "writing", tmp_path / f"writing-{os.getpid()}"
    for one, text in ((folder, "of rank 0"), (mine, "my own")):
        one.mkdir()
        (one / f"{one.name}.txt").write_text(text)
    if seen:
        (folder / ".mark").touch()
    rank = Node()
    found: dict[str, bytes] = {}

    async def given() -> None:
        await rank.begin_giving(folder, ".mark")
        while (pieces := (await rank.give(folder))[0]) != []:
            found.update({piece[0]: piece[-1] for piece in pieces})

    asyncio.run(given())
    assert found == {f"{mine.name}.txt": b"my own"} | ({} if seen else {"writing.txt": b"of rank 0"})
    assert (mine.exists(), folder.exists()) == (False, seen)
