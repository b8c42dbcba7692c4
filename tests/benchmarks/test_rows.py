"""The measurement of memory runs, on few rows."""

import pytest
from benchmarks.rows import main


@pytest.mark.parametrize("further", [[], ["--texts"]])
def test_rows_are_stored_and_drawn(capsys, tmp_path, further):
    main(["--rows", "1500", "--steps", "2", "--folder", str(tmp_path), *further])
    said = capsys.readouterr().out
    assert f"stored {1485 if further else 1500:,} rows" in said
    assert "drew 2 batches of 64" in said
