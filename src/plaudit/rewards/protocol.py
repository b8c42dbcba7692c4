"""The protocol between a run and a reward server; docs/rewards.md describes it.

    Prompt, Completion -> item -> request -> (server) RewardItem -> scores -> answer -> Score

Neither side trusts the other's bytes. A value that is not a finite number becomes a Score without a value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.rewards.functions import beyond
from plaudit.support.bounded import record
from plaudit.types import LARGEST_SCORE, NOT_APPLICABLE, Completion, Finish, Prompt, Score

VERSION = 1
MOST_ITEMS = 1024
"""Largest number of items in one request."""
REASON_LENGTH = 300


class ProtocolError(ValueError):
    """A request or an answer does not follow the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One item of a request, as a server reads it. `same_vocabulary`: it has tokens of the judge's own vocabulary."""

    prompt: Prompt
    completion: Completion
    same_vocabulary: bool


def item(prompt: Prompt, completion: Completion) -> str:
    """Write one completion as JSON. Raises ValueError if a column of its row cannot be written."""
    content: dict[str, Any] = {
        "prompt": prompt.text,
        "completion": completion.text,
        "finish": str(completion.finish),
        "prompt_tokens": prompt.tokens,
        "completion_tokens": list(completion.tokens),
    }
    if prompt.answer is not None:
        content["answer"] = prompt.answer
    if prompt.messages:
        content["messages"] = [dict(message) for message in prompt.messages]
    if prompt.extra:
        content["extra"] = dict(prompt.extra)
    return json.dumps(content, default=str, allow_nan=False)


def request(items: Sequence[str], *, vocabulary: str, options: Mapping[str, Any]) -> bytes:
    head: dict[str, Any] = {"version": VERSION, "vocabulary": vocabulary}
    if options:
        head["options"] = dict(options)
    return f'{json.dumps(head, default=str)[:-1]}, "items": [{", ".join(items)}]}}'.encode()


def read_request(body: bytes, *, vocabulary: str) -> list[RewardItem]:
    """Read the items of a request. `vocabulary`: the digest of the server's. Raises ProtocolError for a bad request."""
    content = _loaded(body)
    if content.get("version") != VERSION:
        raise ProtocolError(f'"version" is {content.get("version")!r:.40}, this server speaks {VERSION}')
    items = content.get("items")
    if not isinstance(items, list) or not items:
        raise ProtocolError('"items" must be a list of at least one item')
    if len(items) > MOST_ITEMS:
        raise ProtocolError(f"{len(items)} items in one request, at most {MOST_ITEMS} are allowed")
    same = bool(vocabulary) and content.get("vocabulary") == vocabulary
    return [_question(number, value, same) for number, value in enumerate(items)]


def _question(number: int, value: Any, same_vocabulary: bool) -> RewardItem:
    if not isinstance(value, dict):
        raise ProtocolError(f"items.{number} must be an object")
    text, reply = value.get("prompt"), value.get("completion")
    if not isinstance(text, str) or not isinstance(reply, str):
        raise ProtocolError(f'items.{number} must have the texts "prompt" and "completion"')
    tokens = [_tokens(value.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    finish = value.get("finish", Finish.EOS)
    if finish not in list(Finish):
        raise ProtocolError(f'items.{number}: "finish" must be one of {", ".join(Finish)}')
    answer, messages, extra = value.get("answer"), value.get("messages") or [], value.get("extra")
    if not isinstance(messages, list) or not all(map(_is_turn, messages)):
        raise ProtocolError(f'items.{number}: "messages" must be a list of objects with the texts "role" and "content"')
    asked, answered = tokens[0] or (), tokens[1] or ()
    return RewardItem(
        prompt=Prompt(
            id=str(number),
            text=text,
            tokens=asked,
            answer=answer if isinstance(answer, str) else None,
            messages=tuple(messages),
            extra=extra if isinstance(extra, dict) else {},
        ),
        completion=Completion(
            tokens=answered,
            logprobs=(0.0,) * len(answered),
            versions=(-1,) * len(answered),
            text=reply,
            finish=Finish(finish),
        ),
        same_vocabulary=same_vocabulary and bool(asked) and bool(answered),
    )


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _tokens(value: Any) -> tuple[int, ...] | None:
    """Return the tokens, or None if they are missing or invalid; then the texts are used."""
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        return None
    return tuple(value)


def answer(scores: Sequence[Score]) -> bytes:
    """Write a server's reply. Numbers keep every bit, since their shortest form in JSON reads back exactly."""
    content = {"version": VERSION, "scores": [s.value for s in scores], "reasons": [s.reason for s in scores]}
    return json.dumps(content, allow_nan=False).encode()


def read_answer(body: bytes, count: int) -> list[Score]:
    """Read the scores of `count` items, in order. Raises ProtocolError unless there are exactly `count` of them."""
    content = _loaded(body)
    scores, reasons = content.get("scores"), content.get("reasons")
    if not isinstance(scores, list):
        raise ProtocolError('the answer has no list "scores"')
    if len(scores) != count:
        raise ProtocolError(f"{count} items were sent, and {len(scores)} scores came back")
    if not isinstance(reasons, list) or len(reasons) != count:
        reasons = [None] * count
    return [_score(value, reason) for value, reason in zip(scores, reasons, strict=True)]


def _score(value: Any, reason: Any) -> Score:
    if value is None and reason == NOT_APPLICABLE:
        return Score(value=None, reason=NOT_APPLICABLE)
    if value is None:
        said = reason[:REASON_LENGTH] if isinstance(reason, str) and reason else "no reason given"
        return Score(value=None, reason=f"not scored by the server: {said}")
    if type(value) not in (int, float):  # a bool is an int, but no score
        return Score(value=None, reason=f"the server's score is {value!r:.40}, a {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_SCORE:
        return Score(value=None, reason=f"the server's score is {number}{beyond(number)}")
    return Score(value=number)


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Return a digest that is equal for tokenizers with the same tokens under the same ids."""
    written = json.dumps(sorted(vocabulary.items())).encode()
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _loaded(body: bytes) -> dict[str, Any]:
    try:
        return record(body)
    except ValueError as error:
        raise ProtocolError(f"no JSON object: {error!s:.100}") from None
