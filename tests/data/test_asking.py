"""Whether a plain prompt is asked as a chat: as the settings say, else as the checkpoint was trained."""

from __future__ import annotations

import pytest
from chat_shapes import SHAPES
from transformers import AutoTokenizer

from plaudit.data.load import load_demonstrations, load_prompts
from plaudit.data.settings import DataSettings
from plaudit.data.template import AS_CHAT, DEFAULT_TEMPLATE
from plaudit.models.tokenizer import load_tokenizer

TEXT, CHAT = "Two?", "<|user|>\nTwo?\n<|assistant|>\n"


@pytest.fixture
def asked(make_tokenizer, write):
    """The text of a plain prompt for a tokenizer with a template, and the report's notes."""

    def ask(template, own=None, ends=(), **how):
        tokenizer = make_tokenizer(eos_token="<eos>", bos_token="<bos>")
        tokenizer.chat_template = template
        if own is not None:
            tokenizer.init_kwargs[AS_CHAT] = own
        settings = DataSettings(train=write("p.jsonl", [{"prompt": TEXT}]), **how)
        data = load_prompts(settings, tokenizer, 0, ends)
        return data.items[0].text, " ".join(data.report.sources[0].noted)

    return ask


def test_the_checkpoint_decides_and_the_report_says_so(asked):
    assert asked(None) == (TEXT, "")
    text, note = asked(DEFAULT_TEMPLATE)
    assert (text, "as the checkpoint was trained" in note) == (CHAT, True)
    base = DEFAULT_TEMPLATE.replace("{{ eos_token }}", "<end>")
    text, note = asked(base)
    assert text == TEXT, "its template ends answers with none of its end tokens: that of a base model"
    assert "though the tokenizer has a chat template" in note
    assert asked(base, own=True)[0] == CHAT, "its run trained on chats"
    assert asked(DEFAULT_TEMPLATE, own=False)[0] == TEXT, "its run trained on texts"


def test_settings_overrule_the_checkpoint_without_a_note(asked):
    assert asked(DEFAULT_TEMPLATE, as_chat=False) == (TEXT, "")
    assert asked(DEFAULT_TEMPLATE, own=False, as_chat=True) == (CHAT, "")
    assert asked(DEFAULT_TEMPLATE, prompt_template="Q: {prompt}") == ("Q: Two?", "")
    text, _ = asked(DEFAULT_TEMPLATE, own=False, system="Be brief.")
    assert text == f"<|system|>\nBe brief.\n{CHAT}"
    assert asked(None, chat_template="default")[0] == TEXT, "a recipe's template is not what it was trained with"


def test_what_a_run_was_trained_on_travels_with_its_tokenizer(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = SHAPES["chatml"].template
    tokenizer.init_kwargs[AS_CHAT] = True
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).init_kwargs[AS_CHAT] is True
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_every_source_shows_its_first_row_with_what_is_trained(make_tokenizer, write):
    tokenizer = make_tokenizer(eos_token="<eos>")
    report = load_demonstrations(
        DataSettings(train=write("a.jsonl", [{"prompt": "Two\n?", "completion": " Four."}])), tokenizer, 0
    ).report
    assert report.sources[0].example == (("Two\n?", False), (" Four.<eos>", True))
    assert r"a row: 'Two\n?' | trained: ' Four.<eos>'" in report.table()
    prompts = load_prompts(DataSettings(train=write("b.jsonl", [{"prompt": "Two?"}])), tokenizer, 0).report
    assert "a prompt: 'Two?'" in prompts.table()
