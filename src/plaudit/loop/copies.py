"""Copy a run's checkpoints to an address (`save.to`), in the same folders as in the run's own folder.

    ranks, or Copies.put: roles, then the state, each with its manifest last;  fetch -> the newest that is whole, here

A checkpoint counts as copied once the manifest of its state is at the address. Removal begins with that file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plaudit.support.address import MANIFEST, Address, AddressError, committed
from plaudit.support.errors import Ended, best_checkpoint

STATE = "state"


class UnwritableError(Ended):
    """Files of a run cannot be written: its folder is full or read-only, or copying to an address fails (CopyError)."""

    status = 7


class CopyError(UnwritableError):
    """Checkpoints cannot be copied to their address, or removed there."""


class Copies:
    """The checkpoints at an address. The caller promises to `put` only checkpoints that are whole."""

    def __init__(self, address: str, beside: Sequence[str] = ()):
        """`beside`: files of the run's folder that are copied with each checkpoint."""
        self.there, self.beside = Address(address), beside
        self.overwritten: list[str] = []
        """Names of checkpoints at the address that belong to the run which this one overwrites."""

    def opened(self, *, overwrite: bool, resumes: bool) -> Copies:
        """Return self. Raises AddressError if the address is not writable, or has a run and neither flag is set."""
        try:
            self.there.write(b"", ".plaudit", "writable")
            self.there.remove(".plaudit")
            self.overwritten = [] if resumes else committed(self.there)
        except Exception as error:
            raise AddressError(
                f"nothing can be written to {self.there.name}: {type(error).__name__}: {error}. Correct the address, "
                "make its bucket (a run makes folders only), or see to your rights there"
            ) from error
        if self.overwritten and not overwrite:
            raise AddressError(
                f"{self.there.name} has checkpoints of a run: set resume=latest, overwrite=true or a name"
            )
        return self

    def let_go(self) -> None:
        """Remove the checkpoints of the overwritten run."""
        while self.overwritten:
            self.remove(self.overwritten[-1])
            self.overwritten.pop()

    def names(self) -> list[str]:
        """Return the names of committed checkpoints at the address, oldest first. Raises CopyError."""
        with self._working():
            return committed(self.there)

    def put(self, folder: Path, names: Sequence[str]) -> None:
        """Copy the named checkpoints that the address lacks, then all `beside` files. Raises CopyError."""
        with self._working():
            there = self.names()
            for name in (name for name in names if name not in there):
                self.remove(name)  # remains of an interrupted copy
                roles = [path for path in folder.iterdir() if path.name != STATE and (path / name).is_dir()]
                for path in (*roles, folder / STATE):
                    self.publish(path / name, path.name, name)
            for one in self.beside:
                if (file := folder.parent / one).exists():
                    self.there.write(file.read_bytes(), one)

    def publish(self, folder: Path, role: str, name: str) -> None:
        """Copy a sealed folder of a checkpoint, its manifest last. Raises CopyError."""
        with self._working():
            self.there.put(folder, role, name, last=MANIFEST)

    def found(self, *parts: str) -> list[str]:
        """Return the relative paths of all files at the address, below `parts`. Raises CopyError."""
        with self._working():
            return self.there.found(*parts)

    def remove(self, name: str) -> None:
        """Remove a checkpoint from the address, its state's manifest first, so that half a removal leaves none."""
        with self._working():
            self.there.remove(STATE, name, MANIFEST)
            for role in {path.split("/")[0] for path in self.there.found() if f"/{name}/" in path}:
                self.there.remove(role, name)

    def fetch(self, folder: Path, name: str) -> None:
        """Copy a checkpoint, its state last, missing `beside` files and the best checkpoint here. Raises CopyError."""
        found = self.found()
        with self._working():
            for one in self.beside:
                if one in found and not (folder.parent / one).exists():
                    self.there.get(folder.parent, [one])
            roles = {path.split("/")[0] for path in found if path.count("/") > 1 and path.split("/")[1] == name}
            for role in sorted(roles, key=lambda role: role == STATE):
                part = folder / role / f".writing-{name}"
                shutil.rmtree(part, ignore_errors=True)
                self.there.get(part, self.there.found(role, name), role, name)
                shutil.rmtree(folder / role / name, ignore_errors=True)
                part.rename(folder / role / name)
        best = best_checkpoint(folder / STATE / name)
        if best not in (None, name) and best in self.names() and not (folder / STATE / str(best)).exists():
            self.fetch(folder, str(best))

    @contextmanager
    def _working(self) -> Iterator[None]:
        try:
            yield
        except CopyError:
            raise
        except Exception as error:  # each kind of storage has errors of its own
            failure = f"{self.there.name} (save.to) failed: {type(error).__name__}: {error}"
            mend = "resume=latest continues from the newest checkpoint in the run's folder or there"
            raise CopyError(f"{failure}. {mend}") from error


Away = tuple[Copies, str, Callable[[Path, dict[str, str]], None]]
"""How ranks copy a checkpoint themselves: where, its name, and a function of a folder and the digests of the roles'
manifests, which writes what the state has besides optimizers."""
