"""What models, rewards and data sets write reaches no terminal, log or error as control characters."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from tiny import GPT2

from plaudit import load_settings, run
from plaudit.commands.convert import convert
from plaudit.commands.generate import generate
from plaudit.data.fields import DataError, shown
from plaudit.data.load import load_prompts
from plaudit.data.settings import DataSettings
from plaudit.data.write import write_rows
from plaudit.evaluate.generation import reward_figures
from plaudit.evaluate.policy import Answer
from plaudit.evaluate.settings import GenerateSettings, SamplingSettings
from plaudit.executors.base import ProcessStatus
from plaudit.loop.outage import RewardFailureError
from plaudit.models.load import fresh_model, load_tokenizer, save_model
from plaudit.monitor.console import Reporter
from plaudit.monitor.sinks import JsonLines, read_jsonl
from plaudit.page.run_page import Curves, closed, page
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.protocol import read_answer
from plaudit.rewards.rules import gsm8k
from plaudit.rewards.weighted import WeightedReward
from plaudit.support.visible import rounded, visible
from plaudit.types import Completion, Finish, Prompt, Score

Recipe = Callable[..., dict[str, Any]]

ESCAPES = {
    "clear the screen": "\x1b[2J\x1b[H",
    "conceal": "\x1b[8mhidden\x1b[0m",
    "cursor up": "\x1b[5A\x1b[2Kstep 9/9 done",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "report": "\x1b[6n",
    "answerback": "\x05",
    "device attributes": "\x1b[c",
    "keyboard": "\x1b[?1000h",
    "charset": "\x1b(0\x0e",
    "reset": "\x1bc",
    "print": "\x1b[5i",
    "device control": "\x1bP$q\x22p\x1b\\",
    "C1 sequence": "\x9b31mred",
    "C1 string": "\x9d0;title\x9c",
    "carriage return": "true reason\rforged reason",
    "backspace": "bad\b\b\bgood",
    "override": "\u202egnp.exe\u202c \u2066x\u2069",
    "separators": "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\x00\x7f\ufeff\U000e0041",
}
KEPT = "\n\t\u200c\u200d"


def harmless(text: str) -> str:
    """The text, after a look at each of its letters."""
    bad = {hex(ord(c)) for c in text if c not in KEPT and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert not bad, f"{bad} in {text!r}"
    return text


def test_there_are_twenty() -> None:
    assert len(ESCAPES) == 20
    for text in ESCAPES.values():
        with pytest.raises(AssertionError):
            harmless(text)


def test_by_hand() -> None:
    assert visible("\x1b[31mred\r\n\tnext\x9b\x7f") == "\\u001b[31mred\\r\n\tnext\\u009b\\u007f"
    assert visible("one\ttwo\nthree", line=True) == "one\\ttwo\\nthree"
    assert visible("\U000e0041\ud800") == "\\udb40\\udc41\\ud800"
    for text in ("plain", "naïve, 日本\u3000\u00a0", "\u06cc\u200c\u062e", "👩\u200d🔬", ""):
        assert visible(text) == text


@given(st.text(st.characters(), max_size=40))
def test_nothing_hidden_is_left_and_json_keeps_its_meaning(text: str) -> None:
    assert visible(harmless(visible(text))) == visible(text)
    assert "\n" not in visible(text, line=True)
    assert json.loads(visible(json.dumps({text: [text]}, ensure_ascii=False))) == {text: [text]}


@pytest.mark.parametrize("terminal", [False, True])
def test_the_console_and_the_log(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter()
    if terminal:
        reporter.console._force_terminal, reporter.console._color_system = True, None
    log = tmp_path / "log.txt"
    reporter.log_to(log)
    for text in ESCAPES.values():
        table = Table(text, title=text)
        table.add_row(text)
        table.add_row(Text(text))
        reporter.say(text)
        reporter.show(table)
        with pytest.raises(ValueError, match="x"), reporter.last_words():
            raise ValueError(text + "x")
    harmless(log.read_text())
    harmless(capsys.readouterr().out)


def test_brackets_in_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("figure")
    table.add_row("reward/[bold]x[/]")
    Reporter().show(table)
    assert "reward/[bold]x[/]" in capsys.readouterr().out


def test_the_page() -> None:
    for text in ESCAPES.values():
        processes = [ProcessStatus(text, text, text, lost=True)]
        harmless(page(text, curves=Curves(), steps=1, processes=processes, ended=text))
        harmless(closed(page("t", curves=Curves(), steps=1, processes=[]), text))


def test_records(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "samples.jsonl") as file:
        for text in ESCAPES.values():
            file.write({"completion": text, text: 1})
    harmless((tmp_path / "samples.jsonl").read_text())
    assert read_jsonl(tmp_path / "samples.jsonl") == [{"completion": text, text: 1} for text in ESCAPES.values()]
    rows = [{"text": text} for text in ESCAPES.values()]
    harmless(write_rows(tmp_path / "rows.jsonl", rows).read_text())
    assert read_jsonl(tmp_path / "rows.jsonl") == rows


def test_answers_and_prompts_that_are_printed(demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(str(demo.tokenizer))
    save_model(fresh_model(GPT2, vocab_size=len(tokenizer)), tmp_path, tokenizer=tokenizer)
    generate(GenerateSettings(model=str(tmp_path), sampling=SamplingSettings(max_tokens=2)), list(ESCAPES.values()))
    assert len(harmless(capsys.readouterr().out).splitlines()) >= len(ESCAPES)


def test_errors_and_reports_of_data(demo: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(demo.tokenizer))
    for number, text in enumerate(ESCAPES.values()):
        file = tmp_path / f"{number}.jsonl"
        chat = {"messages": [{"role": text}]}
        for row in ({text: 1}, {"prompt": {text: text}}, chat, {"prompt": "a", "answer": [text]}):
            file.write_text(json.dumps(row) + "\n")
            with pytest.raises(DataError) as caught:
                load_prompts(DataSettings(train=[str(file)]), tokenizer, 0)
            assert "\n" not in harmless(str(caught.value))
        file.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n" + json.dumps({text: text}) + "\n")
        done = convert(str(file), tmp_path / f"{number}.to.jsonl", to="prompt/answer", bad_rows=1)
        harmless("".join(done.bad))
    odd = tmp_path / "\x1b[2J.jsonl"
    odd.write_text("{\n")
    with pytest.raises(DataError) as caught:
        load_prompts(DataSettings(train=[str(tmp_path)]), tokenizer, 0)
    harmless(str(caught.value))


@pytest.mark.slow
def test_a_command_says_it_and_its_tracebacks_too(environment: dict[str, str], tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}, *({text: text} for text in ESCAPES.values())]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    words = ["convert", str(source), str(tmp_path / "to.jsonl"), "--to", "prompt/answer", "--bad-rows", "20"]
    plugin = tmp_path / "plugin.py"
    code = "class Odd(Exception): __str__ = lambda self: self.args[0]\n"
    plugin.write_text(code + f"raise Odd({''.join(ESCAPES.values())!r})")
    for more, said in (((), "1 written"), (("--bad-rows", "0"), "error: "), (("--plugin", str(plugin)), "Traceback")):
        command = [sys.executable, "-m", "plaudit.commands.cli", *words, *more, "--overwrite"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        told = done.stdout.decode() + done.stderr.decode()
        assert said in told
        assert "\\u001b" in harmless(told)


def raising(completion: str, *, text: str = "") -> float:
    raise ValueError(text or list(ESCAPES.values())[len(completion) % len(ESCAPES)])


def scored(reward: Any, answer: str = "a") -> Score:
    prompt = Prompt(id="p", text="p", tokens=(1,))
    completion = Completion(tokens=(2,), logprobs=(0.0,), versions=(0,), text=answer, finish=Finish.EOS)
    (score,) = asyncio.run(reward.score(prompt, [completion]))
    return score


def test_why_a_reward_failed() -> None:
    class Served:
        async def score(self, prompt: Prompt, completions: Any) -> list[Score]:
            return read_answer(json.dumps({"scores": [None], "reasons": [text]}).encode(), 1)

    for text in ESCAPES.values():
        for part in (FunctionReward(raising, options={"text": text + "\nstep 1/1 forged"}), Served()):
            reason = scored(WeightedReward([(part, 1.0, "one")])).reason
            assert reason is not None
            assert "\n" not in harmless(reason)
        completion = Completion(tokens=(2,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS)
        scores = {"one": scored(FunctionReward(raising, options={"text": text}))}
        answer = Answer(prompt=Prompt(id="p", text=text, tokens=(1,)), completion=completion, scores=scores)
        with pytest.raises(ValueError, match="scored no answer") as caught:
            reward_figures([[answer]])
        assert "\n" not in harmless(str(caught.value))


@pytest.mark.slow
def test_a_run_whose_rewards_fail(make_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its error, its log, its page and its samples."""
    rewards = [{"kind": "function", "function": f"{__file__}:raising"}]
    log = {"quiet": False}
    recipe = make_recipe("grpo", tmp_path, log=log) | {"rewards": rewards}
    with pytest.raises(RewardFailureError) as caught:
        run(load_settings(recipe))
    harmless(str(caught.value))
    recipe["rollout"]["max_failed"] = 1.0
    done = run(load_settings(recipe | {"name": "on"}))
    for file in tmp_path.rglob("*"):
        if file.suffix in (".txt", ".jsonl", ".json", ".html", ".yaml", ".log"):
            harmless(file.read_text())
    assert "u001b" in (done.folder / "samples.jsonl").read_text()
    harmless(capsys.readouterr().out)


def test_what_a_checkpoint_calls_itself(caplog: pytest.LogCaptureFixture) -> None:
    from plaudit.models.fallback import _warn_slower

    with caplog.at_level(logging.WARNING):
        for text in ESCAPES.values():
            _warn_slower(text, text)
    harmless("".join(record.getMessage() for record in caplog.records))


def test_numbers_of_309_digits_are_rounded() -> None:
    assert [rounded(value, "z.3f") for value in (0.5, -1e-9, 1e308, -1e308, float("nan"), float("inf"))] == [
        *("0.500", "0.000", "1e+308", "-1e+308", "nan", "inf")
    ]
    assert [rounded(value, ",.0f") for value in (123456, 10**12, 10**309, -(10**309), 10**5000)] == [
        *("123,456", "1e+12", "1.000e+309", "-1.000e+309", "1.000e+5000")
    ]


NUMBERS = (1.7e308, -1.7e308, 1.1e18, 10**309, 10**5000, Decimal("1e400"))
INFINITE = (math.inf, -math.inf, math.nan, 1.0)


def huge(tokens: tuple[int, ...]) -> dict[str, float]:
    """Every third reward is one; so are their parts, and others are infinite."""
    value = float(len(tokens)) if sum(tokens) % 3 else NUMBERS[sum(tokens) % len(NUMBERS)]
    return {"reward": value, "infinite": INFINITE[sum(tokens) % 4], "large": sum(tokens) % 5 and 10**18}


def test_rewards_of_309_digits(make_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are masked, and no line has 309 digits."""
    rewards = [{"kind": "function", "function": f"{__file__}:huge"}]
    more: dict[str, Any] = {"rollout": {"max_failed": 1.0}, "log": {"quiet": False}, "train": {"log_every": 1}}
    done = run(load_settings(make_recipe("grpo", tmp_path, **more) | {"rewards": rewards}))
    assert all(0 < row["reward/failed"] < 1 and abs(row["reward/mean"]) < 20 for row in done.metrics)
    reasons = {sample["reason"] for sample in done.samples}
    assert {"huge: function returned 1.7e+308, beyond 1e+18", None} < reasons
    assert not re.search(r"\d{30}", capsys.readouterr().out)


def test_a_servers_scores_of_309_digits() -> None:
    digits = "1" + "0" * 308
    scores = read_answer(f'{{"scores": [1e18, {digits}, -{digits}0, 1e400, 1.1e18]}}'.encode(), 5)
    assert [score.value for score in scores] == [1e18, None, None, None, None]
    assert [score.reason for score in scores[1:3]] == [
        *("the server's score is 1e+308, beyond 1e+18", "the server's score is inf")
    ]


def test_no_digit_of_a_negative_number_is_lost() -> None:
    """Decimal's products have 28 digits."""
    assert gsm8k(f"-{10**40 + 1}", f"#### -{10**40 + 2}") == 0.0
    assert gsm8k(f"{10**40 + 1}", f"#### {10**40 + 2}") == 0.0
    assert gsm8k(f"-{10**40 + 1}.0", f"#### -{10**40 + 1}") == 1.0


def test_data_of_309_digits(tmp_path: Path) -> None:
    for number in (f"1{'0' * 308}", f"-1{'0' * 309}", "1e400", f"1{'0' * 5000}"):
        file = tmp_path / "rows.jsonl"
        file.write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {number}}}\n')
        with pytest.raises(DataError) as caught:
            convert(str(file), tmp_path / "to.jsonl", to="prompt/chosen/rejected", overwrite=True)
        assert not re.search(r"\d{100}", str(caught.value))
    assert shown(10**5000) == "the number 1.000e+5000"
    assert shown(12345) == "the number 12345"
