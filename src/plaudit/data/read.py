"""Sources to raw rows: files, folders of them, names that `datasets` loads, functions in a file, and reasoning-gym.

    source name -> its files, or what `datasets` or a function gives -> (where, dict row), (where, dict row), ...

A bad row is a `DataError` in place of the row; a source that cannot be read raises one. Leaves out how a file is read
(`files.py`) and what the columns mean (`formats.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plaudit.data.fields import DataError, shown, table_row
from plaudit.data.files import Note, Scanned, file_kind, file_rows, ignore, numbered
from plaudit.data.settings import is_here
from plaudit.support import gym
from plaudit.support.paths import at_home
from plaudit.support.plugins import load_file

FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?")
SPLITS = {
    word: split
    for split, words in {
        "train": ("train", "training"),
        "validation": ("validation", "valid", "val", "dev"),
        "test": ("test", "testing", "eval", "evaluation"),
    }.items()
    for word in words
}
"""{word in a file's name: the split that it means}."""
SHARD = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\b")
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
DESCRIPTIONS = ("config.json", "dataset_infos.json")
OTHER_DATA = (".arrow", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
KNOWN = (
    "a .jsonl, .json, .csv, .tsv or .parquet file, a folder, a name that `datasets` loads, file.py:function or "
    "reasoning_gym:task"
)


def read_rows(source: str, *, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, such as "file.jsonl:17", row) for all rows of a source. The first bad row raises DataError."""
    for where, row in scan_rows(source, split=split):
        if isinstance(row, DataError):
            raise row
        yield where, row


def scan_rows(source: str, *, split: str = "train", note: Note = ignore) -> Iterator[Scanned]:
    """Yield (place, row) for all rows of a source; for a bad row, its `DataError` instead of the row.

    `note` is called for what is odd but read nevertheless."""
    function = FUNCTION.fullmatch(source)
    files = data_files(source, split)
    if source.startswith(gym.PREFIX):
        rows = _of_gym(source, split)
    elif function:
        rows = _of_function(source, at_home(function["path"]), function["name"])
    elif files:
        rows = (row for name, path in files for row in file_rows(name, path, note))
    elif at_home(source).is_dir():
        rows = numbered(source, map(table_row, _by_datasets(source, at_home(source), split)))
    else:
        rows = _of_hub(source, split)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError("the source has no rows. Give one that has some.", source)


def fetched(source: str) -> bool:
    """True for a name that `datasets` must load, since no file, folder, function or task has it here."""
    return not (is_here(source) or FUNCTION.fullmatch(source) or source.startswith(gym.PREFIX))


def data_files(source: str, split: str) -> list[tuple[str, Path]]:
    """List the files that hold a split of a source, each with its name for errors.

    Return [] if there is no such file or folder, or if `datasets` is to read the folder."""
    if source.startswith(gym.PREFIX):
        return []
    path = at_home(source)
    if path.is_file():
        return [(source, path)]
    folder, config = source, ""
    if not path.is_dir() and ":" in source:
        folder, _, config = source.rpartition(":")
        path = at_home(folder)
    if FUNCTION.fullmatch(source) or not path.is_dir():
        return []
    names = _names_of_split(source, path, split, config)
    _check_shards(source, names)
    return [(str(Path(folder, name)), path / name) for name in names]


def _names_of_split(source: str, path: Path, split: str, config: str) -> list[str]:
    """List the split's files in a folder: the files that its README lists, else those named for the split, else all.

    Return [] if `datasets` should read the folder: it saved the folder, only a part of a split is asked for, or no file
    is of a kind that we read. Raises DataError for files that would otherwise be ignored."""
    names = _files_within(path)
    ours = [name for name in names if file_kind(name) and Path(name).name not in DESCRIPTIONS]
    if "[" in split or any((path / name).is_file() for name in SAVED):
        return []
    listed = _listed(source, path, config)
    if listed is not None:
        return _named_files(source, path, _of_split(source, listed, split))
    if config:
        raise DataError(f"its README.md lists no configuration {config!r}; give only the folder.", source)
    if not ours:
        return []
    for name in names:
        if name not in ours and Path(name).suffix.lower() in OTHER_DATA:
            raise DataError(f"{name} is not read beside {ours[0]}; move it elsewhere, or list the files.", source)
    splits = {name: _split_told(name) for name in ours}
    if not any(splits.values()):
        return ours
    for name, one in splits.items():
        if not one:
            named = ", ".join(sorted({one for one in splits.values() if one}))
            raise DataError(
                f"the name of {name} says no split, but others say {named}; rename it, or list the files.", source
            )
    of_split: dict[str, list[str]] = {}
    for name, one in splits.items():
        of_split.setdefault(one, []).append(name)
    return _of_split(source, of_split, split)


def _of_split(source: str, of_split: Mapping[str, list[str]], split: str) -> list[str]:
    if "+" in split:
        return [name for one in split.split("+") for name in _of_split(source, of_split, one)]
    for own_name, names in of_split.items():
        if SPLITS.get(own_name, own_name) == SPLITS.get(split, split):
            return names
    raise DataError(f"there is no split {split!r}; there are {', '.join(sorted(of_split))}.", source)


def _files_within(path: Path) -> list[str]:
    """Return relative paths of all files in a folder, sorted, without hidden ones. A folder that several links lead to
    is read once, since links may go round in circles."""
    found, visited = [], set[str]()
    for folder, within, files in os.walk(path, followlinks=True):
        within[:] = sorted(name for name in within if not name.startswith("."))
        if (real := os.path.realpath(folder)) in visited:
            within.clear()
            continue
        visited.add(real)
        found += [(Path(folder) / file).relative_to(path).as_posix() for file in files if not file.startswith(".")]
    return sorted(found)


def _split_told(name: str) -> str:
    """Return the split that a file's path names: the part before a shard's number, else the last word that `datasets`
    takes for a split (train, test, ...); "" if there is none."""
    shard = SHARD.match(Path(name).name)
    if shard:
        return SPLITS.get(shard["name"].lower(), shard["name"])
    words = re.split(r"[\W\d_]+", name.lower())
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), "")


def _check_shards(source: str, names: Iterable[str]) -> None:
    """Raise DataError if shards of a split are missing, as after half a download."""
    shards: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if shard := SHARD.match(name):
            shards.setdefault((shard["name"], int(shard["count"])), set()).add(int(shard["number"]))
    for (name, count), there in shards.items():
        missing = sorted(set(range(count)) - there)
        if missing:
            raise DataError(
                f"of the {count} files {name}-00000-of-{count:05}, ... {len(missing)} are missing, first number "
                f"{missing[0]:05}. Fetch them, or list the files to be read.",
                source,
            )


def _listed(source: str, path: Path, config: str) -> dict[str, list[str]] | None:
    """Return the file patterns by split that a README lists for a configuration; None if it lists no configurations."""
    readme = path / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    front = re.match(r"---\r?\n(.*?)\r?\n---\s", text + "\n", re.DOTALL)
    if front is None:
        return None
    import yaml

    try:
        card = yaml.safe_load(front[1])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"the head of its README.md is not valid YAML: {error}", source) from error
    configs = card.get("configs") if isinstance(card, dict) else None
    listed = configs if isinstance(configs, list) else []
    entries = [entry for entry in listed if isinstance(entry, dict) and entry.get("data_files")]
    if not entries:
        return None
    by_name = {str(entry.get("config_name", "default")): entry for entry in entries}
    default = next((name for name, entry in by_name.items() if entry.get("default") or name == "default"), "")
    wanted = config or (next(iter(by_name)) if len(by_name) == 1 else default)
    if wanted not in by_name:
        asked = f"there is no configuration {wanted!r}" if wanted else "it has several configurations"
        raise DataError(
            f"{asked}: name one of {', '.join(by_name)} after a colon, FOLDER:{next(iter(by_name))}.", source
        )
    return _patterns(by_name[wanted]["data_files"], source)


def _patterns(patterns: Any, source: str) -> dict[str, list[str]]:
    """Return the file patterns by split in a configuration's `data_files`, in any form that `datasets` takes."""
    if isinstance(patterns, str):
        return {"train": [patterns]}
    if isinstance(patterns, list) and all(isinstance(one, str) for one in patterns):
        return {"train": patterns}
    if isinstance(patterns, dict):
        patterns = [{"split": split, "path": path} for split, path in patterns.items()]
    found: dict[str, list[str]] = {}
    for one in patterns if isinstance(patterns, list) else [None]:
        path = one.get("path") if isinstance(one, dict) else None
        paths = [path] if isinstance(path, str) else path
        if one is None or not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise DataError(
                f"its README.md lists {shown(one)} among data_files; it must name a split and a path.", source
            )
        found.setdefault(str(one.get("split", "train")), []).extend(paths)
    return found


def _named_files(source: str, path: Path, patterns: Iterable[str]) -> list[str]:
    names: list[str] = []
    for pattern in patterns:
        if "://" in pattern or pattern.startswith("/") or ".." in Path(pattern).parts:
            raise DataError(
                f"its README.md lists {pattern!r}, which is outside the folder. Fetch it, and list the files.", source
            )
        found = sorted(file.relative_to(path).as_posix() for file in path.glob(pattern) if file.is_file())
        if not found:
            raise DataError(
                f"its README.md lists {pattern!r}, but there is no such file. Fetch it, or list the files.", source
            )
        names += [name for name in found if name not in names]
    return names


def _by_datasets(source: str, path: Path, split: str) -> Any:
    import datasets

    try:
        if not any((path / name).is_file() for name in SAVED):
            return datasets.load_dataset(str(path), split=split)
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            sizes = {name: len(rows) for name, rows in saved.items()}
            try:
                parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
            except (ValueError, AssertionError) as error:
                raise DataError(f"there is no split {split!r}; it has {', '.join(saved)}.", source) from error
            saved = datasets.concatenate_datasets(
                [saved[part.splitname].select(range(part.from_, part.to)) for part in parts]
            )
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = f"{error} {error.__cause__ or ''}".rstrip()
        raise DataError(f"`datasets` cannot load the split {split!r} of this folder: {why}", source) from error
    return saved


def _of_hub(source: str, split: str) -> Iterator[Scanned]:
    match = HUB_NAME.fullmatch(source)
    if match is None or file_kind(source) or Path(source).suffix.lower() in (".txt", ".py"):
        raise DataError(f"there is no such file or folder. A source is {KNOWN}.", source)
    import datasets

    try:
        loaded = datasets.load_dataset(match["name"], match["config"], split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"there is no file or folder of this name here, and `datasets` cannot load the split {split!r} of a "
            f"data set of this name: {error} Check the spelling, the split and the network; without one, load the data "
            "set elsewhere, save it with save_to_disk and name that folder.",
            source,
        ) from error
    return numbered(source, map(table_row, loaded))


def _of_function(source: str, path: Path, name: str) -> Iterator[Scanned]:
    rows = _function(source, path, name)()
    if isinstance(rows, str | bytes | dict) or not isinstance(rows, Iterable):
        raise DataError(f"the function returned {shown(rows)}; it must return rows, one dict each.", source)
    return numbered(source, rows)


def _of_gym(source: str, split: str) -> Iterator[Scanned]:
    try:
        yield from numbered(source, gym.questions(source, split))
    except ValueError as error:
        raise DataError(str(error), source) from error


def _function(source: str, path: Path, name: str) -> Callable[[], Iterable[Any]]:
    if not path.is_file():
        raise DataError(f"there is no file {path}.", source)
    module = load_file(str(path))  # errors in it are the user's own and keep their traceback
    found = vars(module).get(name)
    if not callable(found):
        there = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise DataError(f"{path} has no function {name!r}; it has {there or 'none'}.", source)
    return found  # type: ignore[no-any-return]
