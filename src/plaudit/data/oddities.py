"""Notes on data that is odd but used unchanged. The report lists them, since it may be a mistake."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.data.fields import TOOL, listed, tool_inner, unread_keys
from plaudit.data.read import data_files
from plaudit.data.reader import chat_of
from plaudit.data.records import DEMONSTRATION, JUDGEMENT, PREFERENCE, QUESTION, Sample
from plaudit.data.report import Tally
from plaudit.data.settings import DataSettings


def note_row(read: Sample, record: Sample, kind: str, settings: DataSettings, tally: Tally) -> None:
    """Count what may be unintended in a row or its record: a guessed prompt, turns that are not trained, a negative
    margin, no blank between prompt and answer."""
    if read.guess:
        tally.note(read.guess, f"{record.prompt[-20:]!r} at {read.where}")
    if kind == QUESTION:
        return
    if any(not turn.get("train", True) for turn in read.messages):
        tally.note("chats with turns that are not trained, as their weight says")
    if kind == PREFERENCE and any(pair.margin < 0 for pair in record.pairs):
        tally.note("rows with a negative margin, by which the rejected answer may win", read.where)
    if kind == DEMONSTRATION:
        answer = record.answer or ""
    else:
        answer = record.verdicts[0].answer if kind == JUDGEMENT else record.pairs[0].chosen
    bare = record.prompt and settings.prompt_template is None and not chat_of(record.prompt, record.messages, settings)
    if bare and not record.prompt[-1].isspace() and not answer[0].isspace():
        joined = f"{record.prompt[-20:]}{answer[:10]}"
        tally.note("answers that follow their prompt without a blank or a template", f"{joined!r} at {read.where}")


def note_keys(row: Mapping[str, Any], tally: Tally) -> None:
    """Count the keys of a row's turns, calls and tools that are not read."""
    for value in row.values():
        for turn in value if isinstance(value, list | tuple) else ():
            for key in unread_keys(turn):
                tally.note(f"{key} not read")
    for tool in listed(row.get("tools")):
        for key in tool_inner(tool):
            if key not in TOOL:
                tally.note(f"tools' {key} left to the chat template, which may not show it")


def note_same_files(settings: DataSettings, tallies: Sequence[Tally]) -> None:
    """Note validation sources and files that are trained on too, under any name."""
    train = settings.fed
    files = [path for source in train for _, path in data_files(source, settings.split_of(source))]
    for tally in tallies:
        if tally.role == "train":
            continue
        held = data_files(tally.source, settings.validation_split)
        if not held and tally.source in train and settings.split_of(tally.source) == settings.validation_split:
            tally.note("sources that are trained on too", tally.source)
        for name, path in held:
            same = next((other for other in files if _equal(path, other)), None)
            if same is not None:
                tally.note("files that are trained on too", f"{name} is {same}")


def _equal(one: Path, other: Path) -> bool:
    alike = one.stat().st_size == other.stat().st_size
    return one.samefile(other) or (alike and filecmp.cmp(one, other, shallow=False))
