"""Stretches of time: by a clock that the test holds."""

from __future__ import annotations

from pathlib import Path

from plaudit.monitor.events import Events
from plaudit.monitor.sinks import read_jsonl


def test_requests_at_the_same_time_are_one_stretch_which_new_weights_cut(tmp_path: Path) -> None:
    """Two requests overlap from 1 to 4; new weights come at 3. One of a millisecond waits for more."""
    now = [0.0]
    with Events(tmp_path / "events.jsonl", clock=lambda: now[0]) as events:
        one, two = events.doing("engine", "samples"), events.doing("engine", "samples")
        now[0] = 1.0
        one.__enter__()
        two.__enter__()
        now[0] = 2.0
        one.__exit__(None, None, None)
        now[0] = 3.0
        events.cut(1)
        now[0] = 4.0
        two.__exit__(None, None, None)
        with events.doing("rewards", "scores"):
            now[0] += 0.001
    assert read_jsonl(tmp_path / "events.jsonl") == [
        {"worker": "engine", "phase": "samples", "begin": 1.0, "end": 3.0, "version": 0},
        {"worker": "engine", "phase": "samples", "begin": 3.0, "end": 4.0, "version": 1},
    ]


def test_ends_of_turns_are_marks_of_their_stretch(tmp_path: Path) -> None:
    """Turns end at 1.52, 1.54 and 3 s of a stretch that begins at 1; new weights come at 2. One in a tenth is kept."""
    now = [1.0]
    with Events(tmp_path / "events.jsonl", clock=lambda: now[0]) as events, events.doing("engine", "samples"):
        for end in (1.52, 1.54, 3.0):
            with events.doing("engine", "samples", turn=True):
                now[0] = end
            if end == 1.54:
                now[0] = 2.0
                events.cut(1)
    stretches = read_jsonl(tmp_path / "events.jsonl")
    assert [(one["begin"], one["end"], one["turns"]) for one in stretches] == [(1.0, 2.0, [0.5]), (2.0, 3.0, [1.0])]


def test_short_stretches_are_recorded_together(tmp_path: Path) -> None:
    """Twelve rewards of 2 ms, each before 98 ms of learning: 24 ms in four stretches that end with every third."""
    now = [0.0]
    with Events(tmp_path / "events.jsonl", clock=lambda: now[0]) as events:
        for _ in range(12):
            with events.doing("rewards", "scores"):
                now[0] += 0.002
            with events.doing("learner", "learns"):
                now[0] += 0.098
    found = [one for one in read_jsonl(tmp_path / "events.jsonl") if one["phase"] == "scores"]
    assert [(one["begin"], one["end"]) for one in found] == [
        (0.196, 0.202),
        (0.496, 0.502),
        (0.796, 0.802),
        (1.096, 1.102),
    ]


def test_seconds_of_sampling_and_of_rewards_that_nothing_is_sampled_beside(tmp_path: Path) -> None:
    """Sampling from 1 to 4, rewards from 2 to 7: three seconds of the latter alone. An evaluation counts as neither."""
    now = [1.0]
    with Events(tmp_path / "events.jsonl", clock=lambda: now[0]) as events:
        samples, scores = events.doing("engine", "samples"), events.doing("rewards", "scores")
        samples.__enter__()
        now[0] = 2.0
        scores.__enter__()
        now[0] = 4.0
        samples.__exit__(None, None, None)
        now[0] = 7.0
        scores.__exit__(None, None, None)
        now[0] = 9.0
        assert events.spent() == {"time/generate": 3.0, "time/rewards": 3.0}
        with events.doing("learner", "evaluates"), events.doing("engine", "samples"):
            now[0] = 20.0
        assert events.spent() == {}
