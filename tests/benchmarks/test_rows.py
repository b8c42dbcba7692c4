"""The measurement of memory runs, on few rows."""

import pytest
from benchmarks.rows import main


@pytest.mark.parametrize("further", [[], ["--texts"]])
def test_rows_are_stored_and_drawn(capsys, further):
    main(["--rows", "1500", "--steps", "2", *further])
    said = capsys.readouterr().out
    assert f"stored {1485 if further else 1500:,} rows" in said
    assert "drew 2 batches of 64" in said
