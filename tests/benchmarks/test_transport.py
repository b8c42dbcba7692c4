"""The benchmark of weights on their way, with real processes and weights of a few megabytes."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

import transport
from transport import STEPS, measure, rows_of

from plaudit.runtime.settings import WEIGHTS


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_ways_bring_the_weights_to_every_worker(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure` itself asserts that each worker confirmed version and digest."""
    monkeypatch.setenv("PYTHONPATH", str(Path(transport.__file__).parent))  # of the processes that it starts
    found = asyncio.run(measure(2, 8, 2, ranks))
    assert found.keys() == {"plain copy", *(f"{way}: {step}" for way in WEIGHTS for step in STEPS)}
    assert [len(found[f"{way}: whole update"]) for way in WEIGHTS] == [2, 2]
    for way, row in zip(WEIGHTS, rows_of(found, 8, 2, ranks), strict=True):
        assert [*row.values()][:4] == [8, ranks, 2, way]
        assert float(row["plain copy"]) > 0.0


def test_the_speed_is_the_size_by_the_median_of_whole_updates() -> None:
    found = {f"{way}: {step}": [1.0] for way in WEIGHTS for step in STEPS}
    found |= {"store: whole update": [0.5, 9.0, 0.1], "plain copy": [0.1]}
    row = rows_of(found, 1000, 3, 1)[0]
    assert " ".join(map(str, row.values())) == "1000 1 3 store 1.000 1.000 1.000 0.500 2.10 10.5"
