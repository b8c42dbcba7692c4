"""Checkpoints are whole or absent: whatever interrupts a save, whatever happens to the files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from assent.loop import checkpoint
from assent.loop.checkpoint import CheckpointError, Store

NAMES = [f"epoch1epochstep{step}globalstep{step}" for step in range(1, 13)]


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing is slow, and what it is for (a loss of power) cannot be tested here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Interrupted(BaseException):
    """Stands for the end of the process: no `except Exception` catches it."""


def writer(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({"weight": torch.full((4, 3), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"step": step}))
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.txt").write_text(f"step {step}")

    return write


def save(store: Store, step: int) -> str:
    name = NAMES[step - 1]
    roles = {"policy": writer(step), "critic": writer(step)}
    store.write(name, roles, {"moments": torch.full((3,), float(step))}, {"step": step})
    return name


def content(store: Store, name: str) -> set[float]:
    """The step that each part of a checkpoint was saved in: one number if it is whole."""
    store.verify(name)
    tensors, values = store.read(name)
    found = {float(values["step"]), *tensors["moments"].tolist()}
    for role in ("policy", "critic"):
        folder = store.model(role, name)
        found |= set(load_file(folder / "model.safetensors")["weight"].flatten().tolist())
        found |= {float(json.loads((folder / "config.json").read_text())["step"])}
        found |= {float((folder / "tokenizer/vocab.txt").read_text().split()[1])}
    return found


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Make the `at`-th call of anything that touches the disk end the process; the list names the calls so far."""
    calls: list[str] = []

    def guard(owner: Any, attribute: str) -> None:
        original = getattr(owner, attribute)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            calls.append(attribute)
            if len(calls) == at:
                raise Interrupted(attribute)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, guarded)

    guard(os, "fsync")
    guard(shutil, "rmtree")
    guard(checkpoint, "save_file")
    guard(checkpoint, "_digest")
    for method in ("rename", "write_text", "mkdir"):
        guard(Path, method)
    return calls


def operations(tmp_path: Path, prepare: Callable[[Store], None], act: Callable[[Store], None]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        store = Store(tmp_path / "counted")
        prepare(store)
        calls = interrupt(patch, 0)
        act(store)
    return len(calls)


@pytest.mark.parametrize("same_name", [False, True])
def test_an_interrupted_save_leaves_the_previous_checkpoint_or_the_new_one(tmp_path: Path, same_name: bool) -> None:
    """`same_name`: an uncommitted save of that name lies there already, with other content."""

    def prepare(store: Store) -> None:
        save(store, 1)
        if same_name:
            for role in ("policy", "critic"):
                shutil.copytree(store.folder / role / NAMES[0], store.folder / role / NAMES[1])

    total = operations(tmp_path, prepare, lambda store: save(store, 2) and None)
    assert total > 40
    outcomes = []
    for at in range(1, total + 1):
        store = Store(tmp_path / f"at{at}")
        prepare(store)
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(Interrupted):
                save(store, 2)
        found, problems = store.latest()
        assert problems == []
        assert content(store, found) == {float(NAMES.index(found) + 1)}
        outcomes.append(found)
        store.sweep()
        assert list(store.folder.rglob(".writing-*")) == []
        assert {path.name for path in store.folder.glob("*/*")} == set(store.names())
        assert content(store, save(store, 2)) == {2.0}  # what was left behind is in nobody's way
        shutil.rmtree(store.folder)
    assert set(outcomes) == set(NAMES[:2])
    assert outcomes == sorted(outcomes)  # the rename of the state commits, once


def test_an_interrupted_removal_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    def prepare(store: Store) -> None:
        for step in (1, 2, 3):
            save(store, step)

    total = operations(tmp_path, prepare, lambda store: store.prune(1))
    assert total == 6  # two checkpoints of a state and two roles
    for at in range(1, total + 1):
        store = Store(tmp_path / f"at{at}")
        prepare(store)
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(Interrupted):
                store.prune(1)
        for name in store.names():
            assert len(content(store, name)) == 1
        store.sweep()
        assert {path.name for path in store.folder.glob("*/*")} == set(store.names())
        assert store.latest() == (NAMES[2], [])


def damages(path: Path) -> list[tuple[str, bytes | None]]:
    """Ways in which a file can be damaged: bits turned at both ends and between, cut short, emptied, gone."""
    whole = path.read_bytes()
    found: list[tuple[str, bytes | None]] = [
        ("gone", None),
        ("empty", b""),
        ("cut", whole[:-1]),
        ("longer", whole + b"x"),
    ]
    for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
        for bit in (0, 5):
            turned = bytes([whole[place] ^ (1 << bit)])
            found.append((f"bit {bit} of byte {place}", whole[:place] + turned + whole[place + 1 :]))
    return found


def test_any_damage_is_found_and_named_and_the_older_checkpoint_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    name = save(store, 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and name in path.parts]
    assert len(files) == 3 + 2 * 4
    for file in files:
        whole = file.read_bytes()
        for what, damaged in damages(file):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            found, problems = store.latest()
            assert found == NAMES[0], (file, what)
            role, named = file.relative_to(tmp_path).parts[0], file.name
            assert len(problems) == 1
            assert f"{role}/{name}" in problems[0], (file, what, problems)
            assert named in problems[0] or named == "manifest.json", (file, what, problems)
            file.write_bytes(whole)
    assert store.latest() == (name, [])


def test_every_bit_of_the_seal_counts(tmp_path: Path) -> None:
    """Nothing seals the state's own manifest, so that every flip in it has to show by itself."""
    store, name = Store(tmp_path), NAMES[0]
    store.write(name, {}, {}, {})
    manifest = tmp_path / "state" / name / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            turned = bytes([whole[place] ^ (1 << bit)])
            manifest.write_bytes(whole[:place] + turned + whole[place + 1 :])
            with pytest.raises(CheckpointError):
                store.verify(name)


def test_parts_of_two_saves_are_no_checkpoint(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "one"), Store(tmp_path / "two")
    name = save(one, 1)
    two.write(name, {"policy": writer(7), "critic": writer(7)}, {}, {"step": 7})
    shutil.rmtree(one.model("policy", name))
    shutil.copytree(two.model("policy", name), one.model("policy", name))
    with pytest.raises(CheckpointError, match=f"policy/{name} is not the one that"):
        one.verify(name)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        one.latest()


def test_prune_keeps_the_newest_by_number(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 9, 10, 12):
        save(store, step)
    store.prune(0)
    assert store.names() == [NAMES[step - 1] for step in (1, 2, 9, 10, 12)]  # 9 before 10: by number, not by spelling
    store.prune(2)
    assert store.names() == [NAMES[9], NAMES[11]]
    assert {path.name for path in tmp_path.glob("*/*")} == {NAMES[9], NAMES[11]}
    assert [content(store, name) for name in store.names()] == [{10.0}, {12.0}]


def test_going_on_from_an_older_checkpoint_drops_the_later_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 9, 10):
        save(store, step)
    store.drop_after(NAMES[1])
    assert store.names() == NAMES[:2]
    save(store, 3)
    store.prune(1)
    assert store.latest() == (NAMES[2], [])


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert store.names() == []
    store.sweep()
    store.prune(2)
    with pytest.raises(CheckpointError, match="none was committed"):
        store.latest()


def test_sweeping_leaves_models_whose_states_somebody_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = save(store, 1)
    shutil.rmtree(tmp_path / "state")
    store.sweep()
    assert (store.model("policy", name) / "config.json").exists()
