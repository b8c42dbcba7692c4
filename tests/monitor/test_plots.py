"""Plots show what the records hold, from one run or a folder of runs, and say what is missing."""

import os
import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.monitor.plots import PALETTE, Panel, PlottedCurve, _fill, _panels, draw, find_runs, smooth
from plaudit.monitor.sinks import JsonLines


def write_run(folder, records):
    sink = JsonLines(folder / "metrics.jsonl")
    for record in records:
        sink.write(record)
    sink.close()


def sft(steps=20):
    return [
        {"step": s, "loss/policy": 5.0 / s} | ({"validation/loss": 6.0 / s} if s % 10 == 0 else {})
        for s in range(1, steps + 1)
    ]


def online(steps=20, gold=True):
    return [
        {
            "step": s,
            "loss/policy": 0.01,
            "loss/critic": 1 / s,
            "reward/mean": s / 10,
            "kl/reference": s / 4,
            "entropy": 2,
        }
        | ({"reward/gold": s / 40} if gold else {})
        for s in range(1, steps + 1)
    ]


def size_of(png):
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.slow
def test_all_draws_every_quantity_that_one_run_has(tmp_path):
    write_run(tmp_path, online())
    files = draw(tmp_path, "all")
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "plots/loss.png",
        "plots/reward.png",
        "plots/kl.png",
        "plots/entropy.png",
    ]
    # Loss has two panels beside each other, entropy one: 2 * 4.8 and 6.4 inches at 150 points an inch.
    assert size_of(files[0]) == (1440, 540)
    assert size_of(files[3]) == (960, 540)


def test_a_pipeline_folder_is_searched_and_runs_are_named_by_their_place(tmp_path):
    write_run(tmp_path / "demo" / "sft", sft())
    write_run(tmp_path / "demo" / "ppo", online())
    runs = find_runs(tmp_path / "demo")
    assert {run.name for run in runs} == {"sft", "ppo"}
    losses = {panel.title: panel for panel in _panels("loss", runs)}
    assert set(losses) == {"sft: policy loss", "ppo: policy loss", "ppo: critic loss"}
    train, validation = losses["sft: policy loss"].curves
    assert (validation.steps, validation.values) == ([10, 20], [0.6, 0.3])
    assert train.steps == list(range(1, 21))
    assert [len(losses[f"ppo: {whose} loss"].curves) for whose in ("policy", "critic")] == [1, 1]  # none validated
    assert losses["sft: policy loss"].unit == "nats per token"
    assert losses["ppo: policy loss"].unit == "surrogate objective"
    out = tmp_path / "elsewhere"
    assert draw(tmp_path / "demo", "loss", out) == [out / "loss.png"]


def test_a_policy_loss_has_the_unit_of_what_was_minimised(tmp_path):
    sampled = {"step": 1, "loss/policy": 0.5, "reward/mean": 0.1, "kl/old": 0.0}
    write_run(tmp_path / "grpo", [sampled | {"ratio/mean": 1.0}])
    write_run(tmp_path / "online-dpo", [sampled | {"accuracy": 0.5, "margin": 0.1}])
    write_run(tmp_path / "verdicts", [{"step": 1, "loss/policy": 0.5, "accuracy": 0.5}])
    write_run(tmp_path / "best-of-k", [sampled])
    units = {panel.title: panel.unit for panel in _panels("loss", find_runs(tmp_path))}
    assert units == {
        "grpo: policy loss": "surrogate objective",
        "online-dpo: policy loss": "nats per pair",
        "verdicts: policy loss": "loss per answer",
        "best-of-k: policy loss": "nats per token",
    }


def test_a_run_that_is_being_overwritten_is_none(tmp_path):
    for name in ("sft", "sft/.overwritten"):
        write_run(tmp_path / ".home" / name, sft())
    assert [run.name for run in find_runs(tmp_path / ".home")] == ["sft"]


def test_runs_of_one_stage_share_a_panel(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"seed-{seed}" / "sft", sft())
    (panel,) = _panels("loss", find_runs(tmp_path))
    assert {curve.label for curve in panel.curves if not curve.measured} == {f"seed-{s}/sft" for s in range(3)}


def test_runs_keep_their_colours_whichever_wrote_last(tmp_path):
    """Two runs at work took turns in being first, by who had written last, and so swapped colours between drawings."""
    for name, began in (("late", "10:00:09"), ("early", "10:00:01")):
        write_run(tmp_path / name, sft())
        (tmp_path / name / "log.txt").write_text(f"2026-01-01 {began} sft: logs\n2026-01-02 00:00:00 done\n")
    os.utime(tmp_path / "late" / "metrics.jsonl", (0, 0))
    assert [run.name for run in find_runs(tmp_path)] == ["early", "late"]


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_are_whole_on_the_axis_of_a_short_run(tmp_path, steps):
    """A run of one step had ticks at 0.96, 0.98, ..."""
    from matplotlib.figure import Figure

    write_run(tmp_path / "run", sft(steps))
    axes = Figure().add_subplot()
    _fill(axes, _panels("loss", find_runs(tmp_path))[0])
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks and all(tick == int(tick) for tick in ticks)


def test_a_single_run_is_named_by_its_folder(tmp_path):
    write_run(tmp_path / "my-run", sft())
    assert [run.name for run in find_runs(tmp_path / "my-run")] == ["my-run"]


def test_figures_that_are_a_link_belong_to_the_run_that_they_stand_in(tmp_path):
    """As DVC and git-annex keep files. It read "is not in the subpath"."""
    write_run(tmp_path / "kept", sft())
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    (tmp_path / "runs" / "sft" / "metrics.jsonl").symlink_to(tmp_path / "kept" / "metrics.jsonl")
    assert [run.name for run in find_runs(tmp_path / "runs")] == ["sft"]
    assert [run.name for run in find_runs(tmp_path / "runs" / "sft")] == ["sft"]


def test_gold_has_its_own_panel_where_it_is_and_none_where_it_is_not(tmp_path):
    write_run(tmp_path / "a", online(gold=True))
    write_run(tmp_path / "b", online(gold=False))
    panels = {panel.title: [curve.label for curve in panel.curves] for panel in _panels("reward", find_runs(tmp_path))}
    assert sorted(panels["reward"]) == ["a", "b"]
    assert panels["gold reward"] == ["a"]


@pytest.mark.parametrize(("plot", "metric"), [("accuracy", "accuracy"), ("reward", "reward/mean")])
def test_evaluations_stand_beside_what_training_saw(plot, metric, tmp_path):
    write_run(tmp_path / "a", [{"step": 1, metric: 0.5}, {"step": 2, metric: 0.75, f"validation/{metric}": 0.25}])
    (panel,) = _panels(plot, find_runs(tmp_path))
    assert [(c.label, c.steps, c.values, c.measured) for c in panel.curves] == [
        ("a", [1, 2], [0.5, 0.75], False),
        ("a, validation", [2], [0.25], True),
    ]


def test_a_judge_that_is_the_whole_reward_is_drawn_once(tmp_path):
    write_run(tmp_path, [{"step": s, "reward/mean": s, "reward/judge": s} for s in range(1, 4)])
    assert [panel.title for panel in _panels("reward", find_runs(tmp_path))] == ["judge reward"]


def test_figures_that_were_not_finite_leave_a_gap(tmp_path):
    write_run(
        tmp_path, [{"step": 1, "entropy": 2.0}, {"step": 2, "entropy": float("nan")}, {"step": 3, "entropy": 1.0}]
    )
    (panel,) = _panels("entropy", find_runs(tmp_path))
    assert panel.curves[0].steps == [1, 3]
    assert draw(tmp_path, "entropy")


def test_a_panel_has_title_labels_legend_and_a_thin_line_under_a_smooth_one():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    steps = list(range(40))
    noisy = [float(step % 2) for step in steps]
    curves = [
        PlottedCurve("ppo", steps, noisy),
        PlottedCurve("ppo, validation", [10, 20], [0.5, 0.5], True),
        PlottedCurve("b", steps, noisy),
    ]
    _fill(axes, Panel("reward", "reward per answer", curves))
    assert (axes.get_title(loc="left") or axes.get_title()) == "reward"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "reward per answer")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ppo", "ppo, validation", "b"]
    raw, smoothed, validation, *_ = axes.get_lines()
    assert raw.get_linewidth() < smoothed.get_linewidth()
    assert list(raw.get_ydata()) == noisy
    middle = list(smoothed.get_ydata())[5:-5]
    assert all(0.3 < value < 0.7 for value in middle)  # the zigzag between 0 and 1 is gone
    assert {raw.get_color(), smoothed.get_color(), validation.get_color()} == {PALETTE[0]}


def test_many_runs_are_told_apart_and_their_legend_stands_beside_them(tmp_path):
    for number in range(20):
        write_run(tmp_path / f"run{number:02}", online(steps=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # matplotlib's, that there is no room
        (file,) = draw(tmp_path, "entropy")
    assert size_of(file) == (1080, 720)  # 7.2 inches, and 0.8 + 0.2 for each run
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    _fill(axes, _panels("entropy", find_runs(tmp_path))[0])
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 20
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"run{number:02}" for number in range(20)]


def test_smoothing_by_hand():
    # width 4: a box of 3 twice. Once: (3/2, 3/3, 3/3, 0/2) = (1.5, 1, 1, 0); twice: (1.25, 3.5/3, 2/3, 0.5).
    assert smooth([0, 3, 0, 0], 4) == pytest.approx([1.25, 3.5 / 3, 2 / 3, 0.5])


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), width=st.integers(1, 90))
def test_smoothing_stays_in_range_and_turns_with_the_series(values, width):
    smoothed = smooth(values, width)
    assert len(smoothed) == len(values)
    assert min(values) - 1e-6 <= min(smoothed)
    assert max(smoothed) <= max(values) + 1e-6
    assert smooth(values[::-1], width) == pytest.approx(smoothed[::-1], abs=1e-6)
    assert smooth([2.0] * len(values), width) == pytest.approx([2.0] * len(values))


def test_errors_name_what_was_searched(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        draw(tmp_path / "nowhere", "loss")
    with pytest.raises(FileNotFoundError, match=rf"metrics\.jsonl .*{tmp_path}"):
        draw(tmp_path, "loss")
    write_run(tmp_path / "sft", sft())
    with pytest.raises(ValueError, match=r"kl/reference, kl/sampler .*sft/metrics\.jsonl"):
        draw(tmp_path, "kl")
    with pytest.raises(ValueError, match=r"'losses' .* loss, accuracy, reward"):
        draw(tmp_path, "losses")
    assert [file.name for file in draw(tmp_path, "all")] == ["loss.png"]


def test_importing_the_module_imports_no_matplotlib():
    program = "import sys, plaudit.monitor.plots, plaudit.monitor.health; print('matplotlib' in sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert answer.stdout.strip() == "False"


def test_a_run_that_cannot_be_read_is_named_and_others_are_drawn(tmp_path):
    write_run(tmp_path / "good_$x^$", sft())
    for name, text in {"a": "nonsense\n{}\n", "b": '{"step": "x"}\n', "c": "[]\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "d" / "metrics.jsonl")
    write_run(tmp_path / "e", [{"step": 1e300, "loss/policy": 1e308}, {"step": -1e300, "loss/policy": -1e308}])
    said = []
    assert draw(tmp_path, "loss", tmp_path / "out", say=said.append)
    assert [line.split("/")[-2] for line in said] == ["a", "b", "c", "d"]
