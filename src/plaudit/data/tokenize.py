"""Records to token rows: which tokens there are, and which of them are trained.

    demonstration -> Row, ...      prompt masked, answer and its end token trained
    preference    -> Row, Row, ... chosen and rejected next to each other
    judgement     -> Row, Row, ... each judged answer before one to another prompt
    prompt        -> Prompt

One `Reader` reads all of them, so equal prompts and answers have equal tokens. Counts go to the source's `Tally`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from plaudit.data.fields import DataError, Message
from plaudit.data.formats import speaks
from plaudit.data.reader import Answer, Asked, Encoded, Reader, Tokens
from plaudit.data.records import Sample, beside
from plaudit.data.report import Tally
from plaudit.types import Prompt, Row


def demonstration_rows(records: Sequence[Sample], reader: Reader, tally: Tally, first_group: int = 0) -> list[Row]:
    """Return a row per record, or with `data.every_turn` per trained assistant turn, whose prompt is all turns before.

    Rows of a record share a `group`, numbered from `first_group`. Records without rows are counted as dropped.
    """
    rows: list[Row] = []
    group = first_group
    for _, turns in reader.read(records, _turns if reader.settings.every_turn else _last_turn, tally):
        before, left_out = len(rows), Counter[str]()
        for turn in turns:
            fitted = reader.fitting_prompt(turn, left_out)
            if fitted is None:
                continue
            answer = reader.answer(turn, 0, fitted)
            if isinstance(answer, str):
                left_out[answer] += 1
                continue
            _count_prompt(tally, turn, fitted)
            rows.append(_row(reader.before(fitted, answer), answer, tally, group=group))
        if len(rows) > before:
            tally.items += 1
            tally.turns_dropped += left_out
            group += 1
        else:
            tally.dropped[next(iter(left_out))] += 1
    return rows


def _last_turn(record: Sample) -> tuple[Asked, ...]:
    """Return the record with its answer, which is a chat's last turn."""
    return (Asked(record, (_said(record.answer or "", record.turn),)),)


def _turns(record: Sample) -> tuple[Asked, ...]:
    """Return a prompt and its answer for every assistant turn that is trained and says or calls something."""
    said = [i for i, turn in enumerate(record.messages) if i and speaks(turn)]
    before = (Asked(replace(record, messages=record.messages[:i]), (record.messages[i],)) for i in said)
    return (*before, *_last_turn(record))


def _said(text: str, turn: Message) -> Message:
    return {"role": "assistant", "content": text, **beside(turn)}


def _pairs(record: Sample) -> tuple[Asked, ...]:
    """Return the record with its answers: chosen and rejected of each pair in turn."""
    said = [
        _said(text, turn)
        for pair in record.pairs
        for text, turn in ((pair.chosen, pair.chosen_turn), (pair.rejected, pair.rejected_turn))
    ]
    return (Asked(record, tuple(said)),)


def preference_rows(records: Sequence[Sample], reader: Reader, tally: Tally, first_group: int = 0) -> list[Row]:
    """Return chosen answers as rows 2i, rejected as 2i + 1; `group` numbers prompts, `weight` is 1 / prompt's pairs."""
    rows: list[Row] = []
    most = reader.settings.max_pairs_per_prompt
    group = first_group
    for record, (asked,) in reader.read(records, _pairs, tally):
        fitted = reader.fitting_prompt(asked, tally.dropped)
        if fitted is None:
            continue
        fitting: list[tuple[Answer, Answer, float]] = []
        for number, pair in enumerate(record.pairs):
            fit = _fit_pair(reader, asked, number, fitted)
            if isinstance(fit, str):
                tally.pairs_dropped[fit] += 1
            elif len(fitting) == most:
                tally.pairs_dropped[f"beyond max_pairs_per_prompt={most}"] += 1
            else:
                fitting.append((*fit, pair.margin))
        if not fitting:
            tally.dropped["no usable pair"] += 1
            continue
        for one, other, margin in fitting:
            for answer, by in ((one, margin), (other, 0.0)):
                before = reader.before(fitted, answer)
                rows.append(_row(before, answer, tally, group=group, weight=1 / len(fitting), margin=by))
        _count_prompt(tally, asked, fitted)
        tally.pairs += len(fitting)
        tally.items += 1
        group += 1
    return rows


def _judged(record: Sample) -> tuple[Asked, ...]:
    """Return the record with its answers, in the order of the verdicts."""
    return (Asked(record, tuple(_said(one.answer, one.turn) for one in record.verdicts)),)


def judgement_rows(records: Sequence[Sample], reader: Reader, tally: Tally, first_group: int = 0) -> list[Row]:
    """Return judged answers as rows 2i, with the reward 1 (good) or -1 (bad); `group` numbers prompts.

    Row 2i + 1 is the mismatched row: the same prompt with an answer to another prompt of these records. If there is no
    such answer, the row has only the prompt, and none of its tokens is trainable.
    """
    fitting: list[tuple[Tokens, list[tuple[Answer, bool]]]] = []
    for record, (asked,) in reader.read(records, _judged, tally):
        fitted = reader.fitting_prompt(asked, tally.dropped)
        if fitted is None:
            continue
        left_out = Counter[str]()
        judged = _judged_answers(reader, record, asked, fitted, left_out)
        if not judged:
            tally.dropped[next(iter(left_out))] += 1
            continue
        fitting.append((fitted, judged))
        tally.verdicts.update("good" if good else "bad" for _, good in judged)
        tally.verdicts.update({f"left out, {reason}": count for reason, count in left_out.items()})
        _count_prompt(tally, asked, fitted)
        tally.items += 1
    rows: list[Row] = []
    for number, (prompt, judged) in enumerate(fitting):
        for place, (answer, good) in enumerate(judged):
            row = _row(reader.before(prompt, answer), answer, tally, group=first_group + number)
            rows.append(replace(row, reward=1.0 if good else -1.0))
            other = _mismatched(fitting, number, place, answer)
            before = reader.before(prompt, other) if other else prompt
            tokens = other.tokens[: reader.settings.max_tokens - len(before)] if other else ()
            trainable = (False,) * len(before) + (True,) * len(tokens)
            rows.append(Row(tokens=before + tokens, trainable=trainable, group=row.group))
    return rows


def _mismatched(
    fitting: Sequence[tuple[Tokens, list[tuple[Answer, bool]]]], number: int, place: int, answer: Answer
) -> Answer | None:
    """Return an answer to another prompt, the next in order with one that differs from `answer`; None without one."""
    for step in range(1, len(fitting)):
        prompt, judged = fitting[(number + step) % len(fitting)]
        others = [other for other, _ in judged if other.tokens != answer.tokens]
        if prompt != fitting[number][0] and others:
            return others[place % len(others)]
    return None


def _judged_answers(
    reader: Reader, record: Sample, asked: Encoded, prompt: Tokens, left_out: Counter[str]
) -> list[tuple[Answer, bool]]:
    """Return (answer, True if it is good) for each usable answer, once each; count others by reason in `left_out`."""
    called: dict[Answer, set[bool]] = {}
    for number, verdict in enumerate(record.verdicts):
        answer = reader.answer(asked, number, prompt)
        if isinstance(answer, str):
            left_out[answer] += 1
        else:
            called.setdefault(answer, set()).add(verdict.good)
    most = reader.settings.max_pairs_per_prompt
    judged: list[tuple[Answer, bool]] = []
    for answer, verdicts in called.items():
        if len(verdicts) > 1:
            left_out["called good and bad"] += 1
        elif len(judged) == 2 * most:
            left_out[f"beyond two for each of max_pairs_per_prompt={most}"] += 1
        else:
            judged.append((answer, verdicts.pop()))
    return judged


def prompts(records: Sequence[Sample], reader: Reader, tally: Tally) -> list[Prompt]:
    """Return a prompt per record; `text` is what the policy reads. A reference that `refers` refuses is a bad row."""
    fitting: list[Prompt] = []
    for record, (asked,) in reader.read(records, lambda record: (Asked(record),), tally):
        fitted = reader.fitting_prompt(asked, tally.dropped)
        if fitted is None:
            continue
        try:
            reader.refers(record.answer)
        except ValueError as error:
            tally.skip(DataError(str(error), record.where))
            continue
        shown = {"tools": record.arguments["tools"]} if "tools" in record.arguments else {}
        fitting.append(
            Prompt(
                id=record.where,
                text=asked.text if len(fitted) == len(asked.tokens) else _text(fitted, reader),
                tokens=fitted,
                answer=record.answer,
                messages=asked.messages,
                source=tally.source,
                extra={**shown, **record.extra},
            )
        )
        _count_prompt(tally, asked, fitted)
        tally.items += 1
    return fitting


def _text(tokens: Tokens, reader: Reader) -> str:
    """Return the text of a prompt that lost its beginning, without the BOS that `encode_prompt` puts before it."""
    own = tokens[1:] if tokens[0] == reader.bos else tokens
    return str(reader.tokenizer.decode(list(own), clean_up_tokenization_spaces=False))


def _fit_pair(reader: Reader, asked: Encoded, number: int, prompt: Tokens) -> tuple[Answer, Answer] | str:
    chosen, rejected = 2 * number, 2 * number + 1
    if asked.completions[chosen] == asked.completions[rejected]:
        return "chosen equals rejected"
    one = reader.answer(asked, chosen, prompt)
    if isinstance(one, str):
        return one
    other = reader.answer(asked, rejected, prompt)
    if isinstance(other, str):
        return other
    if one.tokens == other.tokens:
        return "chosen equals rejected once cut"
    return one, other


def _count_prompt(tally: Tally, asked: Encoded, fitted: Tokens) -> None:
    tally.truncated_prompts += asked.shortened or len(fitted) < len(asked.tokens)
    tally.prompt_lengths[len(fitted)] += 1


def _row(prompt: Tokens, answer: Answer, tally: Tally, *, group: int, weight: float = 1.0, margin: float = 0.0) -> Row:
    tally.rows += 1
    if answer.span:
        tally.note("answers whose first token begins within the prompt: the policy is asked with another token there")
    tally.truncated_completions += answer.truncated
    tally.completion_lengths[len(answer.tokens)] += 1
    tally.trained_tokens += len(answer.tokens)
    return Row(
        tokens=prompt + answer.tokens,
        trainable=(False,) * len(prompt) + (True,) * len(answer.tokens),
        group=group,
        weight=weight,
        margin=margin,
    )
