"""Episodes in the form of a renderer: the user's object that writes chats as tokens and reads answers.

    chat -> render_ids -> sampled turn -> parse_response -> its message -> what the environment says
         -> bridge_to_next_turn -> tokens to append, or None: render_ids of the whole chat, a further row

The contract is that of the package renderers. It is for models whose chat template shows no tools, or writes calls that
cannot be read off it. Tools that a renderer shows count among the tokens after the row's prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from plaudit.data.chat import Chats
from plaudit.data.fields import THOUGHTS, Message
from plaudit.environments.answers import Forms, Reads, Spoken, decoded, others_read
from plaudit.environments.base import EpisodeError, explained
from plaudit.environments.calls import call_form
from plaudit.environments.settings import EnvironmentSettings
from plaudit.environments.transcript import Transcript
from plaudit.environments.turns import AnswerForm
from plaudit.support.plugins import load_object
from plaudit.types import Prompt, Sampling


class Renderer(Protocol):
    """What `environment.renderer` makes of a tokenizer. Messages and tools are as in OpenAI's protocol."""

    def render_ids(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return a chat's tokens, with `add_generation_prompt` up to where the policy answers."""
        ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> Any:
        """Return an answer with `content`, `reasoning_content`, and `tool_calls` with `status`, `name`, `arguments`."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """Return `token_ids`, which begin with both and go on to where the policy answers; None if they cannot."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedForms:
    """Writes chats and reads answers by a renderer. `asked`: the tokens that the next answer follows."""

    renderer: Renderer
    tools: Sequence[Any]
    asked: tuple[int, ...] = ()

    @property
    def calls(self) -> bool:
        return bool(self.tools)

    def opened(self, chats: Chats, messages: Sequence[Message], arguments: Mapping[str, Any]) -> tuple[str, list[int]]:
        with _named("render_ids"):
            given = [dict(one) for one in messages]
            return "", list(self.renderer.render_ids(given, tools=self._tools, add_generation_prompt=True))

    def read(self, tokenizer: Any, tokens: Sequence[int], sampling: Sampling, *, stopped: bool = False) -> Spoken:
        with _named("parse_response"):
            found = self.renderer.parse_response(list(tokens), tools=self._tools, prompt_ids=list(self.asked))
            attempts = list(found.tool_calls or ())
            calls = [(one.name, one.arguments) for one in attempts if one.status == "ok"]
            calls = [call for call in calls if isinstance(call[0], str) and isinstance(call[1], dict)]
            message: Message = {"content": str(found.content or "")}
            message |= {THOUGHTS[0]: str(found.reasoning_content)} if found.reasoning_content else {}
        return Spoken(
            text=decoded(tokenizer, tokens),
            head="",
            message=message,
            calls=calls,
            unread=len(attempts) - len(calls),
            last=others_read(tokenizer, message["content"], sampling, stopped=stopped),
        )

    def bridged(self, context: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens that follow the context, which ends with an answer; None if it cannot stay as it is."""
        before, whole = list(self.asked), list(context)
        with _named("bridge_to_next_turn"):
            given = [dict(one) for one in messages]
            found = self.renderer.bridge_to_next_turn(before, whole[len(before) :], given, tools=self._tools)
            tokens = [] if found is None else list(found.token_ids)
        return tokens[len(whole) :] if tokens[: len(whole)] == whole else None

    @property
    def _tools(self) -> list[Any] | None:
        return list(self.tools) or None


class Rendered(Transcript):
    """An episode whose chat a renderer writes."""

    forms: RenderedForms

    def ask(self, question: Sequence[Message]) -> None:
        super().ask(question)
        if not question:
            self.open()

    def open(self) -> None:
        super().open()
        self.forms = replace(self.forms, asked=tuple(self.context))

    def observe(self, messages: Sequence[Message]) -> bool:
        room = super().observe(messages)
        self.forms = replace(self.forms, asked=tuple(self.context) if room else self.forms.asked)
        return room

    def _further(self, messages: Sequence[Message]) -> tuple[list[int] | None, list[int], str]:
        if (tokens := self.forms.bridged(self.context, messages)) is not None:
            return None, tokens, ""
        return self.forms.opened(self.chats, [*self.messages, *messages], {})[1], [], ""


def renderer_of(settings: EnvironmentSettings, chats: Chats) -> Renderer | None:
    """Return what `environment.renderer` makes of the tokenizer; None without one. Raises ValueError if that fails."""
    if not settings.renderer:
        return None
    try:
        made: Renderer = load_object(settings.renderer)(chats.tokenizer)
        lacks = [name for name in ("render_ids", "parse_response", "bridge_to_next_turn") if not hasattr(made, name)]
        if lacks:
            raise TypeError(f"it returns a {type(made).__name__}, which has no {' and no '.join(lacks)}")
    except Exception as error:
        raise ValueError(f"environment.renderer={settings.renderer}: {explained(error)}") from error
    return made


def forms_of(chats: Chats, tools: Sequence[Any], renderer: Renderer | None = None) -> Reads:
    """Return how chats are written and answers read: by the renderer, or as the template does. Raises DataError for a
    template whose calls cannot be read, if there are tools."""
    if renderer is not None:
        return RenderedForms(renderer, tuple(tools))
    return Forms(AnswerForm.of(chats), call_form(chats) if tools else None)


def transcript(prompt: Prompt, chats: Chats, forms: Reads, *, most: int) -> Transcript:
    """Begin an episode in these forms, with at most `most` tokens after the prompt."""
    return (Rendered if isinstance(forms, RenderedForms) else Transcript)(prompt, chats, forms, most=most)


@contextmanager
def _named(method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EpisodeError(f"environment.renderer: {method}: {explained(error)}") from error
