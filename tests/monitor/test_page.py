"""A run's page: what is on it, and that nothing which others named is taken for HTML."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from plaudit import load_settings, run
from plaudit.executors.base import ProcessStatus
from plaudit.loop.finite import NonFiniteError
from plaudit.page.run_page import Curves, closed, page


class Tags(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_curves_fill_their_frame_from_left_to_right() -> None:
    """Values 1, 3, 2 in a frame of 320 by 60 with a margin of 4: at the bottom, at the top, in the middle."""
    records = [{"step": step, "reward/mean": value} for step, value in ((1, 1.0), (2, 3.0), (3, 2.0))]
    text = page("run", curves=Curves(records), steps=3, processes=())
    assert 'points="0.0,56.0 160.0,4.0 320.0,30.0"' in text
    assert "reward <b>2</b>" in text
    assert "1 to 3" in text


def test_a_long_run_keeps_its_first_and_its_last_point() -> None:
    records = [{"step": step, "entropy": float(step)} for step in range(1, 10_001)]
    found = re.findall(r'points="([^"]*)"', page("run", curves=Curves(records), steps=10_000, processes=()))
    (points,) = (points.split() for points in found)
    assert points[0] == "0.0,56.0"
    assert points[-1] == "320.0,4.0"
    assert 150 < len(points) < 165


@pytest.mark.parametrize(("extreme", "span", "height"), [(50.0, "1 to 50", 4), (-50.0, "-50 to 1", 56)])
def test_a_long_run_shows_each_of_its_extremes(extreme: float, span: str, height: int) -> None:
    """Steps that were passed over hid a gradient norm of 50 among those of 1, and the range below it too."""
    for place in (4_444, 7_777):
        records = [
            {"step": step, "gradient_norm/policy": extreme if step == place else 1.0} for step in range(1, 10_001)
        ]
        text = page("run", curves=Curves(records), steps=10_000, processes=())
        assert "gradient norm <b>1</b>" in text
        assert f">{span}<" in text
        assert text.count(f",{height}.0 ") == 1


def test_a_long_run_begins_where_it_began() -> None:
    """With a value that is no extreme of those around it."""
    records = [{"step": step, "entropy": 5.0 if step == 1 else 10.0 * (step % 2)} for step in range(1, 1_001)]
    assert 'points="0.0,30.0 ' in page("run", curves=Curves(records), steps=1_000, processes=())


def test_a_page_costs_no_more_late_in_a_run() -> None:
    """Every record of 100,000 steps was kept and gone through every two seconds: seconds each time."""
    curves = Curves({"step": step, "entropy": float(step % 7)} for step in range(1, 20_001))
    (curve,) = curves._curves.values()
    assert len(curve._stretches) <= 80
    assert len(curve.points()) <= 162


def test_one_step_is_a_dot_and_not_an_empty_frame() -> None:
    text = page("run", curves=Curves([{"step": 1, "entropy": 2.0}]), steps=1, processes=())
    assert 'points="160.0,30.0 160.0,30.0" class="dot"' in text


def test_the_latest_value_is_that_of_the_latest_step() -> None:
    """It read 2 where the loss had just become NaN; a record that was read again has null there."""
    for lost in (float("nan"), None):
        records = [{"step": 1, "loss/policy": 2.0}, {"step": 2, "loss/policy": lost}]
        assert "policy loss <b>not finite</b>" in page("run", curves=Curves(records), steps=2, processes=())


def test_large_figures_are_written_out_and_curves_are_told_in_words() -> None:
    records = [{"step": step, "tokens_per_second": value} for step, value in ((1, 6215.4), (2, 12e4))]
    text = page("run", curves=Curves(records), steps=2, processes=())
    assert "tokens per second <b>120,000</b>" in text
    assert 'aria-label="tokens per second, from 6,215 to 120,000 in steps 1 to 2"' in text


def test_small_figures_have_four_digits() -> None:
    records = [{"step": step, "entropy": value} for step, value in ((1, 0.123456), (2, -1_234.5), (3, 1e13))]
    assert ">-1,234 to 1e+13<" in page("run", curves=Curves(records), steps=3, processes=())
    assert "<b>0.1235</b>" in page("run", curves=Curves(records[:1]), steps=3, processes=())


def test_a_lost_worker_is_marked() -> None:
    for lost in (True, False):
        text = page("run", curves=Curves(), steps=1, processes=[ProcessStatus("a", "here", "gone", lost=lost)])
        assert ('<tr class="lost"><td>a</td>' in text) is lost


def test_a_page_that_was_left_open_is_closed_and_one_with_a_last_word_stays() -> None:
    curves = Curves({"step": step, "time/step": 2.0} for step in range(1, 4))
    left = closed(page("<p>", curves=curves, steps=9, processes=()), "killed & gone")
    assert left == page("<p>", curves=curves, steps=9, processes=(), ended="ended: killed & gone")
    assert closed(left, "another reason") == left


def test_what_is_not_finite_or_not_there_has_no_curve() -> None:
    records = [{"step": 1, "entropy": None, "reward/mean": float("nan")}, {"step": 2}]
    assert "polyline points" not in page("run", curves=Curves(records), steps=2, processes=())
    assert "Step 0 of 5" in page("run", curves=Curves(), steps=5, processes=())


def test_the_rest_of_the_run_is_told_by_its_latest_steps() -> None:
    """20 steps of 2 s behind 80 of 50 s: 3,600 more take two hours."""
    records = [{"step": step, "time/step": 50.0 if step <= 80 else 2.0} for step in range(1, 101)]
    text = page("run", curves=Curves(records), steps=3_700, processes=())
    assert re.search(r"Step 100 of 3700, about 2:00:00 to go <small>as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)
    assert 'http-equiv="refresh"' in text
    ended = page("run", curves=Curves(records), steps=3_700, processes=(), ended="stopped")
    assert "Step 100 of 3700, stopped" in ended
    assert "refresh" not in ended


def test_evaluations_count_in_what_is_left_of_the_run() -> None:
    """100 steps of 2 s with an evaluation of 40 s behind every tenth: each takes 6 s, and not 2."""
    records = [{"step": step, "time/step": 2.0, "time": 2.0 * step + 40.0 * (step // 10)} for step in range(1, 101)]
    assert "about 0:10:00 to go" in page("run", curves=Curves(records), steps=200, processes=())


def test_names_and_reasons_are_text() -> None:
    foul = "</td><script>alert(1)</script><img src=x onerror='a'>"
    text = page(foul, curves=Curves(), steps=1, processes=[ProcessStatus(foul, foul, foul, lost=True)], ended=foul)
    tags = Tags(text)
    assert not tags.open
    assert not {"script", "img"} & set(tags.seen)
    assert tags.seen.count("td") == 3


@pytest.mark.slow
def test_a_run_leaves_its_page_and_a_resumed_one_goes_on_with_it(
    make_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    done = run(load_settings(make_recipe("grpo", tmp_path, train={"steps": 2})))
    text = (done.folder / "page.html").read_text()
    assert "grpo: run: step 2 of 2" in text
    assert "this process" in text
    run(load_settings(make_recipe("grpo", tmp_path, train={"steps": 3}) | {"resume": "latest"}))
    text = (done.folder / "page.html").read_text()
    assert "Step 3 of 3, done" in text
    rewards = re.search(r"<div>reward <b>[^<]*</b><svg[^>]*>\s*<polyline points=\"([^\"]*)\"", text)
    assert rewards is not None and len(rewards[1].split()) == 3
    quiet = make_recipe("grpo", tmp_path / "without", train={"steps": 1}, log={"page": False})
    assert not (run(load_settings(quiet)).folder / "page.html").exists()


def test_a_run_that_samples_nothing_says_so_and_shows_what_it_validates(
    make_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    recipe = make_recipe("reward", tmp_path, train={"steps": 2})
    recipe["data"]["validation"] = recipe["data"]["train"]
    text = (run(load_settings(recipe)).folder / "page.html").read_text()
    assert "<td>learns</td>" in text
    assert "<div>validation loss <b>" in text
    assert "<div>accuracy <b>" in text
    assert "<div>validation accuracy <b>" in text


def test_the_page_of_a_run_that_failed_promises_nothing(
    make_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It said for ever that so and so much was to go, and was loaded again every three seconds."""
    recipe = make_recipe("sft", tmp_path, train={"steps": 1000}, optimizer={"learning_rate": 1e30})
    with pytest.raises(NonFiniteError):
        run(load_settings(recipe))
    (path,) = tmp_path.rglob("page.html")
    text = path.read_text()
    assert re.search(r"<p>Step \d+ of 1000, ended: a loss or gradient was not finite in 3 steps", text)
    assert "to go" not in text
    assert text.count("as of 20") == 1
    assert "refresh" not in text
    tags = Tags(text)
    assert not tags.open
