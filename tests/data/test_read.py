"""Sources to rows: what each kind of file gives, and how each kind of damage is reported."""

import bz2
import gzip
import io
import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.fields import DataError
from plaudit.data.json_list import JsonList
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
    with pytest.raises(DataError, match=r"split 'train'; .* test"):
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
    with pytest.raises(DataError, match=r"split: .*more\.jsonl .*test, train, v"):
        list(read_rows(folder))
    write("one/a.jsonl", [{"prompt": "1"}])
    write("one/b.zip", "prompt\n2\n")
    with pytest.raises(DataError, match=r"one: b\.zip .*a\.jsonl"):
        list(read_rows(str(tmp_path / "one")))
    write("other/test.jsonl", [{"prompt": "1"}])
    with pytest.raises(DataError, match=r"other: .*split 'train'; .* test"):
        list(read_rows(str(tmp_path / "other")))


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-00000-of-00001.parquet]
- config_name: other
  data_files: other/*.csv
---
# A data set
"""


def test_a_cloned_repository_is_read_as_its_readme_says(write, tmp_path, monkeypatch):
    """By the files, not by `datasets`, which would copy them."""
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr("datasets.load_dataset", None)
    folder = tmp_path / "gsm"
    write("gsm/README.md", CARD)
    write("gsm/.gitattributes", "*.parquet filter=lfs")
    write("gsm/other/a.csv", "prompt\n4\n")
    (folder / "main").mkdir()
    for name, text in {"train-00000-of-00002": "1", "train-00001-of-00002": "2", "test-00000-of-00001": "3"}.items():
        parquet.write_table(pyarrow.table({"prompt": [text]}), folder / "main" / f"{name}.parquet")

    def texts(source, split="train"):
        return [row["prompt"] for _, row in read_rows(source, split=split)]

    assert (texts(f"{folder}:main"), texts(f"{folder}:main", "test"), texts(f"{folder}:other")) == (
        ["1", "2"],
        ["3"],
        ["4"],
    )
    with pytest.raises(DataError, match=r"gsm: .*configurations.* main, other"):
        texts(str(folder))
    with pytest.raises(DataError, match=r"gsm:mine: .*'mine'.* main, other"):
        texts(f"{folder}:mine")
    with pytest.raises(DataError, match=r"gsm:main: .*'validation'.* test, train"):
        texts(f"{folder}:main", "validation")
    (folder / "main" / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"2 files main/train-00000-of-00002.* 00000"):
        texts(f"{folder}:main")
    write("gsm/README.md", CARD.replace("other/*.csv", "../*.csv"))
    with pytest.raises(DataError, match=r"'\.\./\*\.csv'"):
        texts(f"{folder}:other")
    write("gsm/README.md", "---\nconfigs: [\n---\n")
    with pytest.raises(DataError, match=r"README\.md .*YAML"):
        texts(str(folder))


def test_shards_tell_splits_of_any_name(write, tmp_path):
    for split in ("train_sft", "train_gen", "test"):
        write(f"chat/data/{split}-00000-of-00001.jsonl", [{"prompt": split}])
    folder = str(tmp_path / "chat")
    assert [row["prompt"] for _, row in read_rows(folder, split="train_gen")] == ["train_gen"]
    with pytest.raises(DataError, match=r"split 'train'; .* test, train_gen, train_sft"):
        list(read_rows(folder))


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz"])
def test_packed_files(tmp_path, packing):
    import importlib

    module = importlib.import_module({"gz": "gzip", "xz": "lzma"}.get(packing, packing))
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    listed = json.dumps(ROWS).encode()
    for name, content in {"a.jsonl": lines, "a.json": listed, "list.jsonl": listed}.items():
        path = tmp_path / f"{name}.{packing}"
        path.write_bytes(module.compress(content))
        assert [row for _, row in read_rows(str(path))] == ROWS
    packed = module.compress(lines * 1000)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"list\.jsonl\.[a-z0-9]+: .*Comp"):
        list(read_rows(str(path)))


def test_csv(write):
    content = 'prompt,answer,margin\r\n"a, ""b""\nc",1,\r\nd,2\r\n\r\n\xe9,\ufffd,0.5\r\n'
    source = write("a.csv", b"\xef\xbb\xbf" + content.encode().replace(b"\xef\xbf\xbd", b"\xff"))
    first, second, third = scan_rows(source)
    assert first == (f"{source}:2", {"prompt": 'a, "b"\nc', "answer": "1", "margin": None})
    assert str(second[1]) == f"{source}:4: the row has 2 cells, and the header names 3 columns."
    assert third == (f"{source}:6", {"prompt": "\xe9", "answer": "\udcff", "margin": "0.5"})
    assert next(read_rows(write("a.tsv", "prompt\tanswer\nq\ta\n")))[1] == {"prompt": "q", "answer": "a"}
    long = "x" * 200_000
    assert next(read_rows(write("long.csv", f"prompt\n{long}\n")))[1] == {"prompt": long}


def test_a_line_beyond_any_row_is_refused_and_the_next_one_read(write, monkeypatch):
    monkeypatch.setattr("plaudit.data.files.LONGEST_LINE", 1 << 20)
    source = write("a.jsonl", '{"prompt": "1"}\n{"prompt": "' + "x" * (5 << 19) + '"}\n{"prompt": "3"}\n')
    rows = [row for _, row in scan_rows(source)]
    assert (rows[0], str(rows[1]), rows[2]) == (
        {"prompt": "1"},
        f"{source}:2: the line has more than 1 MiB.",
        {"prompt": "3"},
    )


def test_a_list_is_read_value_by_value(monkeypatch):
    """The same as json.loads reads whole, wherever the pieces end; errors are at the same place."""
    whole = ' [ {"a": "ü\\n[,]", "b": [1, {"c": null}]} , 12,\n-3.5e2,"x", true ,{}]\n '
    for piece in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("plaudit.data.json_list.PIECE", piece)
        for head in (0, 1, 5):
            file = io.BytesIO(whole.encode())
            assert list(JsonList(file, file.read(head), json.JSONDecoder(), 1000)) == json.loads(whole)
        for wrong in ("[1, 2", "[1 2]", "[1,]", "[1]\n x", '[\n{"a": tru}]', "[,1]", "[1,\n\n 2}", '["a]'):
            with pytest.raises(json.JSONDecodeError) as theirs:
                json.loads(wrong)
            with pytest.raises(DataError, match=rf"at line {theirs.value.lineno}, column {theirs.value.colno}\.$"):
                list(JsonList(io.BytesIO(wrong.encode()), b"", json.JSONDecoder(), 1000))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json.gz", b'[{"a": "' + b"x" * 5000 + b'"}]', "the value in line 1 has more than 0 MiB"),
        ("b.json.gz", b'{"data": [' + b"0," * 5000 + b"0]}", "it is one object of more than 0 MiB"),
        ("c.csv.gz", b"a,b\n" + b"x" * 5000, "c.csv.gz:2: the line has more than"),
        ("d.csv.gz", b"a,b\n" + b'"' + b"x\n" * 5000, "field limit"),
        ("e.tsv.bz2", b"\t" * 5000, "e.tsv.bz2:1: the line has more than"),
        ("f.jsonl.xz", b'{"a": "' + b"x" * 5000, "f.jsonl.xz:1: the line has more than"),
    ],
)
def test_what_is_small_and_packed_may_not_fill_the_memory(tmp_path, monkeypatch, name, content, told):
    monkeypatch.setattr("plaudit.data.files.LONGEST_LINE", 2000)
    monkeypatch.setattr("plaudit.data.files.LARGEST_OBJECT", 3000)
    monkeypatch.setattr("plaudit.data.files.PIECE", 100)
    monkeypatch.setattr("plaudit.data.json_list.PIECE", 100)
    path = tmp_path / name
    path.write_bytes({".gz": gzip, ".bz2": bz2, ".xz": lzma}[path.suffix].compress(content))
    with pytest.raises(DataError, match=told):
        list(read_rows(str(path)))


def test_links_that_go_round_in_circles_are_followed_once(write, tmp_path):
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    write("rows/a.jsonl", '{"prompt": "1"}\n')
    write("rows/more/b.jsonl", '{"prompt": "2"}\n')
    for number in range(8):
        (folder / f"round{number}").symlink_to("..")
        (folder / "more" / f"round{number}").symlink_to("..")
    assert [row["prompt"] for _, row in read_rows(str(folder))] == ["1", "2"]


@pytest.mark.parametrize("head", ["configs: 2026-13-45", "configs: " + "[" * 5000, "configs: [a"])
@pytest.mark.slow
def test_a_readme_that_is_no_yaml_is_named(tmp_path, head):
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(DataError, match=r"README\.md .*YAML"):
        list(read_rows(str(tmp_path)))


def test_functions_in_a_file(write):
    source = write("mine.py", "def rows():\n    yield {'prompt': 'q'}\n    yield 3\n\ndef number():\n    return 1\n")
    first, second = scan_rows(f"{source}:rows")
    assert first == (f"{source}:rows#1", {"prompt": "q"})
    assert str(second[1]).startswith(f"{source}:rows#2: the row is the number 3")
    with pytest.raises(DataError, match=r"'row'; .* rows, number"):
        list(read_rows(f"{source}:row"))
    with pytest.raises(DataError, match="the number 1"):
        list(read_rows(f"{source}:number"))


def test_a_file_of_functions_is_run_as_plugins_are(write):
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "@dataclass", "class Ask:"]
    lines += ["    prompt: str", "def rows():", "    yield vars(Ask('q'))"]
    assert [row for _, row in read_rows(write("typed.py", "\n".join(lines)) + ":rows")] == [{"prompt": "q"}]
    with pytest.raises(ImportError, match=r"broken\.py, line 1: "):
        list(read_rows(write("broken.py", "def rows(:\n") + ":rows"))


def test_a_name_that_is_nowhere(monkeypatch):
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/nothing: .*`datasets`"):
        list(read_rows("nobody/nothing"))
    with pytest.raises(DataError, match=r"gone\.jsonl: .*file.py:function"):
        list(read_rows("gone.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', r"a\.jsonl:2: .*JSON: .*column 11"),
        (b'{"prompt": NaN}', r"a\.jsonl:2: .*JSON: NaN"),
        (b"[1, 2]", r"a\.jsonl:2: .*list of 2"),
        (b'{"prompt": "\xe9"}', r"a\.jsonl:2: byte 13 is 0xe9.*UTF-8"),
        (b"[" * 100_000, r"a\.jsonl:2: .*nested"),
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
    assert [str(row).startswith(f"{source}#{number}: ") for number, row in enumerate(rows[1:], 2)] == [True, True]
    assert "byte 0xe9" in str(rows[1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no rows"),
        ("a.json", b"", "JSON"),
        ("a.json", b"[]", "no rows"),
        ("a.json", b'[\n {"a": 1},\n {"b": }\n]', "line 3, column 8"),
        ("a.json", b"3", "the number 3"),
        (
            "a.json",
            b'{"train": [{"a": 1}], "test": [{"a": 2}]}',
            "several lists .*train, test",
        ),
        ("a.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("a.parquet", b"{}", "Parquet"),
        ("a.txt", b"hello", r"'\.txt'"),
        ("a.parquet.gz", b"1", r"'\.parquet\.gz'"),
        ("a.jsonl.gz", b"{}", "Not a gzipped file"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        ("a.csv", b"a,b,a\n1,2,3", "column 'a' twice"),
        ("a.csv", b"", "no rows"),
        ("a.csv", "a,b".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_source_that_cannot_be_read(write, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(write(name, content)))
    assert caught.value.where.endswith(name)


@given(content=st.binary(max_size=60) | st.text('{}[]":,1aN\\u\n ', max_size=40).map(str.encode))
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a.jsonl.gz"])
def test_any_bytes_read_or_are_a_data_error(tmp_path_factory, name, content):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        rows = [row for _, row in scan_rows(str(path))]
    except DataError:
        return
    assert rows
    assert all(isinstance(row, dict | DataError) for row in rows)


def test_splits_are_joined_and_divided_wherever_they_are(write, tmp_path, monkeypatch):
    """Half of four rows and a quarter of four: of files by `datasets`, and of what it saved."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split in ("train", "test"):
        write(f"rows/{split}.jsonl", [{"prompt": f"{split}{number}"} for number in range(4)])
    files, saved = str(tmp_path / "rows"), str(tmp_path / "saved")
    datasets.load_dataset(files).save_to_disk(saved)
    for source in (files, saved):
        found = [row["prompt"] for _, row in read_rows(source, split="train[:50%]+test[:25%]")]
        assert found == ["train0", "train1", "test0"]
        assert len(list(read_rows(source, split="train+test"))) == 8
        with pytest.raises(DataError, match="more"):
            list(read_rows(source, split="train+more"))
