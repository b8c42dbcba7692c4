"""The measurement of the page runs, on few answers."""

import pytest
from benchmarks.browsing import main


@pytest.mark.slow
def test_first_view_and_searches_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["browsing.py", str(tmp_path), "--answers", "640"])
    main()
    said = capsys.readouterr().out
    assert "first view, nothing indexed" in said
    assert "| 640 |" in said
    assert next(line for line in said.splitlines() if line.startswith("| a rare word")).endswith("| 1 |")
