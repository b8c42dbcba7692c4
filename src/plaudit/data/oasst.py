"""Open Assistant's trees of messages, as rows of other dialects.

    rows with a tree each (`prompt`, `replies`), or with a message each (`message_id`, `parent_id`, `text`, `role`)
        -> demonstrations: each conversation through the best-ranked answers, as `messages`
        -> preferences: what users wrote, whose answers are ranked, as `prompt/pos_answers/neg_answers`
        -> prompts: what users wrote, with all before it and the best answer

Messages that were deleted, or that reviewers refused, are left out with all replies to them. Other rows pass unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from plaudit.data.fields import DataError, shown
from plaudit.data.files import Note, Scanned
from plaudit.data.records import DEMONSTRATION, JUDGEMENT, PREFERENCE

Node = Mapping[str, Any]
Chat = tuple[dict[str, Any], ...]


def unfolded(rows: Iterable[Scanned], kind: str, note: Note) -> Iterator[Scanned]:
    """Replace trees of messages by rows for the kind of record `kind`; pass other rows on unchanged.

    Messages are held until all are read, since those of a tree may be far apart."""
    messages: dict[str, tuple[str, dict[str, Any]]] = {}
    for where, row in rows:
        if isinstance(row, DataError):
            yield where, row
        elif isinstance(row.get("prompt"), Mapping) and "replies" in row["prompt"]:
            yield from _tree(where, row["prompt"], kind, note)
        elif {"message_id", "parent_id", "text", "role"} <= row.keys():
            messages[str(row["message_id"])] = where, {**row, "replies": []}
        else:
            yield where, row
    for where, message in messages.values():
        parent = message["parent_id"]
        if parent is None:
            continue
        if str(parent) in messages:
            messages[str(parent)][1]["replies"].append(message)
        else:
            yield (
                where,
                DataError(
                    f"its parent_id {parent!r:.80} is the message_id of no row. Add that row, or leave this one out.",
                    where,
                ),
            )
    for where, message in messages.values():
        if message["parent_id"] is None:
            yield from _tree(where, message, kind, note)


def _tree(where: str, root: Node, kind: str, note: Note) -> Iterator[Scanned]:
    count = 0
    try:
        for count, row in enumerate(_rows(root, kind), start=1):
            yield f"{where}.{count}", row
    except DataError as error:
        yield where, DataError(error.reason, where)
        return
    note("Open Assistant's trees" if count else f"Open Assistant's trees that hold no {kind}", where)


def _rows(root: Node, kind: str) -> Iterator[dict[str, Any]]:
    further = {"lang": root["lang"]} if root.get("lang") is not None else {}
    left: list[tuple[Node, Chat]] = [(root, ())] if _is_usable(root) else []
    while left:
        node, before = left.pop()
        chat = (*before, _turn(node))
        answers = sorted(_replies(node), key=_rank)
        if kind in (PREFERENCE, JUDGEMENT):
            pairs = [(one, other) for one, other in combinations(answers, 2) if _rank(one) < _rank(other) < UNRANKED]
            if pairs:
                better, worse = ([one.get("text") for one in side] for side in zip(*pairs, strict=True))
                yield {"prompt": list(chat), "pos_answers": better, "neg_answers": worse}
        elif kind != DEMONSTRATION:
            yield {"prompt": list(chat), "answer": answers[0].get("text") if answers else None, **further}
        followed = answers[:1] if kind == DEMONSTRATION else answers
        asked = [(ask, (*chat, _turn(answer))) for answer in followed for ask in _replies(answer)]
        if kind == DEMONSTRATION:
            asked = [(ask, said) for ask, said in asked if _replies(ask)]
            if answers and not asked:
                yield {"messages": [*chat, _turn(answers[0])]}
        left += reversed(asked)


UNRANKED = float("inf")


def _rank(message: Node) -> float:
    rank = message.get("rank")
    return rank if isinstance(rank, int) else UNRANKED


def _turn(message: Node) -> dict[str, Any]:
    return {"role": message.get("role"), "content": message.get("text")}


def _replies(message: Node) -> list[Node]:
    replies = message.get("replies")
    if replies is None:
        return []
    if not isinstance(replies, list | tuple):
        raise DataError(f"'replies' is {shown(replies)}; it must be a list of messages.")
    for reply in replies:
        if not isinstance(reply, Mapping):
            raise DataError(f"an entry of 'replies' is {shown(reply)}; it must be a message.")
    return [reply for reply in replies if _is_usable(reply)]


def _is_usable(message: Node) -> bool:
    return not message.get("deleted") and message.get("review_result") is not False
