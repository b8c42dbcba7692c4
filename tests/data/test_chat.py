"""Chats become text by the template that was asked for, and only what asks is rendered."""

import pytest

from plaudit.data.chat import DEFAULT_TEMPLATE, chat_template, other_end, render
from plaudit.data.fields import DataError
from plaudit.data.formats import Demonstration
from plaudit.data.report import DataReport, Tally
from plaudit.data.settings import DataSettings
from plaudit.data.tokenize import demonstration_rows

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


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<eos>"), ""),
        (DEFAULT_TEMPLATE, ""),
        ("{{ messages[-1].content }}", ""),
        ("{{ messages | length }}", ""),
        ("{{ raise_exception('not this chat') }}", ""),
        (None, ""),
    ],
)
def test_a_template_that_ends_answers_in_another_way_is_told_of(tokenizer, template, end):
    """As that of a base model whose end token is another one: the policy would never write what its chats show."""
    assert other_end(tokenizer, template=template) == end
    settings = DataSettings(chat_template=template)
    if end:
        tally = Tally(source="f")
        chat = Demonstration(prompt="", completion="a", messages=tuple(TURNS[:2]), where="f:1")
        demonstration_rows([chat], tokenizer, settings, tally=tally)
        report = DataReport(kind="demonstrations", sources=(tally.freeze(),), train_items=1, validation_items=0)
        told = "f: answers end with the tokenizer's eos_token, the chat template ends them with '<|im_end|>'"
        assert told in report.table()
        assert told not in report.table(measured=True)


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
