"""Every dialect, found by its columns and asked for by name; and no JSON value raises anything but `DataError`."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.data.fields import DataError, Fields
from plaudit.data.formats import (
    Dialect,
    Pair,
    Sample,
    check_columns,
    demonstration,
    dialects,
    preference,
    question,
    register_dialect,
)

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}
ASSISTANT = {"role": "assistant", "content": "a"}

DEMONSTRATIONS = [
    ("prompt/completion", {"prompt": "q", "completion": "a"}, "q", ()),
    ("prompt/completion", {"prompt": "q", "response": "a", "completion": None}, "q", ()),
    ("prompt/completion", {"prompt": [USER], "completion": [ASSISTANT]}, "", (USER,)),
    ("prompt/answer", {"prompt": "q", "answer": "a"}, "q", ()),
    ("question/answer", {"question": "q", "answer": "a"}, "q", ()),
    ("instruction/response", {"instruction": "q", "response": "a"}, "q", ()),
    ("instruction/response", {"instruction": "q", "context": "c", "response": "a"}, "q\n\nc", ()),
    ("instruction/response", {"instruction": "q", "input": "", "output": "a"}, "q", ()),
    ("messages", {"messages": [SYSTEM, USER, ASSISTANT]}, "", (SYSTEM, USER)),
    ("messages", {"messages": [USER, ASSISTANT, USER]}, "", (USER,)),
    ("messages", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "", (USER,)),
    ("text", {"text": "a"}, "", ()),
    ("prompt/chosen/rejected", {"prompt": "q", "chosen": "a", "rejected": "b"}, "q", ()),
]


@pytest.mark.parametrize(("name", "row", "prompt", "messages"), DEMONSTRATIONS)
@pytest.mark.parametrize("by_name", [False, True])
def test_demonstrations(name, row, prompt, messages, by_name):
    read = demonstration(row, where="f.jsonl:1", dialect=name if by_name else "auto")
    assert (read.prompt, read.messages, read.completion, read.where) == (prompt, messages, "a", "f.jsonl:1")


HUMAN = "\n\nHuman: q\n\nAssistant:"
PREFERENCES = [
    ("prompt/chosen/rejected", {"prompt": "q", "chosen": "a", "rejected": "b"}, "q", (), "a", "b"),
    (
        "prompt/chosen/rejected",
        {"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "b"}]},
        "",
        (USER,),
        "a",
        "b",
    ),
    (
        "prompt/chosen/rejected",
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "b"}]},
        "",
        (USER,),
        "a",
        "b",
    ),
    (
        "instruction/chosen/rejected",
        {"instruction": "q", "input": "c", "chosen": "a", "rejected": "b"},
        "q\n\nc",
        (),
        "a",
        "b",
    ),
    ("chosen/rejected", {"chosen": HUMAN + " yes", "rejected": HUMAN + " you"}, HUMAN, (), " yes", " you"),
    (
        # the shared beginning reaches into a second turn, whose question differs: the first answer is the prompt's end
        "chosen/rejected",
        {"chosen": HUMAN + " a\n\nHuman: c\n\nAssistant: d", "rejected": HUMAN + " a\n\nHuman: x\n\nAssistant: d"},
        HUMAN,
        (),
        " a\n\nHuman: c\n\nAssistant: d",
        " a\n\nHuman: x\n\nAssistant: d",
    ),
    (
        "chosen/rejected",
        {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "b"}]},
        "",
        (USER,),
        "a",
        "b",
    ),
]


@pytest.mark.parametrize(("name", "row", "prompt", "messages", "chosen", "rejected"), PREFERENCES)
@pytest.mark.parametrize("by_name", [False, True])
def test_preferences(name, row, prompt, messages, chosen, rejected, by_name):
    read = preference(row, where="f.jsonl:1", dialect=name if by_name else "auto")
    assert (read.prompt, read.messages) == (prompt, messages)
    assert read.pairs == (Pair(chosen=chosen, rejected=rejected),)


@pytest.mark.parametrize("prompt", ["q", [USER], [SYSTEM, USER]])
def test_whole_chats_tell_the_prompt_again(prompt):
    other = {"role": "assistant", "content": "b"}
    told = [SYSTEM, USER, ASSISTANT, USER]
    row = {"prompt": prompt, "chosen": [*told, ASSISTANT], "rejected": [*told, other]}
    assert preference(row, where="f:1").messages == tuple(told)
    went_on = [ASSISTANT, {"role": "user", "content": "r"}]
    answers = {"prompt": prompt, "chosen": [*went_on, ASSISTANT], "rejected": [*went_on, other]}
    with pytest.raises(DataError, match="f:1: chosen and rejected are chats of several turns that do not tell"):
        preference(answers, where="f:1")


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"])
def test_what_a_turn_holds_beside_its_content_is_refused(key):
    """A template would show it; without a word it would be neither read nor trained."""
    answer = {**ASSISTANT, key: [{"function": {"name": "f"}}] if "call" in key else "let me see"}
    with pytest.raises(DataError, match=rf"f:1: messages\[1\] has {key}, which is not read"):
        demonstration({"messages": [USER, answer]}, where="f:1")
    assert demonstration({"messages": [USER, {**ASSISTANT, key: None}]}, where="f:1").completion == "a"


def test_tools_of_a_chat_are_refused():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for read in (demonstration, question):
        with pytest.raises(DataError, match="f:1: the chat has tools, which are not read"):
            read({"messages": [USER, ASSISTANT], "tools": tools}, where="f:1")
        assert read({"messages": [USER, ASSISTANT], "tools": []}, where="f:1").messages == (USER,)
    assert question({"prompt": "q", "tools": tools}, where="f:1").extra == {"tools": tools}


@pytest.mark.parametrize(
    "nothing", [None, [], {}, "", "[]", "null", math.nan, np.array([]), {"name": None, "arguments": ""}], ids=repr
)
def test_tools_and_calls_that_say_nothing_are_none(nothing):
    """As tables hold them, and functions that read one with pandas give them: arrays, which have no truth value."""
    row = {"messages": [USER, {**ASSISTANT, "tool_calls": nothing}], "tools": nothing}
    assert demonstration(row, where="f:1").completion == "a"


def test_tools_and_calls_in_arrays_are_refused():
    several = np.array([{"name": "f"}, {"name": "g"}])
    with pytest.raises(DataError, match="f:1: the chat has tools"):
        demonstration({"messages": [USER, ASSISTANT], "tools": several}, where="f:1")
    with pytest.raises(DataError, match=r"f:1: messages\[1\] has tool_calls"):
        demonstration({"messages": [USER, {**ASSISTANT, "tool_calls": several}]}, where="f:1")


def test_answers_alone_leave_no_prompt_to_guess():
    """A prompt in a column that is not known would be left out, and the pair trained without one."""
    row = {"input": "q", "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match="f:1: chosen and rejected are chats that share no turn"):
        preference(row, where="f:1")
    assert preference(row, where="f:1", columns={"prompt": "input"}).prompt == "q"


@pytest.mark.parametrize("dialect", ["auto", "prompt/pos_answers/neg_answers"])
def test_answer_lists_pair_up_in_order(dialect):
    row = {"prompt": "q", "pos_answers": ["a", "a"], "neg_answers": ["b", "c"], "margin": [0.5, 2]}
    assert preference(row, where="f:1", dialect=dialect).pairs == (
        Pair(chosen="a", rejected="b", margin=0.5),
        Pair(chosen="a", rejected="c", margin=2.0),
    )


def test_one_margin_is_that_of_all_pairs():
    row = {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"], "margin": 0.5}
    assert [pair.margin for pair in preference(row, where="f:1").pairs] == [0.5, 0.5]


def test_transcripts_that_differ_from_the_first_answer_on():
    chosen, rejected = "\n\nAssistant: a", "\n\nAssistant: b"
    read = preference({"chosen": chosen, "rejected": rejected}, where="f:1")
    assert (read.prompt, read.pairs) == ("\n\nAssistant:", (Pair(chosen=" a", rejected=" b"),))


def test_answer_lists_of_different_length_are_refused():
    with pytest.raises(DataError, match=r"f:3: pos_answers has 2 and neg_answers 1"):
        preference({"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c"]}, where="f:3")


QUESTIONS = [
    ("prompt", {"prompt": "q"}, "q", (), None),
    ("prompt", {"instruction": "q", "input": "c"}, "q\n\nc", (), None),
    ("prompt", {"prompt": [SYSTEM, USER]}, "", (SYSTEM, USER), None),
    ("prompt/answer", {"prompt": "q", "answer": 42}, "q", (), "42"),
    ("question/answer", {"question": "q", "answer": "so 4\n#### 4"}, "q", (), "so 4\n#### 4"),
    ("prompt/completion", {"prompt": "q", "completion": "a"}, "q", (), "a"),
    ("messages", {"messages": [USER]}, "", (USER,), None),
    ("messages", {"messages": [USER, ASSISTANT]}, "", (USER,), "a"),
    ("prompt/chosen/rejected", {"messages": [USER], "chosen": "a", "rejected": "b"}, "", (USER,), None),
]


@pytest.mark.parametrize(("name", "row", "prompt", "messages", "answer"), QUESTIONS)
@pytest.mark.parametrize("by_name", [False, True])
def test_questions(name, row, prompt, messages, answer, by_name):
    read = question({**row, "level": 3}, where="f:1", dialect=name if by_name else "auto")
    assert (read.prompt, read.messages, read.answer) == (prompt, messages, answer)
    assert read.extra["level"] == 3


@pytest.mark.parametrize(
    ("row", "extra"),
    [
        ({"prompt": "q", "context": "c", "question": "r"}, {"context": "c", "question": "r"}),
        ({"instruction": "q", "input": "c", "query": "r"}, {"query": "r"}),
        ({"prompt": "q", "completion": "a", "response": "b"}, {"response": "b"}),
    ],
)
def test_columns_that_a_dialect_could_read_and_does_not_are_kept(row, extra):
    assert question(row, where="f:1").extra == extra


def test_a_completion_is_preferred_to_the_chosen_answer_unless_pairs_are_wanted():
    row = {"prompt": "q", "completion": "a", "chosen": "c", "rejected": "r"}
    assert demonstration(row, where="f:1").completion == "a"
    assert preference(row, where="f:1").pairs[0].chosen == "c"


def test_a_column_may_lie_within_another():
    row = {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": "c"}
    read = question(row, where="f:1", columns={"answer": "reward_model.ground_truth"})
    assert (read.messages, read.answer, read.extra["reward_model"]["style"]) == ((USER,), "4", "rule")
    assert question(row, where="f:1", columns={"answer": "a.b"}).answer == "c"
    assert question(row, where="f:1", columns={"answer": "prompt.b"}).answer is None


def test_a_list_of_answers_is_not_taken_for_a_chat():
    """As verl has them for some tasks: it was told that a text in it must be a turn."""
    row = {"prompt": [USER], "reward_model": {"ground_truth": ["4", "four"]}}
    with pytest.raises(DataError, match="f:1: 'answer' is a list of 2; it must be text"):
        question(row, where="f:1", columns={"answer": "reward_model.ground_truth"})


def test_a_row_without_a_renamed_column_says_so():
    with pytest.raises(DataError, match=r"f:1: .* has not what data.columns={completion: reply} names\.$"):
        demonstration({"prompt": "q", "completion": "a"}, where="f:1", columns={"completion": "reply"})


def test_columns_rename_and_unknown_ones_are_refused():
    read = demonstration({"ask": "q", "reply": "a"}, where="f:1", columns={"prompt": "ask", "completion": "reply"})
    assert (read.prompt, read.completion) == ("q", "a")
    with pytest.raises(DataError, match=r"data\.columns\.promt is no column of ours\. Did you mean 'prompt'"):
        check_columns({"promt": "ask"})


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (demonstration, {"prompt": "q"}, "f:7: the columns prompt are no known dialect of demonstrations"),
        (demonstration, {"prompt": "q", "completion": ""}, "'completion' is empty"),
        (demonstration, {"prompt": 3, "completion": "a"}, "'prompt' is the number 3; it must be text"),
        (demonstration, {"prompt": "q", "completion": "\ud800"}, "half a surrogate pair at character 0"),
        (demonstration, {"messages": [USER]}, "no answer to imitate"),
        (demonstration, {"messages": [{"role": "owner", "content": "x"}]}, "role the text 'owner'; allowed are system"),
        (demonstration, {"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, "has function_call"),
        (preference, {"prompt": "q", "completion": "a"}, "no known dialect of preferences"),
        (preference, {"chosen": "a", "rejected": "b"}, "share no beginning"),
        (
            preference,
            {"prompt": "q", "pos_answers": "a", "neg_answers": ["b"]},
            "'pos_answers' is the text 'a'; it mus",
        ),
        (preference, {"prompt": "q", "pos_answers": [], "neg_answers": []}, "'pos_answers' is an empty list"),
        (
            preference,
            {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"], "margin": [1]},
            "'margin' has 1 entries for 2 pairs; give one for each",
        ),
        (demonstration, {"messages": [USER, {**ASSISTANT, "content": " "}]}, "the last assistant turn is empty"),
        (demonstration, {"messages": [{**USER, "content": None}]}, "content' is null; it must be text"),
        (preference, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "finite number"),
        (question, {"prompt": None}, r"the columns \(none\)"),
        (question, {"prompt": [USER, ASSISTANT]}, "ends with an assistant turn"),
        (question, [1], "the row is a list"),
    ],
)
def test_errors_say_where_and_what(read, row, message):
    with pytest.raises(DataError, match=message) as caught:
        read(row, where="f:7")
    assert caught.value.where == "f:7"


def test_a_dialect_by_name_says_which_column_is_missing():
    with pytest.raises(DataError, match=r"column 'completion' is missing; the row has prompt \(null: completion\)"):
        demonstration({"prompt": "q", "completion": None}, where="f:1", dialect="prompt/completion")
    with pytest.raises(DataError, match=r"Did you mean 'prompt/completion'"):
        demonstration({}, where="f:1", dialect="prompt/completions")


def test_a_dialect_of_ones_own(monkeypatch):
    monkeypatch.setattr("plaudit.data.formats._DIALECTS", dialects())
    register_dialect(
        Dialect(
            name="faq", needs=("faq_q", "faq_a"), read=lambda f: Sample(prompt=f.text("faq_q"), answer=f.text("faq_a"))
        )
    )
    read = question({"faq_q": "q", "faq_a": "a", "id": 1}, where="f:1")
    assert (read.prompt, read.answer, read.extra) == ("q", "a", {"id": 1})


COLUMNS = sorted({name for dialect in dialects().values() for name in dialect.columns()})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "type", "text", "x"]), inner, max_size=4)
        | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": inner})
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    row=st.dictionaries(st.sampled_from(COLUMNS), JSON, max_size=5) | JSON,
    dialect=st.sampled_from(["auto", "nonsense", *dialects()]),
    read=st.sampled_from([demonstration, preference, question]),
)
def test_any_json_value_reads_or_is_a_data_error(row, dialect, read):
    try:
        record = read(row, where="f:1", dialect=dialect)
    except DataError:
        return
    assert isinstance(record.prompt, str)
    assert not (record.prompt and record.messages)


def test_nulls_count_as_absent():
    assert not Fields({"a": None}, "f:1").has("a")
