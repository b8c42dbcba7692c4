"""A run's folder: open it, resume it, protect it from other processes, and read its results (`Run`).

run folder: settings.yaml, data.json, log.txt, checkpoints/<role>/<name>/
and {metrics, samples, samples.index, events, health, groups}.jsonl
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from plaudit.loop.checkpoint import Store, make_folder
from plaudit.loop.copies import Copies
from plaudit.loop.recorded import RecordedRun
from plaudit.monitor.sinks import read_figures, read_jsonl, replace_file
from plaudit.runs.differences import compared, differences, three_views, within
from plaudit.settings.tree import Settings, SettingsError, resolved
from plaudit.support.address import AddressError
from plaudit.support.bounded import SETTINGS_BYTES, content, record
from plaudit.support.fields import refuse
from plaudit.support.paths import PARTIAL, at_home

SETTINGS, DATA, METRICS, SAMPLES, EVENTS, HEALTH, GROUPS, LOG, PAGE, CHECKPOINTS = (
    "settings.yaml",
    "data.json",
    "metrics.jsonl",
    "samples.jsonl",
    "events.jsonl",
    "health.jsonl",
    "groups.jsonl",
    "log.txt",
    "page.html",
    "checkpoints",
)

STARTED = "started_in"
"""Key of DATA (data.json) with the folder from which the run's relative paths are resolved."""
OF_NO_CONSEQUENCE = (
    *("name", "output", "resume", "overwrite", "log", "save", "evaluate", "runtime", "threads"),
    *("environment.workers", "environment.resources"),
    *(f"rollout.{name}" for name in ("record", "replay", "workers", "slots", "reward_patience")),
)
_RANKS = ("num_training_workers", "mesh", "strategy", "servers", "offload", "placement.critic")
OF_CONSEQUENCE = tuple(f"runtime.{name}" for name in _RANKS)
"""A replay may differ from the recorded run in settings of OF_NO_CONSEQUENCE, except those of OF_CONSEQUENCE."""
LENGTHS = ("train.steps", "train.epochs", "train.log_every")
"""Settings of length and output, which may also differ when an unnamed run is resumed."""
KEPT = {
    "method": "the state in its checkpoints belongs to its method",
    "seed": "the fresh model, the order of rows and the rows set aside for validation depend on it",
    "model": "its model continues from its checkpoints, and this one would not be read",
    "critic.path": "its critic continues from its checkpoints, and this one would not be read",
    "critic.lora_rank": "its critic's adapters continue from its checkpoints",
    "reference.path": "the KL of all its steps must use the same reference",
    "algorithm.teachers": "the KL of all its steps must use the same references",
    "data.chat_template": "its chats and its checkpoints' tokenizer have the same template",
    "learn.precision": "its moments and masters belong to this precision",
}
"""Settings, or sections, in which a resumed run may not differ, with reasons. All others may differ; a warning names
those that have consequences."""
LOCK = ".lock"
MOVING, OVERWRITTEN, GONE = ".overwriting", ".overwritten", ".overwritten-gone"
"""Folders within a run's folder while a new run overwrites an older one. They hold some of the older run's files, all
of them, and the files that are being removed."""
OF_A_START = (SETTINGS, DATA, LOG, LOCK)
"""Files that a refused start leaves. A folder with only these does not count as a run."""


@dataclass(frozen=True, init=False)
class Run:
    """Access to the results of one run, by its folder: `Run("runs/ppo")`."""

    folder: Path

    def __init__(self, folder: str | Path):
        object.__setattr__(self, "folder", at_home(folder))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per step, oldest first."""
        return read_figures(self.folder / METRICS)

    @property
    def frame(self) -> Any:
        """The metrics as a pandas DataFrame with one row per step and `step` as its index."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("a frame needs pandas: pip install pandas; `metrics` is the same as dicts") from error
        return pandas.DataFrame(self.metrics).set_index("step")

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Recorded answers: prompt, completion, rewards by part, advantage, versions. Empty for offline methods."""
        path = self.folder / SAMPLES
        return read_jsonl(path) if path.exists() else []

    def checkpoint(self, role: str = "policy", name: str | None = None) -> Path:
        """Folder of a role's model (policy, critic, judge): of the named checkpoint, or else the best
        (`evaluate.best`), or else the newest whole one."""
        return Store(self.folder / CHECKPOINTS).model(role, name)

    @property
    def active(self) -> bool:
        """True if another process has locked the run's folder; always False if the storage has no locks."""
        try:
            with alone(self.folder):
                return False
        except SettingsError:
            return True

    @property
    def saved(self) -> list[str]:
        """Names of its checkpoints, oldest first."""
        return Store(self.folder / CHECKPOINTS).names()

    @property
    def model(self) -> Path:
        """Folder of the model that this run trained: the policy's if it has one, else the judge's."""
        role = "policy" if (self.folder / CHECKPOINTS / "policy").exists() else "judge"
        return self.checkpoint(role)


def named(settings: Settings) -> Settings:
    """Return the settings with `name` set. An unnamed run is named after its method and the time; with `resume`, after
    the newest unnamed run with the same settings that has a checkpoint."""
    if settings.name is not None:
        return settings
    before = _before(settings) if settings.resume else None
    return replace(settings, name=before or f"{settings.method}-{time.strftime('%Y%m%d-%H%M%S')}")


def _before(settings: Settings) -> str | None:
    """Return the name of the method's newest unnamed run that has a checkpoint and these settings; None if no run has a
    checkpoint and `resume` is "latest". Raises SettingsError otherwise."""
    folders = Path(settings.output).glob(f"{settings.method}-{'[0-9]' * 8}-{'[0-9]' * 6}")
    here, newest = three_views(settings), ""
    for folder in sorted(folders, reverse=True):
        if (folder / SETTINGS).exists() and Store(folder / CHECKPOINTS).names():
            different = differences(folder / SETTINGS, here, (*OF_NO_CONSEQUENCE, *LENGTHS), never=("rollout.replay",))
            if not different:
                return folder.name
            newest = newest or f"{folder.name}; it differs in:\n" + "\n".join(f"  - {line}" for line in different)
    if newest:
        raise SettingsError(
            f"resume={settings.resume}: no unnamed run in {settings.output} had these settings. To continue "
            f"the newest of {settings.method} anyway, set name={newest}"
        )
    if settings.resume != "latest":
        where = settings.output
        raise SettingsError(f"resume={settings.resume}: {where} has no run of {settings.method} to continue")
    return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes. The system releases the lock, however this process ends. Raises
    SettingsError if another process is using the folder."""
    try:  # not by filelock: forked children would keep its lock, and it empties the file, which names the process
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                who = file.read() or "another process"
                raise SettingsError(
                    f"the run in {folder} is still active ({who}): wait for its end, or set another name"
                ) from None
            # the storage has no locks, so other processes cannot be detected
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


@contextmanager
def open_folder(settings: Settings) -> Iterator[Path]:
    """Open and lock the folder of a named run: a new one, or an existing one to resume. Raises SettingsError if another
    run has it. On exit, a run that was to be overwritten is moved back, unless `let_go` has deleted it."""
    refuse(folder_taken(settings), plain=True)
    folder = Path(settings.output) / str(settings.name)
    refuse_another(settings, folder)
    try:
        make_folder(folder)
    except OSError as error:
        raise SettingsError(f"the run's folder {folder} cannot be made: {error}") from error
    with Store(folder / CHECKPOINTS).writing(folder), alone(folder):
        _put_back(folder)  # what a killed start left behind
        try:
            if settings.overwrite:
                _set_aside(folder)
            yield folder
        finally:
            _put_back(folder)


def copies_of(settings: Settings) -> Copies | None:
    """Open the address that checkpoints are copied to (`save.to`); return None if that is not set. SettingsError if it
    cannot be written to, or holds another run's checkpoints."""
    if settings.save.to is None:
        return None
    try:
        copies = Copies(f"{settings.save.to.rstrip('/')}/{settings.name}", beside=(SETTINGS, DATA, METRICS))
        return copies.opened(overwrite=settings.overwrite, resumes=settings.resume is not None)
    except AddressError as error:
        raise SettingsError(f"save.to: {error}") from error


def folder_taken(settings: Settings) -> list[str]:
    """Return the reasons why the run cannot use the folder of its name."""
    name, problems = str(settings.name), []
    if not name or Path(name).name != name or name.startswith("."):
        return [f"name={name!r} must be a plain folder name; its place is set by `output`"]
    folder = Path(settings.output) / name
    if settings.resume and settings.overwrite:
        problems.append("resume and overwrite contradict each other: keep one")
    if _holds_run(folder) and not settings.resume and not settings.overwrite:
        problems.append(f"{folder} holds a run already: set resume=latest, overwrite=true or another name")
    return problems


def let_go(folder: Path) -> None:
    """Remove the overwritten run, since the new run has finished its first step."""
    if (folder / OVERWRITTEN).exists():
        shutil.rmtree(folder / GONE, ignore_errors=True)
        (folder / OVERWRITTEN).rename(folder / GONE)  # first renamed: a half-removed run must not be put back
        shutil.rmtree(folder / GONE)


def _holds_run(folder: Path) -> bool:
    """True if the folder has files besides those of a refused start (OF_A_START) and partly written ones."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(name not in OF_A_START and not name.endswith(PARTIAL) for name in names)


def _set_aside(folder: Path) -> None:
    """Move a run's files into its folder OVERWRITTEN, from which `_put_back` can restore them."""
    (folder / MOVING).mkdir()
    for path in _entries(folder):
        path.rename(folder / MOVING / path.name)
    (folder / MOVING).rename(folder / OVERWRITTEN)


def _put_back(folder: Path) -> None:
    """Undo `_set_aside`, even if either was interrupted, so that a failed start does not destroy the run that it would
    have overwritten."""
    if (folder / OVERWRITTEN).exists():
        for path in _entries(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (folder / OVERWRITTEN).rename(folder / MOVING)
    if (folder / MOVING).exists():
        for path in (folder / MOVING).iterdir():
            path.rename(folder / path.name)
        (folder / MOVING).rmdir()
    if (folder / GONE).exists():
        shutil.rmtree(folder / GONE, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in (LOCK, MOVING, OVERWRITTEN, GONE)]


def save_start(folder: Path, settings: Settings, report: dict[str, Any]) -> None:
    """Write the settings and the data report of a run. `overwrite` is saved as false, so that the same settings do not
    overwrite this run later."""
    replace_file(folder / SETTINGS, resolved(replace(settings, overwrite=False)).encode())
    replace_file(folder / DATA, json.dumps({STARTED: str(Path.cwd()), **report}, indent=1).encode())


def find_resume(settings: Settings, store: Store) -> tuple[str | None, list[str]]:
    """Return the checkpoint to resume from, or None, and faults of newer ones. SettingsError for an unknown name."""
    if settings.resume is None or (settings.resume == "latest" and not store.names()):
        return None, []
    refuse_another(settings, store.folder.parent)  # checked again: a run that was set aside may be back in its place
    if settings.resume == "latest":
        return store.latest()
    if settings.resume not in store.names():
        raise SettingsError(f"resume={settings.resume} must be latest or one of {store.names()}")
    store.verify(settings.resume)
    return settings.resume, []


def refuse_another(settings: Settings, folder: Path) -> None:
    """Raise SettingsError if `resume` would continue a run that differs in a setting of KEPT. Writes nothing."""
    path = folder / SETTINGS
    if settings.resume is None or not path.exists() or not Store(folder / CHECKPOINTS).names():
        return
    different = compared(path, three_views(settings)) or {}  # a truncated file has no information
    lines = [
        f"\n  - {key}: {there} there, {here} here ({why})"
        for section, why in KEPT.items()
        for key, (there, here) in different.items()
        if within(key, (section,))
    ]
    if lines:
        raise SettingsError(
            f"resume={settings.resume} cannot continue {folder}, whose settings differ:{''.join(lines)}\n"
            f"Set these to the run's values. For a new run, set another name, and model.path={folder} to start from "
            "its model"
        )


def _before_in(folder: Path, key: str) -> str | None:
    """Return the text of a top-level key of a run's settings.yaml, which may be truncated; None if it is absent."""
    path = folder / SETTINGS
    text = content(path, SETTINGS_BYTES).decode(errors="replace") if path.exists() else ""
    found = re.search(rf"^{key}: (.+)\n", text, re.MULTILINE)
    return found[1] if found else None


def other_rows(folder: Path, report: dict[str, Any]) -> bool:
    """True if `report` describes other rows than the run's saved data.json; False if that cannot be read."""
    try:
        before = record(content(folder / DATA))
    except (OSError, ValueError):
        return False
    return bool(_of_rows(before) != _of_rows(json.loads(json.dumps(report))))


def _of_rows(report: Any) -> Any:
    """Return a report without its sources' paths and similar details, so that only the rows are compared."""
    if isinstance(report, dict):
        return {
            name: _of_rows(value)
            for name, value in report.items()
            if name not in ("source", "bad_examples", "unread", STARTED)
        }
    return [_of_rows(one) for one in report] if isinstance(report, list) else report


def resumed(settings: Settings, folder: Path, say: Callable[[str], None]) -> Settings:
    """Return the settings with the run's earlier number of threads, on which the last bits of sums depend. Warn about
    other differences."""
    threads = _before_in(folder, "threads")
    if settings.threads is None and threads is not None and threads.isdecimal():
        settings = replace(settings, threads=int(threads))
    path, free = folder / SETTINGS, (*OF_NO_CONSEQUENCE, *LENGTHS)
    different = differences(path, three_views(settings), free) if path.exists() else []
    if different:
        listed = "\n".join(f"  - {line}" for line in different)
        say(f"warning: the run continues from its checkpoint with changed settings:\n{listed}")
    return settings


def open_record(settings: Settings) -> RecordedRun | None:
    """Open the recorded run that this run replays; None if it replays none. SettingsError if it cannot be replayed."""
    if settings.rollout.replay is None:
        return None
    folder = at_home(settings.rollout.replay)
    if not (folder / GROUPS).is_file():
        raise SettingsError(f"rollout.replay={folder}: there is no {GROUPS}, which rollout.record=true writes")
    if settings.name is not None and (Path(settings.output) / settings.name).resolve() == folder.resolve():
        raise SettingsError(f"rollout.replay={folder} is this run's own folder: set another name for the replay")
    recorded = RecordedRun(folder / GROUPS)
    if not recorded.steps:
        raise SettingsError(f"rollout.replay={folder}: no step was recorded")
    different = differences(folder / SETTINGS, three_views(settings), OF_NO_CONSEQUENCE, never=OF_CONSEQUENCE)
    if settings.threads not in (None, recorded.threads):
        different.append(f"threads: {recorded.threads} there, {settings.threads} here")
    if different:
        listed = "\n".join(f"  - {line}" for line in different)
        raise SettingsError(
            f"{folder} was recorded with other settings. To replay it, set these to the same values:\n{listed}"
        )
    return recorded
