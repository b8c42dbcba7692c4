"""The built-in dialects: one reading function each, and the table of them.

Leaves out Python-side formats of single projects; `register_dialect` adds those from a user's own file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from plaudit.data.fields import SYSTEM_ROLES, DataError, Fields, Message, shared_count, shown
from plaudit.data.records import (
    DEMONSTRATION,
    JUDGEMENT,
    PREFERENCE,
    QUESTION,
    Dialect,
    Pair,
    Sample,
    Verdict,
    beside,
)

ASSISTANT_MARK = "\n\nAssistant:"
"""Opens an answer in Human/Assistant transcripts. It belongs to the prompt, the space after it to the answer."""

HUMAN_MARK = "\n\nHuman:"

PROMPTS = "prompt|question|instruction|query"
COMPLETIONS = "completion|response|output"
ANSWERS = "response|output|answer|completion"
CONTEXTS = ("context", "input")
CHATS = "messages|conversations|conversation"
PAIRED_WITH = f"prompt|{CHATS}|question|query"
LABELS = "label|kto_tag"
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as text, since cells of a CSV file are texts."""
ASKING = ("prompt", "instruction", "question", "query", "input", "context", "history", "task", "post", "title")
"""Columns that may hold the prompt of a pair of texts."""


def _answered(asked: str, answers: str) -> Callable[[Fields], Sample]:
    """Return a function that reads a prompt from column `asked`, and its answer from the first present of `answers`."""

    def read(fields: Fields) -> Sample:
        answer, turn = _turn(fields, _first(fields, answers))
        return replace(_asked(fields, asked, answer=answer), turn=turn)

    return read


def read_instruction(fields: Fields) -> Sample:
    return _asked(fields, "instruction", answer=fields.text(*ANSWERS.split("|"), empty=False))


def read_pair(fields: Fields) -> Sample:
    """Read a prompt and two answers, each a text, one assistant turn, or a whole chat that repeats the prompt."""
    if fields.is_chat("chosen") and fields.is_chat("rejected") and len(fields.messages("chosen")) > 1:
        return _repeated_prompt(fields)
    (chosen, chosen_turn), (rejected, rejected_turn) = _turn(fields, "chosen"), _turn(fields, "rejected")
    pair = Pair(
        chosen=chosen,
        rejected=rejected,
        margin=fields.number("margin"),
        chosen_turn=chosen_turn,
        rejected_turn=rejected_turn,
    )
    return _asked(fields, _first(fields, f"{PAIRED_WITH}|instruction"), pairs=(pair,))


def _repeated_prompt(fields: Fields) -> Sample:
    """Read two whole chats beside a prompt. They must repeat a prompt's turns; a prompt that is a text may differ."""
    read = _read_chat_transcripts(fields)
    if fields.is_chat("prompt"):
        asked = fields.messages("prompt")
        repeated = asked in (read.messages[: len(asked)], read.messages[-len(asked) :])
    else:
        repeated = read.messages[:1] != () and read.messages[0]["role"] != "assistant"
    if not repeated:
        raise fields.error(
            "chosen and rejected are chats of several turns that do not repeat the prompt. Give whole chats, or only "
            "the last assistant turn of each."
        )
    return read


def read_answer_lists(fields: Fields) -> Sample:
    """Read a pair for each i, in which pos_answers[i] beats neg_answers[i]; an answer may be in several pairs."""
    chosen, rejected = fields.texts("pos_answers"), fields.texts("neg_answers")
    if len(chosen) != len(rejected):
        raise fields.error(
            f"pos_answers has {len(chosen)} and neg_answers {len(rejected)} entries; they form pairs, so their numbers "
            "must be equal."
        )
    margins = fields.numbers("margin", len(chosen))
    pairs = tuple(Pair(chosen=c, rejected=r, margin=m) for c, r, m in zip(chosen, rejected, margins, strict=True))
    return _asked(fields, "prompt", pairs=pairs)


def read_transcripts(fields: Fields) -> Sample:
    """Read two whole dialogues. The prompt is their common beginning, through its last ASSISTANT_MARK."""
    if fields.is_chat("chosen") or fields.is_chat("rejected"):
        return _read_chat_transcripts(fields)
    chosen, rejected = fields.text("chosen", empty=False), fields.text("rejected", empty=False)
    shared = chosen[: shared_count(chosen, rejected)]
    start = shared.rfind(ASSISTANT_MARK)
    if start < 0 and ASSISTANT_MARK not in chosen + rejected:
        return _read_common_beginning(fields, chosen, rejected, shared)
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
        if HUMAN_MARK in answer or ASSISTANT_MARK in answer:
            raise fields.error(
                f"{name!r} differs from its counterpart by several turns; only the assistant's last answer may differ."
            )
    return Sample(
        prompt=shared[:end], pairs=(Pair(chosen=answers[0], rejected=answers[1], margin=fields.number("margin")),)
    )


def _read_common_beginning(fields: Fields, chosen: str, rejected: str, shared: str) -> Sample:
    """Read two texts that begin alike. The prompt is their common beginning, to the end of its last whole word."""
    asking = [name for name in ASKING if isinstance(fields.row.get(name), str) and fields.row[name].strip()]
    if asking:
        raise fields.error(
            f"chosen and rejected are read without {asking[0]!r}, which may be their prompt. Name it: "
            f"data.columns={{prompt: {asking[0]}}}; or leave it out."
        )
    words = shared if shared[-1:].isspace() else shared[: len(shared) - len(re.split(r"\s", shared)[-1])]
    prompt = words.rstrip()
    if not prompt or not chosen[len(prompt) :].strip() or not rejected[len(prompt) :].strip():
        raise fields.error(
            "chosen and rejected share no beginning of whole words that both go on from, so there is no prompt. Give a "
            "prompt column, or lists of messages."
        )
    pair = Pair(chosen=chosen[len(prompt) :], rejected=rejected[len(prompt) :], margin=fields.number("margin"))
    return Sample(prompt=prompt, pairs=(pair,), guess="prompts taken to be the common beginning of chosen and rejected")


def read_choice(fields: Fields) -> Sample:
    """Read a prompt, two outputs and the number of the better one (1 or 2), as in alpaca_farm."""
    outputs = fields.text("output_1", empty=False), fields.text("output_2", empty=False)
    better = fields.number("preference")
    if better not in (1, 2):
        raise fields.error(
            f"'preference' is {shown(fields.row.get('preference'))}; it must be 1 or 2, the better output."
        )
    chosen, rejected = outputs if better == 1 else outputs[::-1]
    return _asked(fields, "instruction", pairs=(Pair(chosen=chosen, rejected=rejected),))


def read_judged(fields: Fields) -> Sample:
    """Read a prompt and a judged answer. A judged answer is no reference: read as a prompt, it is a further column."""
    asked = _first(fields, f"prompt|instruction|question|{CHATS}")
    judged = {name: fields.row[name] for name in (_first(fields, ANSWERS), _first(fields, LABELS)) if fields.has(name)}
    if asked not in CHATS.split("|"):
        return replace(_asked(fields, asked), extra=judged, verdicts=_verdicts(fields))
    turns = fields.messages(asked)
    if turns[-1]["role"] != "assistant":
        return Sample(messages=turns, extra=judged | {asked: turns})
    return Sample(messages=turns[:-1], extra=judged | {asked: turns}, verdicts=_verdicts(fields, turns[-1]))


def _verdicts(fields: Fields, last: Message | None = None) -> tuple[Verdict, ...]:
    """Return the answer or last turn with its label, or () if either cannot be read: the row still has a prompt."""
    good = TRUTHS.get(str(fields.row.get(_first(fields, LABELS))).strip().lower())
    try:
        answer, turn = _turn(fields, _first(fields, ANSWERS)) if last is None else (last["content"], beside(last))
    except DataError:
        return ()
    said = last is None or _said(last)
    return (Verdict(answer=answer, good=good, turn=turn),) if said and good is not None else ()


def _is_judged(fields: Fields) -> bool:
    """True if the label is a truth value, or the row has `kto_tag`, or `prompt` and one of COMPLETIONS."""
    label = fields.row[_first(fields, LABELS)]
    completed = fields.has("prompt") and any(fields.has(name) for name in COMPLETIONS.split("|"))
    return str(label).strip().lower() in TRUTHS or fields.has("kto_tag") or completed


def read_steps(fields: Fields) -> Sample:
    """Read a prompt whose answer's steps were judged one by one; steps and labels stay further columns."""
    further = {name: fields.row[name] for name in ("completions", "labels") if fields.has(name)}
    return replace(_asked(fields, "prompt"), extra=further)


def read_messages(fields: Fields) -> Sample:
    """Read a chat, with the column `system` as its system turn. A last assistant turn, if trained, is the answer."""
    turns = fields.messages(*CHATS.split("|"))
    system = fields.optional_text("system")
    if system.strip() and turns[0]["role"] not in SYSTEM_ROLES:
        turns = ({"role": "system", "content": system}, *turns)
    if turns[-1]["role"] != "assistant" or not turns[-1].get("train", True):
        return Sample(messages=turns)
    if not _said(turns[-1]):
        raise fields.error("the last assistant turn is empty; it must hold some text.")
    return Sample(messages=turns[:-1], answer=turns[-1]["content"], turn=beside(turns[-1]))


def read_text(fields: Fields) -> Sample:
    return Sample(answer=fields.text("text", empty=False))


def read_prompt(fields: Fields) -> Sample:
    name = _first(fields, PROMPTS)
    further = {} if name == "instruction" else {one: fields.row[one] for one in CONTEXTS if fields.has(one)}
    return replace(_asked(fields, name), extra=further)


def _first(fields: Fields, names: str) -> str:
    """Return the first of these names ("a|b|c") that is a column of the row; the first name if none is."""
    return next((name for name in names.split("|") if fields.has(name)), names.partition("|")[0])


def _asked(fields: Fields, name: str, *, answer: str | None = None, pairs: tuple[Pair, ...] = ()) -> Sample:
    """Read a prompt column, which holds a text or a chat. An instruction may have a context below it."""
    if fields.is_chat(name):
        turns = fields.messages(name)
        if turns[-1]["role"] == "assistant":
            raise fields.error(f"{name!r} ends with an assistant turn; a prompt ends where the answer begins.")
        return Sample(messages=turns, answer=answer, pairs=pairs)
    prompt = fields.text(name)
    context = fields.optional_text(*CONTEXTS) if name == "instruction" else ""
    return Sample(prompt=f"{prompt}\n\n{context}" if context else prompt, answer=answer, pairs=pairs)


def _turn(fields: Fields, name: str) -> tuple[str, Message]:
    """Read an answer given as a text, an assistant turn or a list with one. Return (text, the turn's other content)."""
    if isinstance(fields.row.get(name), Mapping):
        fields = replace(fields, row={**fields.row, name: [fields.row[name]]})
    if not fields.is_chat(name) or all(isinstance(turn, str) for turn in fields.row[name]):
        return fields.text(name, empty=False), {}
    turns = fields.messages(name)
    if len(turns) != 1 or turns[0]["role"] != "assistant" or not _said(turns[0]):
        raise fields.error(f"{name!r} is a chat of {len(turns)}; beside a prompt it must be one assistant turn.")
    return turns[0]["content"], beside(turns[0])


def _said(turn: Message) -> bool:
    return bool(turn["content"].strip()) or "tool_calls" in turn


def _read_chat_transcripts(fields: Fields) -> Sample:
    chosen, rejected = fields.messages("chosen"), fields.messages("rejected")
    shared = _shared_turns(chosen, rejected)
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        rest = turns[shared:]
        if len(rest) != 1 or rest[0]["role"] != "assistant" or not _said(rest[0]):
            raise fields.error(
                f"{name!r} differs from its counterpart by {len(rest)} turns after {shared} equal ones; it must differ "
                "in one last assistant turn that is not empty."
            )
    if not shared:
        raise fields.error(
            "chosen and rejected are chats that share no turn, so there is no prompt. Begin both with what was asked, "
            "or name the column that holds it: data.columns={prompt: ...}."
        )
    pair = Pair(
        chosen=chosen[-1]["content"],
        rejected=rejected[-1]["content"],
        margin=fields.number("margin"),
        chosen_turn=beside(chosen[-1]),
        rejected_turn=beside(rejected[-1]),
    )
    return Sample(messages=chosen[:shared], pairs=(pair,))


def _shared_turns(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """Count equal turns at the beginning. The last turn of either does not count: equal answers are two answers."""
    return shared_count(chosen[:-1], rejected[:-1])


_CONTEXT = ("|".join(CONTEXTS),)


def _of_answers(name: str, read: Callable[[Fields], Sample], *needs: str, may: tuple[str, ...] = ()) -> Dialect:
    gives = frozenset({DEMONSTRATION, QUESTION})
    return Dialect(name=name, needs=needs, may=may, read=read, gives=gives, precedence=2)


def _of_pairs(name: str, read: Callable[[Fields], Sample], *needs: str, may: tuple[str, ...] = ("margin",)) -> Dialect:
    gives = frozenset({DEMONSTRATION, PREFERENCE, QUESTION, JUDGEMENT})
    return Dialect(name=name, needs=needs, may=may, read=read, gives=gives, precedence=1)


def _of_labels(name: str, *needs: str, imitated_as: str) -> Dialect:
    return Dialect(
        name=name,
        needs=needs,
        read=read_judged,
        fits=_is_judged,
        gives=frozenset({QUESTION, JUDGEMENT}),
        refusal="the rows are answers with a label each, as for KTO, not answers to imitate or pairs. To imitate every "
        f"answer whatever its label, set data.dialect={imitated_as}.",
        precedence=2,
    )


BUILT_IN = (
    _of_answers("messages", read_messages, CHATS, may=SYSTEM_ROLES),
    _of_answers("prompt/completion", _answered("prompt", COMPLETIONS), "prompt", COMPLETIONS),
    _of_answers("prompt/answer", _answered("prompt", "answer"), "prompt", "answer"),
    _of_answers("question/answer", _answered("question", "answer"), "question", "answer"),
    _of_answers("instruction/response", read_instruction, "instruction", ANSWERS, may=_CONTEXT),
    Dialect(name="text", needs=("text",), read=read_text, gives=frozenset({DEMONSTRATION}), precedence=0),
    _of_pairs("prompt/chosen/rejected", read_pair, PAIRED_WITH, "chosen", "rejected"),
    _of_pairs("instruction/chosen/rejected", read_pair, "instruction", "chosen", "rejected", may=(*_CONTEXT, "margin")),
    _of_pairs("prompt/pos_answers/neg_answers", read_answer_lists, "prompt", "pos_answers", "neg_answers"),
    _of_pairs("chosen/rejected", read_transcripts, "chosen", "rejected"),
    _of_pairs(
        "instruction/output_1/output_2/preference",
        read_choice,
        *("instruction", "output_1", "output_2", "preference"),
        may=_CONTEXT,
    ),
    Dialect(name="prompt", needs=(PROMPTS,), may=_CONTEXT, read=read_prompt, gives=frozenset({QUESTION}), precedence=0),
    _of_labels(
        "prompt/completion/label", "prompt|instruction|question", ANSWERS, LABELS, imitated_as="prompt/completion"
    ),
    _of_labels("messages/label", CHATS, LABELS, imitated_as="messages"),
    Dialect(
        name="prompt/completions/labels",
        needs=("prompt", "completions", "labels"),
        read=read_steps,
        gives=frozenset({QUESTION}),
        refusal="the rows are steps of answers with a label each, for process reward models, which no method here "
        "trains. Use them as prompts, or take other data.",
        precedence=2,
    ),
)
