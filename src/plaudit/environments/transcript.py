"""The tokens of an episode so far: appended as sampled, never rendered again.

    first question -> context -> answered(Completion) -> a message -> observe(what the environment says) -> context ...

What stands between two turns are the tokens of the text that the template writes there (`turns.py`); they are not
trained, and have no log-probs. A template that rewrites history begins a further row (restart).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from plaudit.data.chat import Chats
from plaudit.data.fields import template_arguments
from plaudit.environments.answers import Reads, encoded
from plaudit.environments.base import EpisodeError, Message
from plaudit.environments.calls import as_messages
from plaudit.environments.turns import between
from plaudit.types import Completion, Episode, Finish, Numbers, Prompt, Sampling, Score

STEPPED = 256
"""Most tokens of an observation that are read a token a step, after the cache of the turn before. With a longer one the
whole context is computed in one pass."""
COUNTED = ("calls", "failed_calls", "unread_calls")
"""Figures of an episode with tools, beside its turns."""


class Transcript:
    """The tokens of an episode so far, and its chat."""

    def __init__(self, prompt: Prompt, chats: Chats, forms: Reads, *, most: int):
        self.prompt, self.chats, self.forms = prompt, chats, forms
        self.most = len(prompt.tokens) + most
        """Most tokens of a context."""
        self.same = len(prompt.messages)
        """Number of the first messages that are the prompt's."""
        self.messages: list[Message] = [dict(turn) for turn in prompt.messages]
        self.arguments = template_arguments(prompt.extra)
        self.context, self.text = list(prompt.tokens), prompt.text
        self.first = len(self.context)
        """Number of the context's first tokens that are computed in one pass."""
        self.last = ""
        """The content of the last answer, as others read it."""
        self.said, self.rest = "", ""
        """The context's text through the content of the last answer, and what was sampled after that."""
        self.tokens, self.logprobs = Numbers("i"), Numbers("f")
        self.versions, self.sampled = Numbers("i"), Numbers("b")
        self.restarts: list[tuple[int, Sequence[int]]] = []
        self.process: list[tuple[int, float]] = []
        """What turns before the last earned, as (last token of the turn, reward)."""
        self.counts = Counter[str](turns=0, **dict.fromkeys(COUNTED if forms.calls else (), 0))
        self.finish = Finish.EOS

    @property
    def room(self) -> int:
        """Number of tokens that the episode may still grow by."""
        return self.most - len(self.context)

    def ask(self, question: Sequence[Message]) -> None:
        """Add a first question of the environment: a text to the last turn of the prompt, if that is a user's too."""
        if not question:
            return
        *before, last = self.messages
        first, *more = question
        if first["role"] == last["role"] == "user":
            self.messages = [*before, {**last, "content": f"{last['content']}\n{first['content']}".strip()}, *more]
            self.same = len(before)
        else:
            self.messages = [*self.messages, *question]
        self.open()

    def open(self) -> None:
        """Begin with the tokens of all messages."""
        try:
            self.text, self.context = self.forms.opened(self.chats, self.messages, self.arguments)
        except ValueError as error:
            raise EpisodeError(f"the first question: {error}") from error
        self.first = len(self.context)
        self.restarts = [(0, tuple(self.context))]
        if self.room < 1:
            raise EpisodeError(
                "the first question leaves no room for an answer within environment.max_tokens: with it the prompt has "
                f"{len(self.context)} tokens, {len(self.prompt.tokens)} without it"
            )

    def answered(self, answer: Completion, sampling: Sampling) -> None:
        """Append the tokens of an answer, and its message with the calls that it makes."""
        whole = list(answer.tokens[:-1] if answer.finish is Finish.EOS else answer.tokens)
        found = self.forms.read(self.chats.tokenizer, whole, sampling, stopped=answer.finish is Finish.STOP)
        calls, message = found.calls, found.message
        made: Message = as_messages(calls, first=self.counts["calls"]) if calls else {"role": "assistant"}
        self.messages.append({**made, **message})
        self.last = found.last
        end = str(self.chats.tokenizer.decode(list(answer.tokens[len(whole) :]), skip_special_tokens=False))
        before = found.head + message["content"]
        self.said, self.rest = self.text + before, found.text[len(before) :] + end
        self._append(answer.tokens, answer.logprobs, answer.versions, sampled=1)
        self.counts.update(
            {"turns": 1, **({"calls": len(calls), "unread_calls": found.unread} if self.forms.calls else {})}
        )
        self.finish = answer.finish

    def observe(self, messages: Sequence[Message]) -> bool:
        """Append the environment's messages, as the template writes them after an answer. Return False, with nothing
        appended, if no room would be left for an answer. Raises EpisodeError for messages that it cannot show."""
        rewritten, tokens, text = self._further(messages)
        context = self.context if rewritten is None else rewritten
        if len(context) + len(tokens) >= self.most:
            return False
        if rewritten is not None:
            self.context = rewritten
            self.restarts.append((len(self.tokens), tuple(rewritten)))
        self.text = text
        self.messages.extend(dict(message) for message in messages)
        self._append(tokens, [0.0] * len(tokens), [-1] * len(tokens), sampled=0)
        if rewritten is not None or len(tokens) > STEPPED:
            self.first = len(self.context)
        return True

    def _further(self, messages: Sequence[Message]) -> tuple[list[int] | None, list[int], str]:
        """Return the context if it is rewritten, the tokens that follow it, and the text of both."""
        try:
            found = between(self.chats, self.said, self.messages, messages, self.arguments, rest=self.rest)
            tokens = encoded(self.chats.tokenizer, found.text)
            if found.prefix is None:
                return None, tokens, self.said + found.end + found.text
            before = found.prefix + found.end
            return encoded(self.chats.tokenizer, before), tokens, before + found.text
        except ValueError as error:
            raise EpisodeError(str(error)) from error

    def completion(self, earned: Score) -> Completion:
        """Return the episode as a completion, whose text is the policy's last message."""
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            text=self.last,
            finish=self.finish,
            episode=Episode(
                sampled=self.sampled,
                restarts=tuple(self.restarts),
                messages=tuple(self.messages[self.same :]),
                counts={name: float(count) for name, count in self.counts.items()},
                earned=replace(earned, process=tuple(self.process)),
            ),
        )

    def _append(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, sampled: int
    ) -> None:
        self.context.extend(tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.sampled.extend([sampled] * len(tokens))
