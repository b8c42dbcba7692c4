"""Settings of the data that a run reads, and how it reads them.

Leaves out the names that other systems give to these fields, such as `validation_file`. They are refused, with the
nearest one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from plaudit.support.fields import Section, setting
from plaudit.support.paths import at_home

OVERLONG = ("truncate", "drop", "error")
FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet)(\.(gz|bz2|xz))?$")
"""The end of a data file's name."""
SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
"""Form of `validation` that sets a percentage of the train prompts aside: "5%"."""
THOUGHTS = ("closed", "in_content")


@dataclass
class DataSettings(Section):
    """Sources, dialect, lengths, and the treatment of rows that do not fit."""

    train: Any = None
    """One source or a list: files, folders ("folder:config" where its README lists several), names that `datasets`
    loads ("owner/name" or "owner/name:config"), or "file.py:function" that gives dict rows. A mapping from sources to
    numbers says their shares in an epoch; otherwise every row comes once an epoch."""
    validation: Any = None
    """One source or a list, as `train`. Or "5%" or a number: that many of the train prompts, chosen by the seed, are
    set aside with all their rows (single rows, if every prompt has more rows than that)."""
    split: Any = "train"
    """Split of train sources that are folders or loaded by `datasets`, or a mapping from sources to their splits. "a+b"
    is two splits, "a[:20%]" the first fifth of one."""
    validation_split: str = "validation"
    """Split of validation sources that are folders or loaded by `datasets`."""
    dialect: str = "auto"
    """Name of the row format ("prompt/completion", "messages", ...), or "auto" to find it by each row's columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our column name -> the file's, if the file uses other names. `a.b` is entry b of the objects in column a."""
    shuffle: bool = True
    """Draw rows in a seeded random order that is new in every epoch."""
    limit: int | None = setting(None, least=1)
    """Use at most this many good rows of each source, the first ones. Null: all."""
    bad_rows: int = setting(0, least=0)
    """Number of unreadable rows that may be skipped (and reported), over all sources. 0: the first one is an error."""
    max_prompt_tokens: int = setting(512, least=1, unit="tokens")
    """Longest prompt, in tokens, including the BOS token if the tokenizer adds one."""
    max_tokens: int = setting(1024, least=2, unit="tokens")
    """Longest row: prompt, answer and end token together. Prompts without answers ignore it."""
    overlong: str | None = setting(None, choices=OVERLONG)
    """What happens to rows that are longer. "truncate" cuts the beginning of prompts (whole turns of chats, but no
    system turn) and the end of answers; "drop" leaves rows out; both are counted. "error" stops with an error. Null
    drops chats and truncates texts."""
    max_pairs_per_prompt: int = setting(2, least=1)
    """Most preference pairs of a prompt (twice as many judged answers). The first ones are used, others are counted."""
    every_turn: bool = False
    """In demonstrations that are chats, train every assistant turn, not only the last one. The turns before it are its
    prompt."""
    stream: int = setting(0, least=0)
    """Items to read at a time, for data that fits on no disk: every pass reads the train sources again, and shuffles
    within each block of items. The run is one epoch and needs train.steps. 0 reads sources once and stores tokens."""
    prompt_template: str | None = None
    """Template of plain-text prompts, with {prompt} in it, such as "Question: {prompt}\\nAnswer:"."""
    as_chat: bool | None = None
    """Render plain-text prompts as one user turn of a chat. Null lets the checkpoint decide: true if it was trained on
    chats (its run says so, or its template ends answers with one of its end tokens) and prompt_template is null."""
    system: str | None = None
    """System message for every chat that has none. It turns `as_chat` on."""
    chat_template: str | None = None
    """Jinja template for chats: null for the tokenizer's own, "default" for one like ChatML, or a template or file."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking. A row's own column of this name overrides them.
    `strftime_now: 2026-07-31` fixes the date that the template prints. Checkpoints keep them."""
    thoughts: str | None = setting(None, choices=THOUGHTS)
    """Meaning of an answer without thoughts of its own (reasoning_content), if the chat template's prompt opens a
    thought. "closed": the answer closes it at once. "in_content": its text holds the thoughts and closes them. Null
    refuses such answers."""

    @property
    def fed(self) -> tuple[str, ...]:
        """Sources of training; () if there are none."""
        return tuple(self.train) if isinstance(self.train, Mapping) else sources(self.train)

    @property
    def weights(self) -> tuple[Any, ...] | None:
        """The number that `train` gives each source in `fed`, for its share of an epoch; None without numbers."""
        return tuple(self.train.values()) if isinstance(self.train, Mapping) else None

    def split_of(self, source: str) -> str:
        """Return the split of a train source; "train" if `split` is a mapping without that source."""
        return str(self.split.get(source, "train") if isinstance(self.split, Mapping) else self.split)

    @property
    def percent(self) -> float:
        """Per cent of the train prompts that are set aside for validation; 0 if `validation` is no percentage."""
        share = SHARE.fullmatch(self.validation) if isinstance(self.validation, str) else None
        return float(share[1]) if share else 0.0

    @property
    def prompts(self) -> int:
        """Number of train prompts that are set aside for validation; 0 if `validation` is no number."""
        return 0 if isinstance(self.validation, bool) or not isinstance(self.validation, int) else self.validation

    @property
    def apart(self) -> tuple[str, ...]:
        """Sources of validation; () if there are none, or if train prompts are set aside."""
        share = isinstance(self.validation, str) and SHARE.fullmatch(self.validation)
        return () if share or self.prompts > 0 else sources(self.validation)

    def contradictions(self) -> Iterator[str]:
        apart = None if self.prompts > 0 else self.validation
        for name, value in (("train", list(self.fed) if self.weights else self.train), ("validation", apart)):
            try:
                paths = sources(value)
            except ValueError as error:
                yield f"{name}: {error}"
                return
            if twice := sorted({source for source in paths if paths.count(source) > 1}):
                yield f"{name} names {twice[0]!r} twice: to repeat a source give shares, {{{twice[0]}: 2, ...}}"
        if any(isinstance(w, bool) or not isinstance(w, int | float) or not 0 < w < inf for w in self.weights or ()):
            yield f"train={self.train} must be a mapping from sources to numbers above 0"
        if self.percent >= 100:
            yield f"validation={self.validation} leaves nothing to train on: give less than 100%"
        splits = self.split if isinstance(self.split, Mapping) else dict.fromkeys(self.fed, self.split)
        if not all(isinstance(one, str) and one for one in splits.values()) or set(splits) - set(self.fed or splits):
            yield f"split={self.split} must be a split, or a mapping from sources of data.train to splits"
        if self.stream and (self.percent or self.prompts or self.weights is not None):
            yield (
                f"stream={self.stream} reads sources one after the other, without their numbers of rows: give "
                "data.train no shares, and let data.validation name a source"
            )
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            yield f"prompt_template={self.prompt_template!r} has no {{prompt}} in it: put it where the prompt goes"


def unfed(settings: DataSettings) -> list[str]:
    """Return a list with one problem if a run has no source to train on, else []."""
    none = "data.train is empty: give it a file, a folder, a dataset name or file.py:function"
    return [none] if settings.train is None or settings.train in ("", [], (), {}) else []


def sources(value: Any) -> tuple[str, ...]:
    """Return the names in `train` or `validation`, which is one name or a list. Raises ValueError for other values."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value else ()
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"A data source is {_told(value)}; it must be one name or a list of names.")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"A data source is {_told(name)}; it must be the name of a file, folder, data set or function."
            )
    return names


def _told(value: Any) -> str:
    return "null" if value is None else repr(value)


def absent(value: Any) -> list[str]:
    """Return the sources that are named like files and do not exist. A function's file is checked when the function
    runs, and any other name may be that of a data set on a hub."""
    try:
        named = sources(list(value) if isinstance(value, Mapping) else value)
    except ValueError:  # reported as a contradiction
        return []
    return [name for name in named if _is_file(name) and not is_here(name)]


def is_here(name: str) -> bool:
    """True for a file or folder, also with a configuration after a colon."""
    folder, colon, _ = name.rpartition(":")
    return at_home(name).exists() or (bool(colon) and at_home(folder).is_dir())


def _is_file(name: str) -> bool:
    return (name.startswith((".", "/", "~")) or bool(FILE.search(name))) and ".py:" not in name
