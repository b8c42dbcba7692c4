"""The seam between rollout and learning: a frozen value with named columns, ragged and without padding.

    rows -> Batch.of -> annotate (reference, values) -> credit (advantages) -> weigh -> shards, micro -> loss

Sequences are laid end to end in `tokens`. Column rule: entry t of every per-token column is about emitting token t
given the tokens before it: `advantages[t]` belongs to the decision that gave tokens[t]. `partition.py` groups units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plaudit.partition import Unit, by_group, passes, spread
from plaudit.types import Row
from plaudit.types.checked import check_rows
from plaudit.types.distant import Source, laid, landed

ROW_COLUMNS = (*"lengths group episode teacher reward baseline row_weight margin continues bootstrap".split(),)
READ = ("tokens", "trainable", "lengths", "group", "teacher")
WEIGHTS = ("weight", "token_share", "row_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows for one or more optimizer steps. n tokens in r rows; a column that is not needed is None.

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
    """Number of adjacent rows that are never separated (2 for pairs)."""
    episode: Tensor | None = None  # (r,) int64, rows of one episode share it; None if each row is an answer
    teacher: Tensor | None = None  # (r,) int64, the row's teacher; None if all have the first
    sources: tuple[Source, ...] = ()
    """Where numbers that are still on rollout nodes are fetched (`types/distant.py`); `landed` fetches them."""
    behaviour: Tensor | None = None  # (n,) sampler's log-probs, 0 where not sampled
    version: Tensor | None = None  # (n,) int64 policy version of each token, -1 where not sampled
    reference: Tensor | None = None  # (n,) reference log-probs
    proximal: Tensor | None = None  # (n,) learner's log-probs before the batch's first update
    values: Tensor | None = None  # (n,) critic at rollout, in its own (normalised) units
    bootstrap: Tensor | None = None  # (r,) critic's value of the state after the last token
    advantages: Tensor | None = None  # (n,)
    returns: Tensor | None = None  # (n,) value targets, in the critic's units
    reward: Tensor | None = None  # (r,) scalar reward of the answer
    process: Tensor | None = None  # (n,) the part of the reward that stands at tokens before the end; None for none
    baseline: Tensor | None = None  # (r,) reward of the greedy answer (ReMax)
    row_weight: Tensor | None = None  # (r,) relative; once weighed, the unit's share of the optimizer step
    margin: Tensor | None = None  # (r,) by how much the chosen row should beat the rejected one
    continues: Tensor | None = None  # (r,) bool, cut off by length: `bootstrap` stands for the rest of the return
    weight: Tensor | None = None  # (n,) weight of a token's loss in the optimizer step, see maths.aggregate
    token_share: Tensor | None = None  # (n,) 1 / trained tokens of the optimizer step, 0 where not trained: for figures

    @classmethod
    def of(cls, rows: Sequence[Row], *, unit: int = 1) -> Batch:
        """Lay rows end to end. Raises ValueError for no rows, an incomplete unit, or columns of another length."""
        check_rows(rows, unit)
        tokens, sources = laid([row.tokens for row in rows], "int64")
        return cls(
            tokens=torch.from_numpy(tokens),
            sources=sources,
            trainable=torch.from_numpy(laid([row.trainable for row in rows], "bool")[0]),
            lengths=torch.tensor([len(row.tokens) for row in rows]),
            group=torch.tensor([row.group for row in rows]),
            unit=unit,
            episode=torch.tensor([not r.further for r in rows]).cumsum(0) - 1 if any(r.further for r in rows) else None,
            teacher=torch.tensor([row.teacher for row in rows]) if any(row.teacher for row in rows) else None,
            behaviour=_flat([row.logprobs for row in rows], "float32"),
            version=_flat([row.versions for row in rows], "int64"),
            reference=_flat([row.reference for row in rows], "float32"),
            reward=torch.tensor([row.reward for row in rows], dtype=torch.float32),
            process=_process(rows) if any(row.process for row in rows) else None,
            baseline=torch.tensor([row.baseline for row in rows], dtype=torch.float32),
            row_weight=torch.tensor([row.weight for row in rows], dtype=torch.float32),
            margin=torch.tensor([row.margin for row in rows], dtype=torch.float32),
            continues=torch.tensor([row.continues for row in rows]),
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
        """Old log-probs of the importance ratio: proximal if recomputed, else behaviour."""
        column = self.proximal if self.proximal is not None else self.behaviour
        assert column is not None, "a ratio needs behaviour or proximal log-probs"
        return column

    def columns(self) -> dict[str, Tensor]:
        """The columns that are set, by name."""
        return {one.name: value for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)}

    def with_columns(self, **columns: Any) -> Batch:
        """Return the same rows with some columns set. Raises ValueError for an unknown column, and for one of another
        shape, which torch would broadcast."""
        for name, column in columns.items():
            self._check_column(name, column)
        return replace(self, **columns)

    def _check_column(self, name: str, column: Any) -> None:
        if name not in (*TOKEN_COLUMNS, *ROW_COLUMNS):
            raise ValueError(f"a batch has no column {name!r}; it has {', '.join((*TOKEN_COLUMNS, *ROW_COLUMNS))}")
        of, size = ("token", len(self.tokens)) if name in TOKEN_COLUMNS else ("row", len(self))
        if column is not None and (not isinstance(column, Tensor) or tuple(column.shape) != (size,)):
            shape = f"the shape {tuple(column.shape)}" if isinstance(column, Tensor) else f"a {type(column).__name__}"
            raise ValueError(f"{name} has {shape}, but needs an entry a {of}: give a tensor of the shape ({size},)")

    def _mapped(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        return replace(self, **dict[str, Any]((name, change(name, one)) for name, one in self.columns().items()))

    def landed(self) -> Batch:
        """Return the batch after fetching the numbers that are still on rollout nodes. Raises WorkerLost."""
        if not self.sources:
            return self
        found = landed({name: column.numpy() for name, column in self.columns().items()}, self.sources)
        return replace(self, sources=(), **dict[str, Any]((name, torch.from_numpy(one)) for name, one in found.items()))

    def select(self, rows: Tensor) -> Batch:
        """Return the given rows (indices, in that order) with all columns."""
        sizes = self.lengths[rows]
        tokens = (self.ends[rows] + 1 - sizes.cumsum(0)).repeat_interleave(sizes)  # old index minus new one
        tokens += torch.arange(len(tokens), device=tokens.device)
        return self._mapped(lambda name, column: column.index_select(0, rows if name in ROW_COLUMNS else tokens))

    def units(self, order: Sequence[int] | Tensor) -> Batch:
        """Return the units with these numbers (a unit is `unit` adjacent rows), in that order, with all columns."""
        first = torch.as_tensor(order, dtype=torch.int64) * self.unit
        return self.select((first[:, None] + torch.arange(self.unit)).reshape(-1))

    def trained(self) -> Batch:
        """Return only units with a trained token (all, if none has one): others count in baselines and means only."""
        before = F.pad(self.trainable.cumsum(0), (1, 0))[F.pad(self.lengths.cumsum(0), (1, 0))]  # (r + 1,)
        trains = (before[1:] > before[:-1]).view(-1, self.unit).any(1)
        return self if trains.all() or not trains.any() else self.units(trains.nonzero()[:, 0])

    def split(self, parts: int, *, order: Tensor | None = None) -> list[Batch]:
        """Split into `parts` mini-batches of whole units, taken in `order`. Raises ValueError for too many parts."""
        count = len(self) // self.unit
        if not 1 <= parts <= count:
            raise ValueError(f"{count} units cannot be split into {parts} mini-batches: give 1 to {count}")
        order = torch.arange(count) if order is None else order
        if parts == 1 and torch.equal(order, torch.arange(count)):
            return [self]
        ids = [] if self.episode is None else list(dict.fromkeys(self.episode[order].tolist()))
        if self.episode is not None and len(ids) < count:  # rows of an episode go together
            rows = {one: (self.episode == one).nonzero()[:, 0] for one in ids}
            some = [ids[number::parts] for number in range(min(parts, len(ids)))]
            return [self.units(torch.cat([rows[one] for one in own])) for own in some]
        return [self.units(part) for part in order.tensor_split(parts)]

    def shards(self, world: int) -> list[Batch]:
        """Split whole units into shards for `world` ranks. A rank without units gets the first one with weight 0, since
        every rank must take part in collectives."""
        if world == 1:
            return [self]
        parts = spread(self._units, world)
        return [self.units(part) if part else self.units([0]).weightless() for part in parts]

    def sequences(self) -> Batch:
        """Return the batch with only the columns that a forward pass reads."""
        lacks = ("behaviour",) if self.sources else ()  # kept, so that `landed` fetches it on the ranks
        return self.with_columns(**{name: None for name in self.columns() if name not in (*READ, *lacks)})

    def rejoined(self, shards: Sequence[Mapping[str, Tensor]]) -> Batch:
        """Return this batch with the new columns that ranks computed for its `shards`, given in rank order."""
        if len(shards) == 1:
            return self.with_columns(**shards[0])
        parts = spread(self._units, len(shards))
        found = [shard for shard, part in zip(shards, parts, strict=True) if part]
        order = torch.tensor([unit for part in parts for unit in part])
        new = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        placed = self.sequences().units(order).with_columns(**new).units(order.argsort())
        return self.with_columns(**{name: placed.columns()[name] for name in new})

    def weightless(self) -> Batch:
        """Return the same rows with weights of 0, so that they count in no loss and no figure."""
        return self._mapped(lambda name, column: torch.zeros_like(column) if name in WEIGHTS else column)

    def micro(self, token_budget: int, *, together: bool = False, once: bool = False) -> list[Batch]:
        """Cut into micro-batches of whole units, longest first, with at most `token_budget` tokens; a larger unit has
        its own. `together`: units of one prompt follow each other. `once`: its tokens count once in the budget."""
        if len(self.tokens) <= token_budget:
            return [self]
        units, once = self._units, once and self.episode is None
        order = sorted(range(len(units)), key=lambda number: -units[number].tokens)
        if together:
            order = [number for members in by_group(units, order).values() for number in members]
        return [self.units(part) for part in passes(units, order, token_budget, once=once)]

    def consecutive(self, token_budget: int, *, once: bool = False) -> list[Batch]:
        """Cut as `micro` does, but keep the units' order."""
        if len(self.tokens) <= token_budget:
            return [self]
        units, once = self._units, once and self.episode is None
        return [self.units(part) for part in passes(units, range(len(units)), token_budget, once=once)]

    @property
    def _units(self) -> list[Unit]:
        starts = self.lengths.cumsum(0) - self.lengths
        trained = F.pad(self.trainable.nonzero()[:, 0], (0, 1), value=len(self.tokens))
        prompts = torch.minimum(trained[torch.searchsorted(trained, starts)] - starts, self.lengths)  # (r,)
        sizes = self.lengths.view(-1, self.unit).sum(1)
        columns = (self.group[:: self.unit], sizes, prompts[:: self.unit], self.lengths[:: self.unit])
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        return [Unit(group, tokens, prompt, first, self.unit) for group, tokens, prompt, first in numbers]

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on another device."""
        return self._mapped(lambda name, column: column.to(device))


TOKEN_COLUMNS = tuple(field.name for field in fields(Batch) if field.name not in ("unit", "sources", *ROW_COLUMNS))


def _process(rows: Sequence[Row]) -> Tensor:
    parts = [torch.zeros(len(row.tokens)) for row in rows]
    for row, part in zip(rows, parts, strict=True):
        for place, reward in row.process:
            part[place] += reward
    return torch.cat(parts)


def _flat(columns: Sequence[Sequence[Any] | None], kind: str) -> Tensor | None:
    present = [column for column in columns if column is not None]
    return torch.from_numpy(laid(present, kind)[0]) if present else None
