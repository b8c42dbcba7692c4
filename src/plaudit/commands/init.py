"""`plaudit init`: write a recipe for a reader's own data and model.

    METHOD, key=value -> values for the model's size (init.yaml), passes for the number of rows -> recipe with comments

A fresh model gets a tokenizer that is trained on the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from plaudit.commands.options import METHODS
from plaudit.data.byte_pairs import train_tokenizer
from plaudit.data.read import fetched, scan_rows
from plaudit.data.settings import absent, sources
from plaudit.models.described import folder_config
from plaudit.models.families import read_config
from plaudit.models.folders import local_folder
from plaudit.runs.pipeline import merged
from plaudit.settings.recipes import defaults, drafted, nested, parse_override
from plaudit.settings.tree import SettingsError, annotated
from plaudit.support.fields import Rule, flat, leaves, refuse
from plaudit.support.paths import is_here

FRESH: dict[str, Any] = {"model_type": "gpt2", "n_embd": 192, "n_layer": 3, "n_head": 4, "n_positions": 512}
"""Configuration of a fresh model that is trained from random weights on a CPU in minutes."""
SMALL = 100e6  # most parameters of a model that counts as small
VOCABULARY = 2000
MANY = 20_000  # most rows that are counted
ROOM = 1024  # most tokens of a row in the recipe
STEPS = {"demonstrations": 200, "pairs": 50}  # steps to aim for with few rows
MOST = {"small": {"demonstrations": 20, "pairs": 5}, "large": {"demonstrations": 3, "pairs": 3}}
"""Most passes over the rows, by class of model size and kind of data: pretrained models overfit sooner."""


def init(method: str, overrides: Sequence[str], output: Path) -> list[str]:
    """Write the recipe, and a fresh model's tokenizer beside it. Return lines to print. Raises SettingsError for keys
    that the method lacks and for an `output` that exists. A word without "=" is the file of rows."""
    if output.exists():
        raise SettingsError(f"{output} exists already: give another file, --output=FILE")
    overrides = [word if "=" in word else f"data.train={word}" for word in overrides]
    kind = {"demonstrations": "demonstrations", "prompts": "online"}.get(defaults(method).algorithm.data, "pairs")
    asked = reduce(merged, (nested(one.key, one.value) for one in map(parse_override, overrides)), dict[str, Any]())
    train = (asked.get("data") or {}).get("train") or f"my/{kind}.jsonl"
    if missing := absent((asked.get("data") or {}).get("train")):
        raise SettingsError(f"data.train: there is no {missing[0]}")
    model, size, room, said = _model(kind, asked.get("model") or {}, output)
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[size]
    recipe = merged(table[kind], table.get(method, {}))
    recipe |= {"method": method, "name": output.stem, "model": model}
    recipe["data"] = {"train": train, "max_prompt_tokens": room // 2, "max_tokens": room}
    if kind == "online":
        if defaults(method).algorithm.uses_rewards:
            recipe["rewards"] = [{"kind": "judge", "path": "runs/reward"}]
        else:
            del recipe["shaping"]
        recipe["rollout"]["max_tokens"] = min(recipe["rollout"]["max_tokens"], room // 2)
        del recipe["data"]["max_tokens"]
    else:
        recipe["data"]["validation"] = "10%"
        recipe["evaluate"] = {"every": "1 epoch"}
    rows = [row for source in _here(train) for row in islice(scan_rows(source), MANY)]
    if rows and kind != "online" and not (asked.get("train") or {}).keys() & {"epochs", "steps"}:
        batch = (asked.get("train") or {}).get("batch_size") or recipe["train"]["batch_size"]
        recipe["train"]["epochs"] = min(MOST[size][kind], math.ceil(STEPS[kind] * batch / len(rows)))
        said.append(_passes(len(rows), recipe["train"]["epochs"], batch))
    settings, problems = drafted(recipe, overrides, method=method)
    refuse(problems, plain=True)
    keys = {*flat(recipe), *flat(asked)}
    written = [
        replace(leaf, prose=f"{leaf.prose.partition('. ')[0].rstrip('.')}.", rule=Rule())
        for leaf in leaves(settings)
        if leaf.value != "" and (leaf.key in keys or any(key.startswith(f"{leaf.key}.") for key in keys))
    ]
    own = model.get("tokenizer")
    fresh = own is not None and settings.model.tokenizer == own and not Path(own).exists()
    if fresh and not rows:
        raise SettingsError("a model from nothing gets a tokenizer that is trained on your rows: give data.train=FILE")
    output.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        train_tokenizer(_texts([row for _, row in rows]), Path(model["tokenizer"]), vocabulary=VOCABULARY)
        said.append(f"{model['tokenizer']}: a tokenizer, trained on {train}")
    head = f"# {METHODS[method]}\n#   plaudit check {output}\n#   plaudit {method} {output}\n"
    output.write_text(f"{head}{annotated(written, {leaf.key: leaf.value for leaf in written})}\n", encoding="utf-8")
    return [f"{output}: {said[0]}", *said[1:], f"next: plaudit check {output}"]


def _passes(rows: int, passes: int, batch: int) -> str:
    """Return text on how often the rows are read, and the number of steps if all rows were counted."""
    steps = f" make about {passes * math.ceil(0.9 * rows / batch):,} steps" if rows < MANY else ""
    return f"{rows:,} rows{' or more' * (rows >= MANY)}: {passes} passes{steps}"


def _model(kind: str, asked: Mapping[str, Any], output: Path) -> tuple[dict[str, Any], str, int, list[str]]:
    """Return (the recipe's `model`, its class of size in init.yaml, most tokens of a row, lines to print)."""
    path = asked.get("path")
    if path is None and kind == "demonstrations":
        tokenizer = {"tokenizer": str(output.with_name(f"{output.stem}-tokenizer"))}
        return {"config": FRESH} | tokenizer, "small", FRESH["n_positions"], ["a small GPT-2 that learns from nothing"]
    path = str(path or "runs/sft")
    try:
        config = read_config(folder_config(local_folder(path))) if is_here(path) else None
    except FileNotFoundError:  # a run that has saved nothing yet
        config = None
    if config is None:
        size = "small" if path.startswith("runs/") else "large"
        return {"path": path}, size, 512 if size == "small" else ROOM, [f"the model {path}"]
    size = "small" if config.parameters <= SMALL else "large"
    notes = [f"the model in {path}, {config.parameters / 1e6:,.1f} M parameters"]
    return {"path": path}, size, min(ROOM, config.max_positions), notes


def _here(train: Any) -> list[str]:
    """Return the sources that are local files."""
    paths = tuple(train) if isinstance(train, Mapping) else sources(train)
    return [source for source in paths if not fetched(source)]


def _texts(value: Any) -> Iterator[str]:
    """Yield every str within nested mappings and lists."""
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for entry in inner:
        yield from _texts(entry)
