"""The table of steps in a notebook: its cells, and the one output that a real kernel keeps of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plaudit.monitor.notebook import ROWS, StepTable, in_notebook


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> StepTable:
    """One that shows nothing: there is no notebook here."""
    monkeypatch.setattr(StepTable, "_show", lambda self: None)
    return StepTable()


def test_a_steps_columns_are_those_of_its_line(table: StepTable) -> None:
    table.add("step   1/100  loss 0.5000  tok/s 1,200  elapsed 0:01  left 1:39")
    table.add("step 100/100  loss 0.2500  elapsed 1:40  left 0:00\n  evaluation  loss 0.3000  reward/mean 0.1000")
    assert table.columns == ["step", "loss", "tok/s", "elapsed", "left", "evaluation loss", "evaluation reward/mean"]
    assert table.rows[0] == {"step": "1/100", "loss": "0.5000", "tok/s": "1,200", "elapsed": "0:01", "left": "1:39"}
    assert table.rows[1]["evaluation reward/mean"] == "0.1000"
    assert table.html().count("<tr>") == 3
    assert "></td>" in table.html(), "no tok/s in the second row"


def test_of_a_long_run_the_last_rows_are_shown_and_the_others_counted(table: StepTable) -> None:
    for step in range(ROWS + 5):
        table.add(f"step {step}/{ROWS + 5}  loss <b>")
    assert table.html().count("<tr>") == ROWS + 1
    assert "5 earlier rows" in table.html()
    assert "<b>" not in table.html()


def test_this_is_no_notebook() -> None:
    assert not in_notebook()


@pytest.mark.slow
def test_a_real_kernel_shows_one_table_with_all_steps(make_recipe: Any, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    recipe = make_recipe("sft", tmp_path, train={"steps": 4, "log_every": 1}, log={"quiet": False})
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    cell = "from plaudit import load_settings, run; done = run(load_settings('recipe.json'))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    shown = [one["data"]["text/html"] for one in outputs if "text/html" in one.get("data", {})]
    tables = [html for html in shown if "<table" in html]
    assert len(tables) == 1
    assert [f"{step}/4" in tables[0] for step in range(1, 5)] == [True] * 4
    assert not any("step 1/4" in html for html in shown), "its line is not printed too"
    assert "step 1/4" in next(tmp_path.rglob("log.txt")).read_text()


@pytest.mark.slow
def test_the_first_hour_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    """With fewer passes and steps, and from a folder of its own."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(Path(__file__).parents[2] / "examples" / "first_hour.ipynb", 4)
    first = next(cell for cell in notebook.cells if "PASSES, STEPS = 12, 30" in cell.source)
    first.source = first.source.replace("PASSES, STEPS = 12, 30", "PASSES, STEPS = 1, 2")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "0 problems, 0 doubts" in said
    assert said.count("image/png") == 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"sft", "dates"}
