"""Folders at addresses of fsspec, such as s3://bucket/runs, file:///shared or memory://: files go there and come back.

    folder here -> Address.put, its last file last -> Address.get -> folder here;  local_copy: once a process

Left out: reading in place. Weights are read in boxes at any offset, for which a file must be here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from plaudit.support.bounded import opened
from plaudit.support.paths import cache_folder

MANIFEST = "manifest.json"
"""The file of a sealed folder that has the digests of all others."""


class AddressError(ValueError):
    """An address cannot be used, or lacks what was asked for."""


def is_address(path: object) -> bool:
    return "://" in str(path)


class Address:
    """A folder at an address. Raises AddressError if no installed package can open it; nothing is contacted yet."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations

        self.name, (protocol, mark, rest) = address.rstrip("/"), address.partition("://")
        if not mark:
            raise AddressError(f"{address} is no address: write it as s3://bucket/runs or file:///shared/runs")
        user, _, host = rest.partition("/")[0].rpartition("@")
        if ":" in user:
            raise AddressError(
                f"the address of {host} holds a password, which logs would show: set the environment variable "
                f"FSSPEC_{protocol.rpartition(':')[2].upper()}_PASSWORD instead, on every node"
            )
        try:
            self.files, root = url_to_fs(self.name)
        except ImportError as error:
            known = known_implementations.get(protocol, {"class": protocol})
            package = known["class"].partition(".")[0]
            raise AddressError(f"{address} needs a package: pip install {package} ({error})") from error
        except ValueError as error:
            raise AddressError(f"{address} cannot be opened: {error}. Take s3://, gs:// or file:///PATH") from error
        self.root = str(root).rstrip("/")

    def at(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    def found(self, *parts: str) -> list[str]:
        """Return the relative paths of all files in a folder and below; [] if there is no such folder."""
        self.files.invalidate_cache()
        top = self.at(*parts)
        return sorted(str(path)[len(top) + 1 :] for path in self.files.find(top))

    def put(self, folder: Path, *parts: str, last: str) -> None:
        """Copy a folder to the address. The file `last` is renamed into place at the end: it marks a whole copy."""
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        for inner in {str(Path(name).parent) for name in names}:
            self._make(self.at(*parts, inner).removesuffix("/."))
        first = [name for name in names if name != last]
        self.files.put([str(folder / name) for name in first], [self.at(*parts, name) for name in first])
        self.files.put_file(str(folder / last), self.at(*parts, f".{last}"))
        self.files.mv(self.at(*parts, f".{last}"), self.at(*parts, last))

    def _make(self, folder: str) -> None:
        """Make a folder and its parents, but not the bucket of an object store, which `makedirs` of s3fs would make."""
        if "/" in folder:
            with suppress(FileExistsError):
                try:
                    self.files.mkdir(folder, create_parents=False)
                except FileNotFoundError:
                    self._make(folder.rpartition("/")[0])
                    self.files.mkdir(folder, create_parents=False)

    def get(self, folder: Path, names: Sequence[str], *parts: str) -> None:
        """Copy files from the address into a folder."""
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(self.at(*parts, name), str(folder / name))

    def read(self, *parts: str) -> bytes:
        content: bytes = self.files.cat_file(self.at(*parts))
        return content

    def write(self, content: bytes, *parts: str) -> None:
        """Write a file. If this process is killed meanwhile, the file is as it was before."""
        *folder, name = parts
        self._make(self.at(*folder))
        self.files.pipe_file(self.at(*folder, f".{name}"), content)
        self.files.mv(self.at(*folder, f".{name}"), self.at(*parts))

    def remove(self, *parts: str) -> None:
        self.files.invalidate_cache()
        if self.files.exists(self.at(*parts)):
            self.files.rm(self.at(*parts), recursive=True)


@cache
def local_copy(address: str) -> Path:
    """Copy a model's folder, or a run's best or newest model, into the cache; return the copy. Raises AddressError if a
    digest of its manifest differs. The result is cached in this process, and the files by names, sizes and manifest."""
    there = Address(address)
    parts = _model_in(there)
    names = there.found(*parts)
    if not names:
        raise FileNotFoundError(f"There are no files at {address}. Give the address of a saved model, or of a run.")
    sealed = there.read(*parts, MANIFEST) if MANIFEST in names else b""
    sizes: list[Any] = [there.files.size(there.at(*parts, name)) for name in names]
    key = hashlib.sha256(json.dumps([there.name, parts, names, sizes]).encode() + sealed).hexdigest()[:24]
    cached = cache_folder() / "addresses" / key
    if not cached.is_dir():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".writing-") as part:
            there.get(Path(part) / "model", names, *parts)
            for name, digest in (json.loads(sealed)["files"] if sealed else {}).items():
                if digest_of(Path(part) / "model" / name) != digest:
                    raise AddressError(f"{there.at(*parts, name)} is damaged: it changed since it was saved")
            if not cached.is_dir():  # another process may have made it meanwhile
                shutil.move(Path(part) / "model", cached)
    return cached


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file as hex digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_in(there: Address) -> list[str]:
    """Return the path of a run's best or newest model, as [role, checkpoint]; [] if the address is no run."""
    states = committed(there)
    if not states:
        return []
    values = json.loads(there.read("state", states[-1], "values.json"))
    best = (values.get("best") or {}).get("checkpoint")
    name = best if best in states else states[-1]
    return [next(role for role in ("policy", "judge") if role in values["roles"]), name]


def committed(there: Address) -> list[str]:
    """Return the run's checkpoints at the address whose state has a manifest, oldest first; [] if there are none."""
    found = (name.split("/") for name in there.found("state"))
    names = {parts[0] for parts in found if len(parts) == 2 and parts[1] == MANIFEST and "globalstep" in parts[0]}
    return sorted(names, key=lambda name: int(name.rpartition("globalstep")[2]))
