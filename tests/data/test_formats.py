"""Every dialect, found by its columns and asked for by name; and no JSON value raises anything but `DataError`."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import demonstration, preference, question

from plaudit.data.fields import MARKS, DataError, Fields
from plaudit.data.formats import (
    check_columns,
    dialects,
    judgement_of,
    register_dialect,
    sample,
)
from plaudit.data.records import JUDGEMENT, Dialect, Pair, Sample, Verdict

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
    ("messages", {"conversation": [USER, ASSISTANT], "system": "s"}, "", (SYSTEM, USER)),
    ("messages", {"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "weight": 0}]}, "", (USER,)),
    ("messages", {"messages": [USER, {**ASSISTANT, "weight": 1, "train": True}]}, "", (USER,)),
    ("messages", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "", (USER,)),
    ("text", {"text": "a"}, "", ()),
    ("prompt/chosen/rejected", {"prompt": "q", "chosen": "a", "rejected": "b"}, "q", ()),
]


@pytest.mark.parametrize(("name", "row", "prompt", "messages"), DEMONSTRATIONS)
@pytest.mark.parametrize("by_name", [False, True])
def test_demonstrations(name, row, prompt, messages, by_name):
    read = demonstration(row, where="f.jsonl:1", dialect=name if by_name else "auto")
    assert (read.prompt, read.messages, read.answer, read.where) == (prompt, messages, "a", "f.jsonl:1")


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
        "chosen/rejected",
        {"chosen": "The sky is blue", "rejected": "The sky is black"},
        "The sky is",
        (),
        " blue",
        " black",
    ),
    (
        "chosen/rejected",
        {"chosen": "The sky is blue", "rejected": "The sky is"},
        "The sky",
        (),
        " is blue",
        " is",
    ),
    ("prompt/chosen/rejected", {"question": "q", "chosen": "a", "rejected": "b"}, "q", (), "a", "b"),
    (
        "prompt/chosen/rejected",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        "",
        (USER,),
        "a",
        "b",
    ),
    (
        "instruction/output_1/output_2/preference",
        {"instruction": "q", "input": "c", "output_1": "b", "output_2": "a", "preference": 2},
        "q\n\nc",
        (),
        "a",
        "b",
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
    with pytest.raises(DataError, match=r"f:1: .*several turns"):
        preference(answers, where="f:1")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_turns_thoughts_are_read_under_each_of_their_names(key):
    read = demonstration({"messages": [USER, {**ASSISTANT, key: "let me see"}]}, where="f:1")
    assert (read.answer, read.turn) == ("a", {"reasoning_content": "let me see"})
    assert demonstration({"messages": [USER, {**ASSISTANT, key: None}]}, where="f:1").turn == {}


def test_calls_and_tools_are_read_for_the_template_from_json_too():
    tools = [{"type": "function", "function": {"name": "add", "parameters": None}}]
    call = {"name": "add", "arguments": '{"x": 1, "unit": null}', "id": None}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "7"}
    for written in (tools, json.dumps(tools), np.array(tools)):
        read = demonstration({"messages": [USER, answer, result, USER, ASSISTANT], "tools": written}, where="f:1")
        assert read.arguments == {"tools": tools}, "with the null that its author wrote"
        said = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "unit": None}}}
        assert read.messages[1] == {"role": "assistant", "content": "", "tool_calls": [said]}
        assert read.messages[2] == result
    called = demonstration({"messages": [USER, answer]}, where="f:1")
    assert (called.answer, [*called.turn]) == ("", ["tool_calls"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, "function_call"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"arguments": "x"}]}]}, "tool_calls must be"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, r"weight .* 0.5; .* 0, 1"),
        ({"messages": [USER, {**ASSISTANT, "train": "no"}]}, r"train .*'no'; .* 0, 1"),
        ({"messages": [USER, ASSISTANT], "tools": "a hammer"}, r"'tools' .*'a hammer'"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": [1]}, r"'chat_template_kwargs' .* 1"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"tools": [1]}}, "an object without"),
    ],
)
def test_what_a_template_could_not_be_given_is_refused(row, said):
    with pytest.raises(DataError, match=said):
        demonstration(row, where="f:1")


def test_a_row_may_give_the_template_arguments_which_questions_keep_for_judges():
    row = {"messages": [USER, ASSISTANT], "chat_template_kwargs": '{"enable_thinking": false, "date": null}'}
    given = {"enable_thinking": False, "date": None}
    assert demonstration(row, where="f:1").arguments == given
    asked = question(row, where="f:1")
    assert (asked.arguments, [*asked.extra]) == (given, ["chat_template_kwargs"])
    for said in ({"enable_thinking": False}, {"budget": 0, "date": None}):  # false and 0 are said, nulls are padding
        assert demonstration({**row, "chat_template_kwargs": said}, where="f:1").arguments == said
    assert demonstration({**row, "chat_template_kwargs": {"date": None}}, where="f:1").arguments == {}


@pytest.mark.parametrize(
    "untrained",
    [
        *({key: value} for key in MARKS for value in (0, False)),
        {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
    ],
    ids=str,
)
def test_turns_that_are_not_to_be_trained_are_passed_over(untrained):
    last = {"role": "assistant", "content": "z", **untrained}
    read = demonstration({"messages": [USER, {**ASSISTANT, "weight": 1}, USER, last]}, where="f:1")
    assert (read.answer, read.messages) == ("a", (USER,))
    with pytest.raises(DataError, match=r"f:1: .*weight 0"):
        demonstration({"messages": [USER, last]}, where="f:1")
    assert question({"messages": [USER, last]}, where="f:1").answer == "z"


@pytest.mark.parametrize(
    "nothing", [None, [], {}, "", "[]", "null", math.nan, np.array([]), {"name": None, "arguments": ""}], ids=repr
)
def test_tools_and_calls_that_say_nothing_are_none(nothing):
    """As tables hold them, and functions that read one with pandas give them: arrays, which have no truth value."""
    row = {"messages": [USER, {**ASSISTANT, "tool_calls": nothing}], "tools": nothing}
    assert demonstration(row, where="f:1").answer == "a"


def test_answers_alone_leave_no_prompt_to_guess():
    """A prompt in a column that is not known would be left out, and the pair trained without one."""
    row = {"input": "q", "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match=r"f:1: .*share no turn"):
        preference(row, where="f:1")
    assert preference(row, where="f:1", columns={"prompt": "input"}).prompt == "q"


@pytest.mark.parametrize("dialect", ["auto", "prompt/pos_answers/neg_answers"])
def test_answer_lists_pair_up_in_order(dialect):
    row = {"prompt": "q", "pos_answers": ["a", "a"], "neg_answers": ["b", "c"], "margin": [0.5, 2]}
    assert preference(row, where="f:1", dialect=dialect).pairs == (
        Pair(chosen="a", rejected="b", margin=0.5),
        Pair(chosen="a", rejected="c", margin=2.0),
    )


KTO = {"prompt": "q", "completion": "a", "label": True}


@pytest.mark.parametrize(
    "row",
    [
        KTO,
        {**KTO, "label": 0},
        {"instruction": "q", "output": "a", "kto_tag": False},
        {"messages": [USER, ASSISTANT], "label": False},
        {"messages": [USER, ASSISTANT], "label": "true"},
        {"question": "q", "answer": "a", "label": 1},
    ],
)
def test_answers_with_a_label_are_demonstrations_only_where_that_is_said(row):
    """An answer that was judged to be bad would be imitated."""
    for read in (demonstration, preference):
        with pytest.raises(DataError, match=r"f:1: .*label"):
            read(row, where="f:1")
    asked = question(row, where="f:1")
    assert (asked.prompt or asked.messages[0]["content"], asked.answer) == ("q", None)
    assert all(asked.extra[name] == row[name] for name in ("label", "kto_tag", "completion") if name in row)
    told = {
        "prompt": "prompt/completion",
        "instruction": "instruction/response",
        "messages": "messages",
        "question": "question/answer",
    }
    assert demonstration(row, where="f:1", dialect=told[next(iter(row))]).answer == "a"


@pytest.mark.parametrize(
    ("row", "good"),
    [
        (KTO, True),
        ({**KTO, "label": 0}, False),
        ({**KTO, "label": "True"}, True),
        ({**KTO, "label": "0"}, False),
        ({"instruction": "q", "output": "a", "kto_tag": False}, False),
        ({"messages": [USER, ASSISTANT], "label": False}, False),
        ({"messages": [USER, ASSISTANT], "label": 1}, True),
        ({"messages": [USER, ASSISTANT], "label": "false"}, False),
        ({"question": "q", "answer": "a", "label": "0"}, False),
        ({"prompt": [USER], "completion": [ASSISTANT], "label": True}, True),
    ],
)
def test_answers_with_a_label_are_judgements(row, good):
    read, _ = sample(row, kind=JUDGEMENT, where="f:1")
    made = judgement_of(read)
    assert (made.prompt or made.messages[0]["content"], made.where) == ("q", "f:1")
    assert made.verdicts == (Verdict(answer="a", good=good),)
    assert read.extra == {}, "nothing of it is left unread"


@pytest.mark.parametrize(
    "row",
    [
        {**KTO, "label": "good"},
        {**KTO, "label": -1},
        {**KTO, "completion": " "},
        {**KTO, "completion": [USER]},
        {"messages": [USER], "label": True},
        {"messages": [USER, {"role": "assistant", "content": ""}], "label": True},
    ],
)
def test_a_verdict_that_cannot_be_read_is_refused_and_the_row_a_question_all_the_same(row):
    read, _ = sample(row, kind=JUDGEMENT, where="f:1")
    with pytest.raises(DataError, match=r"f:1: .*kto_tag"):
        judgement_of(read)
    assert question(row, where="f:1").answer is None


def test_pairs_are_judgements_of_a_good_and_a_bad_answer_each():
    row = {"prompt": "q", "pos_answers": ["a", "c"], "neg_answers": ["b", "d"]}
    made = judgement_of(sample(row, kind=JUDGEMENT, where="f:1")[0])
    assert [(one.answer, one.good) for one in made.verdicts] == [("a", True), ("b", False), ("c", True), ("d", False)]
    for row in ({"prompt": "q", "completion": "a"}, {"text": "a"}, {"prompt": "q"}):
        with pytest.raises(DataError, match=r"judgements.* prompt/chosen"):
            sample(row, kind=JUDGEMENT, where="f:1")
    with pytest.raises(DataError, match="steps of answers"):
        sample({"prompt": "q", "completions": ["a"], "labels": [True]}, kind=JUDGEMENT, where="f:1")


def test_a_label_that_is_a_class_is_a_further_column():
    assert demonstration({"text": "a", "label": 1}, where="f:1").answer == "a"
    assert demonstration({"question": "q", "answer": "a", "label": "easy"}, where="f:1").answer == "a"


def test_rows_of_steps_are_prompts_and_nothing_else():
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}
    assert question(row, where="f:1").extra == {"completions": ["a", "b"], "labels": [True, False]}
    for read in (demonstration, preference):
        with pytest.raises(DataError, match=r"f:1: .*steps of answers"):
            read(row, where="f:1")


@pytest.mark.parametrize("name", ["image", "images", "video", "audio"])
@pytest.mark.parametrize("row", [{"prompt": "q", "completion": "a"}, {"messages": [USER, ASSISTANT]}])
def test_rows_with_images_are_refused(name, row):
    for read in (demonstration, question):
        with pytest.raises(DataError, match=f"f:1: .*{name}"):
            read({**row, name: {"bytes": b"1", "path": None}}, where="f:1")
        for nothing in (None, [], {"bytes": None, "path": None}):
            assert read({**row, name: nothing}, where="f:1")


def test_transcripts_that_part_before_the_last_answer_are_refused():
    """As chats are: one of the two would be taken for an answer that goes on with a question of its own."""
    chosen, rejected = (HUMAN + f" a\n\nHuman: {turn}\n\nAssistant: d" for turn in "cx")
    with pytest.raises(DataError, match=r"f:1: 'chosen' .*several turns"):
        preference({"chosen": chosen, "rejected": rejected}, where="f:1")
    with pytest.raises(DataError, match=r"f:1: 'rejected' .*several turns"):
        preference({"chosen": HUMAN + " a", "rejected": chosen}, where="f:1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "Sure.", "rejected": "Sorry."}, "no beginning"),
        ({"chosen": "so it is", "rejected": "so it is"}, None),
        ({"chosen": "so", "rejected": "so so"}, "no beginning"),
        ({"input": "q", "chosen": "I am", "rejected": "I can"}, "without 'input'"),
    ],
)
def test_a_common_beginning_that_is_no_prompt(row, message):
    if message is None:
        assert preference(row, where="f:1").prompt == "so it"
        return
    with pytest.raises(DataError, match=message):
        preference(row, where="f:1")


def test_a_tie_of_two_outputs_is_refused():
    row = {"instruction": "q", "output_1": "a", "output_2": "b", "preference": 1.5}
    with pytest.raises(DataError, match=r"'preference' .* 1\.5.* 1 or 2"):
        preference(row, where="f:1")


@pytest.mark.parametrize("weight", [0.5, "0", [], -1])
def test_a_weight_between_is_refused(weight):
    with pytest.raises(DataError, match=r"f:1: messages\[1\]\.weight .* 0, 1,"):
        demonstration({"messages": [USER, {**ASSISTANT, "weight": weight}]}, where="f:1")


def test_a_turn_that_is_not_trained_is_no_answer_to_imitate():
    row = {"messages": [USER, {**ASSISTANT, "train": False}]}
    with pytest.raises(DataError, match=r"f:1: .*weight 0"):
        demonstration(row, where="f:1")
    asked = question(row, where="f:1")
    assert (asked.messages, asked.answer) == ((USER,), "a")


def test_numbers_may_be_texts_as_in_csv():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "-0.5"}
    assert preference(row, where="f:1").pairs[0].margin == -0.5


def test_one_margin_is_that_of_all_pairs():
    row = {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"], "margin": 0.5}
    assert [pair.margin for pair in preference(row, where="f:1").pairs] == [0.5, 0.5]


def test_transcripts_that_differ_from_the_first_answer_on():
    chosen, rejected = "\n\nAssistant: a", "\n\nAssistant: b"
    read = preference({"chosen": chosen, "rejected": rejected}, where="f:1")
    assert (read.prompt, read.pairs) == ("\n\nAssistant:", (Pair(chosen=" a", rejected=" b"),))


def test_answer_lists_of_different_length_are_refused():
    with pytest.raises(DataError, match=r"f:3: pos_answers .*2 .*neg_answers 1"):
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
    # A column `answer` is the reference, whatever else is an answer.
    ("prompt/completion", {"prompt": "q", "completion": " 4.", "answer": "4"}, "q", (), "4"),
    ("messages", {"messages": [USER, ASSISTANT], "answer": "4"}, "", (USER,), "4"),
    ("prompt/chosen/rejected", {"prompt": "q", "chosen": "a", "rejected": "b", "answer": 4}, "q", (), "4"),
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
    assert demonstration(row, where="f:1").answer == "a"
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
    with pytest.raises(DataError, match=r"f:1: 'answer' .*list of 2"):
        question(row, where="f:1", columns={"answer": "reward_model.ground_truth"})


@pytest.mark.parametrize(
    ("read", "row", "said"),
    [
        (demonstration, {"promt": "q", "completion": "a"}, "data.columns={prompt: promt}"),
        (demonstration, {"promt": "q"}, "data.columns={prompt: promt, completion: COLUMN}"),
        (demonstration, {"src": "q", "tgt": "a"}, "data.columns={prompt: src, completion: tgt}"),
        (demonstration, {"id": "n1", "src": "q", "tgt": "a"}, "data.columns={prompt: COLUMN, completion: COLUMN}"),
        (demonstration, {"prompt": "q"}, "The row lacks completion."),
        (demonstration, {"chat": [USER]}, "data.columns={messages: chat}"),
        (preference, {"q": "q", "good": "a", "bad": "b"}, "data.columns={prompt: q, chosen: good, rejected: bad}"),
        (preference, {"prompt": "q", "good": "a", "bad": "b"}, "data.columns={chosen: good, rejected: bad}"),
        (demonstration, {"src": "q", "tgt": "a", "note": None}, "data.columns={prompt: src, completion: tgt}"),
        (demonstration, {"Frage (de)": "q", "größe": "a"}, 'data.columns={prompt: "Frage (de)", completion: "größe"}'),
        (question, {"task_id": 3, "problem": "q"}, "data.columns={prompt: problem}"),
    ],
)
def test_unknown_columns_are_answered_with_the_override_that_reads_them(read, row, said):
    with pytest.raises(DataError, match=re.escape(said)):
        read(row, where="f:1")


def test_a_row_without_a_renamed_column_says_so():
    with pytest.raises(DataError, match=r"f:1: .* data.columns={completion: reply}"):
        demonstration({"prompt": "q", "completion": "a"}, where="f:1", columns={"completion": "reply"})


def test_columns_rename_and_unknown_ones_are_refused():
    read = demonstration({"ask": "q", "reply": "a"}, where="f:1", columns={"prompt": "ask", "completion": "reply"})
    assert (read.prompt, read.answer) == ("q", "a")
    with pytest.raises(DataError, match=r"data\.columns\.promt .*prompt"):
        check_columns({"promt": "ask"})


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (demonstration, {"prompt": "q"}, "f:7: .*prompt .*demonstrations"),
        (demonstration, {"prompt": "q", "completion": ""}, "'completion' is empty"),
        (demonstration, {"prompt": 3, "completion": "a"}, "'prompt' is the number 3"),
        (demonstration, {"prompt": "q", "completion": "\ud800"}, "character 0"),
        (demonstration, {"messages": [USER]}, "completion"),
        (demonstration, {"messages": [{"role": "owner", "content": "x"}]}, "'owner'.* system"),
        (demonstration, {"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, "function_call"),
        (preference, {"prompt": "q", "completion": "a"}, "preferences"),
        (preference, {"chosen": "a", "rejected": "b"}, "share no beginning"),
        (
            preference,
            {"prompt": "q", "pos_answers": "a", "neg_answers": ["b"]},
            "'pos_answers' is the text 'a'",
        ),
        (preference, {"prompt": "q", "pos_answers": [], "neg_answers": []}, "'pos_answers' is an empty list"),
        (
            preference,
            {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"], "margin": [1]},
            "'margin' has 1 .* 2 pairs",
        ),
        (demonstration, {"messages": [USER, {**ASSISTANT, "content": " "}]}, "turn is empty"),
        (demonstration, {"messages": [{**USER, "content": None}]}, "content' is null"),
        (preference, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "finite number"),
        (question, {"prompt": None}, r"the columns \(none\)"),
        (question, {"prompt": [USER, ASSISTANT]}, "ends with an assistant turn"),
        (question, [1], "the row is a list"),
        (question, None, "the row is null"),
    ],
)
def test_errors_say_where_and_what(read, row, message):
    with pytest.raises(DataError, match=message) as caught:
        read(row, where="f:7")
    assert caught.value.where == "f:7"


def test_a_dialect_by_name_says_which_column_is_missing():
    with pytest.raises(DataError, match=r"\(null: completion\)"):
        demonstration({"prompt": "q", "completion": None}, where="f:1", dialect="prompt/completion")
    with pytest.raises(DataError, match="mean prompt/completion"):
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
