"""Stored items: the same as those that were added, in memory and from a file, and what becomes of the file."""

import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data import store
from plaudit.data.cursor import permutation
from plaudit.data.fields import DataError
from plaudit.data.load import (
    VALIDATION_SPLIT,
    _held_out,
    _prompt_key,
    load_demonstrations,
    load_judgements,
    load_preferences,
    load_prompts,
)
from plaudit.data.settings import DataSettings
from plaudit.data.store import AT_ONCE, PromptItems, References, RowItems, Writer
from plaudit.types import Prompt, Row

FLAGS = st.lists(st.booleans(), min_size=1, max_size=6)
COLUMNS = {"logprobs", "versions", "reference"}


@st.composite
def rows(draw):
    flags = tuple(draw(FLAGS))
    tokens = tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(flags), max_size=len(flags))))
    figures = {"weight": draw(st.floats(0, 1)), "margin": draw(st.floats(-3, 3)), "continues": draw(st.booleans())}
    return Row(tokens=tokens, trainable=flags, group=draw(st.integers(0, 10**9)), **figures)


@pytest.fixture(params=["memory", "file"])
def place(request, monkeypatch, tmp_path):
    """Both ways to hold items; of a file the folder."""
    if request.param == "file":
        monkeypatch.setattr(store, "IN_MEMORY", 0)
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "cache")


@given(items=st.lists(st.lists(rows(), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5))
def test_rows_come_back_as_they_were(items):
    writer = Writer(RowItems())
    for item in items:
        writer.add([item])
    assert [*writer.items()] == items


def test_storing_does_not_load_pandas():
    """As `arrow.array` does where it is installed: 50 MiB of every run's memory."""
    code = """
import sys
from plaudit.data.store import PromptItems, References, RowItems, Writer
from plaudit.types import Prompt, Row

row, prompt = Row(tokens=(1, 2), trainable=(False, True)), Prompt(id="a", text="b", tokens=(1,))
for codec, item in ((RowItems(), (row,)), (PromptItems(), prompt), (References(), ((0.5, 0.25),))):
    writer = Writer(codec)
    writer.add([item])
    assert [*writer.items()] == [item]
assert "pyarrow" in sys.modules and "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_every_field_of_a_row_is_stored_or_computed_later():
    """A field that is added to rows must be stored too, or it would be lost without a word. Process rewards are of
    answers that a policy sampled, which are never stored."""
    kept = {"tokens", "trainable", *store.FIGURES, *COLUMNS}
    assert {field.name for field in fields(Row)} == kept | {"process"}


def test_many_items_in_several_batches_and_in_any_order(place):
    count = 2 * AT_ONCE + 10
    items = [
        tuple(Row(tokens=(i, j), trainable=(False, True), group=i) for j in range(i % 3 + 1)) for i in range(count)
    ]
    writer = Writer(RowItems())
    for start in range(0, count, 700):
        writer.add(items[start : start + 700])
    stored = writer.items()
    assert (len(stored), writer.count) == (count, count)
    assert [*stored] == items
    assert [stored[-1], *stored[AT_ONCE - 1 : AT_ONCE + 1]] == [items[-1], *items[AT_ONCE - 1 : AT_ONCE + 1]]
    assert [*stored.picked(np.array([5, 2000, 3]))] == [items[5], items[2000], items[3]]
    assert not [*Path(place).glob("*")], "the file has no name"


ODD = [
    {},
    {"a": [1, "ä", None, {"b": 0.1}]},
    {"a": (1, 2)},
    {1: "b"},
    {"a": Decimal("1.5")},
    {"a": b"x"},
    {"a": np.arange(3)},
]


def test_prompts_come_back_with_whatever_their_columns_hold(place):
    prompts = [
        Prompt(id=f"\udcff{i}", text="q\n\x00", tokens=(1, i), answer=("a", None)[i % 2], source="s", extra=extra)
        for i, extra in enumerate(ODD)
    ]
    prompts.append(replace(prompts[0], messages=({"role": "user", "content": "q"},)))
    writer = Writer(PromptItems())
    writer.add(prompts)
    back = writer.items()
    assert [*back][:6] == prompts[:6]
    assert back[7] == prompts[7]
    assert back[6].extra is prompts[6].extra
    writer = Writer(PromptItems())
    writer.add([replace(prompts[0], extra={"a": math.nan})])
    assert math.isnan(writer.items()[0].extra["a"])


def test_reference_log_probs_come_back_as_they_were(place):
    items = [((-0.1, 0.0), (-1.5,)), ((0.3333,),)]
    exact = [tuple(tuple(np.float32(row).tolist()) for row in item) for item in items]
    writer = Writer(References())
    writer.add(exact)
    assert [*writer.items()] == exact


def test_no_room_for_the_tokens_is_said(monkeypatch):
    monkeypatch.setattr(store, "IN_MEMORY", 0)
    monkeypatch.setenv("PLAUDIT_CACHE", "/proc")
    writer = Writer(RowItems())
    writer.add([(Row(tokens=(1, 2), trainable=(False, True)),)])
    with pytest.raises(DataError, match=r"/proc: .*PLAUDIT_CACHE"):
        writer.items()


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_demonstrations, load_preferences, load_judgements, load_prompts])
def test_data_from_a_file_is_that_from_memory(write, tokenizer, load, monkeypatch, tmp_path):
    rows = [{"prompt": f"q{i % 900}", "chosen": f"{i}", "rejected": "x", "n": i} for i in range(2500)]
    sources = [write("a.jsonl", rows), write("b.jsonl", rows[:40])]
    given = DataSettings(train=dict(zip(sources, (3, 1), strict=True)), validation="10%")
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path))
    first = load(given, tokenizer, 3)
    monkeypatch.setattr(store, "IN_MEMORY", 0)
    again = load(given, tokenizer, 3)
    assert [*first.items] == [*again.items]
    assert [*first.validation] == [*again.validation]
    assert (first.report, first.counts, first.longest) == (again.report, again.counts, again.longest)


def test_texts_are_set_aside_each_by_itself_however_many_they_are(write, tokenizer):
    """They have no prompt; of those in several batches some shared a key."""
    source = write("a.jsonl", [{"text": f"{i}"} for i in range(2500)])
    data = load_demonstrations(DataSettings(train=source, validation="10%"), tokenizer, 3)
    apart = sorted(permutation(2500, VALIDATION_SPLIT, 3, 0)[:250])
    assert [tokenizer.decode(row.tokens[1:-1]) for (row,) in data.validation] == [f"{i}" for i in apart]


@given(prompts=st.lists(st.lists(st.integers(0, 1), max_size=3).map(tuple), min_size=1), percent=st.floats(0.1, 99))
def test_what_is_set_aside_is_what_a_plain_loop_sets_aside(prompts, percent):
    count = round(len(prompts) * percent / 100)
    if len(prompts) > 1:
        count = max(count, 1)
    of_prompt = {}
    for i, asked in enumerate(prompts):
        of_prompt.setdefault(asked if len(asked) > 1 else i, []).append(i)
    groups = list(of_prompt.values())
    if min(map(len, groups)) > count:
        groups = [[i] for i in range(len(prompts))]
    apart = set()
    for i in permutation(len(groups), VALIDATION_SPLIT, 5, 0):
        if len(apart) + len(groups[i]) <= count:
            apart.update(groups[i])
    keys = np.array([_prompt_key(asked, i) for i, asked in enumerate(prompts)])
    assert set(np.flatnonzero(_held_out(keys, percent, (5, 0)))) == apart
