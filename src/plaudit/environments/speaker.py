"""Answers chats with an engine: requests of OpenAI's protocol, whole or as they are sampled.

    ChatRequest -> prompt, Drafts -> [settled text -> delta]* -> Completion -> message, finish_reason

Requests share the engine's batches. Left out: HTTP (`server.py`), and the turns of an episode (`episodes.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.fields import THOUGHTS, DataError, Message
from plaudit.data.reader import Reader, encode_prompt, encode_texts
from plaudit.data.settings import DataSettings
from plaudit.environments import protocol
from plaudit.environments.answers import Forms, Spoken
from plaudit.environments.calls import call_form
from plaudit.environments.protocol import ChatRequest, RequestError
from plaudit.environments.turns import AnswerForm
from plaudit.rollout.queued import QueuedEngine
from plaudit.rollout.rollouter import completion_seed
from plaudit.rollout.settings import VllmStart
from plaudit.types import Completion, Finish

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""How a model of plain text reads a chat: the texts of all turns, one after the other."""
Say = Callable[[str], None]
EVERY = 0.02
"""Seconds between two looks at what has been sampled."""


class Speaker:
    """Answers in the form of a checkpoint's chat template. `as_chat`: read chats by the template (True) or as plain
    text; None: as the checkpoint was trained. Raises ValueError for True without a template."""

    def __init__(self, engine: QueuedEngine, tokenizer: Any, *, as_chat: bool | None = None):
        self.engine, self.tokenizer = engine, tokenizer
        settings = DataSettings(thoughts="closed", as_chat=as_chat)
        reader = Reader(tokenizer, settings, engine.ends)
        self.as_chat, self.chats = bool(reader.settings.as_chat), reader.chats
        if not self.as_chat:
            self.chats = Chats(tokenizer, replace(settings, chat_template=PLAIN_TEMPLATE), engine.ends)
        elif not self.chats.template:
            raise ValueError("the checkpoint has no chat template: give --text, to read chats as plain text")
        self.forms, self.no_calls = Forms(AnswerForm.of(self.chats), None), ""
        try:
            self.forms = replace(self.forms, call=call_form(self.chats))
        except DataError as error:
            self.no_calls = error.reason

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, slots: int, engine: str, as_chat: bool | None, say: Say) -> Speaker:
        """Build the engine, "native" or "vllm", for up to `slots` answers at once; `say` is called meanwhile."""
        from plaudit.rollout.build import build_engine  # loads torch, which `plaudit check` does without

        vllm = VllmStart(sleeps=False) if engine == "vllm" else None
        built = build_engine(model, tokenizer, slots=slots, vllm=vllm, say=say)
        assert isinstance(built, QueuedEngine)
        return cls(built, tokenizer, as_chat=as_chat)

    def speech(self, request: ChatRequest, key: str = "") -> Speech:
        """Begin to answer a request, whatever its api key. Raises RequestError for one that cannot be answered."""
        if request.tools and self.no_calls:
            raise RequestError(self.no_calls, "tools")
        try:
            text = self.chats.prompt(request.messages, request.arguments)
            tokens = encode_texts([text], self.tokenizer)[0] if self.as_chat else encode_prompt(text, self.tokenizer)
        except (TypeError, ValueError) as error:
            raise RequestError(str(error), "messages") from error
        if len(tokens) >= (most := self.engine.max_length):
            reason = f"the messages have {len(tokens)} tokens, and the model reads {most} with the answer: shorten them"
            raise RequestError(reason, "messages", code="context_length_exceeded")
        return Speech(self, request, tokens)


class Speech:
    """The answers to one request."""

    def __init__(self, speaker: Speaker, request: ChatRequest, tokens: Sequence[int]):
        self.request, self.prompt_tokens = request, len(tokens)
        self._tokenizer, self._engine, self._sampling = speaker.tokenizer, speaker.engine, request.draw()
        self._forms = speaker.forms if request.tools else replace(speaker.forms, call=None)
        self._first = sum(len(one.get("tool_calls", ())) for one in request.messages)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        plan = [replace(self._sampling, seed=completion_seed(seed, 0, number)) for number in range(request.n)]
        try:
            self._drafts = self._engine.drafts(tokens, plan)
        except ValueError as error:  # of vLLM, which takes fewer temperatures
            raise RequestError(str(error)) from error

    async def completions(self) -> list[Completion]:
        return await self._engine.answered(self._drafts)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return an answer as the protocol writes it."""
        said = self._said(completion)
        known = protocol.logprobs(completion, self._tokenizer) if self.request.logprobs else None
        reason = protocol.finish_reason(completion, said)
        message = protocol.message(said, self._first)
        return {"index": index, "message": message, "logprobs": known, "finish_reason": reason}

    async def pieces(self, completions: list[Completion]) -> AsyncIterator[dict[str, Any]]:
        """Yield the answers in pieces, each with a `delta`, as they are sampled: a call as one piece, log-probs with
        the last. `completions` gets the whole answers. An engine that reports an answer once gives it as one piece."""
        sent: list[Message] = [{"role": "assistant", "content": ""} for _ in range(self.request.n)]
        for index, message in enumerate(sent):
            yield _piece(index, dict(message))
        asked = asyncio.ensure_future(self.completions())
        try:
            while not (await asyncio.wait({asked}, timeout=EVERY))[0]:
                for index, draft in enumerate(self._drafts):
                    now = self._forms.settled(self._tokenizer, draft.tokens, self._sampling, self._engine.ends)
                    for delta in _further(sent[index], now):
                        yield _piece(index, delta)
            completions += asked.result()
        finally:
            asked.cancel()
        for choice in (self.choice(index, completion) for index, completion in enumerate(completions)):
            whole = choice.pop("message")
            for delta in _further(sent[choice["index"]], whole):
                yield _piece(choice["index"], delta)
            for number, call in enumerate(whole.get("tool_calls", ())):
                yield _piece(choice["index"], {"tool_calls": [{"index": number, **call}]})
            yield {**choice, "delta": {}}

    def _said(self, completion: Completion) -> Spoken:
        tokens = completion.tokens[:-1] if completion.finish is Finish.EOS else completion.tokens
        return self._forms.read(self._tokenizer, tokens, self._sampling, stopped=completion.finish is Finish.STOP)


def _piece(index: int, delta: Message) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _further(sent: Message, now: Message) -> Iterator[Message]:
    """Yield what a message's texts have beyond those that were sent, and note it in `sent`."""
    for name in (THOUGHTS[0], "content"):
        before, text = sent.get(name, ""), now.get(name) or ""
        if len(text) > len(before) and text.startswith(before):
            sent[name] = text
            yield {name: text[len(before) :]}
