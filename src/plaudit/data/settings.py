"""What data a run reads and how: one dataclass, usable as an OmegaConf structured configuration.

Leaves out model and algorithm settings, and the names that other systems give to these fields (`validation_file` and
the like), which are refused with the nearest one of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plaudit.paths import at_home

OVERLONG = ("truncate", "drop", "error")


@dataclass
class DataSettings:
    """Sources, dialect, lengths and what happens to rows that do not fit."""

    train: Any = field(default_factory=list)
    """One source or a list: files, folders, names that `datasets` loads ("owner/name" or "owner/name:config"), or
    "file.py:function" that gives dict rows."""
    weights: list[float] | None = None
    """Share of each train source in an epoch; without it every row comes once an epoch."""
    validation: Any = None
    """One source or a list, as `train`."""
    validation_percent: float = 0.0
    """Per cent of the train prompts to set aside for validation, each with all its rows (unless every prompt has more
    than that), the same ones for the same seed."""
    split: str = "train"
    """Split of train sources that `datasets` loads."""
    validation_split: str = "validation"
    """Split of validation sources that `datasets` loads."""
    dialect: str = "auto"
    """Name of the row format ("prompt/completion", "messages", ...), or "auto" to read it off each row's columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our column name -> the file's, where the file uses other names; `a.b` is entry b of the objects in column a."""
    shuffle: bool = True
    """Draw rows in a seeded random order, a new one every epoch."""
    limit: int | None = None
    """Use at most the first this many good rows of each source."""
    bad_rows: int = 0
    """How many unreadable rows may be skipped (and reported) in all; 0 refuses the first one."""
    max_prompt_tokens: int = 512
    """Longest prompt, with the BOS token where the tokenizer uses one."""
    max_tokens: int = 1024
    """Longest row: prompt, answer and end token together. Prompts without answers ignore it."""
    overlong: str = "truncate"
    """What happens to what is longer: "truncate" (prompts lose their beginning, answers their end; both are counted),
    "drop" (counted) or "error"."""
    max_pairs_per_prompt: int = 2
    """Preference pairs used of one prompt: the first ones; the rest is counted."""
    every_turn: bool = False
    """Of chats to imitate, train every assistant turn, with all before it as its prompt, not the last one alone. Other
    data ignores it."""
    prompt_template: str | None = None
    """Wrapping of plain-text prompts, with {prompt} where the prompt goes, such as "Question: {prompt}\\nAnswer:"."""
    as_chat: bool = False
    """Render plain-text prompts as one user turn of a chat."""
    system: str | None = None
    """System message put before every chat that has none; set, it turns `as_chat` on."""
    chat_template: str | None = None
    """Jinja template for chats: None for the tokenizer's own, "default" for a ChatML-like one, else the template."""

    def check(self) -> None:
        """Raise ValueError for values that contradict each other, before anything is read."""
        train, validation = sources(self.train), sources(self.validation)
        if not train:
            raise ValueError("data.train is empty. Give it a file, a folder, a dataset name or file.py:function.")
        for name, given in (("train", train), ("validation", validation)):
            twice = sorted({source for source in given if given.count(source) > 1})
            if twice:
                raise ValueError(f"data.{name} names {twice[0]!r} twice. To repeat a source set data.weights.")
        if validation and self.validation_percent:
            raise ValueError(
                f"data.validation={list(validation)} and data.validation_percent={self.validation_percent} are two "
                "ways to say the same. Keep one."
            )
        if not 0 <= self.validation_percent < 100:
            raise ValueError(f"data.validation_percent={self.validation_percent} is not in [0, 100).")
        self._check_weights(len(train))
        self._check_lengths()
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise ValueError(f"data.prompt_template={self.prompt_template!r} has no {{prompt}} in it.")

    def _check_weights(self, count: int) -> None:
        if self.weights is None:
            return
        if len(self.weights) != count:
            raise ValueError(f"data.weights has {len(self.weights)} entries for {count} train sources; give one each.")
        if any(not math.isfinite(weight) or weight <= 0 for weight in self.weights):
            raise ValueError(f"data.weights={list(self.weights)} must be positive; leave a source of weight 0 out.")

    def _check_lengths(self) -> None:
        if self.overlong not in OVERLONG:
            raise ValueError(f"data.overlong={self.overlong!r} is not one of {', '.join(OVERLONG)}.")
        least = {"max_prompt_tokens": 1, "max_tokens": 2, "max_pairs_per_prompt": 1, "bad_rows": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"data.{name}={getattr(self, name)} is below {low}.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit={self.limit} is below 1; null means no limit.")


def sources(value: Any) -> tuple[str, ...]:
    """`train` or `validation` as a tuple: both take one name or a list of names."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value else ()
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise ValueError(f"A data source is {value!r}; it must be one name or a list of names.")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"A data source is {name!r}; it must be the name of a file, folder, data set or function.")
    return names


def absent(value: Any) -> list[str]:
    """Those of the sources that are files by their names and are not there. A function's file is told of as it is run,
    and any other name may be a data set's."""
    return [name for name in sources(value) if _is_file(name) and not at_home(name).exists()]


def _is_file(name: str) -> bool:
    named = name.startswith((".", "/", "~")) or name.endswith((".json", ".jsonl", ".parquet"))
    return named and ".py:" not in name
