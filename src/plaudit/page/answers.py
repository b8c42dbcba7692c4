"""Search a run's answers by step, reward, part, length, version and words, even among a million.

    samples.jsonl -> a thread -> SQLite (numbers, and words in its full-text index) -> offsets -> the lines themselves

The database is a cache outside the run's folder and can be deleted at any time. The answers of one step are read
directly from the file, without the index. A search says what share of the file is indexed.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.monitor.samples import Stretch, answer_of, lines_between, stretches
from plaudit.support.bounded import LONGEST, MOST, UnreadableError, opened
from plaudit.support.paths import cache_folder

FORMAT = 1
"""Version of the database's tables; raise it when they change: databases of another version are made again."""
AT_ONCE = 2_000
"""Number of answers indexed in one transaction. Queries are answered between two transactions."""
PATIENCE = 0.2
"""Most seconds that a query waits for the index."""
OF_A_STEP = 1 << 30
"""Most bytes of one step's answers that are read from the file without the index."""
PAGE = 50
COLUMNS, BINS = 120, 24
"""Most columns (stretches of steps) and bins (stretches of rewards) of the histogram."""
BY_TOKEN = ("ids", "pieces", "logprobs", "learner", "entropies", "advantages", "drawn", "turns")
"""Per-token fields of a record, which are left out of lists of answers."""
FIELDS = {"step": "step", "reward": "reward", "advantage": "advantage", "length": "tokens", "version": "oldest"}
TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value);
CREATE TABLE parts (name TEXT PRIMARY KEY, number INTEGER);
CREATE TABLE answers (id INTEGER PRIMARY KEY, at INTEGER, step INTEGER, kind TEXT, prompt_id TEXT, reward REAL,
  advantage REAL, tokens INTEGER, oldest INTEGER, finish TEXT);
CREATE INDEX by_prompt ON answers (prompt_id);
CREATE INDEX by_step ON answers (step);
CREATE VIRTUAL TABLE texts USING fts5(prompt, completion, content='');
"""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A search. `limits`: (field, least, most), where a field is one of FIELDS or `part:NAME`."""

    step: int | None = None
    kind: str = ""
    finish: str = ""
    prompt_id: str | None = None
    words: str = ""
    limits: tuple[tuple[str, float | None, float | None], ...] = ()
    sort: str = ""
    descending: bool = True
    offset: int = 0
    count: int = PAGE

    @property
    def of_a_step(self) -> bool:
        """True if the query is about one step only, whose lines are read without the index."""
        return self.step is not None and not (self.finish or self.prompt_id or self.words or self.limits or self.sort)


@dataclass
class Found:
    total: int
    records: list[dict[str, Any]]
    indexed: float = 1.0
    """Share of the file that was searched."""
    parts: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return {"total": self.total, "rows": self.records, "indexed": self.indexed, "parts": self.parts}


class Answers:
    """Searches the answers of one samples.jsonl."""

    def __init__(self, path: Path):
        self.path = path
        name = hashlib.blake2b(os.fsencode(os.path.realpath(path)), digest_size=12).hexdigest()
        self.database = cache_folder() / "answers" / f"{name}.sqlite"
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._steps: tuple[tuple[int, int], list[Stretch]] = ((0, 0), [])
        self.failed: Exception | None = None

    # --- answers

    def steps(self) -> list[Stretch]:
        if not self.path.exists():
            return []
        found = self.path.stat()
        key = (found.st_mtime_ns, found.st_size)
        if self._steps[0] != key:
            self._steps = key, stretches(self.path, OF_A_STEP)
        return self._steps[1]

    def find(self, question: Query) -> Found:
        """Return a page of the matching answers, and how many match. Raises ValueError for an unknown field; while the
        file is being indexed, such a field gives no answers instead."""
        if not self.path.exists():
            return Found(0, [])
        if question.of_a_step:
            self._follow_on()
            return self._of_step(question)
        share = self._indexed()
        with closing(self._open()) as database:
            parts = dict(database.execute("SELECT name, number FROM parts"))
            asked = {question.sort, *(limit[0] for limit in question.limits)} - {"", *FIELDS}
            if share < 1.0 and asked - {f"part:{name}" for name in parts}:  # of lines not indexed yet
                return Found(0, [], share, sorted(parts))
            where, values = _where(question, parts)
            (total,) = database.execute(f"SELECT count(*) FROM answers{where}", values).fetchone()
            order, way = "", "DESC" if question.descending else "ASC"
            if question.sort:
                order = f"{_column(question.sort, parts)} {way} NULLS LAST, "
            text = f"SELECT at FROM answers{where} ORDER BY {order}id LIMIT ? OFFSET ?"
            places = [at for (at,) in database.execute(text, (*values, question.count, question.offset))]
        return Found(total, list(self._listed(self._read(places))), share, sorted(parts))

    def rewards(self, kind: str) -> dict[str, Any]:
        """Return a histogram of rewards over steps for answers of a kind: a row for every few steps, in it a count
        for each of `bins` equal stretches from `low` to `high`."""
        if not self.path.exists():
            return {"total": 0, "indexed": 1.0}
        share = self._indexed()
        of = "FROM answers WHERE kind = ? AND reward BETWEEN -1e30 AND 1e30"
        with closing(self._open()) as database:
            bounds = f"SELECT count(*), min(step), max(step), min(reward), max(reward) {of}"
            total, first, last, low, high = database.execute(bounds, (kind,)).fetchone()
            if not total:
                return {"total": 0, "indexed": share}
            several = f"SELECT count(*) FROM (SELECT DISTINCT reward {of} LIMIT {BINS})"
            (bins,) = database.execute(several, (kind,)).fetchone()  # two stretches if all rewards are 0 or 1
            low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
            every = -(-(last - first + 1) // COLUMNS)
            counts = [[0] * bins for _ in range((last - first) // every + 1)]
            places = f"(step - ?) / ?, min(?, CAST((reward - ?) * ? AS INTEGER)), count(*) {of} GROUP BY 1, 2"
            bound = (first, every, bins - 1, low, bins / (high - low), kind)
            for column, row, number in database.execute(f"SELECT {places}", bound):
                counts[column][row] = number
        found = {"first": first, "every": every, "low": low, "high": high, "bins": bins, "counts": counts}
        return found | {"total": total, "indexed": share}

    def one(self, at: int) -> dict[str, Any]:
        """Return the whole record at an offset. Raises ValueError if no line begins there."""
        if at < 0 or at >= self.path.stat().st_size:
            raise ValueError(f"no answer begins at {at}")
        if at:
            with opened(self.path) as file:
                file.seek(at - 1)
                if file.read(1) != b"\n":
                    raise ValueError(f"no answer begins at {at}")
        for _, line in lines_between(self.path, at):
            return answer_of(self.path, at, line) | {"at": at}
        raise ValueError(f"no answer begins at {at}")

    def _of_step(self, question: Query) -> Found:
        total, parts, shown = 0, set[str](), list[tuple[int, bytes]]()
        for one in self.steps():
            if one.step != question.step:
                continue
            for at, line in lines_between(self.path, one.begin, one.end):
                found = answer_of(self.path, at, line)
                if question.kind in ("", found.get("kind")):
                    parts |= (found.get("parts") or {}).keys()
                    shown += [(at, line)] * (question.offset <= total < question.offset + question.count)
                    total += 1
        return Found(total, list(self._listed(shown)), parts=sorted(parts))

    def _read(self, places: list[int]) -> Iterator[tuple[int, bytes]]:
        with opened(self.path) as file:
            for at in places:
                file.seek(at)
                yield at, file.readline(LONGEST)

    def _listed(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        """Yield the answers without their per-token fields. Raises UnreadableError above MOST bytes in all."""
        size = 0
        for at, line in lines:
            if (size := size + len(line)) > MOST:
                raise UnreadableError(f"{self.path}: these answers have more than {MOST:,} bytes: ask for fewer")
            found = answer_of(self.path, at, line)
            yield {name: value for name, value in found.items() if name not in BY_TOKEN} | {"at": at}

    # --- the index

    def _indexed(self) -> float:
        """Update the index for at most PATIENCE seconds; return the share of the file that is indexed."""
        thread = self._follow_on()
        thread.join(PATIENCE)
        if self.failed is not None:
            raise ValueError(f"the index of {self.path} cannot be made: {self.failed}")
        if not thread.is_alive():
            return 1.0  # what remains is an incomplete line, or was written meanwhile
        with closing(self._open()) as database:
            return min(0.999, int(_value(database, "read")) / max(1, self.path.stat().st_size))

    def _follow_on(self) -> threading.Thread:
        """Start a thread that continues the index, unless one is running; return the thread."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._follow, name="answers", daemon=True)
                self._thread.start()
            return self._thread

    def _open(self) -> sqlite3.Connection:
        self.database.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.database, timeout=30)
        if database.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            _begin(database, again=False)
        return database

    def _follow(self) -> None:
        try:
            self.failed = None
            with closing(self._open()) as database:
                if not self._same(database):
                    _begin(database, again=True)
                batch: list[tuple[int, bytes]] = []
                for place, line in lines_between(self.path, int(_value(database, "read"))):
                    batch.append((place, line))
                    if len(batch) == AT_ONCE:
                        _add(database, self.path, batch)
                        batch = []
                if batch:
                    _add(database, self.path, batch)
        except (sqlite3.Error, OSError, ValueError, OverflowError) as error:  # a number above 64 bits
            self.failed = error

    def _same(self, database: sqlite3.Connection) -> bool:
        """True if the line that was indexed last is unchanged; a resumed run removes lines and writes others."""
        read, at = int(_value(database, "read")), int(_value(database, "at"))
        if not read:
            return True
        with opened(self.path) as file:
            file.seek(at)
            return bool(_digest(file.read(read - at)) == _value(database, "last"))


def _begin(database: sqlite3.Connection, *, again: bool) -> None:
    """Begin with empty tables; unless `again`, only if no other thread or process has begun meanwhile."""
    with suppress(sqlite3.OperationalError):  # SQLite does not wait for a lock here; its holder sets the same mode
        database.execute("PRAGMA journal_mode=WAL")
    database.execute("BEGIN IMMEDIATE")
    if again or database.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
        for name in ("about", "parts", "answers", "texts"):
            database.execute(f"DROP TABLE IF EXISTS {name}")
        for statement in filter(str.strip, TABLES.split(";")):
            database.execute(statement)
        database.execute("INSERT INTO about VALUES ('read', 0), ('at', 0), ('last', '')")
        database.execute(f"PRAGMA user_version={FORMAT}")
    database.commit()


def _add(database: sqlite3.Connection, path: Path, lines: list[tuple[int, bytes]]) -> None:
    """Index further lines, in one transaction."""
    parts = dict(database.execute("SELECT name, number FROM parts"))
    (first,) = database.execute("SELECT coalesce(max(id), 0) + 1 FROM answers").fetchone()
    rows, texts = [], []
    for number, (at, line) in enumerate(lines, first):
        record = answer_of(path, at, line)
        found_parts = record.get("parts") or {}
        for name in found_parts.keys() - parts.keys():
            parts[name] = len(parts)
            database.execute("INSERT INTO parts VALUES (?, ?)", (name, parts[name]))
            database.execute(f"ALTER TABLE answers ADD COLUMN part{parts[name]} REAL")
        versions = record.get("versions") or [None]
        plain = [record.get(name) for name in ("step", "kind", "prompt_id", "reward", "advantage", "tokens")]
        rows.append((number, at, *plain, versions[0], record.get("finish"), found_parts))
        texts.append((number, record.get("prompt"), record.get("completion")))
    names = sorted(parts, key=parts.__getitem__)
    marks = ",".join("?" * (10 + len(names)))
    database.executemany(
        f"INSERT INTO answers VALUES ({marks})", ((*row[:-1], *(row[-1].get(name) for name in names)) for row in rows)
    )
    database.executemany("INSERT INTO texts (rowid, prompt, completion) VALUES (?, ?, ?)", texts)
    at, line = lines[-1]
    for name, value in (("read", at + len(line)), ("at", at), ("last", _digest(line))):
        database.execute("UPDATE about SET value = ? WHERE name = ?", (value, name))
    database.commit()


def _where(question: Query, parts: dict[str, int]) -> tuple[str, list[Any]]:
    wanted = {"step": question.step, "kind": question.kind or None, "finish": question.finish or None}
    wanted["prompt_id"] = question.prompt_id
    terms = [f"{name} = ?" for name, value in wanted.items() if value is not None]
    values: list[Any] = [value for value in wanted.values() if value is not None]
    for name, least, most in question.limits:
        for sign, bound in ((">=", least), ("<=", most)):
            if bound is not None:
                terms.append(f"{_column(name, parts)} {sign} ?")
                values.append(bound)
    if words := _match(question.words):
        terms.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
        values.append(words)
    return (" WHERE " + " AND ".join(terms) if terms else ""), values


def _match(words: str) -> str:
    """Return a full-text query for all words. The last word also matches as a prefix; words in quotes must be adjacent.
    SQLite's own operators are quoted."""
    found = []
    for number, part in enumerate(words.replace("\0", " ").split('"')):
        found += [part] if number % 2 and part.strip() else part.split()
    quoted = [f'"{word}"' for word in found if any(letter.isalnum() for letter in word)]
    return " ".join(quoted) + ("*" if quoted and not words.rstrip().endswith('"') else "")


def _column(name: str, parts: dict[str, int]) -> str:
    if name in FIELDS:
        return FIELDS[name]
    if name.startswith("part:") and name[5:] in parts:
        return f"part{parts[name[5:]]}"
    raise ValueError(f"answers have no field {name!r}; they have {', '.join((*FIELDS, *(f'part:{p}' for p in parts)))}")


def _value(database: sqlite3.Connection, name: str) -> Any:
    return database.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()[0]


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=12).hexdigest()
