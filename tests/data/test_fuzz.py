"""Rows and files at random: each is read or is a `DataError`. FUZZ_ROWS=100000 is how often each parser is tried."""

import json
import os
import random

import pytest

from plaudit.data.fields import DataError
from plaudit.data.files import READERS, file_rows, ignore
from plaudit.data.formats import demonstration_of, dialects, judgement_of, preference_of, sample
from plaudit.data.oasst import unfolded
from plaudit.data.records import DEMONSTRATION, JUDGEMENT, PREFERENCE, QUESTION

ROWS = int(os.environ.get("FUZZ_ROWS", "1000"))
KINDS = {
    DEMONSTRATION: demonstration_of,
    PREFERENCE: preference_of,
    QUESTION: lambda read: read,
    JUDGEMENT: judgement_of,
}
TEXTS = (
    "",
    " ",
    "q",
    "a b",
    "a c",
    "\n\nHuman: q\n\nAssistant: a",
    "\n\nHuman: q\n\nAssistant: b",
    "\ud800",
    "\x00",
    "1",
)
KEYS = ("role", "content", "from", "value", "weight", "train", "type", "text", "tools", "replies", "rank", "message_id")
ROLES = ("user", "assistant", "system", "human", "gpt", "prompter", "tool", "owner")


def value(chance, depth=3):
    """A JSON value; where there is room, often a chat."""
    kind = chance.randrange(13 if depth else 6)
    if kind < 3:
        return chance.choice(TEXTS)
    if kind < 6:
        return chance.choice((None, True, False, 0, 1, 2, -1, 0.5, 1e400, float("nan"), 10**400))
    if kind < 8:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind < 9:
        return {chance.choice(KEYS): value(chance, depth - 1) for _ in range(chance.randrange(4))}
    if kind == 9:
        return [chance.choice(TEXTS[2:4]) for _ in range(chance.randrange(1, 3))]
    turn = {
        "role": lambda: chance.choice(ROLES),
        "content": lambda: chance.choice(TEXTS),
        "weight": lambda: chance.choice((0, 1, None, "x")),
    }
    return [{name: make() for name, make in turn.items() if chance.random() < 0.9} for _ in range(chance.randrange(5))]


def row(chance, columns):
    good = {"preference": 1, "margin": 0.5, "pos_answers": ["a"], "neg_answers": ["b"]}
    return {
        name: good.get(name, "a b") if chance.random() < 0.3 else value(chance)
        for name in columns
        if chance.random() < 0.9
    }


@pytest.mark.parametrize("dialect", ["auto", *dialects()])
def test_rows(dialect):
    chance = random.Random(dialect)
    known = sorted({name for one in dialects().values() for name in one.columns()} | {"images", "tools"})
    read = 0
    for _ in range(ROWS):
        named = [chance.choice(entry.split("|")) for entry in dialects()[dialect].needs] if dialect != "auto" else []
        one = row(chance, {*named, *chance.sample(known, chance.randrange(4))})
        kind = chance.choice(list(KINDS))
        try:
            KINDS[kind](sample(one, kind=kind, where="f:1", dialect=dialect)[0])
            read += 1
        except DataError as error:
            assert str(error).encode()
    assert read, "some rows are good"


def test_trees():
    chance = random.Random(7)
    read = 0
    for _ in range(ROWS // 5):
        names = [str(number) for number in range(chance.randrange(1, 8))]
        rows = [
            {
                "message_id": name,
                "parent_id": chance.choice([None, *names[:5], 3]),
                "role": chance.choice(ROLES),
                "text": value(chance, 1),
            }
            | row(chance, ("rank", "deleted", "replies"))
            for name in names
        ] + [{"prompt": {"replies": value(chance), **row(chance, KEYS)}}]
        for kind in KINDS:
            for where, one in unfolded([(f"f:{i}", one) for i, one in enumerate(rows)], kind, ignore):
                assert where.startswith("f:")
                try:
                    sample(one, kind=kind, where=where)
                    read += 1
                except DataError:
                    continue
    assert read


@pytest.mark.slow
@pytest.mark.parametrize("ending", READERS)
def test_files(tmp_path, ending):
    chance = random.Random(ending)
    table = (
        b'prompt,answer\nq,"a\nb"\n1,2\n'
        if ending in (".csv", ".tsv")
        else json.dumps({"prompt": "q", "a": [1]}).encode()
    )
    whole = table if ending == ".json" else table * 3 if ending != ".jsonl" else b"\n".join([table] * 5)
    if ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"prompt": ["q", "r"] * 5, "day": [1, None] * 5}), tmp_path / "good.parquet")
        whole = (tmp_path / "good.parquet").read_bytes()
    path = tmp_path / f"a{ending}"
    read = 0
    for _ in range(ROWS):
        content = bytearray(whole)
        for _ in range(chance.randrange(4)):
            content[chance.randrange(len(content))] = chance.choice(
                (0, 10, 34, 44, 91, 123, 125, 255, chance.randrange(256))
            )
        del content[chance.randrange(len(content) * 4) :]
        path.write_bytes(content)
        try:
            found = [one for _, one in file_rows("f", path)]
            read += len(found)
            assert all(isinstance(one, dict | DataError) for one in found)
        except DataError as error:
            assert str(error).encode()
    assert read
