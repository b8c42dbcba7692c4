"""Conversions come back as the same records, or are refused with a reason."""

import json

import pytest
from reading import demonstration, preference, question

from plaudit.commands.convert import TARGETS, convert
from plaudit.data.fields import DataError
from plaudit.data.read import read_rows

USER = {"role": "user", "content": "q"}
PAIRS = [
    {"prompt": "\n\nHuman: p\n\nAssistant:", "chosen": " 1", "rejected": " 2", "margin": 0.5, "id": 7},
    {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " 3", "rejected": " 4", "id": 8},
    {"prompt": "\n\nHuman: p\n\nAssistant:", "chosen": " 5", "rejected": " 6", "id": 7},
]


def rows_of(path):
    return [row for _, row in read_rows(str(path))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("to", ["instruction/chosen/rejected", "chosen/rejected", "prompt/chosen/rejected"])
def test_preferences_go_there_and_back(write, tmp_path, to, suffix):
    there, back = tmp_path / f"there{suffix}", tmp_path / "back.jsonl"
    done = convert(write("a.jsonl", PAIRS), there, to=to)
    assert (done.read, done.written, done.lost) == (3, 3, {})
    convert(str(there), back, to="prompt/chosen/rejected")
    assert rows_of(back) == PAIRS


def test_pairs_of_one_prompt_are_gathered_and_spread_again(write, tmp_path):
    lists, back = tmp_path / "lists.jsonl", tmp_path / "back.jsonl"
    assert convert(write("a.jsonl", PAIRS), lists, to="prompt/pos_answers/neg_answers").written == 2
    assert rows_of(lists)[0] == {
        "prompt": PAIRS[0]["prompt"],
        "pos_answers": [" 1", " 5"],
        "neg_answers": [" 2", " 6"],
        "margin": [0.5, 0.0],
        "id": 7,
    }
    convert(str(lists), back, to="prompt/chosen/rejected")
    assert rows_of(back) == [PAIRS[0], PAIRS[2], PAIRS[1]]


@pytest.mark.parametrize(
    "to", ["prompt/completion", "prompt/answer", "question/answer", "instruction/response", "messages"]
)
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "input": "c", "output": "a", "id": 1},
        {"messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"}], "id": 1},
    ],
)
def test_demonstrations_keep_their_turns(write, tmp_path, to, row):
    source, target, chat = write("a.jsonl", [row]), tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    convert(source, target, to=to)
    convert(str(target), chat, to="messages")
    before, after = demonstration(row, where="f:1"), demonstration(rows_of(chat)[0], where="f:1")
    assert after.answer == before.answer
    assert after.messages == (before.messages or ({"role": "user", "content": before.prompt},))
    assert question(rows_of(target)[0], where="f:1").extra == {"id": 1}


def test_what_the_target_has_no_place_for_is_counted(write, tmp_path):
    source = write("a.jsonl", PAIRS)
    assert convert(source, tmp_path / "p.jsonl", to="prompt").lost == {"pairs": 3}
    assert convert(source, tmp_path / "d.jsonl", to="prompt/completion").lost == {
        "pairs, except the first chosen answer": 3
    }
    answered = write("b.jsonl", [{"question": "q", "answer": "a", "prompt": None}])
    assert convert(answered, tmp_path / "q.jsonl", to="prompt").lost == {"an answer": 1}
    assert rows_of(tmp_path / "q.jsonl") == [{"prompt": "q"}]
    twice = write("c.jsonl", [{"prompt": "q", "completion": "a", "response": "b"}])
    assert convert(twice, tmp_path / "t.jsonl", to="prompt/completion").lost == {
        "the column response, whose name is taken": 1
    }


def test_a_chat_without_an_answer_stays_a_chat(write, tmp_path):
    convert(write("a.jsonl", [{"prompt": "q"}]), tmp_path / "b.jsonl", to="messages")
    assert rows_of(tmp_path / "b.jsonl") == [{"messages": [USER]}]


def test_turns_after_the_last_answer_stay_in_a_chat_and_are_counted_where_they_cannot(write, tmp_path):
    chat = {"messages": [USER, {"role": "assistant", "content": "a"}, USER]}
    source = write("a.jsonl", [chat])
    assert convert(source, tmp_path / "b.jsonl", to="messages").lost == {}
    assert rows_of(tmp_path / "b.jsonl") == [chat]
    assert convert(source, tmp_path / "c.jsonl", to="prompt/completion").lost == {"turns after the last answer": 1}
    assert rows_of(tmp_path / "c.jsonl") == [{"prompt": [USER], "completion": "a"}]


@pytest.mark.parametrize(
    ("row", "to", "message"),
    [
        (
            {"prompt": "q"},
            "prompt/chosen/rejected",
            r"a\.jsonl:1: .* prompt .*preferences",
        ),
        ({"prompt": "q"}, "prompt/completion", "dialect of demonstrations"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen/rejected", "transcript needs"),
        (
            {"prompt": "\n\nAssistant:", "chosen": " a\n\nAssistant: b", "rejected": " a\n\nAssistant: c"},
            "chosen/rejected",
            "read back",
        ),
        ({"prompt": "q", "completion": "a"}, "text", "no place for a prompt"),
        ({"prompt": "q"}, "prompts", r"'prompts'\. .* prompt/completion"),
    ],
)
def test_impossible_conversions_are_refused_and_write_nothing(write, tmp_path, row, to, message):
    with pytest.raises(DataError, match=message):
        convert(write("a.jsonl", [row]), tmp_path / "b.jsonl", to=to)
    assert not (tmp_path / "b.jsonl").exists()


@pytest.mark.parametrize("value", [{}, 2**70, [1, "a"]])
def test_what_parquet_cannot_hold_is_refused_and_leaves_nothing(write, tmp_path, value):
    source = write("a.jsonl", [{"prompt": "q", "meta": value}])
    with pytest.raises(DataError, match=r"b\.parquet: .*column"):
        convert(source, tmp_path / "b.parquet", to="prompt")
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl"}


def test_bad_rows_are_skipped_under_a_budget(write, tmp_path):
    source = write("a.jsonl", '{"prompt": "q"}\nnonsense\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        convert(source, tmp_path / "b.jsonl", to="prompt")
    done = convert(source, tmp_path / "b.jsonl", to="prompt", bad_rows=1)
    assert (done.written, len(done.bad)) == (1, 1)
    assert "1 bad rows skipped" in done.summary()


def test_neither_the_source_nor_other_files_are_overwritten(write, tmp_path):
    source = write("a.jsonl", [{"prompt": "q"}])
    other = write("b.jsonl", [{"prompt": "r"}])
    with pytest.raises(DataError, match="the source"):
        convert(source, source, to="prompt", overwrite=True)
    with pytest.raises(DataError, match="the source"):
        convert(str(tmp_path), tmp_path / "c.jsonl", to="prompt")
    with pytest.raises(DataError, match="exists already"):
        convert(source, other, to="prompt")
    with pytest.raises(DataError, match=r"'\.txt'"):
        convert(source, tmp_path / "b.txt", to="prompt")
    convert(source, other, to="prompt", overwrite=True)
    assert rows_of(other) == [{"prompt": "q"}]


def test_every_target_is_a_dialect_that_is_read():
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert preference(row, where="f:1", dialect="prompt/chosen/rejected").pairs
    from plaudit.data.formats import dialects

    others = {"prompt/completion/label", "messages/label", "prompt/completions/labels"}
    assert set(TARGETS) == set(dialects()) - others - {"instruction/output_1/output_2/preference"}
    assert json.dumps(TARGETS)
