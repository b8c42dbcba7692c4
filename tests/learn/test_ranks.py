"""How tensors are put together to travel; what ranks tell each other is tried in test_sharding.py."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from plaudit.learn import ranks
from plaudit.learn.ranks import Alone, buckets


def test_neighbours_of_one_dtype_travel_together_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BUCKET_ELEMENTS", 10)
    sizes = [4, 6, 1, 11, 10, 2, 3, 3]
    tensors = [torch.zeros(size, dtype=torch.bfloat16 if k == 6 else torch.float32) for k, size in enumerate(sizes)]
    found = list(buckets(iter(tensors)))
    assert [[tensor.numel() for tensor in bucket] for bucket in found] == [[4, 6], [1], [11], [10], [2], [3], [3]]
    assert all(mine is tensor for mine, tensor in zip(chain(*found), tensors, strict=True))
    assert list(buckets([])) == []


def test_one_alone_has_said_everything() -> None:
    alone, tensor = Alone(), torch.tensor([1.0, 2.0])
    alone.sum([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert (alone.most(3), alone.total(0.5), alone.merge({"loss": 2.0})) == (3, 0.5, {"loss": 2.0})
    assert alone.gather(tensor) == [tensor]
