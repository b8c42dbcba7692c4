"""Checkpoints that are whole or absent.

    checkpoints/policy/epoch1epochstep5globalstep5/   Hugging Face files + manifest.json
    checkpoints/critic/...                            the same, for every role that is trained
    checkpoints/state/epoch1epochstep5globalstep5/    optimizer of every role, cursor, counters, RNG + manifest.json

Each folder is written under a temporary name, flushed to disk, sealed by a manifest of SHA-256 digests and renamed. The
state folder comes last; it names the digests of the role folders' manifests and commits the checkpoint. Tensors are
safetensors and the rest is JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.loop.copies import STATE, Copies, CopyError, UnwritableError
from plaudit.support.address import MANIFEST, digest_of
from plaudit.support.errors import best_checkpoint
from plaudit.support.paths import flush, unwritable

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"epoch\d+epochstep\d+globalstep(\d+)")

Writer = Callable[[Path], None]
"""Writes a role's model into an empty folder."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or missing."""


class Store:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, copies: Copies | None = None):
        """`copies`: where each checkpoint is copied once it is committed in `folder`, or committed without that."""
        self.folder, self.copies = folder, copies

    def write(
        self,
        name: str,
        roles: Mapping[str, Writer],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        *,
        ahead: Path | None = None,
    ) -> None:
        """Save and commit one checkpoint. It replaces an uncommitted one of the same name. `ahead` is a folder with
        files of the state that are already written."""
        seals = {role: self._publish(role, name, write) for role, write in roles.items()}

        def write(folder: Path) -> None:
            if ahead is not None:
                moved(ahead, folder)
            write_state(tensors, values, folder, seals)

        self._publish(STATE, name, write)

    def copy(self) -> None:
        """Copy what the address lacks of the checkpoints in `folder`, and the run's files beside them."""
        if self.copies is not None:
            self.copies.put(self.folder, self.names())

    @contextlib.contextmanager
    def writing(self, what: Path) -> Iterator[None]:
        """Turn an error of storage into an UnwritableError that names the checkpoint to resume from, if any. Before
        that, remove half-written files, to free space. `what` is the file or folder being written."""
        try:
            yield
        except Exception as error:
            reason = unwritable(error)
            if reason is None:
                raise
            self.sweep()
            named = (error.filename if isinstance(error, OSError) else None) or what
            role, swept, _ = str(named).partition("/.writing")
            place = Path(role) / what.name if swept else named
            mend = f"Free space there, or make it writable. {self.left()}"
            raise UnwritableError(f"{place} cannot be written: {reason}. {mend}") from error

    def left(self, *, before: int | None = None) -> str:
        """Return a sentence that names the checkpoint from which a run can continue, for an error. `before`: consider
        only checkpoints of earlier steps than this."""
        try:
            newest = self.latest(before=before)[0]
        except CheckpointError:
            which = "whole checkpoint" if before is None else f"checkpoint of a step before {before}"
            return f"{self.folder} has no {which}: start the run again with overwrite=true"
        if before is None:
            return f"The newest whole checkpoint is {newest}: resume=latest continues from there"
        return f"The newest checkpoint before that is {newest}: resume={newest} continues from there"

    def _publish(self, role: str, name: str, write: Writer) -> str:
        with self.writing(self.folder / role / name):
            return _publish(self.folder / role / name, write)

    def staging(self, role: str, part: str = "") -> Path:
        """Return the path of a temporary folder for a role's files before they are committed; `sweep` removes it."""
        return self.folder.resolve() / role / f".writing-ahead{part}"

    def names(self) -> list[str]:
        """Return the names of committed checkpoints in `folder`, oldest first."""
        found = [p.name for p in (self.folder / STATE).glob("*") if _NAME.fullmatch(p.name)]
        return sorted(found, key=step_of)

    def latest(self, *, before: int | None = None) -> tuple[str, list[str]]:
        """Return the newest checkpoint that verifies (of a step before `before`, if given) and the faults of newer
        ones. One that `folder` lacks is fetched. Raises CheckpointError without one."""
        problems: list[str] = []
        for name in reversed([name for name in self.known() if before is None or step_of(name) < before]):
            try:
                if self.copies is not None and name not in self.names():
                    self.copies.fetch(self.folder, name)
                self.verify(name)
            except (CheckpointError, CopyError) as error:
                problems.append(str(error))
            else:
                return name, problems
        detail = f": {'; '.join(problems)}" if problems else " (none was committed)"
        raise CheckpointError(f"no whole checkpoint in {self.folder}{detail}")

    def verify(self, name: str) -> None:
        """Raise CheckpointError unless every file of the checkpoint is as it was written and there are no others."""
        folder = self.folder / STATE / name
        _verify(folder)
        for role, seal in self._values(folder)["roles"].items():
            part = self.folder / role / name
            if _verify(part) != seal:
                raise CheckpointError(f"{part} is not the one that was saved with {folder}")

    def read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and values of a checkpoint's state. Call `verify` first."""
        folder = self.folder / STATE / name
        from safetensors.torch import load_file

        return load_file(folder / "tensors.safetensors"), self._values(folder)

    def model(self, role: str, name: str | None = None) -> Path:
        """Return the folder of a role's model in checkpoint `name`, by default the best (`evaluate.best`) or newest."""
        return self.folder / role / (name or self._best_or_newest())

    def _best_or_newest(self) -> str:
        """Return the best checkpoint, which the newest verified one names, if it verifies too; else the newest."""
        newest = self.latest()[0]
        best = best_checkpoint(self.folder / STATE / newest)
        if best is None or best == newest:
            return newest
        try:
            self.verify(best)
        except CheckpointError:
            return newest
        return best

    @property
    def place(self) -> str:
        """Text for messages: the folder of the checkpoints, and the address of their copies if there is one."""
        return str(self.folder) + ("" if self.copies is None else f" and {self.copies.there.name}")

    def fetch(self, name: str | None) -> None:
        """Copy checkpoint `name` from `copies` ("latest": the newest whole one there) unless `folder` has it whole."""
        there = [] if self.copies is None or name is None else self.copies.names()
        wanted = there[::-1] if name == "latest" else [one for one in there if one == name]
        for one, fetched in itertools.product(wanted, (False, True)):
            if fetched and self.copies is not None:
                self.copies.fetch(self.folder, one)
            with contextlib.suppress(CheckpointError):
                self.verify(one)
                return

    def known(self, *, surely: bool = False) -> list[str]:
        """Return the names of this run's checkpoints, in `folder` and at the address of copies, oldest first. If the
        address cannot be read, raise CopyError if `surely`, else leave it out."""
        there = set[str]()
        with contextlib.suppress(*(() if surely else (CopyError,))):
            there = set() if self.copies is None else {*self.copies.names()} - {*self.copies.overwritten}
        return sorted({*self.names(), *there}, key=step_of)

    def prune(self, keep: int, *, spare: str | None = None) -> None:
        """Remove all but the newest `keep` checkpoints and `spare`; 0 keeps all."""
        for name in self.known(surely=True)[:-keep] if keep else []:
            if name != spare:
                self._remove(name)

    def drop_after(self, name: str) -> None:
        """Remove every checkpoint of a later step: a run that continues from `name` writes its own."""
        for later in self.known(surely=True):
            if step_of(later) > step_of(name):
                self._remove(later)

    def sweep(self) -> None:
        """Remove files that an interrupted save or removal left. Without any committed state, model folders stay."""
        for path in self.folder.glob("*/.writing-*"):
            shutil.rmtree(path, ignore_errors=True)
        committed = set(self.names())
        for path in self.folder.glob("*/*") if committed else ():
            if _NAME.fullmatch(path.name) and path.name not in committed:
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint here and from `copies`, its state first, so that half a removal leaves none."""
        if self.copies is not None:
            self.copies.remove(name)
        folders = [self.folder / STATE, *(p for p in self.folder.iterdir() if p.name != STATE)]
        for folder in folders:
            shutil.rmtree(folder / name, ignore_errors=True)

    @staticmethod
    def _values(folder: Path) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((folder / "values.json").read_text())
        return values


def step_of(name: str) -> int:
    """Return the global step in a checkpoint's name."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def write_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any], folder: Path, seals: dict[str, str]) -> None:
    """Write what the state has besides optimizers. `seals`: the digests of the role folders' manifests."""
    from safetensors.torch import save_file

    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "tensors.safetensors")
    (folder / "values.json").write_text(json.dumps({**values, "roles": seals}, indent=1))


def _publish(target: Path, write: Writer) -> str:
    """Write a folder under a temporary name, add its manifest, flush and rename it. Return the manifest's digest."""
    writing = target.parent / f".writing-{target.name}"
    shutil.rmtree(writing, ignore_errors=True)
    make_folder(target.parent)
    writing.mkdir()
    write(writing)
    seal = sealed(writing)
    for path in [*writing.rglob("*"), writing]:
        flush(path)
    if target.exists():
        shutil.rmtree(target)
    writing.rename(target)
    flush(target.parent)
    return seal


def sealed(folder: Path) -> str:
    """Add the manifest to a folder, in place of an earlier one. Return the manifest's digest."""
    manifest = folder / MANIFEST
    manifest.unlink(missing_ok=True)
    files = {name: digest_of(folder / name) for name in _names(folder)}
    manifest.write_text(json.dumps({"files": files}, indent=1))
    for name in files:  # safetensors closes its files to all but their owner, whatever the umask says
        with contextlib.suppress(OSError):  # not every file system has modes
            (folder / name).chmod(manifest.stat().st_mode)
    return digest_of(manifest)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their entries; without them, flushed content would be lost."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        flush(made.parent)


def _names(folder: Path) -> list[str]:
    """Return the sorted paths of all files in the folder and below, relative to it."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in found)


def _verify(folder: Path) -> str:
    manifest = folder / MANIFEST
    try:
        files = json.loads(manifest.read_text())["files"]
        damaged = sorted(name for name, digest in files.items() if digest_of(folder / name) != digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is incomplete: {error}") from error
    if damaged:
        raise CheckpointError(f"{folder} is damaged: {', '.join(damaged[:3])} changed since it was saved")
    # Hidden files, such as .nfs*, come from the file system: they are not part of a checkpoint.
    added = [name for name in _names(folder) if name not in files and name != MANIFEST and not _hidden(name)]
    if added:
        listed = ", ".join(added[:3]) + (f" and {len(added) - 3} more" if len(added) > 3 else "")
        raise CheckpointError(f"{folder} holds files that it was not saved with: {listed}. Move them elsewhere")
    return digest_of(manifest)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def moved(staging: Path, folder: Path) -> None:
    """Move all files of `staging` into `folder`, and remove `staging`."""
    for path in list(staging.iterdir()):
        path.rename(folder / path.name)
    staging.rmdir()
