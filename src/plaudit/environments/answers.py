"""An answer's tokens as a message: its content, its thoughts and its calls of tools.

tokens -> text -> (AnswerForm) head, thoughts, content -> (CallForm) content, calls -> Spoken
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plaudit.data.chat import Chats
from plaudit.data.fields import THOUGHTS, Message
from plaudit.environments.calls import Call, CallForm, overlap
from plaudit.environments.turns import AnswerForm
from plaudit.support.limits import rust_errors
from plaudit.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """What an answer says. `text` is all of it, `head` what precedes the content; `message` has the content as it was
    sampled, and thoughts; `last` is the content as others read it: up to a stop string, and without special tokens
    unless these are asked for. `unread` is the number of calls that cannot be read."""

    text: str
    head: str
    message: Message
    calls: Sequence[Call]
    unread: int
    last: str

    @property
    def thoughts(self) -> str:
        return str(self.message.get(THOUGHTS[0], ""))


class Reads(Protocol):
    """How chats are written for the policy, and its answers read. `calls`: also calls of tools."""

    @property
    def calls(self) -> bool: ...

    def opened(
        self, chats: Chats, messages: Sequence[Message], arguments: Mapping[str, Any]
    ) -> tuple[str, list[int]]: ...

    def read(self, tokenizer: Any, tokens: Sequence[int], sampling: Sampling, *, stopped: bool = False) -> Spoken: ...


@dataclass(frozen=True, slots=True)
class Forms:
    """How the chat template writes answers, and calls of tools; None without tools."""

    answer: AnswerForm
    call: CallForm | None

    @property
    def calls(self) -> bool:
        return self.call is not None

    def opened(self, chats: Chats, messages: Sequence[Message], arguments: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Return a chat as text and tokens, up to where the policy answers. Raises ValueError for one that the template
        or the tokenizer refuses."""
        text = chats.prompt(messages, arguments)
        return text, encoded(chats.tokenizer, text)

    def read(self, tokenizer: Any, tokens: Sequence[int], sampling: Sampling, *, stopped: bool = False) -> Spoken:
        """Read an answer without its end token. `stopped`: a stop string ended it."""
        text = decoded(tokenizer, tokens)
        head, message = self.answer.split(text)
        calls, unread = list[Call](), 0
        if self.call is not None:
            message["content"], calls, unread = self.call.parsed(message["content"])
        last = others_read(tokenizer, message["content"], sampling, stopped=stopped)
        return Spoken(text=text, head=head, message=message, calls=calls, unread=unread, last=last)

    def settled(self, tokenizer: Any, tokens: Sequence[int], sampling: Sampling, ends: Collection[int]) -> Message:
        """Return content and thoughts of an unfinished answer as far as no further token can change them: nothing until
        its head and its thoughts are whole, and no text that is, or may become, a call or a stop string."""
        text = decoded(tokenizer, tokens[:-1] if tokens and tokens[-1] in ends else tokens).rstrip("\ufffd")
        if self.answer.begins(text):
            return {}
        message = self.answer.split(text)[1]
        content = str(message["content"])
        if self.call is not None:
            content = self.call.before(content)
        content = min((content.partition(stop)[0] for stop in sampling.stop), key=len, default=content)
        marks = [*sampling.stop, self.answer.tail, *([] if sampling.special_tokens else tokenizer.all_special_tokens)]
        content = content[: len(content) - max(overlap(content, mark) for mark in marks)]
        return {**message, "content": _shown(tokenizer, content, sampling)}


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a part of a chat. Raises ValueError for a text that cannot be tokenised."""
    try:
        with rust_errors("the tokenizer"):
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text[-40:]!r} cannot be tokenised: {error}") from error


def others_read(tokenizer: Any, content: str, sampling: Sampling, *, stopped: bool) -> str:
    """Return an answer's content as others read it (`Spoken.last`)."""
    if stopped:
        content = min((content.partition(stop)[0] for stop in sampling.stop), key=len)
    return _shown(tokenizer, content, sampling)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    with rust_errors("the tokenizer"):
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def _shown(tokenizer: Any, text: str, sampling: Sampling) -> str:
    for token in () if sampling.special_tokens else tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text
