"""OpenAI's chat protocol as values: what a request asks, and what is said about an answer.

    JSON -> read -> ChatRequest -> (speaker.py) Completion, Spoken -> choice, usage -> JSON

Fields that change nothing are ignored. Fields and values that would change the answer, and that no engine here can
follow, are refused: the alternatives of a token (top_logprobs), penalties, forced calls, forms of JSON, images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from plaudit.data.fields import THOUGHTS, DataError, Fields, Message, template_arguments, tool_inner, tool_name
from plaudit.environments.answers import Spoken
from plaudit.environments.calls import as_messages
from plaudit.rollout.settings import LEAST_TEMPERATURE, DrawSettings
from plaudit.support.fields import nearest, setting, shown, wrong
from plaudit.types import Completion, Finish

MOST_ANSWERS = 128
MOST_STOPS, LONGEST_STOP = 16, 1000
LARGEST = 1 << 31
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction")
"""Fields that change no answer."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
"""Fields with the only values that are supported."""


class RequestError(ValueError):
    """A request that is refused, with the field that is wrong, the HTTP status, and OpenAI's code if there is one."""

    def __init__(self, reason: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(reason)
        self.status = status
        self.body = error_body(reason, status, param=param, code=code)


def error_body(reason: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    reason, param = _text(reason), None if param is None else _text(param)
    kinds = {401: "authentication_error", 403: "permission_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": reason, "type": kind, "param": param, "code": code}}


def _text(text: str) -> str:
    """Return the text with question marks for what is no Unicode, half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


@dataclass
class ChatRequest(DrawSettings):
    """What a request asks. Beside OpenAI's fields it may set top_k, min_tokens, special_tokens and
    chat_template_kwargs."""

    model: str = ""
    messages: Any = None
    """Turns as `Fields.messages` returns them, at least one."""
    tools: list[Any] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    n: int = setting(1, least=1, most=MOST_ANSWERS)
    """Number of answers."""
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, bool] = field(default_factory=dict)
    logprobs: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The chat template's arguments."""
        return template_arguments({"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs})


def read(body: Any, *, most: int) -> ChatRequest:
    """Read a request. `most` is the limit of its answers' tokens, whatever it asks. Raises RequestError."""
    if not isinstance(body, Mapping):
        raise RequestError(f"the request is {shown(body)}; it must be an object with messages")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    chosen = {name: given.pop(name, allowed[0]) for name, allowed in PLAIN.items()}
    for name, value in chosen.items():
        if value not in PLAIN[name]:
            allowed = " or ".join(map(json.dumps, PLAIN[name]))
            raise RequestError(f"{name}={shown(value)} is not supported: leave it out, or give {allowed}", name)
    given["max_tokens"] = given.pop("max_completion_tokens", given.get("max_tokens", most))
    if type(given["max_tokens"]) is int:
        given["max_tokens"] = min(given["max_tokens"], most)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    known = {one.name for one in fields(ChatRequest)}
    if unknown := next((name for name in given if name not in known), None):
        raise RequestError(f"there is no field {unknown}{nearest(unknown, known | {*PLAIN})}", unknown)
    request = ChatRequest(**given)
    if problems := wrong(request):
        raise RequestError("; ".join(problems), problems[0].partition("=")[0])
    if 0 < request.temperature < LEAST_TEMPERATURE:
        reason = f"temperature={request.temperature} is below {LEAST_TEMPERATURE}: give 0 (greedy), or a larger one"
        raise RequestError(reason, "temperature")
    if len(request.stop) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in request.stop):
        raise RequestError(f"stop: give at most {MOST_STOPS} texts of {LONGEST_STOP} characters", "stop")
    if request.top_k > LARGEST:
        raise RequestError(f"top_k={request.top_k} is above {LARGEST}", "top_k")
    request.tools = [] if chosen["tool_choice"] == "none" else [_tool(tool) for tool in request.tools]
    try:
        request.messages, _ = Fields(body, "").messages("messages"), request.arguments
    except DataError as error:
        raise RequestError(error.reason, "messages") from error
    return request


def _tool(tool: Any) -> dict[str, Any]:
    """Return a function's schema as chat templates read it, without `strict`, which no engine here enforces."""
    if not tool_name(tool) or tool.get("type", "function") != "function":
        raise RequestError(f"the tool {shown(tool)} is no function with a name", "tools")
    return {"type": "function", "function": {key: one for key, one in tool_inner(tool).items() if key != "strict"}}


def message(said: Spoken, first: int) -> Message:
    """Return an answer's message; ids of its calls count from `first` on."""
    found: Message = {"role": "assistant", "content": said.last or (None if said.calls else ""), "refusal": None}
    if said.thoughts:
        found[THOUGHTS[0]] = said.thoughts
    if said.calls:
        found["tool_calls"] = as_messages(said.calls, first=first)["tool_calls"]
        for call in found["tool_calls"]:
            called = call["function"]
            called |= {"name": _text(called["name"]), "arguments": json.dumps(called["arguments"])}
    return found


def finish_reason(completion: Completion, said: Spoken) -> str:
    if completion.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if said.calls else "stop"


def logprobs(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    """Return the log-prob of each sampled token, the end token included, under the distribution that it was drawn
    from."""
    texts = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in completion.tokens]
    content = [
        {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else [*text.encode()], "top_logprobs": []}
        for text, logprob in zip(texts, completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def usage(prompt: int, completions: Sequence[Completion]) -> dict[str, int]:
    """Return the tokens of the prompt, which counts once, and of its answers."""
    sampled = sum(completion.length for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
