"""Requests of OpenAI's protocol, as values: what is read, and what is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plaudit.environments.answers import Spoken
from plaudit.environments.protocol import ChatRequest, RequestError, error_body, message, read

ASKED = {"messages": [{"role": "user", "content": "Hello"}]}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}


def asked(**more: Any) -> ChatRequest:
    return read({**ASKED, **more}, most=50)


def test_a_request_says_how_its_answers_are_drawn() -> None:
    draw = asked(temperature=0.5, top_p=0.9, stop="end", top_k=3).draw()
    assert (draw.temperature, draw.top_p, draw.top_k, draw.stop, draw.max_tokens) == (0.5, 0.9, 3, ("end",), 50)
    assert asked(max_tokens=7).max_tokens == asked(max_completion_tokens=7, max_tokens=9).max_tokens == 7
    assert asked(stop=["a", "b"], n=2, seed=-1).stop == ["a", "b"]
    assert asked(max_tokens=1 << 63).max_tokens == 50, "the server's limit"


def test_messages_are_turns_as_templates_read_them() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "0"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    first, answer, result = asked(messages=turns).messages
    assert first == {"role": "user", "content": "1 + 0"}
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert result == {"role": "tool", "tool_call_id": "a", "content": "1"}


def test_tools_are_shown_without_what_is_not_enforced_and_not_if_none_may_be_called() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert asked(tools=[TOOL], tool_choice="auto").arguments == {"tools": [schema]}
    assert asked(tools=[TOOL], tool_choice="none").arguments == {}
    assert asked(chat_template_kwargs={"thinking": False}).arguments == {"thinking": False}


def test_what_changes_nothing_is_ignored() -> None:
    plain = {"presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "top_logprobs": None}
    assert asked(user="me", metadata={"a": "b"}, store=False, **plain) == asked()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", 0.5),
        ("top_logprobs", 3),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("parallel_tool_calls", False),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 1e-45),  # 0 as float32: NaN for all that is decoded beside it
        ("top_k", 1 << 40),
        ("stop", ["a" * 2000]),
        ("stop", ["a"] * 20),
        ("n", 0),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("guided_json", {}),
        ("messages", []),
        ("messages", "Hello"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]),
        ("tools", [{"type": "web_search"}]),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        asked(**{param: value})
    error = raised.value.body["error"]
    assert (raised.value.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"] or param == "tools"


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="object"):
        read([], most=1)
    assert error_body("it broke", 500)["error"]["type"] == "server_error"


def test_half_a_character_in_a_request_or_a_call_breaks_no_reply() -> None:
    with pytest.raises(RequestError) as raised:
        asked(**{"\ud800": 1})
    json.dumps(raised.value.body, ensure_ascii=False).encode()
    call = ("f\ud83d", {"x": "\ud83d"})
    said = Spoken(text="", head="", message={"content": ""}, calls=[call], unread=0, last="")
    written = message(said, 0)
    json.dumps(written, ensure_ascii=False).encode()
    assert json.loads(written["tool_calls"][0]["function"]["arguments"]) == call[1]
