"""Records survive crashes and resumes; trackers hold what was written."""

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.monitor.settings import LogSettings
from plaudit.monitor.sinks import JsonLines, read_jsonl
from plaudit.trackers.opening import opened_trackers


def write_steps(path, steps):
    sink = JsonLines(path)
    for step in steps:
        sink.write({"step": step, "loss/policy": step / 2})
    sink.close()


def test_each_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"step": 1, "text": "schön\nzwei Zeilen", "parts": [1.5, 2]})
    assert path.read_text(encoding="utf-8") == '{"step": 1, "text": "schön\\nzwei Zeilen", "parts": [1.5, 2]}\n'
    sink.write({"step": 2})
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
    sink.close()


def test_appends_to_what_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    write_steps(path, [3])
    assert read_jsonl(path)[2] == {"step": 3, "loss/policy": 1.5}


def test_figures_that_are_not_finite_become_null_at_any_depth(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"step": 1, "loss": math.nan, "parts": {"a": [math.inf, 1.0], "b": -math.inf}})
    sink.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"step": 1, "loss": None, "parts": {"a": [None, 1.0], "b": None}}


def test_truncate_after_drops_later_steps_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"note": "no step: always kept"})
    for step in range(1, 6):
        sink.write({"step": step})
    sink.truncate_after(3)
    sink.write({"step": 4, "again": True})
    sink.close()
    records = read_jsonl(path)
    assert records[0] == {"note": "no step: always kept"}
    assert [record["step"] for record in records[1:]] == [1, 2, 3, 4]
    assert records[-1]["again"] is True
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_after_leaves_kept_lines_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,  "a":1.10}\n{"step": 2}\n')
    JsonLines(path).truncate_after(1)
    assert path.read_bytes() == b'{"step":1,  "a":1.10}\n'


def test_truncate_after_without_a_file_does_nothing(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl").truncate_after(3)
    assert list(tmp_path.iterdir()) == []


def test_a_torn_last_line_is_skipped_by_readers_and_dropped_by_writers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "los')
    assert read_jsonl(path) == [{"step": 1}]
    assert path.read_bytes().endswith(b"los")  # reading changes nothing
    sink = JsonLines(path)
    sink.write({"step": 2})
    sink.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert len(read_jsonl(path)) == 2
    write_steps(path, [3])
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3]


def test_a_broken_line_inside_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 .*JSON"):
        read_jsonl(path)
    path.write_text('{"step": 1}\n17\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 .*int"):
        read_jsonl(path)


@given(cut=st.integers(min_value=0, max_value=200), texts=st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_cut_anywhere_the_file_holds_a_prefix_of_the_records_and_takes_more(tmp_path_factory, cut, texts):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    sink = JsonLines(path)
    records = [{"step": step, "text": text} for step, text in enumerate(texts)]
    for record in records:
        sink.write(record)
    sink.close()
    path.write_bytes(path.read_bytes()[:cut])
    survived = read_jsonl(path)
    assert survived == records[: len(survived)]
    sink = JsonLines(path)
    sink.write({"step": 99})
    sink.close()
    assert read_jsonl(path) == [*survived, {"step": 99}]


def test_tensorboard_holds_the_figures_and_hides_the_steps_of_a_lost_attempt(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from plaudit.trackers.tensorboard import TensorBoard

    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"loss/policy": step / 4, "entropy": 2.0})
    first.close()
    second = TensorBoard(tmp_path, resumed_after=1)
    second.write(2, {"loss/policy": 8.0})
    second.text(2, "health", "entropy has fallen")
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss/policy", "entropy"}
    (told,) = events.Tensors("health/text_summary")
    assert (told.step, told.tensor_proto.string_val) == (2, [b"entropy has fallen"])
    assert [(e.step, e.value) for e in events.Scalars("loss/policy")] == [(1, 0.25), (2, 8.0)]


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_tracker_says_how_to_install_it(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # what an import of a missing package meets
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    asked = LogSettings(trackers={package: "chats"}), tmp_path, {}
    with (
        pytest.raises(ImportError, match=rf"pip install -e '\.\[{package}\]'"),
        opened_trackers(*asked, resumed_after=0),
    ):
        pass


def _wandb(folder):
    from plaudit.trackers.wandb import WeightsAndBiases

    return WeightsAndBiases(folder, project="plaudit", settings={"seed": 3})


def test_wandb_takes_the_same_figures(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="W&B is not installed: make test-trackers runs this")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = _wandb(tmp_path)
    sink.write(1, {"loss/policy": 0.5})
    sink.text(1, "answers", "reward 1.0: liked it")
    sink.close()
    (file,) = tmp_path.rglob("*.wandb")
    until = time.monotonic() + 20  # its service writes the file, in a process of its own
    while b"loss/policy" not in file.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert any("reward 1.0: liked it" in table.read_text() for table in tmp_path.rglob("answers*.table.json"))


def _mlflow(folder):
    from plaudit.trackers.mlflow import MLflow

    return MLflow(folder, project="plaudit", settings={"seed": 3})


def test_mlflow_keeps_figures_and_texts_and_goes_on_with_the_run_of_its_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: make test-trackers runs this")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    for step, name in ((1, "ppo"), (2, "ppo"), (1, "other")):
        sink = _mlflow(tmp_path / name)
        sink.write(step, {f"part/{number}": step / 4 for number in range(1500)})
        sink.text(step, "health", "entropy has fallen")
        sink.close(failed=name == "other")
    client = mlflow.MlflowClient()
    number = (tmp_path / "ppo" / "mlflow-id.txt").read_text()
    assert [(one.step, one.value) for one in client.get_metric_history(number, "part/1499")] == [(1, 0.25), (2, 0.5)]
    assert [one.path for one in client.list_artifacts(number, "health")] == ["health/000001.txt", "health/000002.txt"]
    found = client.search_runs([client.get_experiment_by_name("plaudit").experiment_id])
    assert sorted((run.info.run_name, run.info.status) for run in found) == [("other", "FAILED"), ("ppo", "FINISHED")]


def _trackio(folder):
    from plaudit.trackers.trackio import Trackio

    return Trackio(folder, project="plaudit", settings={"seed": 3})


def test_trackio_keeps_figures_and_texts_on_this_machine(tmp_path):
    pytest.importorskip("trackio", reason="Trackio is not installed: make test-trackers runs this")
    code = """
import json
import sys
from pathlib import Path
from plaudit.trackers.trackio import Trackio
for step in (1, 2):
    sink = Trackio(Path(sys.argv[1]) / "ppo", project="plaudit", settings={"seed": 3})
    sink.write(step, {"loss/policy": step / 4})
    sink.text(step, "health", "entropy has fallen")
    sink.close()
from trackio.sqlite_storage import SQLiteStorage
Path(sys.argv[1], "logs.json").write_text(json.dumps(SQLiteStorage.get_logs("plaudit", "ppo")))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    logs = json.loads((tmp_path / "logs.json").read_text())
    assert [(one["step"], one["loss/policy"]) for one in logs if "loss/policy" in one] == [(1, 0.25), (2, 0.5)]
    assert str(logs).count("entropy has fallen") == 2


def test_wandb_goes_on_with_the_run_of_its_folder_alone(tmp_path, monkeypatch):
    """Runs of a pipeline, and of several seeds, have the same names."""
    began = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: began.append(given)))
    for folder in ("seed0/ppo", "seed1/ppo", "seed0/ppo"):
        _wandb(tmp_path / folder)
    one, other, again = began
    assert again == one
    assert (one["name"], one["config"], one["resume"]) == ("ppo", {"seed": 3}, "allow")
    assert one["id"] != other["id"]


def test_trackers_are_opened_where_asked_for_and_told_of_the_run(tmp_path, monkeypatch):
    opened = []

    def fake(*given, **named):
        opened.append((*given, named))
        return SimpleNamespace(close=lambda failed: None)

    monkeypatch.setattr("plaudit.trackers.tensorboard.TensorBoard", fake)
    monkeypatch.setattr("plaudit.trackers.wandb.WeightsAndBiases", fake)
    board, theirs = (tmp_path / "tensorboard", {"resumed_after": 7}), {"project": "plaudit", "settings": {"seed": 3}}
    for settings, expected in (
        (LogSettings(), []),
        (LogSettings(trackers={"tensorboard": "tensorboard"}), [board]),
        (LogSettings(trackers={"tensorboard": "tensorboard", "wandb": "plaudit"}), [board, (tmp_path, theirs)]),
    ):
        with opened_trackers(settings, tmp_path, {"seed": 3}, resumed_after=7) as trackers:
            assert len(trackers) == len(expected)
        assert opened == expected
        opened.clear()


def test_trackers_are_closed_as_the_run_ended_and_hide_no_failure(tmp_path, monkeypatch):
    told = []

    class Fake:
        def __init__(self, *given, **named):
            pass

        def close(self, *, failed=False):
            told.append(failed)
            raise OSError("no room left")

    monkeypatch.setattr("plaudit.trackers.tensorboard.TensorBoard", Fake)
    monkeypatch.setattr("plaudit.trackers.wandb.WeightsAndBiases", Fake)
    given = LogSettings(trackers={"tensorboard": "board", "wandb": "plaudit"}), tmp_path, {}

    def fails(trackers):
        raise ArithmeticError(f"{len(trackers)} trackers")

    with (
        pytest.raises(ArithmeticError, match="2"),
        opened_trackers(*given, resumed_after=3) as trackers,
    ):
        fails(trackers)
    assert told == [True, True]
    with pytest.raises(OSError, match="no room left"), opened_trackers(*given, resumed_after=3):
        pass
    assert told == [True, True, False, False]
