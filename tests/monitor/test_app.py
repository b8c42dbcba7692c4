"""The page's server: what it answers, whom, and about files that a crash left behind."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from rich.table import Table
from starlette.testclient import TestClient

from plaudit.monitor.console import Reporter
from plaudit.monitor.folders import Followed, columns, summary
from plaudit.page.answers import Answers
from plaudit.page.app import RunsReader, application

HERE = {"host": "127.0.0.1:8010"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", steps=20)
    make_run(folder / "sets" / "two", steps=20, seed=1, state="failed", rate=1e-3)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(application(folder), base_url="http://127.0.0.1:8010")


def asked(client: TestClient, what: str, **given: Any) -> Any:
    """The answer, once the index is whole."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = client.get(f"/api/{what}", params=given)
        assert found.status_code == 200, found.text
        if not isinstance(found.json(), dict) or found.json().get("indexed", 1.0) == 1.0:
            return found.json()
    raise TimeoutError("the index was not made")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_an_index_that_many_begin_at_once_is_begun_once(folder: Path) -> None:
    answers = Answers(folder / "one" / "samples.jsonl")

    def begun(number: int) -> int:
        database = answers._open()
        (rows,) = database.execute("SELECT count(*) FROM about").fetchone()
        database.close()
        return int(rows)

    for _ in range(20):
        for path in answers.database.parent.glob(f"{answers.database.name}*"):
            path.unlink()
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(begun, range(8))) == [3] * 8


def test_runs_are_listed_with_how_they_go(client: TestClient) -> None:
    found = {run["name"]: run for run in asked(client, "runs")["runs"]}
    assert found.keys() == {"one", "sets/two"}
    assert (found["one"]["state"], found["one"]["step"], found["one"]["steps"], found["one"]["method"]) == (
        "done",
        20,
        20,
        "ppo",
    )
    assert found["sets/two"]["state"] == "failed"
    assert "ArithmeticError" in found["sets/two"]["last"]


STARTED = "ppo: logs and samples in runs/ppo, checkpoints in runs/ppo/checkpoints"
DONE = "done: policy in model (newest checkpoint)\n  curves:  page.html\n  next:    plaudit generate"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (STARTED, "running"),
        (f"{STARTED}|step  2/4  loss 1", "running"),
        (f"{STARTED}|step  4/4  loss 1|{DONE}", "done"),
        (f"{STARTED}|step  2/4  loss 1|warning: it is enough|{DONE}", "done"),
        (f"{DONE}|\n== reward (2 of 3)", "done"),
        (f"{DONE}|\n== evaluation|evaluation: one policy was trained|TABLE", "done"),
        (f"{DONE}|warning: no checkpoint is damaged|{STARTED}", "running"),
        (f"{DONE}|{STARTED}|step  6/8  loss 1|the run ended: stopped by SIGTERM at step 6", "stopped"),
        ("the run ended: stopped by SIGINT at step 1|TABLE", "stopped"),
        (f"{STARTED}|the run ended: ArithmeticError: two\nlines", "failed"),
        (f"the run ended: ArithmeticError: two|{STARTED}|{DONE}|standard output is closed", "done"),
    ],
)
def test_the_state_is_that_of_the_last_start_or_end_whatever_is_said_after_it(
    said: str, state: str, tmp_path: Path
) -> None:
    """A pipeline's next stage and its evaluation speak to the log of the stage before."""
    run = make_run(tmp_path / "run", steps=2)
    (run / "log.txt").unlink()
    reporter = Reporter(quiet=True)
    reporter.log_to(run / "log.txt")
    for one in said.split("|"):
        if one == "TABLE":
            table = Table("figure", "step 1/2")
            table.add_row("reward", "done: no line of the run's own")
            reporter.show(table)
        else:
            reporter.say(one)
    assert summary("run", run)["state"] == state


def test_figures_settings_and_events_are_those_of_the_files(client: TestClient, folder: Path) -> None:
    metrics = asked(client, "metrics", run="one")
    assert metrics["step"] == list(range(1, 21))
    assert [value for value in metrics["validation/reward/mean"] if value is not None] == [0.5, 1.0]
    assert asked(client, "settings", run="one")["optimizer.learning_rate"] == 3e-4
    (alarm,) = asked(client, "health", run="one")
    assert (alarm["sign"], alarm["step"], alarm["last"], alarm["count"]) == ("entropy", 10, 10, 1)
    assert {event["worker"] for event in asked(client, "events", run="one")} == {
        *("learner", "rewards", "rollout worker 1", "rollout worker 2"),
    }


def test_a_sign_is_one_entry_that_grows(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=20)
    reader = RunsReader(tmp_path)
    (before,) = reader.health({"run": "one"})
    with (tmp_path / "one" / "health.jsonl").open("a") as file:
        file.write('{"step": 12, "sign": "entropy", "severity": 1.5}\n')
    assert reader.health({"run": "one"}) == [before | {"last": 12, "count": 2, "severity": 1.5}]


def test_answers_of_a_step_are_in_the_order_of_the_file(client: TestClient, folder: Path) -> None:
    mine = [record for record in lines(folder / "one") if record["step"] == 10]
    found = asked(client, "answers", run="one", step=10)
    assert found["total"] == len(mine) == 20
    assert [row["completion"] for row in found["rows"]] == [record["completion"] for record in mine]
    assert found["parts"] == ["gold", "judge"]
    whole = asked(client, "answer", run="one", at=found["rows"][3]["at"])
    assert {name: whole[name] for name in mine[3]} == mine[3]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"sort": "reward"}, lambda one: one["reward"]),
        ({"sort": "part:gold", "order": "rising"}, lambda one: -one["parts"]["gold"]),
        ({"sort": "length"}, lambda one: one["tokens"]),
        ({"sort": "version", "order": "rising"}, lambda one: -one["versions"][0]),
    ],
)
def test_answers_are_sorted_with_those_without_a_reward_last(
    client: TestClient, folder: Path, given: dict[str, str], key: Any
) -> None:
    found = asked(client, "answers", run="one", count=500, **given)["rows"]
    values = [key(row) for row in found if row["reward"] is not None or given["sort"] != "reward"]
    assert values == sorted(values, reverse=True)
    if given["sort"] == "reward":
        assert [row["reward"] for row in found[len(values) :]] == [None] * (len(found) - len(values))
        assert len(values) < len(found) == len(lines(folder / "one"))


def test_limits_words_kind_and_finish_are_met_by_every_answer_and_no_other(client: TestClient, folder: Path) -> None:
    mine = lines(folder / "one")
    questions: list[tuple[dict[str, Any], Any]] = [
        ({"field": "part:gold", "least": 0.5}, lambda one: one["parts"]["gold"] >= 0.5),
        ({"field": "length", "least": 5, "most": 9}, lambda one: 5 <= one["tokens"] <= 9),
        ({"kind": "validation"}, lambda one: one["kind"] == "validation"),
        ({"finish": "length", "step": 3}, lambda one: one["finish"] == "length" and one["step"] == 3),
        ({"words": "great music"}, lambda one: {"great", "music"} <= set(one["completion"].split())),
        ({"words": '"great music"'}, lambda one: "great music" in one["completion"]),
        ({"words": "musi"}, lambda one: "music" in one["completion"]),
        ({"words": "harbour"}, lambda one: "Harbour" in one["prompt"]),
        ({"prompt": "prompts.jsonl:2"}, lambda one: one["prompt_id"] == "prompts.jsonl:2"),
    ]
    for given, holds in questions:
        found = asked(client, "answers", run="one", count=500, **given)
        expected = [record["completion"] for record in mine if holds(record)]
        assert [row["completion"] for row in found["rows"]] == expected, given
        assert found["total"] == len(expected) > 0, given


def test_every_reward_is_counted_at_its_step_and_height(client: TestClient, folder: Path) -> None:
    found = asked(client, "rewards", run="one")
    mine = [one for one in lines(folder / "one") if one["kind"] == "train" and one["reward"] is not None]
    assert (found["first"], found["every"], len(found["counts"])) == (1, 1, 20)
    assert (found["low"], found["high"]) == (min(one["reward"] for one in mine), max(one["reward"] for one in mine))
    expected = [[0] * found["bins"] for _ in range(20)]
    width = (found["high"] - found["low"]) / found["bins"]
    for one in mine:
        expected[one["step"] - 1][min(found["bins"] - 1, int((one["reward"] - found["low"]) / width))] += 1
    assert found["counts"] == expected
    assert found["total"] == len(mine)
    assert asked(client, "rewards", run="one", kind="dropped") == {"total": 0, "indexed": 1.0}


def test_rewards_of_many_steps_stay_few_numbers_and_right_or_wrong_is_two_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", steps=1)
    answers = [{"step": step, "kind": "train", "reward": step % 2} for step in range(1, 1001)]
    answers += [{"step": 1000, "kind": "train", "reward": reward} for reward in (None, "x", 1e300)]
    (run / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    (run / "samples.index.jsonl").unlink()
    found = asked(TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010"), "rewards", run="one")
    assert (found["every"], found["bins"], found["low"], found["high"]) == (9, 2, 0, 1)
    assert len(found["counts"]) == 112
    assert found["counts"][:2] == [[4, 5], [5, 4]]
    assert found["counts"][-1] == [1, 0]
    assert found["total"] == 1000


@pytest.mark.parametrize("words", ['"', "*", "a OR", "NEAR(", "completion:x", "'; DROP TABLE answers", "^", "-", "\\"])
def test_no_words_are_read_as_a_query(client: TestClient, words: str) -> None:
    assert asked(client, "answers", run="one", words=words)["total"] >= 0


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("metrics?run=../one", 404),
        ("metrics?run=/etc", 404),
        ("metrics?run=empty", 404),
        ("metrics", 404),
        ("answers?run=one&sort=at", 400),
        ("answers?run=one&sort=reward;DROP", 400),
        ("answers?run=one&step=x", 400),
        ("answer?run=one&at=3", 400),
        ("answer?run=one&at=-1", 400),
        ("answer?run=one&at=99999999", 400),
        ("nothing", 404),
    ],
)
def test_what_there_is_not_is_refused_with_a_reason(client: TestClient, address: str, status: int) -> None:
    asked(client, "answers", run="one", sort="reward")
    found = client.get(f"/api/{address}")
    assert found.status_code == status
    assert found.text


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "absent.js"])
def test_only_files_of_the_page_are_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404
    assert client.get("/page/base.js").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8010"}, 200),
        ({"host": "[::1]:8010"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8010"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_only_our_own_page_may_ask(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/api/runs", headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_only_reads(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


def test_data_need_the_token_and_the_page_itself_does_not(folder: Path) -> None:
    client = TestClient(application(folder, token="secret-of-sixteen"), base_url="http://127.0.0.1:8010")
    assert client.get("/").status_code == 200
    assert client.get("/api/runs").status_code == 401
    assert client.get("/api/runs?token=secret-of-sixteen").status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer secret-of-sixteem"}).status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer secret-of-sixteen"}).status_code == 200


@pytest.mark.slow
def test_every_route_is_closed_to_strangers_and_those_with_data_to_who_has_no_token(folder: Path) -> None:
    page: Any = application(folder, names=("localhost", "workstation"), token="secret-of-sixteen")
    client = TestClient(page, base_url="http://127.0.0.1:8010")
    paths = [route.path.replace("{name}", "base.js") for route in page.routes[0].app.routes]
    assert len(paths) == 13
    for path in [*paths, "/absent", "/api/absent", "//api/runs"]:
        for headers in (
            *(
                {"host": host}
                for host in ("evil.example", "localhost.evil.example", "1.2.3.4.evil.example", "", "a:1:1")
            ),
            *({"origin": origin} for origin in ("http://evil.example", "null", "https://127.0.0.1:8010")),
        ):
            assert client.get(path, headers=headers).status_code == 403, (path, headers)
        if path.startswith("/api/"):
            for token in ("", "Bearer", "Bearer secret-of-sixteem", "Basic secret-of-sixteen", "secret-of-sixteen"):
                assert client.get(path, headers={"authorization": token}).status_code == 401, (path, token)
            right = ("authorization", "Bearer secret-of-sixteen")
            assert client.get(path, headers=[right]).status_code != 401
            assert client.get(path, headers=[right, right]).status_code == 401
            assert client.get(path, headers=[right, ("sec-fetch-site", "cross-site")]).status_code == 403
    for host in ("workstation:8010", "WORKSTATION", "10.0.0.7:8010", "[::1]"):
        assert client.get("/", headers={"host": host}).status_code == 200, host


def test_every_answer_forbids_what_is_not_ours(client: TestClient) -> None:
    for path in ("/", "/page/base.js", "/api/runs", "/api/absent"):
        headers = client.get(path).headers
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = client.get("/").text
    assert "://" not in page
    assert " style=" not in page
    assert " onclick" not in page


def test_a_crashed_run_opens_like_a_finished_one(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "cut", steps=6)
    for name in ("samples.jsonl", "metrics.jsonl", "events.jsonl", "samples.index.jsonl"):
        path = tmp_path / "runs" / "cut" / name
        path.write_bytes(path.read_bytes()[:-25])
    client = TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010")
    assert asked(client, "metrics", run="cut")["step"] == [1, 2, 3, 4, 5]
    assert asked(client, "steps", run="cut")["answers"] == [16, 16, 16, 16, 16, 15]
    assert asked(client, "answers", run="cut", step=6)["total"] == 15
    found = client.get("/api/answers", params={"run": "cut", "sort": "reward"}).json()
    assert found["total"] == 95


def test_a_resumed_run_whose_lines_were_replaced_is_indexed_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", steps=6)
    client = TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010")
    before = asked(client, "answers", run="one", sort="reward")
    other = make_run(tmp_path / "other", steps=6, seed=5)
    (run / "samples.jsonl").write_bytes((other / "samples.jsonl").read_bytes())
    (run / "samples.index.jsonl").write_bytes((other / "samples.index.jsonl").read_bytes())
    after = asked(client, "answers", run="one", sort="reward")
    assert before["rows"] != after["rows"]
    best = max(lines(run), key=lambda one: -9.0 if one["reward"] is None else one["reward"])
    assert after["rows"][0]["completion"] == best["completion"]


def test_answers_of_a_step_wait_for_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: TestClient, folder: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "file"))
    found = client.get("/api/answers", params={"run": "one", "step": 6}).json()
    first = next(line for line in lines(folder / "one") if line["step"] == 6)
    assert (found["total"], found["indexed"], found["parts"]) == (16, 1.0, ["gold", "judge"])
    assert found["rows"][0]["completion"] == first["completion"]
    refused = client.get("/api/answers", params={"run": "one", "words": "great"})
    assert refused.status_code == 400
    assert "the index of" in refused.text


def test_a_file_that_grows_is_followed_and_one_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    followed = Followed(path)
    assert followed.look() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert followed.look() == [{"a": 1}, {"a": 2}]
    with path.open("a") as file:
        file.write(": 3}\nnot json\n[]\n")
    assert followed.look() == [{"a": 1}, {"a": 2}, {"a": 3}]
    (tmp_path / "y").write_text('{"b": 1}\n')
    (tmp_path / "y").replace(path)
    assert followed.look() == [{"b": 1}]


def test_a_long_run_is_thinned_but_for_its_rare_figures_and_its_end() -> None:
    records = [{"step": step, "loss": step * 1.0} for step in range(1, 10_001)]
    for step in (777, 7_778):
        records[step - 1]["validation/loss"] = 0.5
    found = columns(records)
    assert 2_000 < len(found["step"]) < 3_010
    assert {777, 7_778, 10_000} <= set(found["step"])
    assert [value for value in found["validation/loss"] if value is not None] == [0.5, 0.5]


def test_an_export_is_one_file_that_asks_nobody_and_has_no_tag_of_a_models_making(tmp_path: Path) -> None:
    evil = "</script><script>window.hit=1</script>"
    make_run(tmp_path / "runs" / "one", steps=3, texts=[evil])
    make_run(tmp_path / "runs" / "two", steps=3)
    make_run(tmp_path / "runs" / "two, 3", steps=3)
    make_run(tmp_path / "runs" / "secret", steps=3)
    client = TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010")
    asked(client, "answers", run="one", sort="reward")
    text = client.get("/api/export", params={"run": "one", "with": "one,two%2C 3,,two"}).text
    assert evil not in text
    assert "secret" not in text
    assert all(f'[\\"metrics\\",[\\"run\\",\\"{name}\\"]]' in text for name in ("one", "two", "two, 3"))
    assert "<script src" not in text
    assert "<link" not in text
    assert "\\u003c/script\\u003e\\u003cscript\\u003ewindow.hit=1" in text
    assert client.get("/api/export", params={"run": "three"}).status_code == 404


@pytest.mark.parametrize(
    ("file", "put", "reason"),
    [
        ("settings.yaml", "method: 2026-13-45\n", "month must be in 1..12"),
        ("settings.yaml", "a: &a [*a]\n", "an alias"),
        ("settings.yaml", "a: " + "[" * 50_000, "levels"),
        ("settings.yaml", None, "FIFO"),
        ("metrics.jsonl", None, "FIFO"),
        ("log.txt", "", "folder"),
        ("samples.jsonl", "/dev/zero", "device"),
        ("samples.jsonl", "samples.jsonl", "symbolic links"),
    ],
)
def test_a_run_that_cannot_be_read_says_why_and_others_are_shown(
    file: str, put: str | None, reason: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "runs" / "good", steps=3)
    bad = make_run(tmp_path / "runs" / "bad", steps=3) / file
    bad.unlink()
    if put is None:
        os.mkfifo(bad)
    elif put == "":
        bad.mkdir()
    elif put.startswith("/") or put == file:
        bad.symlink_to(put)
    else:
        bad.write_text(put)
    client = TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010")
    found = {run["name"]: run for run in asked(client, "runs")["runs"]}
    assert (found["good"]["state"], found["bad"]["state"]) == ("done", "unreadable")
    assert reason in found["bad"]["last"]
    assert asked(client, "metrics", run="good")["step"] == [1, 2, 3]
    for what in ("metrics", "steps", "answers", "answer", "settings", "export"):
        assert client.get(f"/api/{what}", params={"run": "bad", "words": "a", "at": 0}).status_code in (200, 400), what


def test_names_that_are_no_text_are_shown_escaped_and_asked_for_as_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good", steps=3)
    for name in (b"x\xff", b"\x1b[2J", b"a\nb"):
        make_run(Path(os.fsdecode(os.fsencode(tmp_path / "runs") + b"/" + name)), steps=3)
    client = TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010")
    names = {run["name"] for run in asked(client, "runs")["runs"]}
    assert names == {"good", r"x\udcff", r"\u001b[2J", r"a\nb"}
    for name in names:
        assert asked(client, "metrics", run=name)["step"] == [1, 2, 3]


def test_links_in_a_circle_end_and_a_run_that_is_linked_twice_is_shown_once(tmp_path: Path) -> None:
    make_run(tmp_path / "kept" / "one", steps=3)
    for number in range(50):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "up").symlink_to(tmp_path / "runs")
        (tmp_path / "runs" / str(number) / "one").symlink_to(tmp_path / "kept" / "one")
    client = TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010")
    assert len(asked(client, "runs")["runs"]) == 1


def test_figures_that_are_no_numbers_are_left_out_and_names_are_bounded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", steps=3)
    many = ", ".join(f'"n{number}": 1' for number in range(5000))
    lines = ["[]", "17", '{"step": 1e999}', '{"step": "x"}', '{"step": [1]}', '{"step": 2, "loss/policy": NaN}']
    lines += [f'{{"step": 4, "x": [{{}}], {many}}}', '{"x": ' + "[" * 100_000, '{"step": 5']
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines))
    found = asked(TestClient(application(tmp_path / "runs"), base_url="http://127.0.0.1:8010"), "metrics", run="one")
    assert found["step"] == [1, 2, 3, 4]
    assert found["loss/policy"][1] is None
    assert "x" not in found
    assert len(found) <= 1000
