"""`plaudit generate` from Python: which prompts it answers, and what it refuses before it works for nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import GPT2

from plaudit.commands.generate import generate
from plaudit.data.template import DEFAULT_TEMPLATE
from plaudit.evaluate.settings import GenerateSettings, SamplingSettings
from plaudit.models.load import fresh_model, load_tokenizer, save_model


@pytest.fixture(scope="module")
def model(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = load_tokenizer(str(demo.tokenizer))
    sizes = {**GPT2, "n_layer": 1, "n_positions": 600}
    save_model(fresh_model(sizes, vocab_size=len(tokenizer)), folder, tokenizer=tokenizer)
    return str(folder)


def settings(model: str, prompts: Path | None = None, **given: Any) -> GenerateSettings:
    return GenerateSettings(model=model, prompts=None if prompts is None else str(prompts), **given)


def test_prompts_of_a_file_are_whole(model: str, tmp_path: Path) -> None:
    """Training cuts them to data.max_prompt_tokens=512; a prompt of the command line was never cut."""
    text = "The acting was superb . " * 50
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    asked = generate(settings(model, tmp_path / "prompts.jsonl", sampling=SamplingSettings(max_tokens=2)), [text])
    (given, _), (read, _) = asked
    assert 512 < len(read.tokens) < 600
    assert read.tokens == given.tokens


def test_a_prompt_without_room_is_named(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "The acting"}, {"prompt": "The acting was superb . " * 300}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2 .* 599"):
        generate(settings(model, tmp_path / "prompts.jsonl"))


def test_what_would_be_lost_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        generate(settings("nobody/nothing", output=str(tmp_path)), ["x"])
    with pytest.raises(ValueError, match="samples=0"):
        generate(settings("nobody/nothing", sampling=SamplingSettings(samples=0)), ["x"])
    kept = tmp_path / "kept.jsonl"
    kept.write_text("kept\n")
    with pytest.raises(ValueError, match=r"kept\.jsonl exists already"):
        generate(settings("./absent", output=str(kept)), ["x"])
    for out in (kept, tmp_path / "new" / "answers.jsonl"):
        with pytest.raises(FileNotFoundError, match="no folder"):
            generate(settings("./absent", output=str(out), overwrite=True), ["x"])
    assert kept.read_text() == "kept\n"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_prompt_is_asked_as_the_checkpoint_was_trained_unless_told(model: str, tmp_path: Path) -> None:
    """As a chat where its template ends answers with its end token; `as_chat`, `system` and arguments overrule it."""
    shutil.copytree(model, tmp_path / "chat")
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% if loud is defined %}LOUD {% endif %}" + DEFAULT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Hm"}) + "\n")

    def asked(**how: Any) -> list[str]:
        given = settings(str(tmp_path / "chat"), tmp_path / "prompts.jsonl", sampling=SamplingSettings(max_tokens=1))
        found = generate(replace(given, data=replace(given.data, **how)), ["Hm"])
        return [prompt.text for prompt, _ in found]

    chat = "<|user|>\nHm\n<|assistant|>\n"
    assert asked() == [chat] * 2
    assert asked(as_chat=False) == ["Hm"] * 2
    assert asked(system="Be brief.") == [f"<|system|>\nBe brief.\n{chat}"] * 2
    assert asked(chat_template_kwargs={"loud": True}) == [f"LOUD {chat}"] * 2
