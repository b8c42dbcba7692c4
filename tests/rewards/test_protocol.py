import json
import math
import random
from typing import Any

import pytest

from plaudit.rewards import protocol
from plaudit.rewards.protocol import ProtocolError
from plaudit.types import NOT_APPLICABLE, Completion, Finish, Prompt, Score


def completion(text: str, *tokens: int, finish: Finish = Finish.EOS) -> Completion:
    zeros = (0.0,) * len(tokens)
    return Completion(tokens=tokens, logprobs=zeros, versions=(0,) * len(tokens), text=text, finish=finish)


PROMPT = Prompt(id="p", text="2+2=", tokens=(5, 6), answer="4", extra={"level": 1})


def test_what_is_asked_is_what_is_read() -> None:
    items = [
        protocol.item(PROMPT, completion("4", 7, 9)),
        protocol.item(PROMPT, completion("\udc80é", 8, finish="length")),
    ]
    body = protocol.request(items, vocabulary="abc", options={"strict": True})
    content = json.loads(body)
    assert content["version"] == 1
    assert content["options"] == {"strict": True}
    assert content["items"][0] == {
        "prompt": "2+2=",
        "completion": "4",
        "finish": "eos",
        "prompt_tokens": [5, 6],
        "completion_tokens": [7, 9],
        "answer": "4",
        "extra": {"level": 1},
    }
    first, second = protocol.read_request(body, vocabulary="abc")
    assert (first.prompt.tokens, first.completion.tokens, first.same_vocabulary) == ((5, 6), (7, 9), True)
    assert (first.prompt.answer, second.completion.finish, second.completion.text) == ("4", Finish.LENGTH, "\udc80é")
    assert not any(question.same_vocabulary for question in protocol.read_request(body, vocabulary="other"))


@pytest.mark.parametrize("tokens", ["null", '"12"', "[1, true]", "[1, 2.0]", "[1, -1]", '["1"]', "[]", "{}"])
@pytest.mark.parametrize("side", ["prompt_tokens", "completion_tokens"])
def test_what_is_no_list_of_tokens_leaves_the_texts_to_count(side: str, tokens: str) -> None:
    given = {"prompt_tokens": "[0, 3]", "completion_tokens": "[0, 4]"} | {side: tokens}
    columns = ", ".join(f'"{name}": {value}' for name, value in given.items())
    body = f'{{"version": 1, "vocabulary": "abc", "items": [{{"prompt": "a", "completion": "b", {columns}}}]}}'
    (question,) = protocol.read_request(body.encode(), vocabulary="abc")
    assert not question.same_vocabulary
    whole = body.replace(f'"{side}": {tokens}', f'"{side}": [0, 5]')
    (question,) = protocol.read_request(whole.encode(), vocabulary="abc")
    assert question.same_vocabulary and question.completion.logprobs == (0.0, 0.0)
    (question,) = protocol.read_request(whole.replace("abc", "").encode(), vocabulary="")
    assert not question.same_vocabulary, "a server without a vocabulary shares it with nobody"


def test_as_many_items_as_allowed_and_answers_that_are_no_texts() -> None:
    one = b'{"prompt": "a", "completion": "b", "answer": 4}'
    questions = protocol.read_request(b'{"version": 1, "items": [' + b",".join([one] * 1024) + b"]}", vocabulary="abc")
    assert [question.prompt.id for question in questions] == [str(number) for number in range(1024)]
    told = {(one.prompt.text, one.completion.text, one.prompt.answer, one.same_vocabulary) for one in questions}
    assert told == {("a", "b", None, False)}, "two texts are enough"


def test_chats_are_sent_as_they_are() -> None:
    turns = ({"role": "user", "content": "2+2="},)
    asked = Prompt(id="p", text="2+2=", tokens=(5,), messages=turns)
    written = json.loads(protocol.item(asked, completion("4", 7)))
    assert written["messages"] == list(turns)
    assert not {"answer", "extra"} & set(written)
    assert "options" not in json.loads(protocol.request(["{}"], vocabulary="", options={}))


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ('["too long", null]', ["too long", "no reason given"]),
        ('["", 7]', ["no reason given"] * 2),
        ('["too long"]', ["no reason given"] * 2),
        ('"no"', ["no reason given"] * 2),
        (json.dumps(["x" * 301, "y" * 300]), ["x" * 300, "y" * 300]),
    ],
)
def test_reasons_of_a_server_are_cut_and_taken_where_they_fit(reasons: str, told: list[str]) -> None:
    scores = protocol.read_answer(f'{{"scores": [null, null], "reasons": {reasons}}}'.encode(), 2)
    assert [score.reason for score in scores] == [f"not scored by the server: {said}" for said in told]


def test_a_server_says_that_it_is_not_meant_for_an_answer() -> None:
    sent = [Score(value=1.0), Score(value=None, reason=NOT_APPLICABLE), Score(value=None, reason="too long")]
    received = protocol.read_answer(protocol.answer(sent), 3)
    assert [(score.failed, score.applicable) for score in received] == [(False, True), (False, False), (True, True)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[]", "but list"),
        (b'{"items": []}', '"version" is None'),
        (b'{"version": 1}', '"items" must be'),
        (b'{"version": 1, "items": []}', "at least one"),
        (b'{"version": 1, "items": [1]}', "items.0 .*object"),
        (b'{"version": 1, "items": [{"prompt": "a"}]}', "items.0 .*texts"),
        (b'{"version": 1, "items": [{"prompt": "a", "completion": "b", "finish": "x"}]}', "must be one of eos"),
        (b'{"version": 1, "items": [{"prompt": "a", "completion": "b", "finish": []}]}', "must be one of eos"),
        (b'{"version": 1, "items": [' + b",".join([b"{}"] * 1025) + b"]}", "at most 1024"),
    ],
)
def test_a_request_that_is_none_is_refused_with_the_reason(body: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        protocol.read_request(body, vocabulary="abc")


def test_scores_arrive_with_every_bit() -> None:
    generator = random.Random(0)
    values = [generator.gauss(0, 10 ** generator.randint(-20, 17)) for _ in range(500)]
    sent = [Score(value=value) for value in values] + [Score(value=None, reason="too long")]
    received = protocol.read_answer(protocol.answer(sent), len(sent))
    assert [score.value for score in received] == [*values, None]
    assert received[-1].reason == "not scored by the server: too long"


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"1"', "true", "[1]", "{}"]
)
def test_what_is_no_finite_number_is_no_score_and_takes_none_with_it(value: str) -> None:
    scores = protocol.read_answer(f'{{"scores": [1.5, {value}, 2]}}'.encode(), 3)
    assert [score.value for score in scores] == [1.5, None, 2.0]
    assert scores[1].reason is not None and scores[1].reason.startswith("the server's score is")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"7", b"{}", b'{"scores": 1}', b'{"scores": []}', b'{"scores": [1]}', b'{"scores": [1, 2, 3]}'],
)
def test_an_answer_that_cannot_be_matched_is_no_answer(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.read_answer(body, 2)


def test_damaged_answers_give_sent_numbers_or_none() -> None:
    """A thousand damaged copies of an answer: an error, or three scores of which each is finite or has a reason."""
    whole = protocol.answer([Score(value=1.25), Score(value=None, reason="no"), Score(value=-3.0)])
    generator = random.Random(1)
    for _ in range(1000):
        body = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        try:
            scores: list[Any] = protocol.read_answer(bytes(body), 3)
        except ProtocolError:
            continue
        assert len(scores) == 3
        assert all(s.reason if s.value is None else math.isfinite(s.value) for s in scores)


def test_a_row_that_cannot_be_written_is_an_error() -> None:
    prompt = Prompt(id="p", text="p", tokens=(1,), extra={"level": math.nan})
    with pytest.raises(ValueError, match="JSON"):
        protocol.item(prompt, completion("c", 1))


def test_vocabularies_are_told_apart() -> None:
    digest = protocol.vocabulary_digest({"a": 0, "b": 1})
    assert digest == protocol.vocabulary_digest({"b": 1, "a": 0})
    assert digest != protocol.vocabulary_digest({"a": 1, "b": 0})
