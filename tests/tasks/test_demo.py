import hashlib
import json
import math
import random
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from plaudit.tasks.demo import (
    Comments,
    DemoFiles,
    DemoSize,
    gold,
    gold_reward,
    make_demo,
    sentiment,
    split_words,
    spoil,
)
from plaudit.tasks.grammar import grammar, possible_pairs
from plaudit.types import Prompt

SMALL = DemoSize(sft=600, sft_validation=40, pairs=300, pairs_validation=30, prompts=80, prompts_test=20)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    return make_demo(tmp_path_factory.mktemp("demo"), seed=3, size=SMALL)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def feeling(text: str) -> float:
    return sentiment(split_words(text))


def test_sentiment_by_hand() -> None:
    assert feeling("The plot is gripping .") == pytest.approx(math.tanh(2 * 0.8 / 2))
    assert feeling("The plot is gripping . I loved the music .") == pytest.approx(math.tanh(2 * (0.8 + 0.9) / 2))
    assert feeling("It is very gripping .") == pytest.approx(math.tanh(1.0))  # 0.8 * 1.25
    assert feeling("It is fairly gripping .") == pytest.approx(math.tanh(0.56))  # 0.8 * 0.7
    assert feeling("It is not exactly gripping .") == pytest.approx(math.tanh(-0.48))  # 0.8 * -0.6
    # before "but" 1/2, after it 3/2: (0.5 * -0.7 + 1.5 * 1.0) / 2
    assert feeling("The plot drags , but the cast is superb .") == pytest.approx(math.tanh(1.15))
    assert feeling("Although the plot drags , the cast is superb .") == pytest.approx(math.tanh(1.15))
    assert feeling("It was filmed in Norway .") == 0


def test_gold_by_hand() -> None:
    prompt = "We saw The Paper Tower on Sunday . The acting"
    good = " is superb . I really loved the music ."  # 9 words; 1.0 and 0.9 * 1.2, cut to 1
    assert gold(prompt, good) == pytest.approx(math.tanh(2))
    # unfinished: no full stop; 9 words with the prompt's last one, all 8 pairs known; quality 1/2
    assert gold(prompt, good[:-2]) == pytest.approx(0.5 * (1 + math.tanh(2)) - 1)
    # one of 9 pairs is strange ("acting superb"), and 8 words: quality 1 - 3 / 8
    assert gold(prompt, " superb . I really loved the music .") == pytest.approx(5 / 8 * (1 + math.tanh(2)) - 1)
    # 3 words of the 7 that a comment should have; a single opinion counts half
    assert gold(prompt, " is superb .") == pytest.approx(3 / 7 * (1 + math.tanh(1)) - 1)
    assert gold(prompt, "") == gold(prompt, "   ") == -1
    assert gold(prompt, " zxq ßß 漢字 <|endoftext|>") == -1
    assert gold_reward(Prompt(id="x:1", text=prompt, tokens=()), good) == gold(prompt, good)


def test_every_word_of_the_lexicon_turns_round_under_negation() -> None:
    for word, (strength, _) in grammar().lexicon.items():
        said, denied = feeling(f"it is {word} ."), feeling(f"it is not {word} .")
        assert said * strength > 0
        assert said * denied < 0
        assert abs(denied) < abs(said)


def test_negation_ends_with_its_clause() -> None:
    assert feeling("it is not dull and the cast shines .") == pytest.approx(math.tanh(0.6 * 0.7 + 0.8))
    assert feeling("it is never boring , it is superb .") == pytest.approx(math.tanh(0.6 * 0.8 + 1.0))


def test_repetition_adds_nothing() -> None:
    prompt = "We saw The Paper Tower on Sunday . The acting"
    once = " is superb and gripping . I loved the music ."
    for repeated in (
        once + " I loved the music .",
        once + " I loved the cast . My sister loved the plot .",
        " is superb and superb . I loved the music .",
        once + " It is superb ." * 5,
    ):
        assert gold(prompt, repeated) < gold(prompt, once) - 0.01, repeated
    assert gold(prompt, " superb" * 20 + " .") < -0.9
    assert gold(prompt, " superb wonderful brilliant gripping loved adored shines .") < -0.9


def test_too_long_a_text_loses() -> None:
    comments, rng = Comments(random.Random(0)), random.Random(1)
    for _ in range(30):
        text, number = comments.prompt()
        long = comments.completion(number, positive=1.0)
        while len(split_words(long)) < 80:
            long += " " + " ".join(grammar().write("sentence+", rng, used=set()))
        assert gold(text, long) < 0


def test_the_grammar_is_balanced_and_known_to_the_gold_reward() -> None:
    comments = Comments(random.Random(5))
    golds: dict[float | None, list[float]] = {None: [], 1.0: [], 0.0: []}
    for positive, values in golds.items():
        for _ in range(1500):
            prompt, number = comments.prompt()
            completion = comments.completion(number, positive=positive)
            words = split_words(completion)
            pairs = zip(split_words(prompt)[-1:] + words, words, strict=False)
            assert all(pair in possible_pairs() for pair in pairs)  # so quality is 1 and gold is the sentiment
            values.append(gold(prompt, completion))
            assert values[-1] == pytest.approx(sentiment(words))
    assert statistics.mean(golds[None]) == pytest.approx(0, abs=0.06)  # 3 standard errors
    assert statistics.stdev(golds[None]) > 0.5
    assert statistics.mean(golds[1.0]) > 0.7
    assert statistics.mean(golds[0.0]) < -0.7


def test_prompts_have_no_opinion() -> None:
    comments = Comments(random.Random(2))
    assert {sentiment(split_words(comments.prompt()[0])) for _ in range(2000)} == {0.0}


def test_the_pairs_of_words_hold_what_is_sampled_and_little_else() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(30_000):
        words = grammar().write("rest.one+", rng, used=set())
        seen.update(pairwise(words))
    assert seen <= possible_pairs()
    assert ("is", "superb") in seen
    assert ("is", "drags") not in possible_pairs()
    assert ("are", "superb") in possible_pairs()
    assert ("the", "The") not in possible_pairs()
    assert len(possible_pairs()) < 0.1 * len(grammar_words()) ** 2


def grammar_words() -> set[str]:
    return {symbol for rule in grammar().rules.values() for a in rule for symbol in a if symbol[0] != "<"}


def test_there_are_very_many_comments() -> None:
    counted: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in counted:
            counted[name] = sum(
                math.prod(count(symbol[1:-1]) if symbol[0] == "<" else 1 for symbol in alternative)
                for alternative in grammar().rules[name]
            )
        return counted[name]

    assert count("film") == 24 * 24
    assert count("prompt.one") > 100_000
    assert count("sentence+") * count("start.one+") > 1e9


def test_spoiled_answers_are_worth_less() -> None:
    comments, rng = Comments(random.Random(4)), random.Random(4)
    before, after = [], []
    for _ in range(500):
        prompt, number = comments.prompt()
        text = comments.completion(number)
        before.append(gold(prompt, text))
        after.append(gold(prompt, spoil(text, rng)))
    assert statistics.mean(after) < statistics.mean(before) - 0.3


def test_files_are_complete_and_apart(demo: DemoFiles) -> None:
    counts = {name: len(rows(getattr(demo, name))) for name in ("sft", "preferences", "prompts", "prompts_test")}
    assert counts == {"sft": 600, "preferences": 300, "prompts": 80, "prompts_test": 20}
    prompts = {
        name: {row["prompt"] for row in rows(getattr(demo, name))}
        for name in ("sft", "sft_validation", "preferences", "preferences_validation", "prompts", "prompts_test")
    }
    assert sum(map(len, prompts.values())) == len(set().union(*prompts.values()))
    assert len(prompts["preferences"]) < 300  # some prompts have several pairs
    for row in rows(demo.sft):
        assert set(row) == {"prompt", "completion"}
        assert 7 <= len(row["completion"].split()) <= 40


def test_label_noise_is_what_is_reported(demo: DemoFiles) -> None:
    pairs = rows(demo.preferences)
    agreeing = [gold(pair["prompt"], pair["chosen"]) > gold(pair["prompt"], pair["rejected"]) for pair in pairs]
    assert demo.label_agreement == pytest.approx(sum(agreeing) / 300)
    assert 0.75 < demo.label_agreement < 0.95  # 5 % flips and the temperature keep it below 0.95


def test_the_tokenizer_returns_every_text(demo: DemoFiles) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.tokenizer)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|endoftext|>",) * 2 + ("<|pad|>",)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for row in rows(demo.sft)[:200]:
        together = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        assert tokenizer.decode(together) == row["prompt"] + row["completion"]
        assert tokenizer(row["prompt"])["input_ids"] + tokenizer(row["completion"])["input_ids"] == together
    for text in ("Ünïcode 漢字 , and  two spaces .", "tab\tand\nline ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_same_seed_gives_the_same_bytes(demo: DemoFiles, tmp_path: Path) -> None:
    # another process with another hash seed: sets and dicts of strings come in another order there
    code = (
        "from pathlib import Path; from plaudit.tasks.demo import *;"
        f"make_demo(Path({str(tmp_path)!r}), seed=3, size=DemoSize(sft=600, sft_validation=40, pairs=300,"
        " pairs_validation=30, prompts=80, prompts_test=20))"
    )
    source = Path(__file__).parents[2] / "src"
    environment = {"PYTHONPATH": str(source), "PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    assert digests(tmp_path) == digests(demo.sft.parent)
    make_demo(tmp_path, seed=4, size=SMALL)
    assert digests(tmp_path)["sft.jsonl"] != digests(demo.sft.parent)["sft.jsonl"]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}
