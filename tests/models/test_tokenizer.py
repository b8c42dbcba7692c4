from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from plaudit.data.reader import encode_texts
from plaudit.models.load import fresh_model, load_model, load_tokenizer, save_model
from plaudit.models.tokenizer import check_vocabulary, tokenizer_class

Tiny = Callable[..., dict[str, Any]]


def _save(folder: Path, *, specials: list[str], **roles: str) -> None:
    words = {word: index for index, word in enumerate([*specials, "a", "good", "film"])}
    plain = Tokenizer(models.WordLevel(words, unk_token=roles.get("unk_token")))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.add_special_tokens(specials)
    PreTrainedTokenizerFast(tokenizer_object=plain, **roles).save_pretrained(folder)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, specials=["<s>"], bos_token="<s>")
    with pytest.raises(ValueError, match="no end token"):
        load_tokenizer(str(tmp_path))


def test_a_distinct_pad_is_kept(tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>", "<blank>"], eos_token="<end>", pad_token="<blank>")
    assert load_tokenizer(str(tmp_path)).pad_token == "<blank>"


def test_a_reserved_token_becomes_the_pad(tmp_path: Path) -> None:
    specials = ["<end>", "<|reserved_special_token_0|>"]
    _save(tmp_path, specials=specials, eos_token="<end>", pad_token="<end>")
    assert load_tokenizer(str(tmp_path)).pad_token_id == 1


def test_an_unknown_token_becomes_the_pad(tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>", "<unk>"], eos_token="<end>", unk_token="<unk>")
    assert load_tokenizer(str(tmp_path)).pad_token == "<unk>"


def test_a_pad_is_added_where_the_model_has_room(tmp_path: Path, caplog: Any) -> None:
    _save(tmp_path, specials=["<end>"], eos_token="<end>")  # ids 0 to 3
    assert load_tokenizer(str(tmp_path), vocab_size=5).pad_token_id == 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 4}))
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(str(tmp_path)).pad_token_id is None
    assert "no room" in caplog.text


def test_the_tokenizer_and_its_ids_are_saved_with_the_model(tiny: Tiny, tmp_path: Path) -> None:
    _save(tmp_path / "words", specials=["<end>", "<s>"], eos_token="<end>", bos_token="<s>")
    tokenizer = load_tokenizer(str(tmp_path / "words"))
    keys = {name: value for name, value in tiny("llama").items() if not name.endswith(("token_id", "vocab_size"))}
    model = fresh_model(keys, vocab_size=len(tokenizer))
    check_vocabulary(tokenizer, model)
    save_model(model, tmp_path / "model", tokenizer=tokenizer)
    special = load_model(str(tmp_path / "model")).special
    assert (special.bos, special.eos, special.pad) == (1, (0,), 5)
    generation = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert generation["eos_token_id"] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("good film").input_ids == [3, 4]


def test_a_tokenizer_that_is_too_large_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>"], eos_token="<end>")
    model = fresh_model({**tiny("gpt2"), "vocab_size": 3, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    with pytest.raises(ValueError, match=r" \d, .*vocab_size is 3"):
        check_vocabulary(load_tokenizer(str(tmp_path)), model)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_a_model_without_a_tokenizer_gets_no_empty_one(model_type: str, tmp_path: Path) -> None:
    """transformers makes one of the model's class, by which every text has no tokens: runs trained on nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 40}))
    with pytest.raises(ValueError, match=r"no tokenizer: .*model\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_an_end_token_is_never_left_as_the_pad(tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>"], eos_token="<end>", pad_token="<end>")
    # transformers' classifiers skip pads to find the last token, and would skip the end.
    assert load_tokenizer(str(tmp_path), vocab_size=4).pad_token_id is None


@pytest.mark.parametrize("model_type", [None, "gpt2", "llama", "qwen3"])
def test_a_plain_tokenizer_is_read_without_asking_which_class_it_is(model_type: str | None, tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>", "<s>"], eos_token="<end>", bos_token="<s>")
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert tokenizer_class(tmp_path) is not AutoTokenizer
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours("good film a").input_ids == theirs("good film a").input_ids == [3, 4, 2]
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id) == (0, 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"model_type": "qwen2"}),  # transformers takes Qwen2's own class whatever the file says
        ("config.json", {"model_type": "mistral"}),
        ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        ("tokenizer.json", None),
    ],
)
def test_what_is_not_plain_is_left_to_transformers(name: str, changes: dict[str, Any] | None, tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>"], eos_token="<end>")
    file = tmp_path / name
    if changes is None:
        file.unlink()
    else:
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))
    assert tokenizer_class(tmp_path) is AutoTokenizer


# --- files of strangers


def replaced(times: int) -> dict[str, Any]:
    """A normalizer that doubles each "a" so many times."""
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * times}}


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
DAMAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no model": ("tokenizer.json", {"model": None}, "not work: "),
    "another model": ("tokenizer.json", {"model": {"type": "None"}}, "not work: data did not match"),
    "wrong types": ("tokenizer.json", {"added_tokens": 3}, "not work: invalid type"),
    "a pattern": ("tokenizer.json", {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "("}}}, "not work: Oniguruma"),
    "a panic at loading": (
        "tokenizer.json",
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAAAAAAAAAAA"}},
        "not work: index out of bounds",
    ),
    "a panic at encoding": (
        "tokenizer.json",
        {"post_processor": TEMPLATE | {"single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}},
        "not work: no entry found",
    ),
    "growth": ("tokenizer.json", replaced(50), "not work: it takes more than"),
    "an end token": ("tokenizer_config.json", {"eos_token": 3}, "holds no tokenizer that transformers can load"),
    "a class": ("tokenizer_config.json", {"tokenizer_class": 3}, "holds no tokenizer that transformers can load"),
    "a length": ("tokenizer_config.json", {"model_max_length": "x"}, "holds no tokenizer that transformers can load"),
    "added tokens": ("tokenizer_config.json", {"added_tokens_decoder": {"1": "x"}}, "holds no tokenizer"),
    "a list": ("tokenizer_config.json", {}, "does not work|holds no tokenizer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
def test_what_a_stranger_broke_is_refused_in_a_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.models.tokenizer.SECONDS", 2)
    monkeypatch.setattr("plaudit.models.tokenizer.MEMORY", 2 << 30)
    _save(tmp_path, specials=["<end>", "<unk>"], eos_token="<end>", unk_token="<unk>")
    file, keys, told = DAMAGED[name]
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | keys if keys else [1]))
    with pytest.raises(ValueError, match=told) as raised:
        load_tokenizer(str(tmp_path), tried=False)
    assert str(raised.value).count(str(tmp_path)) >= 1


def test_a_tokenizer_may_lack_words_of_the_trial(tmp_path: Path) -> None:
    _save(tmp_path, specials=["<end>"], eos_token="<end>")
    tokenizer = load_tokenizer(str(tmp_path), tried=False)
    assert encode_texts(["good film"], tokenizer) == [(2, 3)]
    with pytest.raises(ValueError, match="the tokenizer fails: WordLevel"):
        encode_texts(["bad"], tokenizer)
