"""Copies of checkpoints at an address: whole or absent there too, whatever interrupts, and fetched where none is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.loop.checkpoint import CheckpointError, Store, UnwritableError
from plaudit.loop.copies import Copies, CopyError
from plaudit.support.address import AddressError

NAMES = [f"epoch1epochstep{step}globalstep{step}" for step in range(1, 9)]


@pytest.fixture(params=["memory", "file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    base = request.getfixturevalue("bucket") if request.param == "s3" else f"{request.param}://"
    return f"{base}{tmp_path}/there/run"


def writer(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"step": step}))
        (folder / "vocab").mkdir()
        (folder / "vocab" / "words").write_text(f"step {step}")

    return write


def save(store: Store, step: int, *, best: int | None = None) -> None:
    kept = {} if best is None else {"best": {"checkpoint": NAMES[best - 1]}}
    moments, roles = {"moments": torch.full((3,), float(step))}, {"policy": writer(step), "critic": writer(step)}
    store.write(NAMES[step - 1], roles, moments, {"step": step} | kept)
    store.copy()


def whole(store: Store, name: str) -> bool:
    """True if all of a checkpoint is of its step."""
    store.verify(name)
    tensors, values = store.read(name)
    steps = {values["step"], *tensors["moments"].tolist()}
    for role in ("policy", "critic"):
        folder = store.model(role, name)
        steps |= {json.loads((folder / "config.json").read_text())["step"]}
        steps |= {int((folder / "vocab" / "words").read_text().split()[1])}
    return steps == {NAMES.index(name) + 1}


def elsewhere(tmp_path: Path, address: str, name: str = "latest") -> Store:
    """What another machine fetches."""
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    store = Store(tmp_path / "other" / "checkpoints", Copies(address, ["settings.yaml"]))
    store.fetch(name)
    return store


def test_each_checkpoint_is_copied_pruned_and_fetched(address: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", Copies(address, ["settings.yaml", "absent.json"]))
    (tmp_path / "settings.yaml").write_text("seed: 3")
    for step in (1, 2, 3, 4):
        save(store, step, best=1)
        store.prune(2, spare=NAMES[0])
    assert store.copies is not None
    assert store.copies.names() == store.names() == [NAMES[0], NAMES[2], NAMES[3]]
    other = elsewhere(tmp_path, address)
    assert other.names() == [NAMES[0], NAMES[3]], "the newest, and the best that it names"
    assert all(whole(other, name) for name in other.names())
    assert (tmp_path / "other" / "settings.yaml").read_text() == "seed: 3"
    assert elsewhere(tmp_path, address, NAMES[2]).names() == [NAMES[0], NAMES[2]]
    other = elsewhere(tmp_path, address)
    other.drop_after(NAMES[2])
    assert store.copies.names() == [NAMES[0], NAMES[2]], "also what is not here"
    save(other, 5)
    other.prune(1)
    assert store.copies.names() == [NAMES[4]]
    assert all(path.split("/")[1] == NAMES[4] for path in store.copies.there.found() if "/" in path)


@pytest.mark.slow
def test_an_interrupted_copy_leaves_the_previous_checkpoint_or_the_new_one(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that writes there may be the last one of the process."""

    class Interrupted(BaseException):
        """No `except Exception` catches it."""

    store = Store(tmp_path / "checkpoints")
    for step in (1, 2):
        save(store, step)
    outcomes, at = list[str](), 0
    while True:
        at += 1
        copies, calls = Copies(f"{address}{at}"), 0
        copies.put(store.folder, NAMES[:1])

        def guarded(original: Any, at: int = at) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise Interrupted
                return original(*given, **named)

            return call

        with monkeypatch.context() as patch:
            files = copies.there.files
            for name in ("put", "put_file", "pipe_file", "mv", "rm", "mkdir"):
                patch.setattr(files, name, guarded(getattr(files, name)))
            try:
                copies.put(store.folder, NAMES[:2])
                copies.remove(NAMES[0])
            except Interrupted:
                pass
            else:
                break
        other = elsewhere(tmp_path, f"{address}{at}")
        newest, problems = other.latest()
        assert problems == []
        assert whole(other, newest)
        outcomes.append(newest)
        copies.put(store.folder, NAMES[:2])  # what was left is in nobody's way
        assert whole(elsewhere(tmp_path, f"{address}{at}"), NAMES[1])
    assert set(outcomes) == set(NAMES[:2])
    assert outcomes == sorted(outcomes), "the state's manifest commits, once"
    assert at > 12


def test_a_damaged_copy_is_passed_over(address: str, tmp_path: Path) -> None:
    copies = Copies(address)
    store = Store(tmp_path / "checkpoints", copies)
    save(store, 1)
    save(store, 2)
    copies.there.write(b"{}", "policy", NAMES[1], "config.json")
    assert whole(elsewhere(tmp_path, address), NAMES[0])
    assert elsewhere(tmp_path, address).latest()[0] == NAMES[0]
    copies.there.remove("policy", NAMES[0])
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        elsewhere(tmp_path, address).latest()
    store.fetch("latest")
    assert store.latest()[0] == NAMES[1], "what is here is whole"


def test_a_failed_copy_ends_the_run_and_the_next_save_makes_up_for_it(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(address)
    store = Store(tmp_path / "checkpoints", copies)

    def fails(*given: Any, **named: Any) -> None:
        raise ConnectionError("the bucket is gone")

    with monkeypatch.context() as patch:
        patch.setattr(copies.there.files, "put", fails)
        with pytest.raises(UnwritableError, match=rf"{address} .*the bucket is gone.*resume=latest"):
            save(store, 1)
    assert whole(store, NAMES[0])
    assert copies.names() == []
    save(store, 2)
    assert copies.names() == NAMES[:2]


def test_another_runs_checkpoints_are_overwritten_only_if_asked(address: str, tmp_path: Path) -> None:
    save(Store(tmp_path / "one", Copies(address)), 3)
    with pytest.raises(AddressError, match="overwrite=true"):
        Copies(address).opened(overwrite=False, resumes=False)
    assert Copies(address).opened(overwrite=False, resumes=True).names() == [NAMES[2]]
    copies = Copies(address).opened(overwrite=True, resumes=False)
    assert copies.names() == [NAMES[2]], "until the first step is done"
    copies.let_go()
    assert copies.names() == []
    assert copies.there.found() == []


def test_an_address_that_cannot_be_written_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **named: Any) -> None:
        raise PermissionError("no access")

    copies = Copies(address)
    monkeypatch.setattr(copies.there.files, "pipe_file", fails)
    with pytest.raises(AddressError, match=rf"{address}.*no access"):
        copies.opened(overwrite=False, resumes=False)


def test_a_checkpoint_that_only_the_address_has_is_the_latest_here(address: str, tmp_path: Path) -> None:
    here = Store(tmp_path / "checkpoints", Copies(address))
    save(here, 1)
    save(Store(tmp_path / "ranks", Copies(address)), 2)
    assert here.known() == NAMES[:2]
    assert here.latest() == (NAMES[1], [])
    assert whole(here, NAMES[1])
    assert here.latest(before=2)[0] == NAMES[0]
    assert "overwrite=true" not in here.left(before=2)


def test_a_run_that_overwrites_another_does_not_take_up_its_checkpoints(address: str, tmp_path: Path) -> None:
    save(Store(tmp_path / "one", Copies(address)), 3)
    other = Store(tmp_path / "checkpoints", Copies(address).opened(overwrite=True, resumes=False))
    assert other.known() == []
    with pytest.raises(CheckpointError, match="none was committed"):
        other.latest()


def test_an_address_that_fails_leaves_what_is_here(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "checkpoints", Copies(address))
    save(store, 1)

    def fails(*given: Any, **named: Any) -> None:
        raise ConnectionError("the bucket is gone")

    assert store.copies is not None
    monkeypatch.setattr(store.copies.there.files, "find", fails)
    assert store.latest() == (NAMES[0], [])
    with pytest.raises(CopyError, match=rf"{address}.*the bucket is gone"):
        store.prune(1)


def test_no_bucket_is_made(bucket: str, tmp_path: Path) -> None:
    import s3fs

    files = s3fs.S3FileSystem()
    with pytest.raises(AddressError, match=r"s3://absent/runs/one: .*bucket does not exist.*make its bucket"):
        Copies("s3://absent/runs/one").opened(overwrite=False, resumes=False)
    files.mkdir("gone")
    store = Store(tmp_path / "checkpoints", Copies("s3://gone/runs/one").opened(overwrite=False, resumes=False))
    save(store, 1)
    files.rm("gone", recursive=True)
    assert not files.exists("gone")
    with pytest.raises(CopyError, match=r"s3://gone/runs/one .*bucket does not exist.*resume=latest"):
        save(store, 2)
    assert whole(store, NAMES[1])
    files.invalidate_cache()
    assert [files.exists(name) for name in ("absent", "gone")] == [False, False]
