"""Checkpoints are written while training goes on: what they hold, and what a failure does."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plaudit import load_settings, run
from plaudit.executors.trainer import Trainer
from plaudit.loop.best import Best
from plaudit.loop.checkpoint import Store
from plaudit.loop.copies import UnwritableError
from plaudit.loop.hooks import Due, RunState, SaveCheckpoint
from plaudit.loop.progress import Delivery, Moment, Progress, Remembered
from plaudit.loop.settings import Every
from plaudit.models import boxes
from plaudit.models.boxes import Pending, create, laid_out
from plaudit.runtime.worker import WorkerLost


def written_late(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> None:
    """`do` gets the number of each write before it begins."""
    original, count = Pending.write, iter(range(1, 100))

    def write(self: Pending, folders: Iterable[Path]) -> None:
        do(next(count))
        original(self, folders)

    monkeypatch.setattr(Pending, "write", write)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "ppo"])
def test_a_checkpoint_has_the_bits_of_its_step_however_late_it_is_written(
    method: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {"save": {"every": 1, "keep": 0}, "train": {"steps": 4}}
    at_once = run(load_settings(make_recipe(method, tmp_path / "at once", **more)))
    written_late(monkeypatch, lambda count: time.sleep(1.0))
    late = run(load_settings(make_recipe(method, tmp_path / "late", **more)))
    assert files(late.folder / "checkpoints") == files(at_once.folder / "checkpoints")
    assert len(files(late.folder / "checkpoints")) == 4 * (2 if method == "sft" else 4) + 4


@pytest.mark.slow
def test_storage_that_is_full_ends_the_run_by_the_next_checkpoint(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(count: int) -> None:
        if count == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    written_late(monkeypatch, full)
    with pytest.raises(UnwritableError, match=r"globalstep4 cannot be written: No space .* is \S+globalstep2"):
        run(load_settings(make_recipe("sft", tmp_path, save={"every": 2}, train={"steps": 8})))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert 4 <= len(lines) <= 6, "it is raised with the step, with one after it, or with the next checkpoint"


class Fake:
    """The rest of a run, whose only model is a number."""

    def __init__(self, root: Path):
        self.store, self.number, self.moves = Store(root), 0, 0
        self.trained: dict[Any, Any] = {}
        self.saved = {"policy": None}
        self.copies: list[tuple[Path, int]] = []
        self.given_up: list[Path] = []
        self.may_write = asyncio.Event()
        self.steps: list[int] = []
        models: Any = self
        source: Any = SimpleNamespace(state=dict, close=self.close)
        self.saver = SaveCheckpoint(
            self.store,
            Due(Every(steps=1), at_end=True),
            models,
            RunState(source, {}, Best(None, None)),
            keep=0,
            save=self.save,
            written=self.written,
            mirror=self.mirrored,
        )

    async def sound(self, *, whole: bool) -> bool:
        return True

    async def close(self) -> None: ...

    async def save(self, role: str, folder: Path) -> None:
        self.copies.append((folder, self.number))

    async def written(self, folders: Mapping[str, Path], commit: Callable[[], None], away: None) -> None:
        folder, number = self.copies.pop()
        await self.may_write.wait()
        for one in (*folders.values(), *self.given_up):
            one.mkdir(parents=True)
        for one in (folder, *self.given_up):
            (one / "model").write_text(str(number))
        commit()

    async def mirrored(self, now: Remembered) -> None:
        self.steps.append(now.progress.step)

    async def step(self, number: int, *, last: bool = False) -> None:
        self.number = number
        delivery = Delivery(batch=None, epoch=1)
        await self.saver(Moment(progress=Progress(step=number), delivery=delivery, batch=None, stats={}, last=last))

    def committed(self) -> dict[str, str]:
        return {name: (self.store.model("policy", name) / "model").read_text() for name in self.store.names()}


ONE, TWO = (f"epoch1epochstep0globalstep{step}" for step in (1, 2))


def test_steps_go_on_while_one_checkpoint_is_written_and_the_end_waits(tmp_path: Path) -> None:
    async def steps() -> None:
        fake = Fake(tmp_path)
        async with fake.saver.ends():
            await fake.step(1)
            fake.number = 7
            assert not fake.committed()
            second = asyncio.ensure_future(fake.step(2))
            done, _ = await asyncio.wait((second,), timeout=0.05)
            assert not done, "there is room for one copy"
            fake.may_write.set()
            await second
            assert fake.committed()[ONE] == "1"
        assert fake.committed() == {ONE: "1", TWO: "2"}

    asyncio.run(steps())


def test_a_run_that_ends_while_its_last_write_fails_ends_with_that_failure(tmp_path: Path) -> None:
    async def steps() -> None:
        fake = Fake(tmp_path)

        async def full(*given: Any) -> None:
            await asyncio.sleep(0)
            raise OSError(errno.ENOSPC, "No space left on device")

        fake.saver.written = full
        async with fake.saver.ends():
            await fake.step(1)

    with pytest.raises(UnwritableError, match="No space"):
        asyncio.run(steps())


def test_a_write_that_fails_once_no_one_waits_for_it_prints_nothing(tmp_path: Path) -> None:
    """The run that began it may have gone back to a checkpoint."""
    printed: list[dict[str, Any]] = []

    async def steps() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
        fake = Fake(tmp_path)

        async def lost(*given: Any) -> None:
            raise WorkerLost("training rank 1", "it ended")

        fake.saver.written = lost
        await fake.step(1)
        await asyncio.sleep(0)
        del fake
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(steps())
    assert not printed


def test_a_run_that_is_cancelled_first_commits_what_it_writes(tmp_path: Path) -> None:
    """It may go back to this checkpoint."""

    async def steps() -> None:
        fake = Fake(tmp_path)

        async def endless() -> None:
            async with fake.saver.ends():
                await fake.step(1)
                await asyncio.sleep(3600)

        work = asyncio.ensure_future(endless())
        await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.sleep(0.01)
        fake.may_write.set()
        await asyncio.wait((work,))
        assert work.cancelled()
        assert fake.committed() == {ONE: "1"}

    asyncio.run(steps())


def test_a_rank_that_was_given_up_and_still_writes_harms_no_later_checkpoint(tmp_path: Path) -> None:
    async def steps() -> None:
        lost = Fake(tmp_path)
        await lost.step(1)  # the run goes back to a checkpoint: nobody takes it
        fake = Fake(tmp_path)
        fake.given_up = [folder for folder, _ in lost.copies]
        fake.may_write.set()
        await fake.step(1, last=True)
        assert fake.committed() == {ONE: "1"}
        fake.store.verify(ONE)

    asyncio.run(steps())


def test_what_is_written_is_what_was_copied_in_the_precision_of_the_file(tmp_path: Path) -> None:
    tensors = {"half": torch.randn(3, 4), "turned": torch.randn(5, 2), "number": torch.tensor(3.0)}
    specs = {name: (torch.bfloat16 if name == "half" else torch.float32, tuple(x.shape)) for name, x in tensors.items()}
    specs["turned"] = (torch.float32, (2, 5))
    places, headers = laid_out(tmp_path, specs)
    create(places, headers)
    expected = {
        "half": tensors["half"].bfloat16(),
        "turned": tensors["turned"].t().clone(),
        "number": tensors["number"].clone(),
    }
    pending = Pending()
    pending.add(
        (places[name], tuple((0, size) for size in specs[name][1]), x.t() if name == "turned" else x)
        for name, x in tensors.items()
    )
    for x in tensors.values():
        x.zero_()
    pending.write([tmp_path])
    found = load_file(tmp_path / "model.safetensors")
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_where_memory_is_short_a_box_is_written_at_once(tmp_path: Path) -> None:
    places, headers = laid_out(tmp_path, dict.fromkeys(("first", "second"), (torch.float32, (1000,))))
    create(places, headers)
    left = iter([boxes.SPARED + boxes.EACH * 4000, boxes.SPARED + boxes.EACH * 4000 - 1])
    pending = Pending(lambda: next(left))
    pending.add((places[name], ((0, 1000),), torch.ones(1000)) for name in ("first", "second"))
    assert {name: float(x.sum()) for name, x in load_file(tmp_path / "model.safetensors").items()} == {
        "first": 0.0,
        "second": 1000.0,
    }
    pending.write([tmp_path])
    assert float(load_file(tmp_path / "model.safetensors")["first"].sum()) == 1000.0


def test_what_was_copied_for_a_checkpoint_that_was_given_up_is_never_written(tmp_path: Path) -> None:
    pending = Pending()
    for name in ("given up", "whole", f"whole-{os.getpid()}"):  # the last one is on a disk that the driver does not see
        (tmp_path / name).mkdir()
        places, headers = laid_out(tmp_path / name, {"x": (torch.float32, (4,))})
        create(places, headers)
        pending.add([(places["x"], ((0, 4),), torch.ones(4))])
    shutil.rmtree(tmp_path / "given up")
    pending.write([tmp_path / "whole"])
    for name in ("whole", f"whole-{os.getpid()}"):
        assert load_file(tmp_path / name / "model.safetensors")["x"].tolist() == [1.0] * 4
    pending.write([tmp_path / "given up"])


@pytest.mark.slow
def test_a_save_that_fails_midway_leaves_nothing_to_the_next_one(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with the failure; its last step is saved by a second try, and that one only."""
    original, tries = Trainer.save, iter(range(100))

    def save(self: Trainer, role: str, folder: Path) -> None:
        if role == "critic" and next(tries) == 0:
            for one in folder.parents[1].glob(f"*/{folder.name}"):
                shutil.rmtree(one)  # as `Store.sweep` does where storage is full
            raise RuntimeError("no critic")
        original(self, role, folder)

    monkeypatch.setattr(Trainer, "save", save)
    with pytest.raises(RuntimeError, match="no critic") as error:
        run(load_settings(make_recipe("ppo", tmp_path, save={"every": 2}, train={"steps": 4})))
    assert "could not be saved" not in "".join(error.value.__notes__)
    name, faults = Store(tmp_path / "run" / "checkpoints").latest()
    assert (name.endswith("globalstep2"), faults) == (True, [])
