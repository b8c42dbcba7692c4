"""Settings to data sets: what is kept, what is counted, and the real files."""

import json
from dataclasses import replace

import pytest

from plaudit.data.fields import DataError
from plaudit.data.files import file_kind
from plaudit.data.load import load_demonstrations, load_judgements, load_preferences, load_prompts
from plaudit.data.settings import DataSettings, absent, sources
from plaudit.rewards.rules import check_reference
from plaudit.rewards.settings import RewardSettings

SHORT = DataSettings(max_prompt_tokens=4, max_tokens=8)


def rows_of(count, start=0):
    return [{"prompt": f"{i}", "completion": f"{i}"} for i in range(start, start + count)]


def test_the_report_counts_what_became_of_every_row(write, tokenizer):
    source = write(
        "a.jsonl",
        '{"prompt": "q", "completion": "a"}\n'  # 1 + 2 tokens
        '{"question": "wxyz!", "answer": "1"}\n'  # the prompt loses 1 of 5
        "not json\n"
        '{"prompt": "q", "completion": "12345678"}\n'  # the answer is cut to 7
        '{"prompt": "q"}\n'
        '{"text": "x<eos>y"}\n',
    )
    data = load_demonstrations(replace(SHORT, train=source, bad_rows=2), tokenizer, 0)
    (report,) = data.report.sources
    assert (report.read, report.kept, report.bad_rows, report.rows) == (6, 3, 2, 3)
    assert report.dropped == {"end token inside the answer": 1}
    assert report.dialects == {"prompt/completion": 2, "question/answer": 1, "text": 1}
    assert (report.truncated_prompts, report.truncated_completions) == (1, 1)
    assert (report.prompt_tokens.p50, report.prompt_tokens.max) == (1, 4)
    assert (report.completion_tokens.p50, report.completion_tokens.max) == (2, 7)
    assert report.trained_tokens == 2 + 2 + 7
    assert report.bad_examples[0].startswith(f"{source}:3: it is not valid JSON")
    assert report.bad_examples[1].startswith(f"{source}:5: the columns prompt are not a known dialect")
    assert json.loads(json.dumps(data.report.json()))["sources"][0]["read"] == 6
    table = data.report.table()
    for text in (
        "3 to train on",
        "end token inside the answer: 1",
        "prompts that lost their beginning: 1",
        f"{source}:3",
    ):
        assert text in table


def test_columns_that_nothing_reads_are_told_of(write, tokenizer):
    """A score would otherwise be left out without a word; prompts keep all of theirs for rewards."""
    further = dict.fromkeys(("id", "a", "b", "c", "d"), 1) | {"none": None, "\ud800": 1, "tools": [], "context": ""}
    rows = [{"prompt": "q", "completion": "a", "score": False}, {"prompt": "r", "completion": "a", **further}]
    settings = DataSettings(train=write("a.jsonl", "\n".join(map(json.dumps, rows))))
    report = load_demonstrations(settings, tokenizer, 0).report
    assert report.sources[0].unread == dict.fromkeys(("score", "id", "a", "b", "c", "d", r"\ud800"), 1)
    assert "columns not read: score, id, a, b, c and 2 more" in report.table()
    assert load_prompts(settings, tokenizer, 0).report.sources[0].unread == {}


def test_a_column_whose_entries_are_read_is_not_called_unread(write, tokenizer):
    settings = DataSettings(train=write("a.jsonl", [{"prompt": "q", "data": {"reply": "a"}, "score": 1}]))
    settings.columns = {"completion": "data.reply"}
    assert load_demonstrations(settings, tokenizer, 0).report.sources[0].unread == {"score": 1}


def test_keys_of_turns_calls_and_tools_that_nothing_reads_are_counted(write, tokenizer):
    call = {"id": "1", "index": 1, "function": {"name": "add", "arguments": {"x": 1}, "strict": True}}
    chat = [
        {"role": "user", "content": "q", "id": 7, "timestamp": None},
        {"role": "assistant", "content": "", "tool_calls": [call], "train": False, "id": 8},
        {"role": "tool", "content": "1", "name": "add"},
        {"from": "gpt", "value": "a", "loss": True},
    ]
    tool = {
        "function": {"name": "add", "description": "Adds.", "strict": True, "parameters": {"properties": {"x": {}}}}
    }
    settings = DataSettings(train=write("a.jsonl", [{"messages": chat, "tools": [tool]}]), chat_template="default")
    (source,) = load_demonstrations(settings, tokenizer, 0).report.sources
    assert source.kept == 1
    assert {what: count for what, count in source.noted.items() if "turns that are not trained" not in what} == {
        "turns' id not read": 2,
        "calls' index not read": 1,
        "calls' strict not read": 1,
        "tools' strict left to the chat template, which may not show it": 1,
    }


def test_an_authors_null_is_kept_and_a_tables_padding_is_not(write, tokenizer, tmp_path):
    import pyarrow
    from pyarrow import parquet

    def row(given):
        call = {"function": {"name": "f", "arguments": given}}
        return {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        }

    rows = [row({"unit": None, "n": 1}), row({"unit": "C", "n": None})]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    for source, said in (
        (write("a.jsonl", rows), ['{"unit": null, "n": 1}', '{"unit": "C", "n": null}']),
        (str(tmp_path / "b.parquet"), ['{"n": 1}', '{"unit": "C"}']),
    ):
        items = load_demonstrations(DataSettings(train=source, chat_template="default"), tokenizer, 0).items
        texts = [tokenizer.decode(items[i][0].tokens) for i in range(2)]
        assert [
            text.partition('"arguments": ')[2].partition("}<")[0] for text in sorted(texts, reverse=True)
        ] == sorted(said, reverse=True), source


def test_what_is_odd_and_used_all_the_same_is_said(write, tokenizer):
    turn = {"role": "assistant", "content": "a"}
    asked = {"role": "user", "content": "q"}
    lines = ['{"prompt": "q", "prompt": "ask?", "completion": "Four."}', '{"prompt": "q ", "completion": "a"}']
    lines += [
        '{"prompt": "q", "completion": " a"}',
        json.dumps({"messages": [asked, {**turn, "weight": 0}, asked, turn]}),
    ]
    source = write("a.jsonl", "\n".join(lines))
    settings = DataSettings(train=source, chat_template="default")
    assert load_demonstrations(settings, tokenizer, 0).report.sources[0].noted == {
        "objects with a key twice, of which the last value is read": 1,
        "answers that follow their prompt without a blank or a template": 1,
        "chats with turns that are not trained, as their weight says": 1,
        "plain prompts, asked as text though the tokenizer has a chat template (data.as_chat=true: as chats)": 3,
    }
    table = load_demonstrations(settings, tokenizer, 0).report.table()
    assert f"key twice, of which the last value is read: 1, the first: 'prompt' at {source}:1" in table
    assert f"without a blank or a template: 1, the first: 'ask?Four.' at {source}:1" in table
    for wrapped in ({"prompt_template": "{prompt}"}, {"as_chat": True}):
        assert len(load_demonstrations(replace(settings, **wrapped), tokenizer, 0).report.sources[0].noted) == 2
    pairs = [{"prompt": "q ", "chosen": "a", "rejected": "b", "margin": -1}, {"chosen": "So a", "rejected": "So b"}]
    noted = load_preferences(replace(settings, train=write("b.jsonl", pairs)), tokenizer, 0).report.sources[0].noted
    assert noted == {
        "plain prompts, asked as text though the tokenizer has a chat template (data.as_chat=true: as chats)": 2,
        "rows with a negative margin, by which the rejected answer may win": 1,
        "prompts taken to be the common beginning of chosen and rejected": 1,
    }


def test_a_file_that_is_trained_on_and_validated_with_is_named(write, tokenizer, tmp_path):
    train, copy = write("a.jsonl", rows_of(3)), write("b.jsonl", rows_of(3))
    other = write("c.jsonl", rows_of(3, 5))
    (tmp_path / "link.jsonl").symlink_to(train)
    for validation in (train, copy, str(tmp_path / "link.jsonl")):
        report = load_demonstrations(replace(SHORT, train=train, validation=validation), tokenizer, 0).report
        assert f"files that are trained on too: 1, the first: {validation} is {train}" in report.table()
    report = load_demonstrations(replace(SHORT, train=train, validation=other), tokenizer, 0).report
    assert "trained on too" not in report.table()
    function = write("rows.py", f"def rows():\n    return {rows_of(2)!r}\n") + ":rows"
    settings = replace(SHORT, train=function, validation=function)
    assert "trained on too" not in load_demonstrations(settings, tokenizer, 0).report.table(), "another split"
    settings.validation_split = "train"
    assert "sources that are trained on too: 1" in load_demonstrations(settings, tokenizer, 0).report.table()


def test_the_budget_of_bad_rows_is_kept(write, tokenizer):
    source = write("a.jsonl", "x\n" + json.dumps(rows_of(1)[0]) + "\ny\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*data\.bad_rows=N"):
        load_demonstrations(replace(SHORT, train=source), tokenizer, 0)
    with pytest.raises(DataError, match=r"a\.jsonl:3: .*2.*data\.bad_rows=1"):
        load_demonstrations(replace(SHORT, train=source, bad_rows=1), tokenizer, 0)
    assert len(load_demonstrations(replace(SHORT, train=source, bad_rows=2), tokenizer, 0).items) == 1


def test_a_bad_row_whose_column_is_no_text_can_be_reported(write, tokenizer):
    source = write("a.jsonl", [*rows_of(1), {"\ud800": "1"}])
    report = load_demonstrations(replace(SHORT, train=source, bad_rows=1), tokenizer, 0).report
    assert r"a.jsonl:2: the columns \ud800 are not a known dialect" in report.table().encode().decode()


@pytest.mark.parametrize("load", [load_demonstrations, load_preferences, load_judgements, load_prompts])
def test_a_chat_that_the_template_refuses_is_a_bad_row(write, tokenizer, load):
    user = {"role": "user", "content": "q"}
    rows = [{"prompt": [*turns, user], "chosen": "a", "rejected": "b"} for turns in ([], [user], [])]
    second = "{% if loop.index > 1 and m.role == 'user' %}{{ raise_exception('one turn') }}{% endif %}"
    once = "{% for m in messages %}{{ m.content }}" + second + "{% endfor %}"
    source = write("a.jsonl", ["3", *rows])
    chats = replace(SHORT, train=source, chat_template=once, bad_rows=2)
    data = load(chats, tokenizer, 0)
    (report,) = data.report.sources
    assert (len(data.items), report.read, report.kept, report.bad_rows) == (2, 4, 2, 2)
    assert "a.jsonl:3: the chat template refuses the turns user, user: one turn" in report.bad_examples[1]
    with pytest.raises(DataError, match=r"a\.jsonl:3: .*chat .*2.*data\.bad_rows=1"):
        load(replace(chats, bad_rows=1), tokenizer, 0)


def test_items_of_preferences_are_prompts(write, tokenizer):
    one = write("a.jsonl", [{"prompt": "p", "pos_answers": ["1", "2", "3"], "neg_answers": ["4", "5", "6"]}])
    two = write("b.jsonl", [{"prompt": "q", "chosen": "1", "rejected": "2"}])
    data = load_preferences(replace(SHORT, train=[one, two]), tokenizer, 0)
    assert [[tokenizer.decode(row.tokens[1:2]) for row in item] for item in data.items] == [
        ["1", "4", "2", "5"],
        ["1", "2"],
    ]
    assert [{row.group for row in item} for item in data.items] == [{0}, {1}]
    assert (data.counts, data.report.sources[0].pairs) == ((1, 1), 2)


def test_validation_is_set_aside_by_seed_or_read_from_its_own_source(write, tokenizer):
    train, other = write("a.jsonl", rows_of(20)), write("b.jsonl", rows_of(3, start=50))
    percent = replace(SHORT, train=train, validation="10%")
    first, again, third = (load_demonstrations(percent, tokenizer, seed) for seed in (1, 1, 2))
    assert (len(first.items), len(first.validation), first.counts) == (18, 2, (18,))
    assert [*first.validation] == [*again.validation] != [*third.validation]
    assert {row.tokens for (row,) in first.items}.isdisjoint(row.tokens for (row,) in first.validation)
    apart = load_demonstrations(replace(SHORT, train=train, validation=other), tokenizer, 0)
    assert (len(apart.items), len(apart.validation)) == (20, 3)
    assert [source.role for source in apart.report.sources] == ["train", "validation"]


@pytest.mark.parametrize("load", [load_demonstrations, load_preferences, load_judgements, load_prompts])
def test_no_prompt_is_trained_on_and_set_aside(write, tokenizer, load):
    rows = [{"prompt": f"q{i // 4}", "chosen": f"{i}", "rejected": "x"} for i in range(40)]
    data = load(replace(SHORT, train=write("a.jsonl", rows), validation="20%"), tokenizer, 0)
    asked = [
        {(item if load is load_prompts else item[0]).tokens[:2] for item in part}
        for part in (data.items, data.validation)
    ]
    assert (len(data.items), len(data.validation)) == (32, 8)
    assert [len(part) for part in asked] == [8, 2]
    assert asked[0].isdisjoint(asked[1])


@pytest.mark.parametrize(("prompts", "apart"), [("aa", 2), ("aaaaaaaaab", 1), ("aaaaabbbbb", 2), ("aaabbbcccd", 1)])
def test_what_is_set_aside_where_prompts_repeat(write, tokenizer, prompts, apart):
    rows = [{"prompt": f"q{prompt}", "completion": f"{i}"} for i, prompt in enumerate(prompts * (10 // len(prompts)))]
    data = load_demonstrations(replace(SHORT, train=write("a.jsonl", rows), validation="20%"), tokenizer, 0)
    assert (len(data.items), len(data.validation)) == (10 - apart, apart)


@pytest.mark.parametrize(
    ("rows", "percent", "apart"), [(10, 15, 2), (10, 1, 1), (2, 1, 1), (1, 20, 0), (10, 0, 0), (200, 60, 120)]
)
def test_how_many_are_set_aside(write, tokenizer, rows, percent, apart):
    """To the nearest row, and at least one where another is left to train on."""
    data = load_demonstrations(
        replace(SHORT, train=write("a.jsonl", rows_of(rows)), validation=f"{percent}%"), tokenizer, 0
    )
    assert (len(data.items), len(data.validation)) == (rows - apart, apart)


def test_groups_of_several_sources_are_apart(write, tokenizer):
    """Also from those that are set aside: rows of one group are taken to answer one prompt."""
    train, other = [write("a.jsonl", rows_of(5)), write("b.jsonl", rows_of(5, 5))], write("c.jsonl", rows_of(5, 10))
    for apart in ({"validation": other}, {"validation": "40%"}):
        data = load_demonstrations(replace(SHORT, train=train, **apart), tokenizer, 0)
        items = [*data.items, *data.validation]
        assert len({row.group for (row,) in items}) == len(items)


def test_each_role_reads_its_own_split(tmp_path, tokenizer):
    for name, rows in {"train": rows_of(3), "test": rows_of(2), "validation": rows_of(1)}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = str(tmp_path)
    data = load_demonstrations(replace(SHORT, train=folder, split="test"), tokenizer, 0)
    assert len(data.items) == 2
    data = load_demonstrations(replace(SHORT, train=folder, validation=folder), tokenizer, 0)
    assert (len(data.items), len(data.validation)) == (3, 1)
    data = load_demonstrations(replace(SHORT, train=folder, validation=folder, validation_split="test"), tokenizer, 0)
    assert (len(data.items), len(data.validation)) == (3, 2)


def test_limits_and_mixtures(write, tokenizer):
    one, two = write("a.jsonl", rows_of(9)), write("b.jsonl", rows_of(9))
    data = load_demonstrations(replace(SHORT, train={one: 3, two: 1}, limit=4), tokenizer, 0)
    cursor = data.cursor(0)
    assert (data.counts, cursor.length, cursor.quotas) == ((4, 4), 8, (6, 2))
    assert sum(cursor.item(draw) < 4 for draw in range(8)) == 6


def test_a_source_that_would_never_be_drawn_from_is_refused(write, tokenizer):
    mixture = replace(SHORT, train={write("a.jsonl", rows_of(9)): 1000, write("b.jsonl", rows_of(9)): 1})
    with pytest.raises(DataError, match=r"b\.jsonl: .*\[1000, 1\] .*18"):
        load_demonstrations(mixture, tokenizer, 0)


def test_prompts_carry_their_place_and_answer(write, tokenizer):
    source = write("a.jsonl", [{"question": "q", "answer": "#### 4", "level": 2}])
    (prompt,) = load_prompts(replace(SHORT, train=source), tokenizer, 0).items
    assert (prompt.id, prompt.answer, prompt.extra, prompt.source) == (f"{source}:1", "#### 4", {"level": 2}, source)


def test_a_renamed_column_that_no_row_has_is_refused(write, tokenizer):
    """The answer that a rule compares with may be absent: a slip in its name would be seen in no row."""
    one, other = write("a.jsonl", [{"prompt": "q"}]), write("b.jsonl", [{"prompt": "q", "truth": "4"}])
    with pytest.raises(DataError, match=r"{answer: truht}"):
        load_prompts(DataSettings(train=[one, other], columns={"answer": "truht"}), tokenizer, seed=0)
    loaded = load_prompts(DataSettings(train=[one, other], columns={"answer": "truth"}), tokenizer, seed=0)
    assert [prompt.answer for prompt in loaded.items] == [None, "4"]


def test_sources_of_several_kinds_share_renamed_columns(write, tokenizer):
    """As a pipeline's stages and the sources of an evaluation do; a slip in what a kind does read is still refused."""
    columns = {"prompt": "ask", "completion": "reply", "chosen": "good", "rejected": "bad", "margin": "by"}
    rows = {
        load_demonstrations: {"ask": "q", "reply": "a"},
        load_preferences: {"ask": "q", "good": "a", "bad": "b", "by": 1},
        load_judgements: {"ask": "q", "good": "a", "bad": "b", "by": 1},
        load_prompts: {"ask": "q"},
    }
    for load, row in rows.items():
        settings = DataSettings(train=write("a.jsonl", [row]), columns=columns)
        assert len(load(settings, tokenizer, 0).items) == 1
        slips = {
            load_demonstrations: "context",
            load_preferences: "margin",
            load_judgements: "context",
            load_prompts: "answer",
        }
        settings.columns = columns | {slips[load]: "slip"}
        with pytest.raises(DataError, match=rf"{slips[load]}: slip}}"):
            load(settings, tokenizer, 0)


def test_nothing_left_says_why(write, tokenizer):
    source = write("a.jsonl", [{"prompt": "123456", "completion": "1"}])
    with pytest.raises(DataError, match=r"1 dropped \(prompt"):
        load_demonstrations(replace(SHORT, train=source, overlong="drop"), tokenizer, 0)
    with pytest.raises(DataError, match="2 set aside"):
        load_demonstrations(replace(SHORT, train=write("b.jsonl", rows_of(2)), validation="90%"), tokenizer, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": []}, "data.train is empty"),
        ({"train": ["a", "a"]}, "names 'a' twice"),
        ({"validation": {"a": 1}}, "data source"),
        ({"validation": "100%"}, "validation=100%"),
        ({"train": {"a": 0.0}}, "train={'a': 0.0} must"),
        ({"train": {"a": "1"}}, "train={'a': '1'} must"),
        ({"overlong": "cut"}, "overlong=cut must be one of"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0 must be"),
        ({"max_prompt_tokens": 8}, "max_prompt_tokens=8"),
        ({"prompt_template": "Q:"}, r"no \{prompt\}"),
        ({"dialect": "prompt/complete"}, "mean prompt/completion"),
        ({"columns": {"promp": "x"}}, "mean prompt"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(tokenizer, change, message):
    with pytest.raises(ValueError, match=message):
        load_demonstrations(replace(SHORT, **{"train": "absent.jsonl", **change}), tokenizer, 0)


def test_a_single_source_is_accepted_by_omegaconf_too():
    from omegaconf import OmegaConf

    tree = OmegaConf.merge(OmegaConf.structured(DataSettings), OmegaConf.from_dotlist(["train=a.jsonl"]))
    assert sources(OmegaConf.to_object(tree).train) == ("a.jsonl",)
    tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(["train=[a.jsonl,b]", "columns.prompt=text"]))
    assert sources(OmegaConf.to_object(tree).train) == ("a.jsonl", "b")


def test_rows_whose_answer_is_no_reference_are_bad_rows(tmp_path, tokenizer):
    """Named by their place, before anything else is loaded; what no reward reads is not asked about."""
    file = tmp_path / "rows.jsonl"
    rows = ({"prompt": "a", "answer": "#### 72"}, {"prompt": "b", "answer": "10:30"}, {"prompt": "c"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refers = check_reference([RewardSettings(kind="gsm8k")])
    for stream in (0, 2):
        with pytest.raises(DataError, match=r"rows.jsonl:2: .*10:30.*kind: math"):
            load_prompts(DataSettings(train=str(file), stream=stream), tokenizer, 0, refers=refers)
    some = load_prompts(DataSettings(train=str(file), bad_rows=2), tokenizer, 0, refers=refers)
    assert [prompt.answer for prompt in some.items] == ["#### 72"]
    assert len(load_prompts(DataSettings(train=str(file)), tokenizer, 0).items) == 3


@pytest.mark.slow
def test_gsm8k_as_prompts_and_as_demonstrations(shared_file, tokenizer):
    source = str(shared_file("gsm8k-train-2000.jsonl"))
    limits = DataSettings(train=source, max_prompt_tokens=1100, max_tokens=3000)
    questions = load_prompts(limits, tokenizer, 0)
    assert len(questions.items) == 2000
    assert questions.items[0].text.startswith("Natalia sold clips to 48")
    assert questions.items[0].answer.endswith("\n#### 72")
    assert questions.report.sources[0].dialects == {"question/answer": 2000}
    rows = load_demonstrations(limits, tokenizer, 0)
    assert tokenizer.decode(rows.items[0][0].tokens).endswith("\n#### 72<eos>")


@pytest.mark.slow
def test_film_sentences_through_a_function(shared_file, write, tokenizer):
    path = shared_file("rt-polarity.pos")
    function = write(
        "film.py",
        f"def rows():\n    for line in open({str(path)!r}, encoding='latin-1', newline='\\n'):\n"
        "        yield {'text': line.strip()}\n",
    )
    data = load_demonstrations(DataSettings(train=f"{function}:rows", max_tokens=1024), tokenizer, 0)
    assert len(data.items) == 5331
    assert data.report.sources[0].truncated_completions == 0
    (row,) = data.items[0]
    assert tokenizer.decode(row.tokens).startswith("<eos>the rock is destined")


def test_all_turns_of_a_chat_are_one_item_and_stay_on_one_side(write, tokenizer):
    def chat(number):
        turns = [("user", f"{number}"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    source = write("a.jsonl", "".join(json.dumps(chat(number)) + "\n" for number in range(10)))
    settings = DataSettings(train=source, validation="20%", chat_template="default", every_turn=True)
    data = load_demonstrations(settings, tokenizer, 0)
    assert [len(data.items), len(data.validation)] == [8, 2]
    assert all(len(item) == 2 and item[0].group == item[1].group for item in (*data.items, *data.validation))
    assert len({item[0].group for item in (*data.items, *data.validation)}) == 10
    (report,) = data.report.sources
    assert (report.read, report.kept, report.rows) == (10, 10, 20)
    assert "a.jsonl: assistant turns: 20" in data.report.table()


@pytest.mark.parametrize(
    "ending", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "json.gz", "csv.xz", "gz", "txt"]
)
def test_names_that_are_files_are_those_that_are_read(ending):
    assert absent(f"gone.{ending}") == ([f"gone.{ending}"] if file_kind(f"gone.{ending}") else [])


def test_a_source_that_is_null_is_called_so():
    with pytest.raises(ValueError, match="is null"):
        sources([None])


def test_sources_may_have_splits_of_their_own_and_several(tmp_path, tokenizer):
    """b has 3 rows to train on and 2 to test on, 5 of both. a says no split of its own: its 3 train rows."""
    for source in "ab":
        (tmp_path / source).mkdir()
        for name, rows in {"train": rows_of(3), "test": rows_of(2)}.items():
            (tmp_path / source / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, two = str(tmp_path / "a"), str(tmp_path / "b")
    data = load_demonstrations(replace(SHORT, train=[one, two], split={two: "train+test"}), tokenizer, 0)
    assert data.counts == (3, 5)
    assert load_demonstrations(replace(SHORT, train=[one, two], split="test+train"), tokenizer, 0).counts == (5, 5)
    for wrong in ({"c": "train"}, {one: 3}, 5):
        assert next(replace(SHORT, train=[one], split=wrong).contradictions()).startswith("split=")


@pytest.mark.parametrize(("asked", "counts"), [(4, (6, 2)), (1, (8, 2))])
def test_a_number_of_prompts_is_set_aside_from_sources_by_their_sizes(write, tokenizer, asked, counts):
    """Of 9 and 3 prompts 4 are 3 and 1; of each source at least one is set aside."""
    one, two = write("a.jsonl", rows_of(9)), write("b.jsonl", rows_of(3))
    data = load_demonstrations(replace(SHORT, train=[one, two], validation=asked), tokenizer, 0)
    assert (data.counts, len(data.validation)) == (counts, 12 - sum(counts))
    with pytest.raises(DataError, match="9 set aside"):
        load_demonstrations(replace(SHORT, train=[one, two], validation=99), tokenizer, 0)
