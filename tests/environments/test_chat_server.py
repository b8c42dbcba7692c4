"""OpenAI's protocol over HTTP without sockets: answers of an engine, whole and as they are sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from written import Written

from plaudit.environments.answers import Forms
from plaudit.environments.server import application
from plaudit.environments.speaker import Speaker
from plaudit.environments.turns import AnswerForm
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.tokenizer import load_tokenizer
from plaudit.rollout.native import NativeEngine
from plaudit.types import Sampling

TOKEN = "0123456789abcdef"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "The acting"}], "max_tokens": 8, "seed": 1}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(demo: Any) -> Any:
    return load_tokenizer(str(demo.tokenizer))


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> NativeEngine:
    keys = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = fresh_model(keys, vocab_size=len(tokenizer), seed=3)
    assert isinstance(model, Decoder)
    return NativeEngine(model, tokenizer, slots=8)


def served(engine: Any, token: str | None = None) -> Any:
    speaker = Speaker(engine, engine.tokenizer)
    return application(speaker, model="tiny", names=("localhost",), most=200, token=token)


def written(tokenizer: Any, *texts: str, template: str | None = None, pause: float = 0.0) -> Any:
    from plaudit.data.template import DEFAULT_TEMPLATE

    tokenizer.chat_template = template or DEFAULT_TEMPLATE
    try:
        return served(Written(tokenizer, texts, pause))
    finally:
        tokenizer.chat_template = None


def ask(app: Any, *bodies: Any, path: str = "chat/completions", **more: Any) -> list[httpx2.Response]:
    """The responses to requests at the same time."""

    async def run() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:8000/v1/"
        ) as one:
            return list(await asyncio.gather(*(one.post(path, json=body, **more) for body in bodies)))

    return asyncio.run(run())


def answer(app: Any, **more: Any) -> dict[str, Any]:
    (reply,) = ask(app, ASKED | more)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def stream(app: Any, **more: Any) -> list[dict[str, Any]]:
    (reply,) = ask(app, ASKED | {"stream": True} | more)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = reply.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def deltas(events: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [found for event in events for one in event["choices"] if (found := one["delta"].get(name))]


def test_an_answer_has_the_form_of_the_protocol(engine: NativeEngine) -> None:
    found = answer(served(engine), model="tiny", logprobs=True)
    (choice,) = found["choices"]
    assert (found["object"], found["model"]) == ("chat.completion", "tiny")
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == found["usage"]["completion_tokens"] <= 8
    assert all(one["logprob"] < 0 for one in tokens)
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + len(tokens)


def test_a_seed_repeats_its_answers_also_beside_others_and_in_a_stream(engine: NativeEngine) -> None:
    app = served(engine)
    steps = engine.counts.steps
    alone = answer(app, n=2)
    alone_steps = engine.counts.steps - steps
    texts = [one["message"]["content"] for one in alone["choices"]]
    assert texts[0] != texts[1]
    many = [reply.json() for reply in ask(app, *[ASKED | {"n": 2, "seed": seed} for seed in (1, 2, 1, 3)])]
    assert engine.counts.steps - steps - alone_steps < 3 * alone_steps, "they are decoded together"
    assert [one["choices"] == alone["choices"] for one in many] == [True, False, True, False]
    events = stream(app, n=2, stream_options={"include_usage": True})
    for index, text in enumerate(texts):
        own = [event for event in events if event["choices"] and event["choices"][0]["index"] == index]
        assert "".join(deltas(own, "content")) == text
        assert own[-1]["choices"][0]["finish_reason"] == alone["choices"][index]["finish_reason"]
    assert events[-1]["usage"] == alone["usage"]


def test_a_stream_gives_text_as_it_is_sampled_and_no_part_of_a_stop_string(tokenizer: Any) -> None:
    text = "The acting was superb and the plot was dull"
    events = stream(written(tokenizer, text, pause=0.03), max_tokens=100, stop=["plot was"])
    pieces = deltas(events, "content")
    assert "".join(pieces) == "The acting was superb and the "
    assert len(pieces) > 2
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_unfinished_answer_shows_nothing_that_a_stop_string_or_a_special_token_may_take_back(tokenizer: Any) -> None:
    forms = Forms(AnswerForm(head=None, tail="", before=None, then=""), None)

    def settled(text: str, **how: Any) -> str:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return str(forms.settled(tokenizer, tokens, Sampling(**how), ends=())["content"])

    assert settled("The plot. And more", stop=(". A", "lot")) == "The p", "the earliest, though more follows"
    special = tokenizer.all_special_tokens[0]
    assert settled(f"The {special[:-1]}") == "The "
    assert settled(f"The {special}") == "The "


def test_calls_are_no_text(tokenizer: Any) -> None:
    text = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    app = written(tokenizer, text, text, text, pause=0.002)
    whole = answer(app, tools=[TOOL], max_tokens=200)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("I add.", "tool_calls")
    assert call == {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    events = stream(app, tools=[TOOL], max_tokens=200)
    assert "".join(deltas(events, "content")) == "I add."
    assert deltas(events, "tool_calls") == [[{"index": 0, **call}]]
    assert answer(app, max_tokens=200)["choices"][0]["message"]["content"] == text, "without tools it is text"


def test_thoughts_are_apart_where_the_template_has_them(tokenizer: Any) -> None:
    text = "<think>two and two</think>Four."
    app = written(tokenizer, text, text, template=THINKS, pause=0.002)
    message = answer(app, max_tokens=100)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("two and two", "Four.")
    events = stream(app, max_tokens=100)
    assert "".join(deltas(events, "reasoning_content")) == "two and two"
    assert "".join(deltas(events, "content")) == "Four."


def test_errors_have_the_form_of_the_protocol(engine: NativeEngine, tokenizer: Any) -> None:
    app = served(engine)
    long = {"messages": [{"role": "user", "content": "The acting was superb " * 50}]}
    replies = ask(app, {**ASKED, "model": "gpt-4"}, {**ASKED, "n": 0}, long, {**ASKED, "tools": [TOOL]})
    assert [reply.status_code for reply in replies] == [404, 400, 400, 400]
    errors = [reply.json()["error"] for reply in replies]
    assert [error["code"] for error in errors] == ["model_not_found", None, "context_length_exceeded", None]
    assert [error["param"] for error in errors] == ["model", "n", "messages", "tools"]
    (other,) = ask(app, {}, path="completions")
    assert (other.status_code, other.json()["error"]["type"]) == (404, "invalid_request_error")
    (broken,) = ask(written(tokenizer), ASKED)  # no text is left
    assert (broken.status_code, broken.json()["error"]["type"]) == (500, "server_error")
    (event,) = [
        one for one in ask(written(tokenizer), ASKED | {"stream": True})[0].text.split("\n\n") if "error" in one
    ]
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"


def test_clients_need_the_key(engine: NativeEngine) -> None:
    app = served(engine, TOKEN)
    (refused,) = ask(app, ASKED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    (reply,) = ask(app, ASKED, headers={"authorization": f"Bearer {TOKEN}"})
    assert reply.status_code == 200


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_slot(tokenizer: Any, streams: bool) -> None:
    engine = Written(tokenizer, ["The acting was superb . " * 40], pause=0.02)
    app = served(engine)
    body = json.dumps(ASKED | {"stream": streams, "max_tokens": 1000}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}

    async def run() -> None:
        sent, away = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await away.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        asked = asyncio.ensure_future(app({**scope, "asgi": {"spec_version": "2.3"}}, receive, send))
        while not engine.running:
            await asyncio.sleep(0.01)
        away.set()
        await asked
        while engine.busy:  # a generator that is not exhausted is closed by the loop
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert engine.running == {}
