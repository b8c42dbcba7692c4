"""Sources to rows: what each kind of file gives, and how each kind of damage is reported."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.data.fields import DataError
from plaudit.data.read import read_rows, scan_rows

ROWS = [{"prompt": "ä", "answer": "1"}, {"prompt": "b\u2028c", "answer": None}]


def test_jsonl_counts_lines_and_skips_blank_ones(write):
    source = write("a.jsonl", "\ufeff" + json.dumps(ROWS[0]) + "\n\n  \r\n" + json.dumps(ROWS[1], ensure_ascii=False))
    assert list(read_rows(source)) == [(f"{source}:1", ROWS[0]), (f"{source}:4", ROWS[1])]


@pytest.mark.parametrize("content", [ROWS, {"data": ROWS}, {"version": 1, "rows": ROWS}])
def test_json_lists_count_rows(write, content):
    source = write("a.json", json.dumps(content, indent=1))
    assert list(read_rows(source)) == [(f"{source}#1", ROWS[0]), (f"{source}#2", ROWS[1])]


def test_json_lines_under_the_name_json(write):
    source = write("a.json", ROWS)
    assert [row for _, row in read_rows(source)] == ROWS


def test_a_json_list_under_the_name_jsonl(write):
    source = write("a.jsonl", json.dumps(ROWS, indent=1))
    assert list(read_rows(source)) == [(f"{source}#1", ROWS[0]), (f"{source}#2", ROWS[1])]


def test_parquet_and_folders(write, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_list(ROWS)
    source = str(tmp_path / "a.parquet")
    table.to_parquet(source)
    assert list(read_rows(source)) == [(f"{source}#1", ROWS[0]), (f"{source}#2", ROWS[1])]

    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "saved"))
    assert [row for _, row in read_rows(str(tmp_path / "saved"), split="test")] == ROWS
    with pytest.raises(DataError, match="no split 'train'; it has test"):
        list(read_rows(str(tmp_path / "saved")))

    write("plain/train.jsonl", [ROWS[0]])
    assert [row for _, row in read_rows(str(tmp_path / "plain"))] == [ROWS[0]]


def test_every_file_of_a_folder_is_read_with_its_lines(write, tmp_path):
    import pyarrow
    from pyarrow import parquet

    first = write("all/a.jsonl", '{"prompt": "1", "answer": 4}\nnonsense\n{"prompt": "2", "answer": 4.5}\n')
    second = write("all/more/b.json", '[{"prompt": "3", "day": "2020-01-01"}]')
    parquet.write_table(pyarrow.table({"prompt": ["4"]}), tmp_path / "all" / "c.parquet")
    write("all/README.md", "what it is")
    write("all/.hidden.jsonl", "{}")
    rows = dict(scan_rows(str(tmp_path / "all")))
    assert isinstance(rows.pop(f"{first}:2"), DataError)
    assert rows == {
        f"{first}:1": {"prompt": "1", "answer": 4},
        f"{first}:3": {"prompt": "2", "answer": 4.5},
        f"{tmp_path}/all/c.parquet#1": {"prompt": "4"},
        f"{second}#1": {"prompt": "3", "day": "2020-01-01"},
    }


def test_names_of_files_tell_their_split_and_none_is_left_out(write, tmp_path):
    folder = str(tmp_path / "split")
    for name in ("train/a.jsonl", "train_2.jsonl", "Dev.jsonl", "my-test-1.jsonl"):
        write(f"split/{name}", [{"prompt": name}])
    assert [row["prompt"] for _, row in read_rows(folder)] == ["train/a.jsonl", "train_2.jsonl"]
    assert [row["prompt"] for _, row in read_rows(folder, split="validation")] == ["Dev.jsonl"]
    write("split/more.jsonl", [{"prompt": "5"}])
    with pytest.raises(
        DataError, match=r"split: the name of more\.jsonl tells no split, and others tell test, train, v"
    ):
        list(read_rows(folder))
    write("one/a.jsonl", [{"prompt": "1"}])
    write("one/b.csv", "prompt\n2\n")
    with pytest.raises(DataError, match=r"one: b\.csv is not read beside a\.jsonl; move it elsewhere, or list"):
        list(read_rows(str(tmp_path / "one")))
    write("other/test.jsonl", [{"prompt": "1"}])
    with pytest.raises(DataError, match=r"other: there is no split 'train'; it has test"):
        list(read_rows(str(tmp_path / "other")))


def test_functions_in_a_file(write):
    source = write("mine.py", "def rows():\n    yield {'prompt': 'q'}\n    yield 3\n\ndef number():\n    return 1\n")
    first, second = scan_rows(f"{source}:rows")
    assert first == (f"{source}:rows#1", {"prompt": "q"})
    assert str(second[1]).startswith(f"{source}:rows#2: the row is the number 3")
    with pytest.raises(DataError, match="no function 'row'; it has rows, number"):
        list(read_rows(f"{source}:row"))
    with pytest.raises(DataError, match="gives the number 1; it must give rows"):
        list(read_rows(f"{source}:number"))


def test_a_file_of_functions_is_run_as_plugins_are(write):
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "@dataclass", "class Ask:"]
    lines += ["    prompt: str", "def rows():", "    yield vars(Ask('q'))"]
    assert [row for _, row in read_rows(write("typed.py", "\n".join(lines)) + ":rows")] == [{"prompt": "q"}]
    with pytest.raises(ImportError, match=r"Python cannot read .*broken\.py, line 1: .*Mend that line"):
        list(read_rows(write("broken.py", "def rows(:\n") + ":rows"))


def test_a_name_that_is_nowhere(monkeypatch):
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"nobody/nothing: there is no file or folder of this name here, and `datasets`"
    ):
        list(read_rows("nobody/nothing"))
    with pytest.raises(DataError, match=r"gone\.jsonl: there is no such file or folder"):
        list(read_rows("gone.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', r"a\.jsonl:2: it is not valid JSON: Expecting value at column 11"),
        (b'{"prompt": NaN}', r"a\.jsonl:2: it is not valid JSON: NaN is no JSON value"),
        (b"[1, 2]", r"a\.jsonl:2: the row is a list of 2; it must be an object"),
        (b'{"prompt": "\xe9"}', r"a\.jsonl:2: byte 13 is 0xe9, which is no UTF-8"),
        (b"[" * 100_000, r"a\.jsonl:2: it is JSON nested too deeply"),
    ],
)
def test_a_bad_line_is_named_and_the_next_one_is_read(write, line, message):
    source = write("a.jsonl", b'{"prompt": "1"}\n' + line + b'\n{"prompt": "3"}\n')
    rows = [row for _, row in scan_rows(source)]
    assert [rows[0], rows[2]] == [{"prompt": "1"}, {"prompt": "3"}]
    with pytest.raises(DataError, match=message):
        list(read_rows(source))


def test_a_bad_row_of_a_parquet_file_is_named_and_the_next_one_is_read(tmp_path):
    import pyarrow
    from pyarrow import parquet

    source = str(tmp_path / "a.parquet")
    texts = pyarrow.array([b"1", b"\xe9", b"3"]).view(pyarrow.string())
    days = pyarrow.array([0, 0, 2**53], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"prompt": texts, "day": days}), source)
    rows = [row for _, row in scan_rows(source)]
    assert rows[0]["prompt"] == "1"
    assert str(rows[1]).startswith(f"{source}#2: a value cannot be read: 'utf-8' codec can't decode byte 0xe9")
    assert str(rows[2]).startswith(f"{source}#3: a value cannot be read: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "there are no rows in it"),
        ("a.json", b"", "not valid JSON"),
        ("a.json", b"[]", "there are no rows in it"),
        ("a.json", b'[\n {"a": 1},\n {"b": }\n]', "Expecting value at line 3, column 8"),
        ("a.json", b"3", "the file holds the number 3"),
        (
            "a.json",
            b'{"train": [{"a": 1}], "test": [{"a": 2}]}',
            "several lists of rows in it: train, test. Give each",
        ),
        ("a.jsonl", "{}".encode("utf-16"), "it is UTF-16"),
        ("a.parquet", b"{}", "no readable Parquet file"),
        ("a.txt", b"hello", r"files that end in '\.txt' are not read"),
    ],
)
def test_a_source_that_cannot_be_read(write, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(write(name, content)))
    assert caught.value.where.endswith(name)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=60) | st.text('{}[]":,1aN\\u\n ', max_size=40).map(str.encode))
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_any_bytes_read_or_are_a_data_error(tmp_path_factory, name, content):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        rows = [row for _, row in scan_rows(str(path))]
    except DataError:
        return
    assert rows
    assert all(isinstance(row, dict | DataError) for row in rows)
