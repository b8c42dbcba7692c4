"""Data of your own: rows from anywhere, and a dialect for columns that nobody else uses."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from plaudit import register_dialect
from plaudit.data.fields import Fields
from plaudit.data.records import Dialect, Sample

TABLE = Path(__file__).with_name("reviews.csv")


def reviews() -> Iterator[dict[str, str]]:
    """One dict a row."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def read_review(fields: Fields) -> Sample:
    """A text that is missing or is no text is refused by `fields`, with the row's place."""
    return Sample(prompt=f"{fields.text('film', empty=False)}:", answer=" " + fields.text("verdict", empty=False))


register_dialect(Dialect(name="film/verdict", needs=("film", "verdict"), read=read_review))
