"""A language model that compares answers, over real HTTP: order, ties, retries, deadlines, cache, bad replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from completions import Endpoint, longer, said, shown

from plaudit.rewards import llm, remote
from plaudit.rewards.llm import UNPARSED, Decision, LlmJudge, verdict
from plaudit.rewards.remote import RewardServerError
from plaudit.rewards.settings import LlmSettings
from plaudit.runtime.coroutines import finished, together
from plaudit.support.fields import SettingsError, check


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(llm, "FIRST_REST", 0.01)
    with Endpoint(longer) as made:
        yield made


@pytest.fixture
def judge(endpoint: Endpoint, tmp_path: Path) -> Callable[..., LlmJudge]:
    def make(**changes: Any) -> LlmJudge:
        given = {"url": endpoint.url, "model": "judge-1", "cache": str(tmp_path / "cache"), "retries": 2}
        return LlmJudge(LlmSettings(**{**given, **changes}))

    return make


def decide(judge: LlmJudge, *pairs: tuple[str, str], prompt: str = "Which?") -> list[Decision]:
    return finished(together(judge.decide(prompt, *pair) for pair in pairs))


def test_both_orders_are_asked_and_the_last_verdict_counts(endpoint: Endpoint, judge: Any) -> None:
    won, lost, tied = decide(judge(criterion="length alone"), ("long", "no"), ("no", "long"), ("ab", "cd"))
    assert (won.value, lost.value, tied.value) == (1.0, 0.0, 0.5)
    assert all(one.consistent for one in (won, lost, tied))
    assert set(map(shown, endpoint.asked)) == {("long", "no"), ("no", "long"), ("ab", "cd"), ("cd", "ab")}
    body = endpoint.asked[0]
    assert (body["path"], body["model"], body["temperature"]) == ("/v1/chat/completions", "judge-1", 0)
    assert "decided by length alone." in body["messages"][0]["content"]
    assert "<prompt>\nWhich?\n</prompt>" in body["messages"][1]["content"]


def test_a_judge_that_favours_a_place_decides_nothing(endpoint: Endpoint, judge: Any) -> None:
    endpoint.reply = lambda body: said("[[A]]")
    (decision,) = decide(judge(), ("good", "bad"))
    assert decision.value == 0.5
    assert decision.verdicts == (1.0, 0.0)
    assert not decision.consistent


def test_equal_answers_tie_without_a_question(endpoint: Endpoint, judge: Any) -> None:
    assert decide(judge(), ("same", "same"))[0].value == 0.5
    assert endpoint.asked == []


def test_texts_with_the_questions_own_words_are_shown_as_they_are(endpoint: Endpoint, judge: Any) -> None:
    decide(judge(), ("{second} [[B]]", "{prompt}"), prompt="{first}")
    assert shown(endpoint.asked[0]) == ("{second} [[B]]", "{prompt}")
    assert "<prompt>\n{first}\n</prompt>" in endpoint.asked[0]["messages"][1]["content"]


def test_replies_are_kept_on_disk_and_asked_again_where_anything_differs(endpoint: Endpoint, judge: Any) -> None:
    first = decide(judge(), ("long", "no"))
    assert len(endpoint.asked) == 2
    endpoint.reply = lambda body: (500, "down")
    assert decide(judge(), ("long", "no")) == first
    assert len(endpoint.asked) == 2
    endpoint.reply = longer
    for number, changes in enumerate(({"model": "other"}, {"criterion": "tone"}, {"options": {"max_tokens": 9}}), 1):
        decide(judge(**changes), ("long", "no"))
        assert len(endpoint.asked) == 2 + 2 * number
    assert endpoint.asked[-1]["max_tokens"] == 9


def test_a_damaged_file_of_the_cache_is_asked_again(endpoint: Endpoint, judge: Any, tmp_path: Path) -> None:
    decide(judge(), ("long", "no"))
    for file in (tmp_path / "cache").iterdir():
        file.write_text(file.read_text()[:20])
    assert decide(judge(), ("long", "no"))[0].value == 1.0
    assert len(endpoint.asked) == 4


def test_replies_without_a_verdict_are_counted_as_such(endpoint: Endpoint, judge: Any) -> None:
    texts = iter(["I cannot say.", "[[B]]", None, "[[D]]"])
    endpoint.reply = lambda body: said(next(texts))
    for pair in (("a", "bb"), ("c", "dd")):
        (decision,) = decide(judge(), pair)
        assert (decision.value, decision.reason) == (None, UNPARSED)


def test_what_may_pass_is_sent_again(endpoint: Endpoint, judge: Any) -> None:
    answers = iter([(500, "down"), (429, "slow down"), longer, longer])

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        found = next(answers)
        return found(body) if callable(found) else found

    endpoint.reply = reply
    one = judge(concurrency=1)
    assert decide(one, ("long", "no"))[0].value == 1.0
    assert (one.asked, one.answered) == (4, 2)


def test_an_endpoint_that_never_answers_ends_the_evaluation(endpoint: Endpoint, judge: Any) -> None:
    endpoint.reply = lambda body: (503, "no")
    with pytest.raises(RewardServerError, match=r"status 503: no, 3 times"):
        decide(judge(), ("long", "no"))
    assert len(endpoint.asked) == 3
    endpoint.reply = lambda body: (200, "<html>")
    with pytest.raises(RewardServerError, match="not a chat completion"):
        decide(judge(), ("long", "no"))


def test_a_wrong_token_ends_it_at_once(endpoint: Endpoint, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.reply = lambda body: (401, "who are you?")
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with pytest.raises(RewardServerError, match="status 401: who are you"):
        decide(judge(token_env="JUDGE_TOKEN"), ("long", "no"))
    assert len(endpoint.asked) == 1
    assert endpoint.headers[0]["authorization"] == "Bearer secret"
    with pytest.raises(RewardServerError, match=r"NO_TOKEN .*empty"):
        judge(token_env="NO_TOKEN")


def test_a_refused_question_is_no_decision_and_the_others_stand(endpoint: Endpoint, judge: Any) -> None:
    endpoint.reply = lambda body: (400, "too long") if "huge" in str(body) else longer(body)
    refused, won = decide(judge(), ("huge", "no"), ("long", "no"))
    assert refused.value is None
    assert "status 400: too long" in refused.reason
    assert won.value == 1.0


def test_a_request_has_a_deadline(endpoint: Endpoint, judge: Any) -> None:
    over = threading.Event()
    endpoint.reply = lambda body: (over.wait(10), longer(body))[1]
    began = time.monotonic()
    with pytest.raises(RewardServerError, match=r" 0\.1 s, 2 times"):
        decide(judge(timeout=0.1, retries=1), ("long", "no"))
    over.set()
    assert time.monotonic() - began < 5


def test_redirects_and_large_replies_are_refused(endpoint: Endpoint, judge: Any) -> None:
    endpoint.reply = lambda body: (302, "elsewhere")
    with pytest.raises(RewardServerError, match="status 302"):
        decide(judge(), ("long", "no"))
    endpoint.reply = lambda body: said("x" * (remote.LARGEST_ANSWER + 1))
    with pytest.raises(RewardServerError, match="4 MiB"):
        decide(judge(), ("long", "no"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("[[A]]", 1.0), ("x [[B]]\n", 0.0), ("[[C]]", 0.5), ("[[A]] no, [[B]]", 0.0), ("[A]", None), ("[[a]]", None)],
)
def test_verdicts(text: str, value: float | None) -> None:
    assert verdict(text) == value


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "ftp://x", "model": "m"}, "ftp://x"),
        ({"url": "http://x"}, "give both"),
        ({"url": "http://u:p@x", "model": "m"}, "password"),
    ],
)
def test_contradictions_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        check(LlmSettings(**given))
