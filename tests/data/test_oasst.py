"""Open Assistant's messages and trees: the same records of both, and what is left out."""

import json
from dataclasses import replace

import pytest

from plaudit.data.fields import DataError
from plaudit.data.files import ignore
from plaudit.data.load import load_demonstrations, load_judgements, load_preferences, load_prompts
from plaudit.data.oasst import unfolded
from plaudit.data.records import DEMONSTRATION, PREFERENCE, QUESTION
from plaudit.data.settings import DataSettings


def message(name, role, replies=(), **further):
    return {"message_id": name, "role": role, "text": name, "lang": "en", "replies": list(replies), **further}


# q is answered by a (ranked second) and b (first), and by d, which was deleted; after b the user asks r or s
LATER = [message("r", "prompter", [message("c", "assistant")]), message("s", "prompter")]
TREE = message(
    "q",
    "prompter",
    [
        message("a", "assistant", [message("t", "prompter", [message("e", "assistant", rank=0)])], rank=1),
        message("d", "assistant", rank=0, deleted=True),
        message("b", "assistant", LATER, rank=0),
    ],
)


def messages_of(node, parent=None):
    row = {key: value for key, value in node.items() if key != "replies"} | {"parent_id": parent}
    return [row, *(one for reply in node["replies"] for one in messages_of(reply, node["message_id"]))]


ROWS = messages_of(TREE)
SOURCES = {
    "trees": [{"message_tree_id": "q", "tree_state": "ready_for_export", "prompt": TREE}],
    "messages": ROWS,
    "messages in any order": [*ROWS[3:], *ROWS[:3]],
}


def turns(*names):
    return [{"role": ("user", "assistant")[i % 2], "content": name} for i, name in enumerate(names)]


@pytest.mark.parametrize("source", SOURCES)
def test_a_tree_as_each_kind_of_record(write, tokenizer, source):
    settings = DataSettings(train=write("a.jsonl", SOURCES[source]), chat_template="default", max_prompt_tokens=99)
    shown = load_demonstrations(settings, tokenizer, 0)
    (row,) = shown.items[0]
    assert len(shown.items) == 1
    assert tokenizer.decode(row.tokens) == "<|user|>\nq\n<|assistant|>\nb<eos>\n<|user|>\nr\n<|assistant|>\nc<eos>"
    assert "Open Assistant's trees: 1" in shown.report.table()
    (pair,) = load_preferences(settings, tokenizer, 0).items
    assert [tokenizer.decode(row.tokens)[-6:] for row in pair] == ["b<eos>", "a<eos>"]
    (judged,) = load_judgements(settings, tokenizer, 0).items
    assert [(row.tokens, row.reward) for row in judged[::2]] == [(pair[0].tokens, 1.0), (pair[1].tokens, -1.0)]
    asked = load_prompts(settings, tokenizer, 0).items
    assert [(list(one.messages), one.answer) for one in asked] == [
        (turns("q"), "b"),
        (turns("q", "b", "r"), "c"),
        (turns("q", "b", "s"), None),
        (turns("q", "a", "t"), "e"),
    ]


def test_all_ranked_answers_form_pairs():
    ranked = message(
        "q", "prompter", [message(name, "assistant", rank=rank) for name, rank in (("c", 2), ("a", 0), ("b", 1))]
    )
    (only,) = unfolded([("f:1", {"prompt": ranked})], PREFERENCE, ignore)
    assert only == (
        "f:1.1",
        {
            "prompt": [{"role": "prompter", "content": "q"}],
            "pos_answers": ["a", "a", "b"],
            "neg_answers": ["b", "c", "c"],
        },
    )


def test_damaged_trees_are_bad_rows(write, tokenizer):
    orphan = {**ROWS[1], "message_id": "x", "parent_id": "gone"}
    broken = [{"prompt": {"text": "q", "role": "prompter", "replies": replies}} for replies in (3, [None])]
    unread = {"prompt": message("q", "prompter", [message("a", "assistant", rank=0, text=None)])}
    settings = DataSettings(
        train=write("a.jsonl", [*ROWS, orphan, *broken, unread]), chat_template="default", bad_rows=4
    )
    (report,) = load_demonstrations(settings, tokenizer, 0).report.sources
    keys = ("'replies' is the number 3", "'replies' is null", "'messages[1].content' is null", "'gone'")
    assert [key in said for key, said in zip(keys, report.bad_examples, strict=True)] == [True] * 4
    with pytest.raises(DataError, match="bad row number 4"):
        load_demonstrations(replace(settings, bad_rows=3), tokenizer, 0)


def test_a_long_chain_and_a_circle_of_messages():
    """Neither recursion nor a walk without end."""
    chain = [
        {"message_id": f"{i}", "parent_id": f"{i - 1}" if i else None, "text": "x", "role": "user"} for i in range(3000)
    ]
    rows = list(unfolded([(f"f:{i}", row) for i, row in enumerate(chain)], DEMONSTRATION, ignore))
    assert len(rows) == 1
    circle = [{**chain[1], "parent_id": "2"}, {**chain[2], "parent_id": "1"}]
    assert list(unfolded([("f:1", circle[0]), ("f:2", circle[1])], QUESTION, ignore)) == []
    assert json.dumps(rows[0][1])
