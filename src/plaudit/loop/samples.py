"""A hook that records a step's answers with log-probs, entropies, advantages and rewards, within a budget of bytes.

    groups of a step, the batch's columns, the learner's log-probs -> one record per answer -> monitor/samples.py

The hook changes nothing in the run, so the weights are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaudit.batch import Batch
from plaudit.learn.watched import WatchedRows
from plaudit.loop.progress import Moment
from plaudit.monitor.samples import Groups, Samples, guaranteed
from plaudit.runtime.worker import AnswersLost
from plaudit.types import Completion, Group, Response, Stats
from plaudit.types.distant import here

DIGITS = 5
"""Decimals of a recorded log-prob, entropy or advantage: enough to read, and half of a file's bytes."""

SIZE = (450, 45)
"""Estimated bytes of a record besides prompt and reference, and per token of its answer. Low estimates: a record that
does not fit after all is left out when it is written."""

PART = "\ufffd"
"""The character that a tokenizer decodes to for bytes that are no whole character (U+FFFD)."""

Key = tuple[int, bytes]
"""Key of a row: (group, bytes of its tokens)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """One row's columns, each with an entry per token of the row; `learner` holds log-probs. None if not computed."""

    trainable: Any
    advantages: Any = None
    learner: Any = None
    entropies: Any = None


class Pieces:
    """Return one text per token. If several tokens share a character, the first has the text of all, the others ''."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._known: dict[int, str] = {}
        self._joined: dict[tuple[int, ...], str] = {}

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        known, joined = self._known, self._joined
        for token in tokens:
            if token not in known:
                known[token] = self._decode([token])
        pieces = [known[token] for token in tokens]
        if not any(PART in piece for piece in pieces):
            return pieces
        found: list[str] = []
        for parts, run in groupby(zip(tokens, pieces, strict=True), lambda one: PART in one[1]):
            members = list(run)
            if parts:
                own = tuple(token for token, _ in members)
                if own not in joined:
                    joined[own] = self._decode(list(own))
                found += [joined[own], *[""] * (len(own) - 1)]
            else:
                found += [piece for _, piece in members]
        return found


class RecordSamples:
    """Record each step's groups: groups of the validation, groups that the step learned from, and dropped groups.

    `decode` returns the text of tokens. `watched_rows` returns the learner's log-probs and entropies of groups. It is
    asked only for groups that fit into the step's share of the budget, so a large step costs no more than a small one.
    """

    def __init__(
        self,
        samples: Samples,
        decode: Callable[[Sequence[int]], str],
        watched_rows: Callable[[Sequence[int]], Awaitable[Sequence[WatchedRows]]],
    ):
        self.samples, self.pieces, self.watched_rows = samples, Pieces(decode), watched_rows
        self._validation: Sequence[Group] = ()

    def validated(self, groups: Sequence[Group]) -> None:
        """Record these answers to held-out prompts with the current step."""
        self._validation = groups

    async def __call__(self, moment: Moment) -> Stats:
        step, delivery, validation = moment.progress.step, moment.delivery, self._validation
        self._validation = ()
        kinds = {"validation": validation, "train": delivery.groups, "dropped": delivery.dropped}
        fit, space = dict[str, list[Group]](), self.samples.bytes_left(step)
        for kind, groups in kinds.items():
            fit[kind], space = _first(groups, space, guaranteed(kind, step))
        wanted = [group.index for group in fit["train"]]
        watched = await self.watched_rows(wanted)
        with suppress(AnswersLost):  # the step is done: if a node's loss took its answers, it has no record
            rows = row_columns(_of_groups(moment.batch, wanted), watched)
            made = {
                kind: (len(groups), self._records(fit[kind], rows if kind == "train" else {}))
                for kind, groups in kinds.items()
            }
            self.samples.write(step, made)
        return {}

    def _records(self, groups: Sequence[Group], rows: dict[Key, list[Columns]]) -> Groups:
        return (self._of_group(group, rows) for group in groups)

    def _of_group(self, group: Group, rows: dict[Key, list[Columns]]) -> list[dict[str, Any]]:
        """Return one record per response of the group, or [] if no process holds its answers any more."""
        with suppress(AnswersLost):
            return list(sample_records(group, rows, self.pieces))
        return []


@contextmanager
def recording(
    path: Path,
    decode: Callable[[Sequence[int]], str],
    watched_rows: Callable[[Sequence[int]], Awaitable[Sequence[WatchedRows]]],
    *,
    budget: int,
    steps: int,
    after: int,
) -> Iterator[RecordSamples]:
    """Yield a hook that records into a file of at most `budget` bytes (see `Samples`); close the file at the end."""
    with Samples(path, budget=budget, steps=steps, after=after) as samples:
        yield RecordSamples(samples, decode, watched_rows)


def _first(groups: Sequence[Group], space: int, least: int) -> tuple[list[Group], int]:
    """Return the first groups that fit into `space` bytes, at least `least` of them, and the space that is left."""
    for number, group in enumerate(groups):
        each = SIZE[0] + len(group.prompt.text) + len(group.prompt.answer or "")
        size = sum(each + SIZE[1] * len(response.tokens) for response in group.responses)
        if size > space and number >= least:
            return list(groups[:number]), space
        space -= size
    return list(groups), space


def _of_groups(batch: Batch | None, groups: Sequence[int]) -> Batch | None:
    """Return these groups' rows of the batch, with distant numbers fetched; None without a batch or such rows."""
    if batch is None:
        return None
    rows = torch.isin(batch.group, torch.tensor(groups, dtype=torch.int64)).nonzero()[:, 0]
    return batch.select(rows).landed() if len(rows) else None


def row_columns(batch: Batch | None, watched: Iterable[WatchedRows] = ()) -> dict[Key, list[Columns]]:
    """Return the columns of a batch's rows by key (group, tokens), {} without a batch; equal answers share a key. The
    learner's log-probs are those before the first update (`proximal`) if set, else of the first pass in `watched`."""
    if batch is None:
        return {}
    first: dict[Key, tuple[Any, Any]] = {}
    for one in watched:
        for key, logprobs, entropy in _rows(one.tokens, one.lengths, one.group, one.logprobs, one.entropy):
            first.setdefault(key, (logprobs, entropy))
    found: dict[Key, list[Columns]] = {}
    columns = (batch.trainable, batch.advantages, batch.proximal)
    for key, trainable, advantages, proximal in _rows(batch.tokens, batch.lengths, batch.group, *columns):
        logprobs, entropy = first.get(key, (None, None))
        learner = logprobs if proximal is None else proximal
        found.setdefault(key, []).append(Columns(trainable, advantages, learner, entropy))
    return found


def _rows(tokens: Tensor, lengths: Tensor, group: Tensor, *columns: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield each row's key (group, tokens) and its part of each column."""
    flat, place = tokens.numpy(), 0
    plain = [None if column is None else _short(column.detach().numpy()) for column in columns]
    for index, length in zip(group.tolist(), lengths.tolist(), strict=True):
        here = slice(place, place + length)
        yield (index, flat[here].tobytes()), *(None if column is None else column[here] for column in plain)
        place += length


def sample_records(group: Group, rows: dict[Key, list[Columns]], pieces: Pieces) -> Iterator[dict[str, Any]]:
    """Yield one JSON record per response of a group. Responses with equal tokens take columns in the order of rows."""
    taken = dict[Key, int]()
    reference = {} if group.prompt.answer is None else {"answer": group.prompt.answer}
    completions = here([response.completion for response in group.responses])
    for number, (response, completion) in enumerate(zip(group.responses, completions, strict=True)):
        response = replace(response, completion=completion)
        without = response.reward is None and not response.continues and response.score.applicable
        rowless = response.greedy or not response.trained or without
        columns = None if rowless else _columns(group, completion, rows, taken)
        yield {
            "group": group.index,
            "sample": number,
            "greedy": response.greedy,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            **reference,
            **_answer(response),
            **_by_token(response, columns, pieces),
        }


def _columns(
    group: Group, completion: Completion, rows: dict[Key, list[Columns]], taken: dict[Key, int]
) -> Columns | None:
    """Return the columns of an answer's tokens, or None if a row of it has none; `taken` counts the rows with a key."""
    found = []
    whole = [(group.prompt.tokens, slice(None))]
    for prefix, part in whole if completion.episode is None else completion.episode.sequences(group.prompt.tokens):
        tokens = completion.tokens[part]
        key = (group.index, b"".join(np.array(one, dtype=np.int64).tobytes() for one in (prefix, tokens)))
        if taken.get(key, 0) == len(rows.get(key, ())):
            return None
        found.append((rows[key][taken.setdefault(key, 0)], len(tokens)))
        taken[key] += 1
    if len(found) == 1:
        return found[0][0]
    by_name = {one.name: [(getattr(row, one.name), count) for row, count in found] for one in fields(Columns)}
    return Columns(
        **{
            name: None if parts[0][0] is None else np.concatenate([column[-count:] for column, count in parts])
            for name, parts in by_name.items()
        }
    )


def _answer(response: Response) -> dict[str, Any]:
    completion, score = response.completion, response.score
    return {
        "completion": completion.text,
        "finish": str(completion.finish),
        "tokens": completion.length,
        "reward": response.reward,
        "score": score.value,
        "parts": dict(score.parts),
        "reason": score.reason,
        **({} if completion.episode is None else {"messages": completion.episode.messages}),
        "versions": sorted({version for version in completion.versions if version >= 0}),
    }


def _by_token(response: Response, columns: Columns | None, pieces: Pieces) -> dict[str, Any]:
    """Return an answer's per-token fields, and its mean advantage if known; advantages by token only if they differ."""
    completion, count = response.completion, len(response.tokens)
    found: dict[str, Any] = {
        "advantage": None,
        "ids": tuple(completion.tokens),
        "pieces": pieces(completion.tokens),
        "logprobs": _short(np.array(completion.logprobs)).tolist(),
    }
    if len(set(completion.versions)) > 1:
        found["drawn"] = [[version, len(list(run))] for version, run in groupby(completion.versions)]
    if completion.episode is not None:
        found["turns"] = [len(list(run)) for _, run in groupby(completion.episode.sampled)]
    if columns is not None:
        if columns.advantages is not None:
            mine = columns.advantages[columns.trainable].tolist()
            found["advantage"] = sum(mine) / len(mine)
            if min(mine) < max(mine):
                found["advantages"] = columns.advantages[-count:].tolist()
        for name, column in (("learner", columns.learner), ("entropies", columns.entropies)):
            if column is not None:
                found[name] = column[-count:].tolist()
    return found


def _short(values: Any) -> Any:
    """Return numbers as float64 rounded to DIGITS decimals; return booleans unchanged."""
    return values if values.dtype == bool else np.round(values.astype(np.float64), DIGITS)
