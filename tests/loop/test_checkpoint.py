"""Checkpoints are whole or absent: whatever interrupts a save, whatever happens to the files."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from plaudit.loop import checkpoint
from plaudit.loop.checkpoint import CheckpointError, Store, UnwritableError, moved

pytestmark = pytest.mark.slow

NAMES = [f"epoch1epochstep{step}globalstep{step}" for step in range(1, 13)]
FSYNC = os.fsync


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing is slow, and nothing but a loss of power needs it: the tests of that put it back."""
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
    guard(safetensors.torch, "save_file")
    guard(checkpoint, "digest_of")
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


# --- the process is killed

KILLED = 9


def in_a_child(act: Callable[[], object]) -> int:
    """Do it in a process of its own and return its exit code: the negative signal if one ended it."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(folder: Path, at: int, act: Callable[[], object]) -> None:
    """Do it, and end this process, with nothing tidied up, just before it touches the disk for the `at`-th time."""
    count = 0

    def touch(event: str, arguments: tuple[Any, ...] = ()) -> None:
        nonlocal count
        on_disk = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "fsync", "save_file")
        written = event == "open" and isinstance(arguments[1], str) and arguments[1].strip("rbt") != ""
        if on_disk or (written and str(arguments[0]).startswith(str(folder))):
            count += 1
            if count == at:
                os._exit(KILLED)

    os.fsync = lambda handle: touch("fsync")  # type: ignore[assignment]  # of a process that ends with this function
    original = safetensors.torch.save_file
    safetensors.torch.save_file = lambda *a, **k: (touch("save_file"), original(*a, **k))  # type: ignore[assignment]
    sys.addaudithook(touch)
    act()


def test_a_process_killed_before_any_write_flush_or_rename_leaves_one_of_the_two_checkpoints(tmp_path: Path) -> None:
    """Real files and a real end: no handler, no context manager, no buffer gets its turn."""
    outcomes = []
    for at in range(1, 200):
        store = Store(tmp_path / f"at{at}")
        save(store, 1)
        code = in_a_child(partial(killed_at, tmp_path, at, partial(save, store, 2)))
        assert code in (0, KILLED)
        found, problems = store.latest()
        assert problems == []
        assert content(store, found) == {float(NAMES.index(found) + 1)}
        if code == 0:
            assert found == NAMES[1]
            break
        outcomes.append(found)
        store.sweep()
        assert {path.name for path in store.folder.glob("*/*")} == set(store.names())
        assert content(store, save(store, 2)) == {2.0}
        shutil.rmtree(store.folder)
    assert len(outcomes) > 30
    assert set(outcomes) == set(NAMES[:2])
    assert outcomes == sorted(outcomes)


def test_a_process_killed_within_a_write_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The kernel ends it where a file would outgrow the limit, so that every file of a save is cut off somewhere."""

    def limited(size: int, store: Store) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would have an OSError of it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save(store, 2)

    store = Store(tmp_path / "whole")
    save(store, 1)
    sizes = sorted({path.stat().st_size for path in store.folder.rglob("*") if path.is_file()})
    cuts = {cut for size in sizes for cut in (0, size // 2, size - 1)}
    for size in [*sorted(cuts), sizes[-1]]:
        store = Store(tmp_path / f"cut{size}")
        save(store, 1)
        code = in_a_child(partial(limited, size, store))
        whole = size == sizes[-1]
        assert code == (0 if whole else -signal.SIGXFSZ), size
        found, problems = store.latest()
        assert (found, problems) == (NAMES[whole], [])
        assert content(store, found) == {whole + 1.0}


# --- the power is lost


class Disk:
    """What a folder's disk holds for certain: the entries of folders and the content of files that were flushed.

    A loss of power may keep more than that. It keeps names before contents, if anything, so that two outcomes are
    checked: `kept()` with flushed entries only, and `kept(eager=True)` with every entry, where a file that was not
    flushed is empty.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch):
        self.root, self.entries, self.contents = root, dict[int, dict[str, int]](), dict[int, bytes]()
        for path in (root, *root.rglob("*")):
            self._remember(path)
        self.outcomes: list[tuple[dict[str, bytes], dict[str, bytes]]] = []
        original = os.rename

        def rename(*arguments: Any) -> None:
            original(*arguments)
            self.outcomes.append((self.kept(), self.kept(eager=True)))

        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "rename", rename)

    def _remember(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        self._flushed(handle)
        os.close(handle)

    def _flushed(self, handle: int) -> None:
        known = os.fstat(handle)
        if stat.S_ISDIR(known.st_mode):
            self.entries[known.st_ino] = {name: os.stat(name, dir_fd=handle).st_ino for name in os.listdir(handle)}
        else:
            self.contents[known.st_ino] = os.pread(handle, known.st_size, 0)

    def fsync(self, handle: int) -> None:
        self.outcomes.append((self.kept(), self.kept(eager=True)))
        FSYNC(handle)
        self._flushed(handle)
        self.outcomes.append((self.kept(), self.kept(eager=True)))

    def kept(self, *, eager: bool = False) -> dict[str, bytes]:
        """Path -> content of what a loss of power now would leave."""
        if eager:
            files = [path for path in self.root.rglob("*") if path.is_file()]
            return {str(f.relative_to(self.root)): self.contents.get(f.stat().st_ino, b"") for f in files}
        return dict(self._walk(self.root.stat().st_ino, ""))

    def _walk(self, folder: int, prefix: str) -> Iterator[tuple[str, bytes]]:
        for name, inode in self.entries.get(folder, {}).items():
            if inode in self.contents:
                yield prefix + name, self.contents[inode]
            else:
                yield from self._walk(inode, f"{prefix}{name}/")


def restored(kept: Mapping[str, bytes], folder: Path) -> Store:
    """A store in `folder` of what was kept."""
    folder.mkdir()
    for name, whole in kept.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(whole)
    return Store(folder / "run/checkpoints")


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_of_power_at_any_moment_of_a_save_leaves_one_of_the_two_checkpoints(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are flushed before the rename, the new name after it; `first`: so are the folders that the first save of a
    run makes, of the roles, of the store and of the run."""
    root = tmp_path / "disk"
    root.mkdir()
    store = Store(root / "run/checkpoints")
    if not first:
        save(store, 1)
    disk = Disk(root, monkeypatch)
    save(store, 1 if first else 2)
    disk.outcomes.append((disk.kept(), disk.kept(eager=True)))
    monkeypatch.undo()
    assert len(disk.outcomes) > 40
    newest, expected = [], NAMES[0 if first else 1]
    for number, both in enumerate(disk.outcomes):
        for mode, kept in zip(("lazy", "eager"), both, strict=True):
            after = restored(kept, tmp_path / f"{mode}{number}")
            if first and not after.names():
                newest.append((mode, ""))
                continue
            found, problems = after.latest()
            assert problems == []
            assert content(after, found) == {float(NAMES.index(found) + 1)}
            newest.append((mode, found))
    for mode in ("lazy", "eager"):
        found_in_turn = [found for which, found in newest if which == mode]
        assert found_in_turn == sorted(found_in_turn)
        assert found_in_turn[-1] == expected  # once `write` has returned, nothing takes the checkpoint away
        assert found_in_turn[0] != expected


FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EROFS, "Read-only file system"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    Exception("Disk quota exceeded (os error 122)"),  # as of tokenizers
)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_storage_that_takes_nothing_more_is_told_with_what_is_left(error: Exception, tmp_path: Path) -> None:
    store = Store(tmp_path)

    def failing(folder: Path) -> None:
        (folder / "half").write_text("written")
        raise error

    def told(left: str) -> None:
        place = re.escape(str(tmp_path / "policy" / NAMES[1]))
        reason = "(No space left on device|Read-only file system|Disk quota exceeded)"
        with pytest.raises(UnwritableError, match=rf"^{place} .*{reason}.* {left}"):
            store.write(NAMES[1], {"policy": failing}, {}, {})
        assert not list(tmp_path.glob("*/.writing-*"))

    told(rf"{re.escape(str(tmp_path))} has no whole checkpoint: start the run again with overwrite=true$")
    save(store, 1)
    told(f"The newest whole checkpoint is {store.names()[0]}: resume=latest continues from there$")


def test_other_failures_to_save_stay_what_they_are(tmp_path: Path) -> None:
    for error in (OSError(errno.ENOENT, "No such file"), SafetensorError("no tensor"), ValueError("os error 28")):

        def failing(folder: Path, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as found:
            Store(tmp_path).write(NAMES[1], {"policy": failing}, {}, {})
        assert found.value is error


def test_the_folder_of_a_run_is_flushed_into_its_parents(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plaudit import load_settings
    from plaudit.runs.records import open_folder

    disk = Disk(tmp_path, monkeypatch)
    with open_folder(load_settings(make_recipe("sft", tmp_path / "deep/runs"))) as folder:
        handle = folder.stat().st_ino
        assert disk.entries[folder.parent.stat().st_ino] == {"run": handle}
        assert disk.entries[tmp_path.stat().st_ino] == {"deep": (tmp_path / "deep").stat().st_ino}


def test_weights_may_be_read_by_whoever_may_read_the_rest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    before = os.umask(0o027)
    try:
        save(store, 1)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}


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


def test_a_file_that_was_added_is_found_and_named(tmp_path: Path) -> None:
    """Another index or tokenizer file could change what is loaded. What is hidden is the file system's own."""
    store = Store(tmp_path)
    save(store, 1)
    name = save(store, 2)
    for added in ("policy/{}/model.safetensors.index.json", "critic/{}/tokenizer/extra.txt", "state/{}/x.json"):
        path = tmp_path / added.format(name)
        path.write_text("{}")
        found, (problem,) = store.latest()
        assert found == NAMES[0]
        assert f"{path.relative_to(tmp_path).parts[0]}/{name} holds files that it was not saved with" in problem
        assert path.name in problem
        path.unlink()
    (tmp_path / "policy" / name / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="link"):
        store.verify(name)
    (tmp_path / "policy" / name / "link").unlink()
    for number in range(5):
        (tmp_path / "policy" / name / f"more{number}").touch()
    with pytest.raises(CheckpointError, match=r"more2 and 2 more\."):
        store.verify(name)
    for number in range(3, 5):
        (tmp_path / "policy" / name / f"more{number}").unlink()
    with pytest.raises(CheckpointError, match=r"more1, more2\."):
        store.verify(name)
    for number in range(3):
        (tmp_path / "policy" / name / f"more{number}").unlink()
    (tmp_path / "policy" / name / ".cache").mkdir()
    (tmp_path / "policy" / name / ".cache/note").touch()
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
    with pytest.raises(CheckpointError, match=f"policy/{name} "):
        one.verify(name)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        one.latest()


def test_prune_keeps_the_newest_by_number(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 9, 10, 12):
        save(store, step)
    store.prune(0)
    assert store.names() == [NAMES[step - 1] for step in (1, 2, 9, 10, 12)]  # 9 before 10: by number, not by spelling
    store.prune(2, spare=NAMES[1])
    assert store.names() == [NAMES[1], NAMES[9], NAMES[11]]
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


def test_sweeping_leaves_what_people_put_beside_checkpoints(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = save(store, 1)
    for kept in ("policy/best-so-far/model.safetensors", "notes/monday/read.me", f"policy/{name}-copy/config.json"):
        (tmp_path / kept).parent.mkdir(parents=True)
        (tmp_path / kept).write_text("mine")
    for left in ("policy/.writing-ahead", f"critic/.writing-{name}", f"policy/{NAMES[4]}"):
        (tmp_path / left).mkdir()
    assert store.staging("policy") == tmp_path / "policy/.writing-ahead"
    store.sweep()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    theirs = {"policy/best-so-far", "notes/monday", f"policy/{name}-copy"}
    assert found == theirs | {f"{role}/{name}" for role in ("policy", "critic", "state")}


def test_what_was_written_elsewhere_is_moved_whole(tmp_path: Path) -> None:
    staging, folder = tmp_path / "ahead", tmp_path / "there"
    staging.mkdir()
    folder.mkdir()
    writer(3)(staging)
    moved(staging, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer"]
    assert (folder / "tokenizer/vocab.txt").read_text() == "step 3"
    assert not staging.exists()
