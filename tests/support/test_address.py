"""Folders at addresses: what was put comes back, the last file comes last, and a model is read like one of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plaudit.loop.settings import SaveSettings
from plaudit.support import address as addresses
from plaudit.support.address import Address, AddressError, committed, digest_of, local_copy


@pytest.fixture(params=["memory", "file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(addresses, "cache_folder", lambda: tmp_path / "cache")
    yield (request.getfixturevalue("bucket") if request.param == "s3" else f"{request.param}://") + f"{tmp_path}/there"
    local_copy.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed model."""
    made = tmp_path / "model"
    (made / "lora").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "lora" / "a.bin").write_bytes(bytes(range(256)))
    files = {name: digest_of(made / name) for name in ("config.json", "lora/a.bin")}
    (made / "manifest.json").write_text(json.dumps({"files": files}))
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_comes_back_and_goes(root: str, folder: Path, tmp_path: Path) -> None:
    there = Address(root)
    assert there.found("policy") == []
    there.put(folder, "policy", "one", last="manifest.json")
    assert there.found("policy", "one") == ["config.json", "lora/a.bin", "manifest.json"]
    there.get(tmp_path / "back", there.found("policy", "one"), "policy", "one")
    assert content(tmp_path / "back") == content(folder)
    there.write(b"x", "beside")
    there.remove("policy", "one", "manifest.json")
    assert there.found() == ["beside", "policy/one/config.json", "policy/one/lora/a.bin"]
    there.remove("policy")
    there.remove("policy")
    assert (there.found(), there.read("beside")) == (["beside"], b"x")


def test_what_is_cut_off_lacks_its_last_file(root: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Address(root)

    def fails(*given: Any, **named: Any) -> None:
        raise ConnectionError("reset")

    for cut in ("put", "put_file", "mv"):
        with monkeypatch.context() as patch:
            patch.setattr(there.files, cut, fails)
            with pytest.raises(ConnectionError):
                there.put(folder, "policy", "one", last="manifest.json")
        assert "manifest.json" not in there.found("policy", "one")


def test_a_model_is_copied_once_and_a_damaged_one_is_refused(root: str, folder: Path) -> None:
    there = Address(root)
    there.put(folder, "one", last="manifest.json")
    copy = local_copy(f"{root}/one")
    assert content(copy) == content(folder)
    local_copy.cache_clear()
    assert local_copy(f"{root}/one/") == copy
    there.put(folder, "two", last="manifest.json")
    there.write(b"other", "two", "lora", "a.bin")
    with pytest.raises(AddressError, match=r"lora/a\.bin"):
        local_copy(f"{root}/two")
    with pytest.raises(FileNotFoundError, match="/three"):
        local_copy(f"{root}/three")


@pytest.mark.parametrize(
    ("best", "expected"), [(None, "epoch1epochstep10globalstep10"), ("epoch1epochstep2globalstep2",) * 2]
)
def test_a_run_stands_for_its_best_or_newest_model(
    best: str | None, expected: str, root: str, folder: Path, tmp_path: Path
) -> None:
    there = Address(root)
    for step in (2, 10, 11):
        name = f"epoch1epochstep{step}globalstep{step}"
        state = tmp_path / "state" / name
        state.mkdir(parents=True)
        kept = None if best is None else {"checkpoint": best}
        (state / "values.json").write_text(json.dumps({"best": kept, "roles": {"judge": ""}}))
        (state / "manifest.json").write_text(json.dumps({"files": {}}))
        (folder / "step").write_text(name)
        there.put(folder, "judge", name, last="manifest.json")
        there.put(state, "state", name, last="manifest.json")
    there.remove("state", "epoch1epochstep11globalstep11", "manifest.json")  # as while it is being copied
    assert committed(there) == ["epoch1epochstep2globalstep2", "epoch1epochstep10globalstep10"]
    assert (local_copy(root) / "step").read_text() == expected


@pytest.mark.parametrize(
    ("address", "said"),
    [("runs/here", "s3://"), ("nowhere://x", "nowhere"), ("abfs://box@account/x", "pip install adlfs")],
)
def test_addresses_that_cannot_be_opened_say_what_to_do(address: str, said: str) -> None:
    with pytest.raises(AddressError, match=said):
        Address(address)


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Address(f"file://{tmp_path}/there")
    there.write(b"whole", "settings.yaml")
    pipe = there.files.pipe_file

    def killed(path: str, content: bytes) -> None:
        pipe(path, content[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(there.files, "pipe_file", killed)
    with pytest.raises(KeyboardInterrupt):
        there.write(b"newer", "settings.yaml")
    assert there.read("settings.yaml") == b"whole"
    monkeypatch.undo()
    there.write(b"newer", "settings.yaml")
    assert there.read("settings.yaml") == b"newer"


@pytest.mark.parametrize("address", ["sftp://me:secret@host/runs", "simplecache::sftp://me:secret@host:22/runs"])
def test_a_password_in_an_address_is_refused_and_not_shown(address: str) -> None:
    """fsspec reads the variable itself (its page on configuration)."""
    with pytest.raises(AddressError, match="FSSPEC_SFTP_PASSWORD") as caught:
        Address(address)
    assert "secret" not in str(caught.value) and "host" in str(caught.value)
    (complaint,) = SaveSettings(to=address).contradictions()
    assert "secret" not in complaint


def test_cache_is_by_content(root: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same address with another model is another copy."""
    there = Address(root)
    there.put(folder, "one", last="manifest.json")
    first = local_copy(f"{root}/one")
    (folder / "config.json").write_text('{"other": 1}')
    (folder / "manifest.json").write_text(json.dumps({"files": {"config.json": digest_of(folder / "config.json")}}))
    there.put(folder, "one", last="manifest.json")
    local_copy.cache_clear()
    assert local_copy(f"{root}/one") != first
    assert addresses.is_address(root)
