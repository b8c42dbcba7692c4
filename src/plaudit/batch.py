"""The seam between rollout and learning: one frozen value with named columns, ragged and without padding.

    rows -> Batch.of -> annotate (reference, values) -> credit (advantages) -> weigh -> shards, micro -> loss

Sequences lie end to end in `tokens`. Column rule: entry t of every per-token column speaks of emitting token t given
the tokens before it, so `behaviour[t]`, `values[t]` and `advantages[t]` belong to the decision that gave tokens[t].
Left of here is plain Python; right of here nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plaudit.types import Row

TOKEN_COLUMNS = (
    "tokens",
    "trainable",
    "behaviour",
    "version",
    "reference",
    "proximal",
    "values",
    "advantages",
    "returns",
    "weight",
    "token_share",
)
ROW_COLUMNS = ("lengths", "group", "reward", "baseline", "row_weight", "margin", "truncated", "bootstrap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows for one or more optimizer steps. n tokens in r rows; a column that nobody asked for is None.

    Two rows (prompt | answer, T = trained):
        tokens     7 8 | 4 5 2    9 | 6 2       lengths 5 3
        trainable  - - | T T T    - | T T
        behaviour  0 0 | a b c    0 | d e
    """

    tokens: Tensor  # (n,) int64
    trainable: Tensor  # (n,) bool
    lengths: Tensor  # (r,) int64
    group: Tensor  # (r,) int64, rows of one prompt share it
    unit: int = 1
    """This many adjacent rows are never separated (2 for pairs)."""
    behaviour: Tensor | None = None  # (n,) sampler's log-probs, 0 where not sampled
    version: Tensor | None = None  # (n,) int64 policy version of each token, -1 where not sampled
    reference: Tensor | None = None  # (n,) reference log-probs
    proximal: Tensor | None = None  # (n,) learner's log-probs before the batch's first update
    values: Tensor | None = None  # (n,) critic at rollout, in its own (normalised) units
    bootstrap: Tensor | None = None  # (r,) critic's value of the state after the last token
    advantages: Tensor | None = None  # (n,)
    returns: Tensor | None = None  # (n,) value targets, in the critic's units
    reward: Tensor | None = None  # (r,) scalar reward of the answer
    baseline: Tensor | None = None  # (r,) reward of the greedy answer (ReMax)
    row_weight: Tensor | None = None  # (r,) relative; once weighed, the unit's share in the optimizer step
    margin: Tensor | None = None  # (r,)
    truncated: Tensor | None = None  # (r,) bool
    weight: Tensor | None = None  # (n,) weight of a token's loss in the optimizer step, see maths.aggregate
    token_share: Tensor | None = None  # (n,) 1 / trained tokens of the optimizer step, 0 where not trained: for figures

    @classmethod
    def of(cls, rows: Sequence[Row], *, unit: int = 1) -> Batch:
        """Lay rows end to end. Raises ValueError for no rows, a broken unit, or columns that do not fit."""
        if not rows:
            raise ValueError("a batch needs at least one row")
        if len(rows) % unit:
            raise ValueError(f"{len(rows)} rows cannot be kept in units of {unit}")
        for number, row in enumerate(rows):
            _check(number, row)
            _check_alike(number, row, rows[0])
        lengths = torch.tensor([len(row.tokens) for row in rows])
        has_reference = all(row.reference is not None for row in rows)
        has_behaviour = all(row.logprobs is not None for row in rows)
        has_version = all(row.versions is not None for row in rows)
        return cls(
            tokens=_flat([row.tokens for row in rows], torch.int64),
            trainable=_flat([row.trainable for row in rows], torch.bool),
            lengths=lengths,
            group=torch.tensor([row.group for row in rows]),
            unit=unit,
            behaviour=_flat([row.logprobs or () for row in rows], torch.float32) if has_behaviour else None,
            version=_flat([row.versions or () for row in rows], torch.int64) if has_version else None,
            reference=_flat([row.reference or () for row in rows], torch.float32) if has_reference else None,
            reward=torch.tensor([row.reward for row in rows], dtype=torch.float32),
            baseline=torch.tensor([row.baseline for row in rows], dtype=torch.float32),
            row_weight=torch.tensor([row.weight for row in rows], dtype=torch.float32),
            margin=torch.tensor([row.margin for row in rows], dtype=torch.float32),
            truncated=torch.tensor([row.truncated for row in rows]),
        )

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def ends(self) -> Tensor:
        """Index of each row's last token, (r,)."""
        return self.lengths.cumsum(0) - 1

    @property
    def row(self) -> Tensor:
        """Row number of each token, (n,)."""
        return torch.arange(len(self), device=self.lengths.device).repeat_interleave(self.lengths)

    @property
    def old(self) -> Tensor:
        """Log-probs that the importance ratio is taken against: proximal where recomputed, else behaviour."""
        column = self.proximal if self.proximal is not None else self.behaviour
        assert column is not None, "a ratio needs behaviour or proximal log-probs"
        return column

    def with_columns(self, **columns: Any) -> Batch:
        """The same rows with some columns set. Raises ValueError for a column that there is none of, or that does not
        fit: one of another shape would be spread by torch over whatever it meets."""
        for name, column in columns.items():
            self._check_column(name, column)
        return replace(self, **columns)

    def _check_column(self, name: str, column: Any) -> None:
        if name not in (*TOKEN_COLUMNS, *ROW_COLUMNS):
            raise ValueError(f"a batch has no column {name!r}; it has {', '.join((*TOKEN_COLUMNS, *ROW_COLUMNS))}")
        of, size = ("token", len(self.tokens)) if name in TOKEN_COLUMNS else ("row", len(self))
        if column is not None and (not isinstance(column, Tensor) or tuple(column.shape) != (size,)):
            given = f"the shape {tuple(column.shape)}" if isinstance(column, Tensor) else f"a {type(column).__name__}"
            raise ValueError(f"{name} has an entry a {of}: a tensor of the shape ({size},) is needed, not {given}")

    def select(self, rows: Tensor) -> Batch:
        """The given rows (indices, in that order), all columns with them."""
        starts = self.lengths.cumsum(0) - self.lengths
        sizes = self.lengths[rows]
        before = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        offsets = torch.arange(len(before), device=sizes.device) - before
        index = starts[rows].repeat_interleave(sizes) + offsets
        columns: dict[str, Any] = {"unit": self.unit}
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else column[index]
        for name in ROW_COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows]
        return Batch(**columns)

    def units(self, order: Sequence[int] | Tensor) -> Batch:
        """The given units in that order."""
        first = torch.as_tensor(order, dtype=torch.int64) * self.unit
        return self.select((first[:, None] + torch.arange(self.unit)).reshape(-1))

    def split(self, parts: int, *, order: Tensor | None = None) -> list[Batch]:
        """`parts` mini-batches of whole units, as equal in number as can be; `order` shuffles the units first."""
        count = len(self) // self.unit
        if not 1 <= parts <= count:
            raise ValueError(f"{count} units cannot be split into {parts} mini-batches: give 1 to {count}")
        order = torch.arange(count) if order is None else order
        if parts == 1 and torch.equal(order, torch.arange(count)):
            return [self]
        return [self.units(part) for part in order.tensor_split(parts)]

    def shards(self, world: int) -> list[Batch]:
        """What each of `world` ranks takes, in whole units.

        Ranks meet in collectives, so none may go without: one that is left over gets the first unit with no weight.
        """
        if world == 1:
            return [self]
        return [self.units(part) if part else self.units([0]).weightless() for part in self._parts(world)]

    def rejoined(self, shards: Sequence[Batch]) -> Batch:
        """This batch from its shards, in rank order, with the columns that they have got."""
        if len(shards) == 1:
            return shards[0]
        parts = self._parts(len(shards))
        shards = [shard for shard, part in zip(shards, parts, strict=True) if part]
        columns: dict[str, Any] = {"unit": self.unit}
        for name in (*TOKEN_COLUMNS, *ROW_COLUMNS):
            column = getattr(shards[0], name)
            columns[name] = None if column is None else torch.cat([getattr(shard, name) for shard in shards])
        return Batch(**columns).units(torch.tensor([unit for part in parts for unit in part]).argsort())

    def _parts(self, world: int) -> list[list[int]]:
        """The units of each rank: every world-th, so that lengths spread evenly; or whole prompts, which a rank then
        computes once for all of their answers, if that leaves less to the rank that has most."""
        groups, sizes, prompts = self._groups, self._sizes, self._prompts
        members: dict[int, list[int]] = {}
        for unit, group in enumerate(groups):
            members.setdefault(group, []).append(unit)
        spread = [list(range(rank, len(groups), world)) for rank in range(world)]
        if not world <= len(members) < len(groups):
            return spread

        def tokens(part: Sequence[int]) -> int:
            """That a rank computes: each prompt once."""
            once = {groups[unit]: prompts[unit] for unit in part}
            return sum(sizes[unit] - prompts[unit] for unit in part) + sum(once.values())

        whole: list[list[int]] = [[] for _ in range(world)]
        load = [0] * world
        for group in sorted(members, key=lambda group: (-tokens(members[group]), group)):
            rank = load.index(min(load))
            whole[rank] += members[group]
            load[rank] += tokens(members[group])
        return [sorted(part) for part in whole] if max(load) < max(map(tokens, spread)) else spread

    @property
    def _groups(self) -> list[int]:
        """Of each unit."""
        return self.group[:: self.unit].tolist()

    @property
    def _sizes(self) -> list[int]:
        """Tokens of each unit."""
        return self.lengths.view(-1, self.unit).sum(1).tolist()

    @property
    def _prompts(self) -> list[int]:
        """Tokens before the first trained one of each unit's first row; all of it where none is trained."""
        starts = self.lengths.cumsum(0) - self.lengths
        trained = F.pad(self.trainable.nonzero()[:, 0], (0, 1), value=len(self.tokens))
        first = trained[torch.searchsorted(trained, starts)]
        return torch.minimum(first - starts, self.lengths)[:: self.unit].tolist()

    def weightless(self) -> Batch:
        """The same rows, counting for nothing in losses and figures."""
        columns = {name: getattr(self, name) for name in ("weight", "token_share", "row_weight")}
        return self.with_columns(**{name: None if x is None else torch.zeros_like(x) for name, x in columns.items()})

    def micro(self, token_budget: int, *, together: bool = False, once: bool = False) -> list[Batch]:
        """Cut into micro-batches of whole units with at most `token_budget` tokens each (a longer unit goes alone).

        Units of similar length go together, so that little is padded; with `together` those of one prompt do, where a
        pass computes it once, and prompts with answers of similar length. With `once` it counts once too. The loss
        depends on none of this.
        """
        sizes, groups = self._sizes, self._groups
        if sum(sizes) <= token_budget:
            return [self]
        order = sorted(range(len(sizes)), key=lambda unit: -sizes[unit])
        if together:  # groups in the order of their longest unit
            members: dict[int, list[int]] = {}
            for unit in order:
                members.setdefault(groups[unit], []).append(unit)
            order = [unit for units in members.values() for unit in units]
        return [self.units(part) for part in self._within(order, token_budget, once=once)]

    def consecutive(self, token_budget: int, *, once: bool = False) -> list[Batch]:
        """As `micro`, but the order is kept."""
        if sum(self._sizes) <= token_budget:
            return [self]
        return [self.units(part) for part in self._within(range(len(self._sizes)), token_budget, once=once)]

    def _within(self, order: Iterable[int], token_budget: int, *, once: bool) -> list[list[int]]:
        """Runs of these units within the budget. With `once` a prompt counts at the first of its rows in a run."""
        sizes, groups, firsts = self._sizes, self._groups, self.lengths[:: self.unit].tolist()
        answered = zip(self._prompts, firsts, strict=True)
        shared = [prompt if once and prompt < first else 0 for prompt, first in answered]
        parts: list[list[int]] = [[]]
        used = 0
        for unit in order:
            alone = sizes[unit] - shared[unit] * (self.unit - 1)
            known = bool(parts[-1]) and groups[parts[-1][-1]] == groups[unit]
            size = alone - shared[unit] if known else alone
            if parts[-1] and used + size > token_budget:
                parts.append([])
                used, size = 0, alone
            parts[-1].append(unit)
            used += size
        return parts

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in columns.items()}
        return Batch(**moved)


def _flat(columns: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([entry for column in columns for entry in column], dtype=dtype)


def _check(number: int, row: Row) -> None:
    size = len(row.tokens)
    if size == 0:
        raise ValueError(f"row {number} has no tokens")
    for name in ("trainable", "logprobs", "versions", "reference"):
        column = getattr(row, name)
        if column is not None and len(column) != size:
            raise ValueError(f"row {number}: {name} has {len(column)} entries for {size} tokens")
    if row.trainable[0]:
        raise ValueError(f"row {number}: its first token is trained, but nothing precedes it; put a BOS in front")


def _check_alike(number: int, row: Row, first: Row) -> None:
    for name in ("logprobs", "versions", "reference"):
        mine, others = getattr(row, name) is not None, getattr(first, name) is not None
        if mine != others:
            has, lacks = (number, 0) if mine else (0, number)
            raise ValueError(f"row {has} has {name} and row {lacks} has none: give them to every row or to none")
