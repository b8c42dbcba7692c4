import asyncio
import json
from decimal import Decimal
from pathlib import Path

import pytest

from plaudit.rewards.rules import (
    RULES,
    check_reference,
    exact_match,
    final_number,
    function_reward,
    gsm8k,
    length,
    matches,
    numbers,
    overlong,
    register_reward,
)
from plaudit.rewards.settings import RewardSettings
from plaudit.types import Completion, Finish, Prompt


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-$1,200.50.", ["-1200.50"]),
        ("$-5 and -$6", ["-5", "-6"]),
        ("10-5=5", ["10", "5", "5"]),
        ("(3)-2", ["3", "2"]),
        ("It is 3. Or .5", ["3", "0.5"]),
        ("1,2345 and 12,34", ["1", "2345", "12", "34"]),
        ("1,234,567.8%", ["1234567.8"]),
        ("none", []),
        ("3/4, 10:30, 2^5, (7, 4), [0,1], \\frac{1}{4} and {1; 2} of 8", [None] * 7 + ["8"]),
        ("5 1/2, 1e3, A5 and 18km", [None] * 3 + ["18"]),
        ("10/2 = 5", [None, "5"]),
        ("{1,080} (3) 1, 2", ["1080", "3", "1", "2"]),
    ],
)
def test_numbers(text: str, expected: list[str | None]) -> None:
    assert numbers(text) == [None if number is None else Decimal(number) for number in expected]


def test_final_number() -> None:
    assert final_number("48/2 = 24, so\n#### 72") == 72
    assert final_number("#### Step 1\nadd 48 and 24\n#### 72") == 72  # the last one
    assert final_number("#### 3/4") is None
    assert final_number("#### I do not know\n7") is None  # nothing on the marker's line
    assert final_number("so it is 24.") == 24
    assert final_number("so it is 24.", need_marker=True) is None


def test_gsm8k() -> None:
    answer = "She has 9 * 2 = $<<9*2=18>>18 dollars.\n#### 18"
    assert gsm8k(" She makes $18.00.", answer) == 1.0
    assert gsm8k(" 9 * 2 = 18\n#### 18 dollars", answer) == 1.0
    assert gsm8k(" 9 * 2 = 18\n#### -18", answer) == 0.0
    assert gsm8k(" The 18 of them make 20.", answer) == 0.0
    assert gsm8k(" I cannot say.", answer) == 0.0
    assert gsm8k(" It is 18.", answer, need_marker=True) == 0.0
    assert gsm8k("#### 1,080", "#### 1080") == 1.0
    for text in ("\\boxed{1/4}", "It is 1/4", "(7, 4)", "9:4", "2^4"):
        assert gsm8k(text, "#### 4") == 0.0
    assert gsm8k("\\boxed{4}", "#### 4") == 1.0


@pytest.mark.parametrize("answer", [None, "", "no", "3/4", "(3, 4)", "10:30", "It is 18", "#### 18 dollars", "#### "])
def test_what_is_no_plain_number_is_no_reference_of_gsm8k(answer: str | None) -> None:
    for refuse in (check_reference([RewardSettings(kind="gsm8k")]), lambda answer: gsm8k("18", answer)):
        with pytest.raises(ValueError, match=r"no number .*kind: math"):
            refuse(answer)


def test_references_are_checked_for_the_rewards_that_count() -> None:
    shown = RewardSettings(kind="gsm8k", weight=0.0)
    check_reference([shown, RewardSettings(kind="length", options={"target": 3})])(None)
    for kind in ("gsm8k", "math", "exact_match"):
        with pytest.raises(ValueError, match="answer"):
            check_reference([shown, RewardSettings(kind=kind)])(None)
    for reference in ("$1,080.", "-18.5", "a\n#### 72"):
        check_reference([RewardSettings(kind="gsm8k")])(reference)


def test_gsm8k_reads_every_real_answer() -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / "gsm8k-train-2000.jsonl"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    for answer in answers:
        final = answer.rpartition("#### ")[2]
        assert final_number(answer) == Decimal(final.replace(",", ""))
        assert gsm8k(answer, answer) == gsm8k(f"The answer is ${final}.", answer) == 1.0
        assert gsm8k(f"The answer is {final}1", answer) == 0.0


def test_exact_match_and_matches() -> None:
    assert exact_match("  Paris \n", "Paris") == 1.0
    assert exact_match("paris", "Paris") == 0.0
    assert exact_match("paris", "Paris", ignore_case=True) == 1.0
    assert matches("a <b> c", pattern="<.>") == 1.0
    assert matches("a b c", pattern="<.>") == 0.0


def test_length() -> None:
    assert [length(n, target=10) for n in (0, 5, 10, 15, 20, 50)] == [0, 0.5, 1, 0.5, 0, -1]
    with pytest.raises(ValueError, match="target=0"):
        length(1, target=0)


def test_overlong_by_hand() -> None:
    # max 20, cache 8: free up to 12, then (12 - n) / 8
    found = [overlong(n, max_tokens=20, cache_tokens=8) for n in (0, 12, 13, 16, 20, 21, 100)]
    assert found == [0, 0, -0.125, -0.5, -1, -1, -1]
    with pytest.raises(ValueError, match="cache_tokens=30"):
        overlong(0, max_tokens=20, cache_tokens=30)


PROMPT = Prompt(id="f:1", text="How many?", tokens=(1,), answer="#### 4")


def completion(text: str) -> Completion:
    return Completion(tokens=(0,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS)


def test_from_settings(tmp_path: Path) -> None:
    reward = function_reward(RewardSettings(kind="gsm8k"))
    assert reward.name == "gsm8k"
    found = asyncio.run(reward.score(PROMPT, [completion("4"), completion("5")]))
    assert [score.value for score in found] == [1.0, 0.0]
    unknown = Prompt(id="f:2", text="How many?", tokens=(1,))
    (score,) = asyncio.run(reward.score(unknown, [completion("4")]))
    assert score.value is None  # without an answer there is nothing to say: not 0
    assert "no number" in str(score.reason)

    (tmp_path / "mine.py").write_text(
        "def shout(prompt, completion, factor):\n    return factor * completion.count('!')\n"
    )
    settings = RewardSettings(
        kind="function", function=f"{tmp_path / 'mine.py'}:shout", options={"factor": 2}, name="loud"
    )
    reward = function_reward(settings)
    assert reward.name == "loud"
    assert asyncio.run(reward.score(PROMPT, [completion("a!!")]))[0].value == 4


def test_settings_reach_the_function() -> None:
    reward = function_reward(RewardSettings(kind="gsm8k", deadline=3.0, thread=True))
    assert (reward.name, reward.deadline, reward.thread) == ("gsm8k", 3.0, True)


def test_unknown_kinds_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="mean gsm8k"):
        function_reward(RewardSettings(kind="gsm8"))
    with pytest.raises(ValueError, match=r"'zzz'; .*function, gsm8k"):
        function_reward(RewardSettings(kind="zzz"))


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.rewards.rules.RULES", dict(RULES))

    @register_reward("vowels")
    def vowels(completion: str) -> float:
        return sum(letter in "aeiou" for letter in completion)

    reward = function_reward(RewardSettings(kind="vowels"))
    assert asyncio.run(reward.score(PROMPT, [completion("moving")]))[0].value == 2
    for taken in ("judge", "gsm8k"):
        with pytest.raises(ValueError, match="already"):
            register_reward(taken)(vowels)
    with pytest.raises(ValueError, match="already"):
        register_reward("vowels")(lambda completion: 0.0)
    assert "vowels" not in RULES  # the original is untouched


def test_a_cell_that_is_run_again_replaces_what_it_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.rewards.rules.RULES", dict(RULES))
    cell = (
        "from functools import partial\n"
        "@register_reward('mine')\ndef mine(completion): return {0}\n"
        "register_reward('part')(partial(mine))\n"
        "register_reward('nameless')(lambda completion: {0})\n"
    )
    for value in (1, 2):
        exec(cell.format(value), {"register_reward": register_reward, "__name__": "__main__"})
        for kind in ("mine", "part", "nameless"):
            reward = function_reward(RewardSettings(kind=kind))
            assert asyncio.run(reward.score(PROMPT, [completion("a")]))[0].value == value
    with pytest.raises(ValueError, match="already"):
        exec(cell.format(3), {"register_reward": register_reward, "__name__": "elsewhere"})
