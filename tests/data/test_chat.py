"""Chats become text by the template that was asked for, and only what asks is rendered."""

import pytest

from assent.data.chat import DEFAULT_TEMPLATE, chat_template, render
from assent.data.fields import DataError

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
]


def test_the_default_template_ends_every_answer_and_opens_the_next(tokenizer):
    text = render(TURNS, tokenizer, template=DEFAULT_TEMPLATE)
    assert text == "<|system|>\ns\n<|user|>\nq\n<|assistant|>\na<eos>\n<|user|>\nr\n<|assistant|>\n"


def test_the_tokenizers_own_template_is_used_unless_told_otherwise(make_tokenizer):
    tokenizer = make_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = "{{ messages | length }}"
    assert render(TURNS, tokenizer, template=chat_template(None)) == "4"
    assert render(TURNS, tokenizer, template=chat_template("{{ messages[0].content }}")) == "s"


def test_a_template_may_stand_in_a_file(write):
    assert chat_template(write("t.jinja", "{{ 1 }}")) == "{{ 1 }}"
    with pytest.raises(DataError, match="'chatml' is neither null"):
        chat_template("chatml")


def test_errors_name_the_row_and_the_fix(tokenizer):
    with pytest.raises(DataError, match=r"f:3: the row is a chat, and the tokenizer has no chat template\. Set data\."):
        render(TURNS, tokenizer, where="f:3")
    refusing = "{{ raise_exception('no system here') }}"
    with pytest.raises(DataError, match=r"f:3: the chat template refuses .* no system here"):
        render(TURNS, tokenizer, template=refusing, where="f:3")
