"""The chat template of a run, with what is fixed in it."""

import datetime

import pytest

from plaudit.data.chat import Chats
from plaudit.data.fields import DataError
from plaudit.data.settings import DataSettings
from plaudit.data.template import chat_template, chosen_template, pinned

ASKED = [{"role": "user", "content": "q"}]


def rendered(tokenizer, template, **arguments):
    return tokenizer.apply_chat_template(ASKED, chat_template=template, tokenize=False, **arguments)


def test_the_tokenizers_own_template_is_used_unless_the_settings_give_one(make_tokenizer):
    tokenizer = make_tokenizer(eos_token="<eos>")
    assert chosen_template(DataSettings(), tokenizer) is None
    tokenizer.chat_template = "{{ messages | length }}"
    assert chosen_template(DataSettings(), tokenizer) == "{{ messages | length }}"
    assert chosen_template(DataSettings(chat_template="{{ 1 }}"), tokenizer) == "{{ 1 }}"
    tokenizer.chat_template = {"default": "d", "tool_use": "{{ tools[0].name }}{{ messages[0].content }}"}
    assert chosen_template(DataSettings(), tokenizer) == tokenizer.chat_template
    chats = Chats(tokenizer, DataSettings())
    assert chats.prompt(ASKED, {"tools": [{"name": "add"}]}) == "addq"


def test_the_default_template_opens_with_bos_where_the_tokenizer_does(make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<bos>", eos_token="<eos>")
    assert "bos" not in chosen_template(DataSettings(chat_template="default"), tokenizer)
    tokenizer.add_bos_token = True
    assert chosen_template(DataSettings(chat_template="default"), tokenizer).startswith("{{ bos_token }}")


def test_a_template_may_stand_in_a_file(write):
    assert chat_template(write("t.jinja", "{{ 1 }}")) == "{{ 1 }}"
    with pytest.raises(DataError, match="'chatml'"):
        chat_template("chatml")


def test_arguments_are_fixed_in_the_template_and_a_rows_own_go_over_them(tokenizer):
    template = "  {% if thinking %}T{% else %}F{% endif %}\n{{ names | join }}{{ said }}"
    fixed = pinned(template, {"thinking": True, "names": ["ä", "'"], "said": "😀\\n"})
    assert rendered(tokenizer, fixed) == rendered(tokenizer, template, thinking=True, names=["ä", "'"], said="😀\\n")
    assert rendered(tokenizer, fixed, thinking=False, names=[], said="") == "F"
    assert pinned(fixed, {"thinking": True}) == fixed, "a later run of the checkpoint repeats nothing"
    assert rendered(tokenizer, pinned(fixed, {"thinking": False})).startswith("F"), "and may change its mind"
    assert rendered(tokenizer, pinned("\n{{ said }}", {"said": 1})) == rendered(tokenizer, "\n{{ said }}", said=1)


def test_the_date_is_fixed(tokenizer):
    template = '{% if strftime_now is defined %}{{ strftime_now("%d %b %Y, %A") }}{% endif %}'
    first, later = (pinned(template, {"strftime_now": day}) for day in ("2024-07-26", datetime.date(2031, 1, 2)))
    assert rendered(tokenizer, first) == "26 Jul 2024, Friday"
    assert rendered(tokenizer, later) == rendered(tokenizer, pinned(first, {"strftime_now": "2031-01-02"}))
    assert rendered(tokenizer, later) == "02 Jan 2031, Thursday"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_thinkin": False}, "is not read"),
        ({"messages": []}, "cannot be set"),
        ({"strftime_now": "today"}, r"must be .*2026-07-31"),
    ],
)
def test_what_a_template_does_not_read_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        pinned("{{ enable_thinking }}{{ messages }}{{ strftime_now('%Y') }}", arguments)
