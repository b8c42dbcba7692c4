"""Render chats to text by their template: the prompt that asks for an answer, and the completion that answers it.

    messages            -> template, asked for an answer -> prompt
    messages and answer -> template                      -> prompt + completion, through the token that ends it

The template decides what a completion holds beside the answer's text: a header, an empty thought, a space. If it does
not write an answered chat as the prompt and a continuation, the completion is put together to continue the prompt: a
policy is always asked with the prompt. Leaves out images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from plaudit.data.fields import SYSTEM_ROLES, THOUGHTS, DataError, Message, shared_count
from plaudit.data.marks import THOUGHT_TAGS, Probes, marked, pieces_of, places, unused
from plaudit.data.settings import DataSettings
from plaudit.data.template import TODAY, chosen_template
from plaudit.support.limits import TooSlowError, limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHAPES = 4096
"""Number of chat shapes for which the turns that the template leaves out are cached."""
QUESTION, ANSWER, AGAIN = "zqsentinelquestion", "zqsentinelanswer", "zqsentinelagain"
DATE = "zqtoday"
RENDER_SECONDS, MOST_RENDERED, MOST_EXCESSES = 5, 1 << 26, 3
"""Most seconds and most characters for one rendered chat; after this many chats above them, reading ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a template writes an answer, found out by rendering a chat of one question."""

    asks: str
    """Text that the generation prompt (add_generation_prompt) adds after the chat."""
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
    """True if the prompt of a chat's later turn begins with the whole row of the turn before: rows share one pass."""
    prints_date: bool
    """True if the template prints today's date, so that rows change from day to day."""

    def json(self) -> dict[str, Any]:
        return asdict(self)


class Chats:
    """Renders chats for one tokenizer. `ends` are the model's end tokens beside the tokenizer's own; every prompt shows
    `tools`, beside its row's own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: DataSettings,
        ends: Collection[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self.tokenizer, self.thoughts, self.tools = tokenizer, settings.thoughts, tools
        self.template = chosen_template(settings, tokenizer)
        ids = {*ends, tokenizer.eos_token_id} - {None}
        self.ends = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(ids))]
        self._missing: dict[str, str] = {}
        self._excesses = 0

    # What one row asks and answers

    def prompt(self, messages: Sequence[Message], arguments: Mapping[str, Any], *, where: str = "") -> str:
        """Render the text that asks for the next assistant turn.

        Raises DataError for a chat that the template refuses, and for a turn or tool that it does not show."""
        arguments = self.shown(arguments)
        text = self.rendered(messages, arguments, ask=True, where=where)
        if missing := self._not_shown(messages, arguments):
            raise DataError(
                f"the chat template does not show {missing}. Leave it out, write it into another turn, or set "
                "data.chat_template; its value default shows all turns, tools and calls.",
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

        Raises DataError if the rendered text lacks some of the answer's text or calls."""
        arguments = self.shown(arguments)
        text = self._answered(prompt, messages, answer, arguments, where)
        if calls := answer.get("tool_calls"):
            probes = Probes(text)
            probed = {
                **answer,
                "tool_calls": [probes.call(call, f"call {i} of the answer, of") for i, call in enumerate(calls, 1)],
            }
            if missing := probes.missing(self._answered(prompt, messages, probed, arguments, where)):
                raise DataError(f"the chat template does not show {missing}, before the token that ends it.", where)
        return text

    def shown(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row's arguments of the template, with the tools that every prompt shows."""
        return {**arguments, "tools": [*arguments.get("tools", ()), *self.tools]} if self.tools else arguments

    def _answered(
        self, prompt: str, messages: Sequence[Message], answer: Message, arguments: Mapping[str, Any], where: str
    ) -> str:
        """Return the completion. Raises DataError if it lacks some of the answer's text; calls are not checked."""
        whole = self.rendered([*messages, answer], arguments, ask=False, where=where)
        marks, pieces = unused(whole), pieces_of(answer)
        shown = self.rendered([*messages, marked(answer, pieces, marks)], arguments, ask=False, where=where)
        if marks.sub("", shown) != whole:
            raise DataError("the chat template writes the answer in another way if its text is marked.", where)
        found = places(shown, marks)
        tag = opened(prompt)
        thought, start = _thought(answer, tag)
        if tag and not thought:
            self._check_thoughts(tag, where)
        thoughts = [i for i, piece in enumerate(pieces) if piece.key != "content" or piece.start < start]
        said = [i for i in range(len(pieces)) if i not in thoughts]
        text = whole[len(prompt) :] if whole.startswith(prompt) else None
        joined = text is None or bool(tag and not _closes(text, tag, thought))
        if joined and all(2 * i in found for i in said):
            text = self._joined(prompt, whole, tag, thought, found[2 * said[0]] if said else None, where)
        text = text or ""
        before = len(whole) - len(text)  # `text` is the end of `whole`
        for i, piece in enumerate(pieces):
            first = found.get(2 * i, -1)
            apart = joined and tag and i in thoughts  # these thoughts were put before `text`
            if not apart and (first < before or whole[first : found.get(2 * i + 1)] != piece.text):
                raise DataError(f"the chat template does not show the answer's {piece.text[:40]!r}.", where)
        if thoughts and not joined:
            piece, head = pieces[thoughts[0]], text[: found[2 * thoughts[0]] - before]
            inside = piece.key == "content"
            own = answer["content"][: piece.start] if inside else ""
            closings = [tag for tag in THOUGHT_TAGS.values() if not inside or tag in answer["content"]]
            if any(head.count(closing) > own.count(closing) for closing in closings):
                raise DataError("the chat template writes an empty thought before the answer's thoughts.", where)
        ends = (found.get(2 * i + 1, 0) - before for i in range(len(pieces)))
        return self._ended(text, max([0, *ends]))

    def _joined(self, prompt: str, whole: str, tag: str, thought: str, place: int | None, where: str) -> str:
        """Put together a completion that continues the prompt. `place`: the answer text's index in `whole`, if any."""
        shared = shared_count(prompt, whole)
        surplus = prompt[shared:]
        unfinished = re.search(r"[<\[][^<>\[\]\s]{0,40}\Z", whole[:shared])  # both continue a tag that began before
        start = unfinished.start() if unfinished else shared
        if place is None:  # the answer has only calls, or nothing
            inside, end, _ = whole[start:].partition(THOUGHT_TAGS.get(tag, "\0"))
            empty = inside.strip().removeprefix(tag).strip() in ("", thought)
            place = start + len(inside) + len(end) if end and empty else start
        place = max(place, start)
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
        """Return the text through its first end token from `start` on; if it has none, end it with `Form.end`."""
        if cut := self.through_end(text, start):
            return cut
        form = self.form
        return text if form is None else text.removesuffix(form.other_end) + form.end

    def _check_thoughts(self, tag: str, where: str) -> None:
        """Raise for an answer without thoughts after a prompt that opens one, unless data.thoughts is "closed"."""
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
        """The form that a probe of the template found; None if it refuses the probe, or hides its answer."""
        asked: list[Message] = [{"role": "user", "content": QUESTION}]
        answer: Message = {"role": "assistant", "content": ANSWER}
        further: Message = {"role": "user", "content": AGAIN}
        clock = f"{{% macro {TODAY}(format) %}}{DATE}{{% endmacro %}}\n" if TODAY in str(self.template) else ""
        try:
            prompt = self.rendered(asked, {}, ask=True, before=clock)
            plain = self.rendered(asked, {}, ask=False, before=clock)
            whole = self.rendered([*asked, answer], {}, ask=False, before=clock)
        except DataError:
            return None
        if ANSWER not in whole:
            return None
        try:
            longer = self.rendered([*asked, answer, further], {}, ask=True, before=clock)
        except DataError:
            longer = ""
        tail = whole.rpartition(ANSWER)[2]
        after = longer.partition(ANSWER)[2].partition(AGAIN)[0]
        end = next((cut for text in (tail, after) if (cut := self.through_end(text))), "")
        between = whole.rpartition(ANSWER)[0].removeprefix(prompt) if whole.startswith(prompt) else ""
        return Form(
            asks=prompt.removeprefix(plain) if prompt.startswith(plain) else prompt.rpartition(QUESTION)[2],
            between=between,
            end=end,
            other_end="" if self.through_end(tail) else tail,
            open_thought=opened(prompt),
            nests=longer.startswith(f"{prompt}{between}{ANSWER}{end or self.tokenizer.eos_token}"),
            prints_date=DATE in whole,
        )

    def through_end(self, text: str, start: int = 0) -> str:
        """Return the text through the first end token from `start` on; "" if there is none."""
        found = [place + len(end) for end in self.ends if (place := text.find(end, start)) >= 0]
        return text[: min(found)] if found else ""

    def _not_shown(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """Name the first tool, call or turn that the template leaves out of chats of this shape; "" if none."""
        shape = [{**turn, "content": f"zqsentinel{i}x" if turn["content"] else ""} for i, turn in enumerate(messages)]
        key = repr((shape, arguments))
        if key not in self._missing:
            if len(self._missing) == SHAPES:
                self._missing.clear()
            self._missing[key] = self._first_missing(shape, arguments, Probes(key))
        return self._missing[key]

    def _first_missing(self, shape: Sequence[Message], arguments: Mapping[str, Any], probes: Probes) -> str:
        probed = [
            turn | {"tool_calls": [probes.call(call, f"turn {i}'s call of") for call in turn["tool_calls"]]}
            if "tool_calls" in turn
            else turn
            for i, turn in enumerate(shape, 1)
        ]
        tools = {"tools": [probes.tool(tool) for tool in arguments["tools"]]} if "tools" in arguments else {}
        try:
            text = self.rendered(probed, {**arguments, **tools}, ask=True)
        except DataError:  # the template refuses the probes
            return ""
        turns = (i for i, turn in enumerate(shape) if turn["content"] not in text)
        return probes.missing(text) or next(
            (f"turn {i + 1} ({shape[i]['role']}) of the {len(shape)}" for i in turns), ""
        )

    def rendered(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any],
        *,
        ask: bool,
        where: str = "",
        before: str = "",
    ) -> str:
        """Render a chat; `ask` adds the generation prompt, `before` is put before the template. Raises DataError."""
        if not self.template:
            raise DataError(
                "the row is a chat, and the tokenizer has no chat template. Set data.chat_template=default (or a "
                "template of your own), or use a tokenizer of an instruction-tuned model.",
                where,
            )
        template = self.template
        if isinstance(template, Mapping):
            name = "tool_use" if "tools" in arguments and "tool_use" in template else "default"
            if name not in template:
                raise DataError(
                    f"the tokenizer has the chat templates {', '.join(sorted(template))} and none called default. Set "
                    "data.chat_template to one of these names.",
                    where,
                )
            template = template[name]
        turns = [_as_read(message, template) for message in messages]
        ways = [
            turns,
            *([[_with_texts(turn) for turn in turns]] if any("tool_calls" in turn for turn in turns) else []),
        ]
        why: Exception | None = None
        for way in ways:
            try:
                text = limited(
                    RENDER_SECONDS,
                    partial(
                        self.tokenizer.apply_chat_template,
                        way,
                        chat_template=before + template,
                        tokenize=False,
                        add_generation_prompt=ask,
                        **arguments,
                    ),
                )
            except TooSlowError:
                raise self._too_much(f"takes more than {RENDER_SECONDS} s", where) from None
            except Exception as error:  # noqa: BLE001 - a template is a program, which may fail in any way
                why = why or error
            else:
                if len(text) > MOST_RENDERED:
                    raise self._too_much(f"writes more than {MOST_RENDERED:,} characters", where)
                return str(text)
        reason = str(why) or type(why).__name__
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses the turns {roles}: {reason}", where) from why

    def _too_much(self, excess: str, where: str) -> ValueError:
        """Return a DataError (a bad row); the MOST_EXCESSES-th time a ValueError, to end reading: it takes hours."""
        self._excesses += 1
        if self._excesses < MOST_EXCESSES:
            return DataError(f"the chat template {excess} for this chat.", where)
        return ValueError(f"the chat template {excess} for a chat, {MOST_EXCESSES} times. Set data.chat_template.")


def opened(prompt: str) -> str:
    """Return the tag of the thought that a prompt leaves open; "" if it leaves none."""
    stripped = prompt.rstrip()
    return next((tag for tag in THOUGHT_TAGS if stripped.endswith(tag)), "")


def shorter(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Drop a chat's first turns up to its second user turn, but keep the system turn; () if no user turn is left."""
    first = 1 if messages and messages[0]["role"] in SYSTEM_ROLES else 0
    later = next((i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"), None)
    return () if later is None else (*messages[:first], *messages[later:])


def _thought(answer: Message, tag: str) -> tuple[str, int]:
    """Return an answer's thoughts, stripped, and the index in its content at which the rest of it begins. The content
    may hold the thoughts, up to the tag that closes `tag`, or if that is "" up to any closing tag."""
    thought, content, start = str(answer.get(THOUGHTS[0], "")).strip(), str(answer["content"]), 0
    for opening, closing in THOUGHT_TAGS.items():
        end = content.rfind(closing, start)
        if not thought and tag in ("", opening) and end >= 0:
            thought = content[start:end].strip().removeprefix(opening).strip()
            start = end + len(closing)
    return thought, start


def _closes(text: str, tag: str, thought: str) -> bool:
    """True if a completion begins with exactly this thought, without opening `tag` again, and then closes `tag`."""
    inside, closed, _ = text.partition(THOUGHT_TAGS[tag])
    return bool(closed) and not inside.lstrip().startswith(tag) and inside.strip() == thought


def _as_read(message: Message, template: str) -> Message:
    """Return the turn without `train`, with its thoughts under every key that templates read. A developer's turn
    becomes a system turn if the template does not name developers."""
    read = {key: value for key, value in message.items() if key != "train"}
    if read["role"] == "developer" and "developer" not in template:
        read["role"] = "system"
    thoughts = read.get(THOUGHTS[0])
    return read | ({} if thoughts is None else dict.fromkeys(THOUGHTS, thoughts))


def _with_texts(message: Message) -> Message:
    """Return the turn with its calls' arguments as JSON, which a few templates expect."""
    calls = [
        call
        | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})
