"""The order in which the items of a data set are drawn: a pure function of (seed, draw number).

A run's data state is therefore one integer, the next draw, and resuming needs nothing else. Leaves out batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]


class Cursor:
    """Draws item indices of one source or a mixture, epoch after epoch, without end.

    Without weights every epoch holds each item once. With weights an epoch is as long as all sources together, and each
    source fills its share to within one draw. A source continues in the next epoch where it stopped. After its last
    item it begins a new pass, newly shuffled, so its items are drawn equally often.
    """

    def __init__(
        self,
        counts: int | Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.counts = (counts,) if isinstance(counts, int) else tuple(counts)
        self.length = sum(self.counts)
        """Number of draws in an epoch."""
        if self.length == 0 or min(self.counts) < 0:
            raise ValueError(f"counts={self.counts}: there must be at least one item to draw from.")
        if seed < 0:
            raise ValueError(f"seed={seed} is negative; seeds count from 0.")
        self.quotas = None if weights is None else _quotas(self.counts, tuple(weights))
        """Number of draws from each source in an epoch; None without weights."""
        self.seed = seed
        self.shuffle = shuffle

    def item(self, draw: int) -> int:
        """Return the index of draw `draw`'s item in the concatenated sources. Raises IndexError for a negative draw."""
        if draw < 0:
            raise IndexError(f"draw={draw} is negative; draws count from 0.")
        return int(_epoch(self.counts, self.quotas, self.seed, self.shuffle, draw // self.length)[draw % self.length])

    def epoch(self, draw: int) -> int:
        """Return the epoch, counted from 0, that a draw belongs to."""
        return draw // self.length


def _quotas(counts: tuple[int, ...], weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return each source's number of draws in an epoch: its share by weight, rounded by largest remainders."""
    if len(weights) != len(counts):
        raise ValueError(f"{len(weights)} weights for {len(counts)} sources; give one each.")
    if any(not weight > 0 or weight == float("inf") for weight in weights):
        raise ValueError(f"weights={weights} must be positive and finite; leave a source of weight 0 out.")
    if 0 in counts:
        raise ValueError(f"counts={counts}: a source without items cannot fill its share.")
    total = sum(counts)
    exact = [weight / sum(weights) * total for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: total - sum(quotas)]:
        quotas[i] += 1
    return tuple(quotas)


@lru_cache(maxsize=2)  # this epoch and the next, since online prompts are drawn ahead
def _epoch(counts: tuple[int, ...], quotas: tuple[int, ...] | None, seed: int, shuffle: bool, epoch: int) -> Order:
    total = sum(counts)
    if quotas is None:
        return permutation(total, 0, seed, epoch) if shuffle else np.arange(total)
    starts = np.cumsum((0, *counts[:-1]))
    drawn = np.concatenate(
        [
            start + _stretch(count, quota * epoch, quota, key=(1, seed, source), shuffle=shuffle)
            for source, (start, count, quota) in enumerate(zip(starts, counts, quotas, strict=True))
        ]
    )
    # Unshuffled sources are interleaved evenly: draw j of q stands at (j + 1/2) / q of the epoch.
    places = np.concatenate([(np.arange(quota) + 0.5) / max(quota, 1) for quota in quotas])
    order: Order = drawn[permutation(total, 0, seed, epoch) if shuffle else np.argsort(places, kind="stable")]
    return order


def _stretch(count: int, first: int, length: int, *, key: tuple[int, ...], shuffle: bool) -> Order:
    """Return the item indices of draws first .. first + length - 1 from one source, whose passes follow each other."""
    positions = np.arange(first, first + length)
    if not shuffle or length == 0:
        return positions % count
    passes = range(first // count, (first + length - 1) // count + 1)
    endless = np.concatenate([permutation(count, *key, one) for one in passes])
    stretch: Order = endless[positions - passes[0] * count]
    return stretch


def permutation(count: int, *key: int) -> Order:
    """Return a random permutation of range(count) that depends only on the key."""
    # Ranks of raw generator bits: numpy promises the bits across its versions, not what `permutation` makes of them.
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")
