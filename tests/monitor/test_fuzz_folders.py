"""Folders of runs at random: whatever one holds, the page answers in seconds and shows the good run beside it.

FUZZ_FOLDERS=2000 is how many folders are tried.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from starlette.testclient import TestClient

from plaudit.monitor.folders import FILES
from plaudit.page.app import application

FOLDERS = int(os.environ.get("FUZZ_FOLDERS", "12"))
SECONDS = 20.0
"""Within which every question of one folder is answered, also beside other work. Most need less than one."""
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}]\n" for n in range(15))
YAML = (
    "method: 2026-13-45\n",
    "method: !!timestamp 2026-13-45\n",
    "method: !!python/object/apply:os.getcwd []\n",
    LAUGHS,
    "a: &a [*a]\nmethod: *a\n",
    "method: " + "[" * 50_000,
    "method: " + "{a: " * 50_000,
    "? " * 5_000,
    "a:\n" + "".join(" " * depth + "a:\n" for depth in range(1, 500)),
    "method: 1" + ":1" * 20_000,
    "method: " + "9" * 10_000,
    "method: .inf\nrate: .nan\n",
    "method: 2026-01-02\n",
    "- method\n",
    "method: ppo\n<<: {method: [1]}\n",
    "a: 1\n" * 40_000,
    "method: " + "x" * 300_000,
    "\x00",
    "method: \x1b[2J\u202e\n",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 2**64, 10**400, 0.5, 1e308, -1e308, float("nan"), float("inf"), "", "x"),
    *("\ud800", "\x1b[2J", "\u202e", "</script><script>", "x" * 100_000, [], [1], [[]], {}, {"a": 1}, {"\ud800": []}),
)
LINES = (
    b"[]\n",
    b"17\n",
    b"null\n",
    b"nonsense\n",
    b"\xff\xfe\n",
    b"{}\n",
    b"\n" * 1000,
    b'{"step": 1e999}\n',
    b'{"step": NaN, "loss/policy": -Infinity}\n',
    b'{"step": ' + b"9" * 5000 + b"}\n",
    b'{"step": ' + b"[" * 200_000 + b"\n",
    b'{"step": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
    b'{"step": 3, "loss/policy": 0.1',
    b'{"step": 1, ' + b", ".join(b'"n%d": 1' % k for k in range(3000)) + b"}\n",
)
NAMES = (
    b"x\xff",
    b"\x1b[2J",
    "\u202eabc".encode(),
    b"a\nb",
    b"a\rb",
    b"$x^$",
    b"<b>",
    b"%2e%2e",
    b"n" * 200,
    b"a b",
    b"+&#?",
)


def damaged(chance: random.Random, run: Path) -> list[str]:
    """Damage some of a run's files; return what was done."""
    return [f"{name}: {chance.choice(WAYS)(chance, run / name)}" for name in chance.sample(FILES, chance.randint(1, 3))]


def flipped(chance: random.Random, path: Path) -> str:
    found = bytearray(path.read_bytes() if path.is_file() else b"")
    for _ in range(min(len(found), chance.choice((1, 5, 50)))):
        found[chance.randrange(len(found))] = chance.randrange(256)
    path.write_bytes(found)
    return "bytes flipped"


def cut(chance: random.Random, path: Path) -> str:
    found = path.read_bytes() if path.is_file() else b""
    path.write_bytes(found[: chance.randint(0, len(found))])
    return "cut"


def replaced(chance: random.Random, path: Path) -> str:
    """Put something that is no ordinary file in its place."""
    path.unlink(missing_ok=True)
    kind = chance.choice(
        ("fifo", "folder", "/dev/zero", "/dev/random", "/dev/tty", "itself", "absent", "socket folder")
    )
    if kind == "fifo":
        os.mkfifo(path)
    elif "folder" in kind:
        path.mkdir()
    else:
        path.symlink_to({"itself": path, "absent": path.with_name("absent")}.get(kind, Path(kind)))
    return kind


def sparse(chance: random.Random, path: Path) -> str:
    with path.open("wb") as file:
        file.truncate(chance.choice((100 << 20, 10 << 30)))
    return "a large file of zeros"


def yaml(chance: random.Random, path: Path) -> str:
    path.write_text(chance.choice(YAML), encoding="utf-8")
    return "other YAML"


def lines(chance: random.Random, path: Path) -> str:
    found = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for _ in range(chance.randint(1, 4)):
        found.insert(chance.randint(0, len(found)), chance.choice(LINES))
    path.write_bytes(b"".join(found))
    return "other lines"


def values(chance: random.Random, path: Path) -> str:
    """Other values in some of the records of a file."""
    found = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for _ in range(chance.randint(1, 5) if found else 0):
        place = chance.randrange(len(found))
        try:
            record = json.loads(found[place])
            record[chance.choice([*record, "step", "validation/x", "new"])] = chance.choice(VALUES)
        except (ValueError, AttributeError, TypeError):  # was damaged before
            continue
        found[place] = json.dumps(record).encode() + b"\n"
    path.write_bytes(b"".join(found))
    return "other values"


WAYS = (flipped, cut, replaced, sparse, yaml, lines, values, values, lines)


def questions(name: str) -> list[tuple[str, dict[str, Any]]]:
    asked: list[tuple[str, dict[str, Any]]] = [
        (what, {"run": name}) for what in "metrics health events settings steps rewards".split()
    ]
    asked += [
        ("answers", {"run": name, **more})
        for more in ({"step": 2}, {"sort": "reward"}, {"words": "great"}, {"sort": "part:gold"})
    ]
    asked += [("answer", {"run": name, "at": at}) for at in (0, 1, 100)]
    return [*asked, ("export", {"run": name}), ("export", {"run": "good", "with": name})]


def good(client: TestClient) -> tuple[Any, ...]:
    """What the page shows of the run that nobody damaged."""
    row = next(one for one in client.get("/api/runs").json()["runs"] if one["name"] == "good")
    found = [client.get(f"/api/{what}", params=given) for what, given in questions("good")[:6]]
    assert [one.status_code for one in found] == [200] * 6
    figures = next(one["figures"] for one in client.get("/api/table").json()["rows"] if one["name"] == "good")
    return row["state"], row["step"], row["method"], figures, *(one.json() for one in found)


@pytest.mark.slow
def test_whatever_a_folder_holds_only_its_own_run_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "made").mkdir()
    make_run(tmp_path / "made" / "run", steps=4, prompts=2, samples=2)
    runs = tmp_path / "runs"
    make_run(runs / "good", steps=3, prompts=2, samples=2)
    client = TestClient(application(runs), base_url="http://127.0.0.1:8010")
    before = good(client)
    statuses: dict[int, int] = {}
    slowest = 0.0
    for number in range(FOLDERS):
        chance = random.Random(number)
        bad = Path(os.fsdecode(os.fsencode(runs) + b"/" + chance.choice(NAMES) + b"%d" % number))
        bad.mkdir()
        for path in (tmp_path / "made" / "run").iterdir():
            (bad / path.name).write_bytes(path.read_bytes())
        done = damaged(chance, bad)
        began = time.monotonic()
        listed = client.get("/api/runs")
        assert listed.status_code == 200, (number, done)
        (name,) = {one["name"] for one in listed.json()["runs"]} - {"good"}
        for what, given in questions(name):
            found = client.get(f"/api/{what}", params=given)
            statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
            assert found.status_code == 200 or (
                found.status_code in (400, 404) and len(found.text.splitlines()) == 1
            ), (*(number, done, what, given, found.text),)
        assert good(client) == before, (number, done)
        slowest = max(slowest, time.monotonic() - began)
        assert slowest < SECONDS, (number, done)
        bad.rename(tmp_path / f"tried{number}")
    print(f"{FOLDERS} folders, answers by status {statuses}, slowest folder {slowest:.2f} s")
