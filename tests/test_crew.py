"""What a crew does without its workers. Whole runs are `test_ray_runs.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from assent.crew import RayCrew
from assent.loop.checkpoint import Store
from assent.runtime.local import LocalGang


class Rank:
    """Writes what number of its calls it is."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def save(self, role: str, folder: Path) -> None:
        self.folders.append(folder)
        folder.mkdir(parents=True)
        (folder / "model").write_text(str(len(self.folders)))


def test_a_rank_that_was_given_up_and_still_writes_harms_no_later_checkpoint(tmp_path: Path) -> None:
    crew, rank, store = object.__new__(RayCrew), Rank(), Store(tmp_path)
    crew.gang = LocalGang(rank)

    async def steps() -> None:
        await crew.writer("policy", store.staging("policy"))  # the run goes back to a checkpoint: nobody takes it
        write = await crew.writer("policy", store.staging("policy"))
        (rank.folders[0] / "model").write_text("late")
        store.write("epoch1epochstep1globalstep1", {"policy": write}, {}, {})

    asyncio.run(steps())
    assert (store.model("policy") / "model").read_text() == "2"
    store.sweep()
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["epoch1epochstep1globalstep1"]
