"""Rows in the shapes of public data sets: what is read of each, what is refused, and the table of it in the docs."""

from pathlib import Path

import pytest

from plaudit.data.fields import DataError
from plaudit.data.formats import demonstration_of, preference_of, sample
from plaudit.data.records import DEMONSTRATION, PREFERENCE, QUESTION

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WORSE = {"role": "assistant", "content": "b"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
TURNS = "\n\nHuman: q\n\nAssistant:"

# A data set, a row of it, and what is read of it as demonstrations, preferences and prompts: the dialect, or the
# beginning of the refusal.
NO = "not a known dialect"
SHAPES = [
    (
        "HuggingFaceH4/ultrachat_200k",
        {"prompt": "q", "prompt_id": "1", "messages": [USER, BOT]},
        ("messages", NO, "messages"),
    ),
    (
        "HuggingFaceH4/no_robots",
        {"prompt": "q", "messages": [USER, BOT], "category": "Chat"},
        ("messages", NO, "messages"),
    ),
    (
        "HuggingFaceH4/ultrafeedback_binarized",
        {"prompt": "q", "chosen": [USER, BOT], "rejected": [USER, WORSE], "messages": [USER, BOT], "score_chosen": 8.0},
        ("messages", "prompt/chosen/rejected", "messages"),
    ),
    (
        "openbmb/UltraFeedback",
        {"source": "x", "instruction": "q", "completions": [{"response": "a"}]},
        (NO, NO, "prompt"),
    ),
    ("Anthropic/hh-rlhf", {"chosen": f"{TURNS} a", "rejected": f"{TURNS} b"}, ("chosen/rejected",) * 3),
    ("openai/gsm8k", {"question": "q", "answer": "a"}, ("question/answer", NO, "question/answer")),
    (
        "tatsu-lab/alpaca",
        {"instruction": "q", "input": "", "output": "a", "text": "Below is q a"},
        ("instruction/response", NO, "instruction/response"),
    ),
    (
        "tatsu-lab/alpaca_farm",
        {"instruction": "q", "input": "", "output_1": "a", "output_2": "b", "preference": 1},
        ("instruction/output_1/output_2/preference",) * 3,
    ),
    (
        "databricks/databricks-dolly-15k",
        {"instruction": "q", "context": "", "response": "a", "category": "open_qa"},
        ("instruction/response", NO, "instruction/response"),
    ),
    ("teknium/OpenHermes-2.5", {"conversations": [HUMAN, GPT], "source": "x"}, ("messages", NO, "messages")),
    ("lmsys/lmsys-chat-1m", {"conversation": [USER, BOT], "language": "English"}, ("messages", NO, "messages")),
    (
        "lmsys/chatbot_arena_conversations",
        {"conversation_a": [USER, BOT], "conversation_b": [USER, WORSE], "winner": "model_a"},
        (NO, NO, NO),
    ),
    (
        "Intel/orca_dpo_pairs",
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        ("prompt/chosen/rejected",) * 3,
    ),
    ("Open-Orca/OpenOrca", {"system_prompt": "s", "question": "q", "response": "a"}, (NO, NO, "prompt")),
    (
        "nvidia/HelpSteer2",
        {"prompt": "q", "response": "a", "helpfulness": 3},
        ("prompt/completion", NO, "prompt/completion"),
    ),
    (
        "trl-lib/kto-mix-14k",
        {"prompt": [USER], "completion": [BOT], "label": True},
        ("the rows are answers with a label", "the rows are answers with a label", "prompt/completion/label"),
    ),
    (
        "trl-lib/math_shepherd",
        {"prompt": "q", "completions": ["a"], "labels": [True]},
        ("the rows are steps", "the rows are steps", "prompt/completions/labels"),
    ),
    ("stanfordnlp/imdb", {"text": "a", "label": 1}, ("text", NO, NO)),
    ("stanfordnlp/SHP", {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}, (NO, NO, NO)),
    (
        "PKU-Alignment/PKU-SafeRLHF",
        {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 0},
        (NO, NO, "prompt"),
    ),
    (
        "liuhaotian/LLaVA-Instruct-150K",
        {"id": "1", "image": "1.jpg", "conversations": [HUMAN, GPT]},
        ("the row has image", NO, "the row has image"),
    ),
    (
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"prompt": [USER], "ability": "MATH", "reward_model": {"ground_truth": "4"}},
        (NO, NO, "prompt"),
    ),
]


@pytest.mark.parametrize(("name", "row", "expected"), SHAPES, ids=[shape[0] for shape in SHAPES])
def test_what_is_read_of_public_data_sets(name, row, expected):
    kinds = (DEMONSTRATION, PREFERENCE, QUESTION)
    for kind, record, wanted in zip(kinds, (demonstration_of, preference_of, lambda read: read), expected, strict=True):
        try:
            read, dialect = sample(row, kind=kind, where="f:1")
        except DataError as error:
            assert wanted in str(error), kind
            continue
        assert dialect == wanted, kind
        made = record(read)
        assert made.prompt.strip() in ("q", TURNS.strip(), "") and all(
            turn["content"] in "sq" for turn in made.messages
        )
        assert not made.prompt or not made.messages


def test_the_table_of_the_docs_says_the_same():
    table = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and "/" in cells[0]:
            table[cells[0].strip("`")] = cells[2:]
    for name, _, expected in SHAPES:
        said = [f"`{word}`" if "/" in word or word in ("messages", "text", "prompt") else "-" for word in expected]
        cells = [cell if cell.startswith("`") else "-" for cell in table.pop(name)]
        assert cells == said, name
    assert set(table) == {"OpenAssistant/oasst1"}
