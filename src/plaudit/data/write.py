"""Writes rows as JSON lines: UTF-8, one object a line, the same bytes on every platform. Also writes the files of a
task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.data.fields import Message
from plaudit.data.records import Pair, Sample
from plaudit.support.visible import visible

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """The files of a task that a pipeline reads: training and set-aside rows for every stage, a tokenizer's folder."""

    sft: Path
    sft_validation: Path
    preferences: Path
    preferences_validation: Path
    prompts: Path
    prompts_test: Path
    tokenizer: Path


def write_task(
    folder: Path, *, sft: tuple[Rows, Rows], preferences: tuple[Rows, Rows], prompts: tuple[Rows, Rows]
) -> dict[str, Path]:
    """Write rows to train on and set-aside rows; return the fields of `TaskFiles`. The tokenizer is trained later."""
    rows = {"sft": sft[0], "sft_validation": sft[1], "preferences": preferences[0]}
    rows |= {"preferences_validation": preferences[1], "prompts": prompts[0], "prompts_test": prompts[1]}
    written = {name: write_rows(folder / f"{name}.jsonl", some) for name, some in rows.items()}
    return written | {"tokenizer": folder / "tokenizer"}


def write_rows(path: Path, rows: Rows) -> Path:
    """Write the rows, make the folder if it is missing, and return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(visible(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    return path


def turns_of(one: Sample) -> list[Message]:
    """Return a prompt as the turns of a chat: a text becomes one user turn."""
    if one.messages:
        return [dict(turn) for turn in one.messages]
    return [{"role": "user", "content": one.prompt}] if one.prompt else []


def ask(one: Sample) -> str | list[Message]:
    """Return a prompt as a column holds it: a text, or the turns of a chat."""
    return turns_of(one) if one.messages else one.prompt


def answered(text: str, turn: Message) -> str | list[Message]:
    """Return the answer as text, or as a turn of a chat if it holds more than text."""
    return [{"role": "assistant", "content": text, **turn}] if turn else text


def pair_row(one: Sample, pair: Pair, *, asked: str = "prompt") -> dict[str, Any]:
    """Return a pair as a row of the dialect prompt/chosen/rejected, without its margin and further columns."""
    chosen, rejected = answered(pair.chosen, pair.chosen_turn), answered(pair.rejected, pair.rejected_turn)
    return {asked: ask(one), "chosen": chosen, "rejected": rejected}
