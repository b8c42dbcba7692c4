"""Convert TRL's keys for data sets and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from math import inf
from typing import Any

from plaudit.importers.table import Found, Translation
from plaudit.support.fields import shown

STREAMED = 10_000
"""Items of a stream that are held and shuffled at a time (data.stream)."""
FILES = ("json", "csv", "parquet", "text")
WEIGHED = {"id", "config", "split", "columns", "weight"}
ENTRY = {"path", "name", "data_dir", "data_files", "split", "columns", "fraction"}
THOUGHT = r"(?s)^<think>(?!.*<think>).*?</think>.*$"
ANSWERED = r"(?sm)\A<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
SOLVED = ("accuracy", "accuracy_reward")
"""Rewards of open-r1 and TRL that compare with the column `solution` by math-verify."""
RULES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"kind": "math"} for name in SOLVED},
    "format": {"kind": "matches", "options": {"pattern": ANSWERED}},
    "get_soft_overlong_punishment": {"kind": "overlong", "options": {"max_tokens": 1280, "cache_tokens": 256}},
    "think_format_reward": {"kind": "matches", "options": {"pattern": THOUGHT}},
}


def sources(r: Translation) -> Found:
    streaming = r("dataset_streaming", False)
    if listed := r("datasets"):
        streaming = r("streaming", False)
        yield from _mixture(r, listed)
    elif (mixture := r("dataset_mixture")) is not None:
        yield from _weighed(r, mixture)
    elif (mixer := r("dataset_mixer")) is not None:
        yield from _mixed(r, mixer)
    elif (name := r("dataset_name")) is not None:
        config = r("dataset_config", r("dataset_subset", *_configs(r, 1)))
        source = f"{name}:{config}" if config else name
        yield "data.train", source
        if (split := r("dataset_train_split", "train")) != "train":
            yield "data.split", split
        if _evaluates(r):
            yield from {"data.validation": source, "data.validation_split": r("dataset_test_split", "test")}.items()
    if streaming:
        yield "data.stream", STREAMED
    if streaming and "train.steps" not in r.found:
        r.problems.append("max_steps is missing: streamed data has no known length, so give the number of steps")
    text = r("dataset_text_field", r("text_column", "text"))
    solved = {*SOLVED}.intersection(_named_rewards(r))
    columns = {
        "text": text,
        "prompt": r("dataset_prompt_column", "prompt"),
        "answer": "solution" if solved else "answer",
    }
    if other := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
        yield "data.columns", other


def _evaluates(r: Translation) -> bool:
    return str(r("eval_strategy", r("evaluation_strategy", "no"))).lower() not in ("no", "false")


def _weighed(r: Translation, mixture: Any) -> Found:
    """Yield settings for `dataset_mixture` (open-r1, alignment-handbook): parts of splits, joined and shuffled."""
    listed = mixture.get("datasets") if isinstance(mixture, Mapping) else None
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(one, Mapping) and "id" in one for one in listed)
    ):
        r.refuse("dataset_mixture", "it must have `datasets`, a list of entries with an id")
        return
    found: dict[str, list[str]] = {}
    for number, one in enumerate(listed):
        key = f"dataset_mixture.datasets.{number}"
        r.problems += [f"{key}.{name} is no key of an entry" for name in sorted(map(str, set(one) - WEIGHED))]
        source = f"{one['id']}:{one['config']}" if one.get("config") else str(one["id"])
        part = _part(r, f"{key}.weight", str(one.get("split") or "train"), one.get("weight"))
        found.setdefault(source, []).append(part)
    yield from _joined(found)
    if any("[" in part for parts in found.values() for part in parts):
        r.notes.append("dataset_mixture: of a split with a weight the first rows are read; there they are drawn")
    r.notes.append(
        "dataset_mixture: seed and columns are ignored (the run's seed draws; rows are read by their dialect)"
    )
    size = mixture.get("test_split_size")
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        yield "data.validation", size
    elif size is not None:
        yield from set_aside(r, "dataset_mixture", size, hundred=1)


def _mixed(r: Translation, mixer: Any) -> Found:
    """Yield settings for `dataset_mixer` (earlier alignment-handbook): a part of each data set, from its beginning."""
    splits = r("dataset_splits", ["train", "test"])
    if not isinstance(mixer, Mapping) or not mixer or not isinstance(splits, list):
        r.refuse("dataset_mixer", "it must be a mapping from data sets to parts, and dataset_splits a list")
        return
    train, test = ([str(one) for one in splits if word in str(one)] for word in ("train", "test"))
    found: dict[str, list[str]] = {}
    for (name, part), config in zip(mixer.items(), _configs(r, len(mixer)), strict=True):
        source = f"{name}:{config}" if config else str(name)
        found[source] = [_part(r, f"dataset_mixer.{name}", split, part) for split in train]
    yield from _joined(found)
    if test and _evaluates(r):
        yield from {"data.validation": [*found], "data.validation_split": "+".join(test)}.items()


def _configs(r: Translation, count: int) -> list[str]:
    """Return the configuration of each data set by `dataset_configs`; "" for each that has none."""
    names = r("dataset_configs", [])
    configs = [names] if isinstance(names, str) else names or [""] * count
    if len(configs) != count:
        r.refuse("dataset_configs", f"give one for each of the {count} data sets")
    return [*configs, *[""] * count][:count]


def _part(r: Translation, key: str, split: str, part: Any) -> str:
    """Return a split's name, or a slice with its first rows: "train[:5%]". Any other part is noted as a problem."""
    if part in (None, 1):
        return split
    percent = 100 * part if isinstance(part, int | float) and not isinstance(part, bool) else 0
    if not 0 < percent < 100 or abs(percent - round(percent)) > 1e-9:
        r.problems.append(f"{key}={shown(part)}: a part of a split is 1, or whole per cents such as 0.05")
        return split
    return f"{split}[:{round(percent)}%]"


def _joined(found: Mapping[str, list[str]]) -> Found:
    """Yield data.train, and data.split unless every source reads "train"."""
    splits = {source: "+".join(parts) for source, parts in found.items()}
    yield "data.train", [*splits] if len(splits) > 1 else next(iter(splits))
    alike = set(splits.values())
    if alike != {"train"}:
        yield "data.split", splits if len(alike) > 1 else alike.pop()


def _mixture(r: Translation, listed: Any) -> Found:
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) and "path" in one for one in listed):
        r.refuse("datasets", "it must be a list of entries with a path")
        return
    for number, one in enumerate(listed):
        r.problems += [f"datasets.{number}.{key} is no key of an entry" for key in sorted(map(str, set(one) - ENTRY))]
    names = [_names(r, number, one) for number, one in enumerate(listed)]
    if any(one.get("fraction") is not None for one in listed):
        yield "data.train", _shares(r, names, listed)
        r.notes.append(
            "fractions: an epoch has as many rows as all sources together; a small source is read repeatedly"
        )
    else:
        yield "data.train", [name for some in names for name in some]
    splits = {str(one.get("split") or "train") for one in listed}
    if len(splits) > 1:
        r.problems.append(f"datasets name the splits {', '.join(sorted(splits))}: all entries must use the same split")
    if splits != {"train"}:
        yield "data.split", min(splits)
    if (share := r("test_split_size")) is not None:
        if not isinstance(share, float) or not 0 < share < 1:
            r.refuse("test_split_size", "it must be a share of the rows, such as 0.05")
        else:
            yield from set_aside(r, "test_split_size", share, hundred=1)


def set_aside(r: Translation, key: str, share: Any, *, hundred: int = 100) -> Found:
    """Set a share of the train prompts aside for validation; `hundred` is the value that means all (1 or 100)."""
    try:
        percent = Decimal(str(share)) * 100 / hundred
    except InvalidOperation:
        percent = Decimal("nan")
    if percent.is_nan() or not 0 < percent < 100:
        r.refuse(key, "it must be above 0 and below 100 per cent")
    else:
        yield "data.validation", f"{percent.normalize():f}%"


def _shares(r: Translation, names: list[list[str]], listed: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each source with its share of an epoch."""
    found: dict[str, Any] = {}
    for number, (some, one) in enumerate(zip(names, listed, strict=True)):
        key, share = f"datasets.{number}.fraction", one.get("fraction")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < inf:
            r.problems.append(f"{key}={shown(share)}: give every entry a number above 0, or no entry")
        if len(some) > 1:
            r.problems.append(f"{key}={shown(share)}: the entry has {len(some)} files: give each file its own entry")
        r.problems += [f"datasets.{number}: {name} is listed twice: list it once" for name in some if name in found]
        found |= dict.fromkeys(some, share)
    return found


def _names(r: Translation, number: int, one: Mapping[str, Any]) -> list[str]:
    key, files = f"datasets.{number}", one.get("data_files")
    if one.get("data_dir") is not None:
        r.problems.append(f"{key}.data_dir={shown(one['data_dir'])}: give the folder as the path instead")
    if one.get("columns") is not None:
        r.problems.append(f"{key}.columns={shown(one['columns'])}: set data.dialect on the command line instead")
    if (one["path"] in FILES) != (files is not None) or not isinstance(files, str | list | None):
        r.problems.append(
            f"{key}.data_files={shown(files)}: give one file or a list of files, and only with a path of "
            f"{', '.join(FILES)}"
        )
        return []
    if files is not None:
        return [files] if isinstance(files, str) else [*map(str, files)]
    return [f"{one['path']}:{one['name']}" if one.get("name") else str(one["path"])]


def _named_rewards(r: Translation) -> list[str]:
    named = r("reward_funcs", [])
    return [named] if isinstance(named, str) else list(named)


def reward_entries(r: Translation) -> list[dict[str, Any]]:
    """Return entries of `rewards` with their weights: the judge first, as in TRL, then rules."""
    judge = r("reward_model_name_or_path", r("reward_model_path"))
    entries: list[dict[str, Any]] = [] if judge is None else [{"kind": "judge", "path": judge}]
    for name in _named_rewards(r):
        if name in RULES:
            entries.append(dict(RULES[name]))
        else:
            why = f"known are {', '.join(sorted(RULES))}. Functions work as they are: leave reward_funcs and "
            why += "reward_weights out, and set rewards=[{kind: function, function: 'package.module:name'}]"
            r.problems.append(f"reward_funcs: {name} is no reward that is known by name; {why}")
            entries.append({})
    weights = r("reward_weights", [])
    if weights and len(weights) != len(entries):
        r.refuse("reward_weights", f"give one weight for each of the {len(entries)} rewards")
    for entry, weight in zip(entries, weights, strict=False):
        entry["weight"] = float(weight)
    return entries
