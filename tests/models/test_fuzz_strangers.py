"""Tokenizers and chat templates at random: each works, or is refused in a line within seconds.

FUZZ_SECONDS=1200 is how long they are tried, half of it each; without it, some with the same seed each time.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from plaudit.data.chat import Chats
from plaudit.data.reader import encode_texts
from plaudit.data.settings import DataSettings
from plaudit.models.load import load_tokenizer
from plaudit.rollout.text import text_of
from plaudit.types import Sampling

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SLOW = 120.0
"""Within which one is refused, also beside other work; most need less than one second."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 10**6, 2**32 - 1, 2**63, 1e308, 0.5, "", "a", "aa", "\ud7ff", "<end>"),
    *([], {}, [[]], ["a", "b"], [["a", "b"]], {"a": 0}, {"String": "a"}, {"Regex": "a*"}, {"Regex": "(a+)+$"}),
    *(
        {"type": kind}
        for kind in ("BPE", "WordPiece", "Unigram", "WordLevel", "Sequence", "ByteLevel", "NFKC", "Strip")
    ),
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaa"}] * 30},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAAAAAAAAAAA"},
    {"type": "Split", "pattern": {"Regex": "(\\w+\\s?)+$"}, "behavior": "Removed", "invert": True},
    {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "B", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9},
)
NUMBERS = ("0", "1", "7", "-1", "1e3", "99999", "10**5", "10**12", "messages|length")
TEXTS = ("'a'", "''", "messages[0]['content']", "messages[-1].role", "bos_token", "nothing", "messages", "true", "none")
FILTERS = (
    "length",
    "tojson",
    "upper",
    "trim",
    "first",
    "last",
    "list",
    "sort",
    "reverse",
    "join",
    "int",
    "string",
    "safe",
)
WIDE = ("center(99999)", "indent(999)", "batch(0)", "slice(0)", "wordwrap(0)", "truncate(-1)", "round(99)", "items")


def trials(seconds: float, count: int) -> Iterator[random.Random]:
    """A generator for each trial: `count` of them, or as many as there is time for."""
    began, seed = time.monotonic(), int(time.time()) << 16 if seconds else 0
    while time.monotonic() - began < seconds if seconds else seed < count:
        yield random.Random(seed)
        seed += 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The tokenizer.json of a byte-level, a WordPiece and a Unigram tokenizer."""
    kinds: list[tuple[Any, Any]] = [
        (models.BPE(), trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)),
        (
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer(vocab_size=80, special_tokens=["<end>", "<unk>"], show_progress=False),
        ),
        (
            models.Unigram(),
            trainers.UnigramTrainer(
                vocab_size=40, special_tokens=["<end>", "<unk>"], unk_token="<unk>", show_progress=False
            ),
        ),
    ]
    made = []
    for model, trainer in kinds:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
        tokenizer.train_from_iterator(["we saw a good film and it was fine"] * 9, trainer)
        folder = tmp_path_factory.mktemp("tokenizer")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
        made.append({path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.suffix == ".json"})
    return made


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container in a tree with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [place for key in keys for place in ((tree, key), *places(tree[key]))]


def damaged(chance: random.Random, tree: Any) -> None:
    for _ in range(chance.choice((1, 1, 2, 4))):
        inner, key = chance.choice(places(tree))
        if isinstance(inner, dict) and chance.random() < 0.2:
            del inner[key]
        else:
            inner[key] = copy.deepcopy(chance.choice(VALUES))


def refused(use: Callable[[], Any], what: str) -> str:
    """Use it; return how it ended. Fails for any error but ours."""
    began = time.monotonic()
    try:
        use()
        ended = "works"
    except ValueError as error:
        ended = "refused" if str(error) else "without a word"
    assert time.monotonic() - began < SLOW, what
    assert ended != "without a word", what
    return ended


def test_tokenizers(files: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.models.tokenizer.SECONDS", 3)
    monkeypatch.setattr("plaudit.models.tokenizer.MEMORY", 2 << 30)
    ended = Counter[str]()
    for chance in trials(SECONDS / 2, 12):
        found = json.loads(json.dumps(chance.choice(files)))
        damaged(chance, found[chance.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))])
        texts = {name: json.dumps(content) for name, content in found.items()}
        for name, text in texts.items():
            (tmp_path / name).write_text(text)

        def use() -> None:
            tokenizer = load_tokenizer(str(tmp_path), tried=False)
            for tokens in encode_texts(["we saw a film", "", "<end>", "é\n\n  12"], tokenizer):
                text_of(tokenizer, list(tokens), Sampling(max_tokens=1))

        ended[refused(use, json.dumps(texts))] += 1
    print(dict(ended))
    assert ended["works"]
    assert ended["refused"]


def expression(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(NUMBERS + TEXTS)
    one, other = (expression(chance, depth - 1) for _ in range(2))
    operator = chance.choice(("+", "-", "*", "/", "//", "%", "~", "<", "==", "in", "and"))
    return chance.choice(
        (
            f"({one} {operator} {other})",
            f"({one})|{chance.choice(FILTERS + WIDE)}",
            f"({one})[{other}]",
            f"range({one})",
        )
    )


def program(chance: random.Random, depth: int) -> str:
    inner = "".join(program(chance, depth - 1) for _ in range(chance.randint(1, 2))) if depth else "x"
    value = expression(chance, chance.randint(0, 2))
    return chance.choice(
        (
            f"{{{{ {value} }}}}",
            f"{{% for i in {value} %}}{inner}{{% endfor %}}",
            f"{{% for m in messages %}}{{{{ m.role }}}}{{{{ m.content }}}}{inner}{{% endfor %}}",
            f"{{% if {value} %}}{inner}{{% endif %}}",
            f"{{% set n = namespace(v={value}) %}}{{% for i in range(30) %}}{{% set n.v = n.v ~ n.v %}}{{% endfor %}}",
            f"{{% macro m(n) %}}{inner}{{{{ m(n) }}}}{{% endmacro %}}{{{{ m({value}) }}}}",
        )
    )


def test_templates(files: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.data.chat.RENDER_SECONDS", 1)
    for name, content in files[0].items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer, ended = load_tokenizer(str(tmp_path)), Counter[str]()
    chat = [{"role": "user", "content": "Two and two?"}]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, before[1]))
    try:
        for chance in trials(SECONDS / 2, 50):
            template = "".join(program(chance, 2) for _ in range(2))

            def use(template: str = template) -> None:
                chats = Chats(tokenizer, DataSettings(train=("a.jsonl",), chat_template=template))
                chats.prompt(chat, {})

            ended[refused(use, template)] += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    print(dict(ended))
    assert ended["refused"]
