"""The built-in dialects: one reading function each, and the table that registers them.

Leaves out Python-side formats of single projects; `register_dialect` adds those from a user's own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plaudit.data.fields import Fields, Message
from plaudit.data.formats import (
    DEMONSTRATION,
    PREFERENCE,
    QUESTION,
    Dialect,
    Pair,
    Sample,
    register_dialect,
)

ASSISTANT_MARK = "\n\nAssistant:"
"""What opens an answer in Human/Assistant transcripts. It belongs to the prompt; the space after it to the answer."""

PROMPTS = "prompt|question|instruction|query"
COMPLETIONS = "completion|response|output"
ANSWERS = "response|output|answer|completion"
CONTEXTS = ("context", "input")


def read_completion(fields: Fields) -> Sample:
    name = next((name for name in COMPLETIONS.split("|") if fields.has(name)), "completion")
    return _asked(fields, "prompt", answer=_answer(fields, name))


def read_prompt_answer(fields: Fields) -> Sample:
    return _asked(fields, "prompt", answer=_answer(fields, "answer"))


def read_question_answer(fields: Fields) -> Sample:
    return _asked(fields, "question", answer=_answer(fields, "answer"))


def read_instruction(fields: Fields) -> Sample:
    answers = [name for name in ANSWERS.split("|") if fields.has(name)]
    return _asked(fields, "instruction", answer=fields.text(*(answers or ANSWERS.split("|")), empty=False))


def read_pair(fields: Fields) -> Sample:
    """prompt/chosen/rejected and instruction/chosen/rejected; each answer a text or the assistant's one message."""
    if fields.is_chat("chosen") and fields.is_chat("rejected") and len(fields.messages("chosen")) > 1:
        return _told_again(fields)  # what they share is the prompt
    pair = Pair(chosen=_answer(fields, "chosen"), rejected=_answer(fields, "rejected"), margin=fields.number("margin"))
    name = next((name for name in ("prompt", "messages", "instruction") if fields.has(name)), "prompt")
    return _asked(fields, name, pairs=(pair,))


def _told_again(fields: Fields) -> Sample:
    """Whole chats beside a prompt, which they must tell again: its turns, or a text in whatever words."""
    read = _read_chat_transcripts(fields)
    if fields.is_chat("prompt"):
        asked = fields.messages("prompt")
        told = asked in (read.messages[: len(asked)], read.messages[-len(asked) :])
    else:
        told = read.messages[:1] != () and read.messages[0]["role"] != "assistant"
    if not told:
        raise fields.error(
            "chosen and rejected are chats of several turns that do not tell the prompt again; give whole chats, or "
            "the last assistant turn of each alone."
        )
    return read


def read_answer_lists(fields: Fields) -> Sample:
    """pos_answers[i] beats neg_answers[i]; an answer may stand in several pairs."""
    chosen, rejected = fields.texts("pos_answers"), fields.texts("neg_answers")
    if len(chosen) != len(rejected):
        raise fields.error(
            f"pos_answers has {len(chosen)} and neg_answers {len(rejected)} entries; they form pairs, so they must "
            "be of one length."
        )
    margins = fields.numbers("margin", len(chosen))
    pairs = tuple(Pair(chosen=c, rejected=r, margin=m) for c, r, m in zip(chosen, rejected, margins, strict=True))
    return _asked(fields, "prompt", pairs=pairs)


def read_transcripts(fields: Fields) -> Sample:
    """Two whole dialogues; what both begin with, up to the last answer in it, is the prompt."""
    if fields.is_chat("chosen") or fields.is_chat("rejected"):
        return _read_chat_transcripts(fields)
    chosen, rejected = fields.text("chosen", empty=False), fields.text("rejected", empty=False)
    shared = chosen[: _shared_count(chosen, rejected)]
    start = shared.rfind(ASSISTANT_MARK)
    if start < 0:
        raise fields.error(
            f"chosen and rejected share no beginning that leads to {ASSISTANT_MARK!r}, so the prompt cannot be told "
            "from the answers. Give a prompt column, or lists of messages."
        )
    end = start + len(ASSISTANT_MARK)
    answers = (chosen[end:], rejected[end:])
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer.strip():
            raise fields.error(f"{name!r} has an empty last answer; it must hold some text.")
    return Sample(prompt=shared[:end], pairs=(Pair(chosen=answers[0], rejected=answers[1], margin=_margin(fields)),))


def read_messages(fields: Fields) -> Sample:
    """A chat; a last assistant turn is the answer to what comes before it."""
    turns = fields.messages("messages", "conversations")
    if turns[-1]["role"] != "assistant":
        return Sample(messages=turns)
    if not turns[-1]["content"].strip():
        raise fields.error("the last assistant turn is empty; it must hold some text.")
    return Sample(messages=turns[:-1], answer=turns[-1]["content"])


def read_text(fields: Fields) -> Sample:
    return Sample(answer=fields.text("text", empty=False))


def read_prompt(fields: Fields) -> Sample:
    name = next((name for name in PROMPTS.split("|") if fields.has(name)), "prompt")
    further = {} if name == "instruction" else {one: fields.row[one] for one in CONTEXTS if fields.has(one)}
    return replace(_asked(fields, name), extra=further)


def _asked(fields: Fields, name: str, *, answer: str | None = None, pairs: tuple[Pair, ...] = ()) -> Sample:
    """The sample of a prompt column, which holds a text or a chat; an instruction may have a context below it."""
    if fields.is_chat(name):
        turns = fields.messages(name)
        if turns[-1]["role"] == "assistant":
            raise fields.error(f"{name!r} ends with an assistant turn; a prompt ends where the answer begins.")
        return Sample(messages=turns, answer=answer, pairs=pairs)
    prompt = fields.text(name)
    context = fields.optional_text(*CONTEXTS) if name == "instruction" else ""
    return Sample(prompt=f"{prompt}\n\n{context}" if context else prompt, answer=answer, pairs=pairs)


def _answer(fields: Fields, name: str) -> str:
    """A text, or a chat of one assistant turn."""
    if not fields.is_chat(name) or all(isinstance(turn, str) for turn in fields.row[name]):
        return fields.text(name, empty=False)
    turns = fields.messages(name)
    if len(turns) != 1 or turns[0]["role"] != "assistant" or not turns[0]["content"].strip():
        raise fields.error(f"{name!r} is a chat of {len(turns)}; beside a prompt it must be one assistant turn.")
    return turns[0]["content"]


def _margin(fields: Fields) -> float:
    return fields.number("margin")


def _read_chat_transcripts(fields: Fields) -> Sample:
    chosen, rejected = fields.messages("chosen"), fields.messages("rejected")
    shared = _shared_turns(chosen, rejected)
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        rest = turns[shared:]
        if len(rest) != 1 or rest[0]["role"] != "assistant" or not rest[0]["content"].strip():
            raise fields.error(
                f"{name!r} differs from its counterpart by {len(rest)} turns after {shared} equal ones; it must differ "
                "in one last assistant turn that is not empty."
            )
    if not shared:
        raise fields.error(
            "chosen and rejected are chats that share no turn, so there is no prompt. Begin both with what was asked, "
            "or name the column that holds it: data.columns={prompt: ...}."
        )
    pair = Pair(chosen=chosen[-1]["content"], rejected=rejected[-1]["content"], margin=_margin(fields))
    return Sample(messages=chosen[:shared], pairs=(pair,))


def _shared_turns(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """Equal turns at the beginning, without the last turn of either (equal answers are still two answers)."""
    return _shared_count(chosen[:-1], rejected[:-1])


def _shared_count(one: Sequence[object], other: Sequence[object]) -> int:
    """How many entries two sequences share at their beginning."""
    for i, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return i
    return min(len(one), len(other))


_ANSWERED, _PAIRED, _TEXT, _ASKED = (
    frozenset(kinds)
    for kinds in ({DEMONSTRATION, QUESTION}, {DEMONSTRATION, PREFERENCE, QUESTION}, {DEMONSTRATION}, {QUESTION})
)
_CONTEXT = ("|".join(CONTEXTS),)

for _name, _needs, _may, _read, _gives, _precedence in (
    ("messages", ("messages|conversations",), (), read_messages, _ANSWERED, 2),
    ("prompt/completion", ("prompt", COMPLETIONS), (), read_completion, _ANSWERED, 2),
    ("prompt/answer", ("prompt", "answer"), (), read_prompt_answer, _ANSWERED, 2),
    ("question/answer", ("question", "answer"), (), read_question_answer, _ANSWERED, 2),
    ("instruction/response", ("instruction", ANSWERS), _CONTEXT, read_instruction, _ANSWERED, 2),
    ("text", ("text",), (), read_text, _TEXT, 0),
    ("prompt/chosen/rejected", ("prompt|messages", "chosen", "rejected"), ("margin",), read_pair, _PAIRED, 1),
    (
        "instruction/chosen/rejected",
        ("instruction", "chosen", "rejected"),
        (*_CONTEXT, "margin"),
        read_pair,
        _PAIRED,
        1,
    ),
    (
        "prompt/pos_answers/neg_answers",
        ("prompt", "pos_answers", "neg_answers"),
        ("margin",),
        read_answer_lists,
        _PAIRED,
        1,
    ),
    ("chosen/rejected", ("chosen", "rejected"), ("margin",), read_transcripts, _PAIRED, 1),
    ("prompt", (PROMPTS,), _CONTEXT, read_prompt, _ASKED, 0),
):
    register_dialect(Dialect(name=_name, needs=_needs, may=_may, read=_read, gives=_gives, precedence=_precedence))
