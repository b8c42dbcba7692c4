"""The text around the policy's turns, as the chat template writes it.

    template, a probe of an answer -> AnswerForm.split(sampled text) -> what precedes the content, content, thoughts
    context, messages, what the environment says -> between -> the text to append, and the context if it is rewritten

The place after the policy's last answer is found by a mark in a full rendering of the chat. If what the template writes
before the mark is not what the policy's context says, but for whitespace, the template has rewritten history (dropped
thoughts, for instance), and the episode goes on from the template's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.data.chat import ANSWER, QUESTION, Chats
from plaudit.data.fields import THOUGHTS, DataError, Message
from plaudit.data.marks import unused

ASKED: Message = {"role": "user", "content": "zqsentinelasked"}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the template writes of an answer: `head` and `tail` around the text of an answer without thoughts; `before`
    and `then` around the thoughts of one with them. None where it has no such answers."""

    head: str | None
    tail: str
    before: str | None
    then: str

    @classmethod
    def of(cls, chats: Chats) -> AnswerForm:
        """Read the form off a chat of one question."""
        head, _, tail = _answered(chats, {"content": ANSWER}).partition(ANSWER)
        thinking = _answered(chats, {"content": ANSWER, THOUGHTS[0]: QUESTION})
        before, _, rest = thinking.partition(QUESTION)
        then, _, other = rest.partition(ANSWER)
        tail = tail or other
        tail = next((tail.removesuffix(end) for end in chats.ends if tail.endswith(end)), "")
        return cls(head or None, tail, before if thinking else None, then)

    def split(self, text: str) -> tuple[str, dict[str, str]]:
        """Return what precedes the content in an answer without its end token, and its content with its thoughts."""
        if self.before is not None and text.startswith(self.before) and self.then in text:
            thoughts, _, content = text[len(self.before) :].partition(self.then)
            head = self.before + thoughts + self.then
            return head, {"content": content.removesuffix(self.tail), THOUGHTS[0]: thoughts}
        head = self.head if self.head is not None and text.startswith(self.head) else ""
        return head, {"content": text[len(head) :].removesuffix(self.tail)}

    def begins(self, text: str) -> bool:
        """True if the text of an unfinished answer may still be a part of what precedes the content."""
        thinks = self.before is not None and text.startswith(self.before) and self.then not in text
        return thinks or any(
            form is not None and form != text and form.startswith(text) for form in (self.head, self.before)
        )


def _answered(chats: Chats, answer: Message) -> str:
    """Return what the template writes for this answer; "" if it refuses it."""
    try:
        prompt = chats.prompt([ASKED], {})
        return chats.completion(prompt, [ASKED], {"role": "assistant", **answer}, {})
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class Between:
    """What follows an answer's content: `end`, which the answer's tokens hold (its calls, its end token), then `text`.
    `prefix`: what the template writes before all this in place of the context; None if the context stays."""

    end: str
    text: str
    prefix: str | None = None


def between(
    chats: Chats,
    context: str,
    messages: Sequence[Message],
    further: Sequence[Message],
    arguments: Mapping[str, Any],
    *,
    rest: str,
) -> Between:
    """Return what stands between the policy's answer, the last of `messages`, and the place of its next one, after the
    `further` messages. `context`: prompt, turns and observations as text, through the answer's content. `rest`: what
    the policy sampled after it, its calls and its end token. Raises DataError if the template hides a message."""
    arguments, *earlier, answer = chats.shown(arguments), *messages
    marks = unused(context + "".join(str(one.get("content")) for one in further)).pattern[1:4:2]
    marked = [*earlier, {**answer, "content": answer["content"] + marks[0]}]
    before, shown, after = chats.rendered([*marked, *further], arguments, ask=True).rpartition(marks[0])
    if not shown:
        raise DataError("the chat template hides an answer before what follows it. Set data.chat_template=default.")
    first = len(after)
    for number, one in enumerate(further):
        said = str(one.get("content") or "")
        probed = {**one, "content": f"{said[: len(said) // 2]}{marks[1]}{said[len(said) // 2 :]}"}
        text = chats.rendered([*marked, *further[:number], probed, *further[number + 1 :]], arguments, ask=True)
        if marks[1] not in text:
            raise DataError(
                f"the chat template does not show a message of the role {one['role']!r} after an answer. Set "
                "data.chat_template=default, which shows all, or let the environment answer in the role user."
            )
        first = min(first, text.index(marks[1]) - text.rindex(marks[0]))
    written = chats.through_end(after) if rest else ""
    written = "" if len(written) >= first else written  # an end token of what follows
    stays = _squeezed(before) == _squeezed(context) and _squeezed(written) == _squeezed(rest)
    return Between(written, after[len(written) :], None if stays else before)


def _squeezed(text: str) -> str:
    return "".join(text.split())
