"""Chats to text as their template writes them: the prompt that asks for an answer, and the completion that answers.

    messages            -> template, asked for an answer -> prompt
    messages and answer -> template                      -> prompt + completion, through the token that ends it

The template decides what a completion holds beside the answer's text: a header, an empty thought, a space. If it does
not write an answered chat as the prompt and a continuation, the completion is put together to continue the prompt: a
policy is always asked with the prompt. Leaves out images.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from plaudit.data.fields import THOUGHTS, DataError, Message, shared_count, tool_name
from plaudit.data.settings import DataSettings
from plaudit.data.template import TODAY, chosen_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT_TAGS = {
    **{f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning", "seed:think", "mm:think")},
    "<|START_THINKING|>": "<|END_THINKING|>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
"""Tags that open a thought, with those that close it."""
SHAPES = 4096
"""Number of chat shapes for which the turns that the template leaves out are cached."""
QUESTION, ANSWER, AGAIN = "zqsentinelquestion", "zqsentinelanswer", "zqsentinelagain"
DATE = "zqtoday"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a template writes an answer, read off a chat of one question."""

    asks: str
    """What the generation prompt adds to the chat."""
    between: str
    """Text between prompt and answer, which is trained."""
    end: str
    """Text that is trained after the answer, through the first of the model's end tokens. Empty if the template writes
    none of those; then the tokenizer's eos_token ends the answer."""
    other_end: str
    """Text that the template writes after an answer instead of an end token."""
    open_thought: str
    """The tag of a thought that the generation prompt leaves open."""
    nests: bool
    """A longer chat's prompt begins with the row before it, so that the turns of a chat share one pass."""
    prints_date: bool
    """The template prints today's date."""

    def json(self) -> dict[str, Any]:
        return asdict(self)


class Chats:
    """Renders chats for one tokenizer. `ends` are the model's end tokens beside the tokenizer's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: DataSettings, ends: Collection[int] = ()):
        self.tokenizer, self.thoughts = tokenizer, settings.thoughts
        self.template = chosen_template(settings, tokenizer)
        ids = {*ends, tokenizer.eos_token_id} - {None}
        self.ends = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(ids))]
        self._unseen: dict[str, tuple[int, ...]] = {}

    # What one row asks and answers

    def prompt(self, messages: Sequence[Message], arguments: Mapping[str, Any], *, where: str = "") -> str:
        """Render the text that asks for the next assistant turn.

        Raises DataError for a chat that the template refuses, and for a turn or tool that it does not show."""
        text = self._rendered(messages, arguments, ask=True, where=where)
        calls = [call for turn in messages for call in turn.get("tool_calls", ())]
        for tool in (*arguments.get("tools", ()), *calls):
            if tool_name(tool) not in text:
                raise DataError(f"the chat template does not show the tool {tool_name(tool)!r}.", where)
        for i in self._vanishing(messages, arguments):
            raise DataError(
                f"the chat template does not show turn {i + 1} ({messages[i]['role']}) of the {len(messages)}. "
                "Leave it out, write it into another turn, or set data.chat_template.",
                where,
            )
        return text

    def completion(
        self,
        prompt: str,
        messages: Sequence[Message],
        answer: Message,
        arguments: Mapping[str, Any],
        *,
        where: str = "",
    ) -> str:
        """Return what the template writes after `prompt` for an answer, through the model's end token if it writes one.

        Raises DataError if the answer's text is not in it."""
        whole = self._rendered([*messages, answer], arguments, ask=False, where=where)
        tag = opened(prompt)
        thought, said = _parts(answer, tag)
        if tag and not thought:
            self._check_thoughts(tag, where)
        text = whole[len(prompt) :] if whole.startswith(prompt) else None
        if text is None or (tag and not _closes(text, tag, thought)):
            text = self._joined(prompt, whole, tag, thought, said, where)
        if thought and any(text.count(closing) > 1 for closing in THOUGHT_TAGS.values()):
            raise DataError("the chat template writes an empty thought before the answer's thoughts.", where)
        for part in (said, thought, *map(tool_name, answer.get("tool_calls", ()))):
            if part not in text:
                raise DataError(f"the chat template does not show the answer's {part[:40]!r}.", where)
        return self._ended(text, text.rfind(said) + len(said) if said else 0)

    def _joined(self, prompt: str, whole: str, tag: str, thought: str, said: str, where: str) -> str:
        """The completion if the whole chat does not begin with the prompt."""
        shared = shared_count(prompt, whole)
        surplus = prompt[shared:]
        unfinished = re.search(r"[<\[][^<>\[\]\s]{0,40}\Z", whole[:shared])  # both begin a tag here
        start = unfinished.start() if unfinished else shared
        place = whole.rfind(said) if said else start
        if place < start:
            raise DataError(f"the chat template does not show the answer's {said[:40]!r}.", where)
        header = whole[start:place]
        if tag:
            closing = THOUGHT_TAGS[tag]
            if closing in header:
                bridge = header[header.rfind(closing) :]
            else:
                lines = prompt.endswith("\n")
                bridge = f"\n{closing}\n\n" if lines else closing
                bridge += re.sub(r"\A\s*" + re.escape(tag) + r"\s*", "", header).lstrip("\n")
            return thought + bridge + whole[place:]
        closed = any(closing in surplus for closing in THOUGHT_TAGS.values())
        if thought and surplus.strip() and (closed or self.thoughts != "in_content"):
            raise DataError(
                f"the answer has thoughts, but the chat template asks for it with {surplus[-60:]!r} and has no place "
                "for them after that. Leave them out, or find data.chat_template_kwargs that ask for thoughts.",
                where,
            )
        if surplus.strip() and not closed and self.thoughts != "in_content":
            raise DataError(
                f"the chat template asks for an answer with {surplus[-60:]!r}, but begins no answer with that. If the "
                "answers' texts continue it, set data.thoughts=in_content; otherwise give another data.chat_template.",
                where,
            )
        for pair in THOUGHT_TAGS.items() if closed else ():
            for mark in pair:
                header = header.replace(mark, "")
        return header + whole[place:]

    def _ended(self, text: str, start: int) -> str:
        """The text through its first end token from `start` on, or with the end that the template lacks."""
        if cut := self._through_end(text, start):
            return cut
        form = self.form
        return text if form is None else text.removesuffix(form.other_end) + form.end

    def _check_thoughts(self, tag: str, where: str) -> None:
        """Refuse an answer without thoughts after a prompt that opens one, unless the settings say what it means."""
        if self.thoughts is None:
            raise ValueError(
                f"{where}: the chat template asks for an answer with an open thought ({tag}), and the answer has no "
                "thoughts of its own (reasoning_content). Set data.thoughts=closed to close the thought at once, or "
                f"in_content if the answers' texts hold the thoughts and {THOUGHT_TAGS[tag]}."
            )
        if self.thoughts == "in_content":
            raise DataError(
                f"with data.thoughts=in_content the answer must hold its thoughts, then {THOUGHT_TAGS[tag]}.", where
            )

    # What the template is like

    @cached_property
    def form(self) -> Form | None:
        """What a probe of the template found; None if it refuses a chat of one question."""
        asked: list[Message] = [{"role": "user", "content": QUESTION}]
        answer: Message = {"role": "assistant", "content": ANSWER}
        further: Message = {"role": "user", "content": AGAIN}
        clock = f"{{% macro {TODAY}(format) %}}{DATE}{{% endmacro %}}\n" if TODAY in str(self.template) else ""
        try:
            prompt = self._rendered(asked, {}, ask=True, before=clock)
            plain = self._rendered(asked, {}, ask=False, before=clock)
            whole = self._rendered([*asked, answer], {}, ask=False, before=clock)
        except DataError:
            return None
        if ANSWER not in whole:
            return None
        try:
            longer = self._rendered([*asked, answer, further], {}, ask=True, before=clock)
        except DataError:
            longer = ""
        tail = whole.rpartition(ANSWER)[2]
        after = longer.partition(ANSWER)[2].partition(AGAIN)[0]
        end = next((cut for text in (tail, after) if (cut := self._through_end(text))), "")
        between = whole.rpartition(ANSWER)[0].removeprefix(prompt) if whole.startswith(prompt) else ""
        return Form(
            asks=prompt.removeprefix(plain) if prompt.startswith(plain) else prompt.rpartition(QUESTION)[2],
            between=between,
            end=end,
            other_end="" if self._through_end(tail) else tail,
            open_thought=opened(prompt),
            nests=longer.startswith(f"{prompt}{between}{ANSWER}{end or self.tokenizer.eos_token}"),
            prints_date=DATE in whole,
        )

    def _through_end(self, text: str, start: int = 0) -> str:
        """The text through the first end token from `start` on; "" if there is none."""
        found = [place + len(end) for end in self.ends if (place := text.find(end, start)) >= 0]
        return text[: min(found)] if found else ""

    def _vanishing(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Indices of turns whose text the template leaves out of chats with these roles."""
        shape = [{**turn, "content": f"zqsentinel{i}x" if turn["content"] else ""} for i, turn in enumerate(messages)]
        key = repr((shape, arguments))
        if key not in self._unseen:
            if len(self._unseen) == SHAPES:
                self._unseen.clear()
            try:
                text = self._rendered(shape, arguments, ask=True)
            except DataError:  # a template may refuse these texts
                text = "".join(turn["content"] for turn in shape)
            self._unseen[key] = tuple(i for i, turn in enumerate(shape) if turn["content"] not in text)
        return self._unseen[key]

    def _rendered(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any],
        *,
        ask: bool,
        where: str = "",
        before: str = "",
    ) -> str:
        """`before` goes in front of the template."""
        import jinja2

        if not self.template:
            raise DataError(
                "the row is a chat, and the tokenizer has no chat template. Set data.chat_template=default (or a "
                "template of your own), or use a tokenizer of an instruction-tuned model.",
                where,
            )
        template = self.template
        if isinstance(template, Mapping):
            template = template["tool_use" if "tools" in arguments and "tool_use" in template else "default"]
        try:
            text = self.tokenizer.apply_chat_template(
                [_as_read(message) for message in messages],
                chat_template=before + template,
                tokenize=False,
                add_generation_prompt=ask,
                **arguments,
            )
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses the turns {roles}: {error}", where) from error
        return str(text)


def opened(prompt: str) -> str:
    """The tag of a thought that a prompt leaves open, or ""."""
    stripped = prompt.rstrip()
    return next((tag for tag in THOUGHT_TAGS if stripped.endswith(tag)), "")


def shorter(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Drop a chat's first turns up to its second user turn, but keep the system turn; () if no user turn is left."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    later = next((i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"), None)
    return () if later is None else (*messages[:first], *messages[later:])


def _parts(answer: Message, tag: str) -> tuple[str, str]:
    """Split an answer into thoughts and text, without outer whitespace. The text may hold the thoughts, up to the tag
    that closes `tag`, or if that is "" up to any closing tag."""
    thought, said = str(answer.get(THOUGHTS[0], "")).strip(), str(answer["content"])
    for opening, closing in THOUGHT_TAGS.items():
        if not thought and tag in ("", opening) and closing in said:
            thought, _, said = said.rpartition(closing)
            thought = thought.strip().removeprefix(opening).strip()
    return thought, said.strip()


def _closes(text: str, tag: str, thought: str) -> bool:
    """True if a completion continues the open thought with this one and closes it."""
    inside, closed, _ = text.partition(THOUGHT_TAGS[tag])
    return bool(closed) and not inside.lstrip().startswith(tag) and inside.strip() == thought


def _as_read(message: Message) -> Message:
    """The turn with its thoughts under every name that templates use."""
    read = {key: value for key, value in message.items() if key != "train"}
    thoughts = read.get(THOUGHTS[0])
    return read | ({} if thoughts is None else dict.fromkeys(THOUGHTS, thoughts))
