"""The counters of a run."""

from __future__ import annotations

from plaudit.batch import Batch
from plaudit.loop.progress import Delivery, Progress
from plaudit.types import Row


def test_counters_by_hand() -> None:
    """Three tokens in the first epoch, two and none in the next, where an update was not made."""
    first, second = (Batch.of([Row(tokens=(1,) * n, trainable=(False,) + (True,) * (n - 1))]) for n in (3, 2))
    begun = Progress(seconds=1.0, skipped=1)
    one = begun.after(Delivery(batch=first, epoch=1), seconds=2.0, skipped=False)
    two = one.after(Delivery(batch=second, epoch=2, epochs_done=1), seconds=0.5, skipped=True)
    three = two.after(Delivery(batch=None, epoch=2, epochs_done=2), seconds=0.25, skipped=True)
    assert one == Progress(step=1, epoch=1, epoch_step=1, tokens=3, seconds=3.0)
    assert two == Progress(step=2, epoch=2, epoch_step=1, epochs_done=1, tokens=5, seconds=3.5, skipped=1)
    assert three == Progress(step=3, epoch=2, epoch_step=2, epochs_done=2, tokens=5, seconds=3.75, skipped=2)
    assert three.name == "epoch2epochstep2globalstep3"
    assert Progress(**three.state()) == three
