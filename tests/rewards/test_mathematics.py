"""Rewards for mathematics: what equals the reference, and answers that would make the library compute for ever."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plaudit import load_settings, run
from plaudit.data.fields import DataError
from plaudit.rewards.mathematics import Comparing, MathOptions, MathReward, answer_of, reference_of
from plaudit.rewards.rules import function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.support.fields import complaints
from plaudit.types import Completion, Finish, Prompt, Score

pytestmark = pytest.mark.slow


def completion(text: str) -> Completion:
    return Completion(tokens=(0,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS)


def scores(reward: MathReward, answer: str | None, texts: Sequence[str]) -> list[Score]:
    prompt = Prompt(id="f:1", text="How many?", tokens=(1,), answer=answer)
    return asyncio.run(reward.score(prompt, [completion(text) for text in texts]))


@pytest.fixture(scope="module")
def reward() -> MathReward:
    """Its processes stay: an event loop of its own asks for each reference."""
    return MathReward("", {"seconds": 2})


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("3/4", [r"\boxed{3/4}", r"so \boxed{\frac{3}{4}}.", "0.75", "The answer is 3/4."], [r"\boxed{1/4}", "4"]),
        ("4", [r"\boxed{4}", "#### 4", r"\boxed{x = 4}"], ["1/4", "(7, 4)", r"\boxed{5} or \boxed{4}"]),
        ("(3, 4)", ["(3, 4)", r"\boxed{(3,4)}", "The answer is (3, 4)."], ["(7, 4)", "The answer is (7, 4).", "4"]),
        ("10:30", [r"\boxed{10:30}", "10:30"], ["30", "It is 10:45."]),
        ("Add them.\n#### 72", ["#### Step 1\nadd\n#### 72", "It is 72.", r"\boxed{72}"], ["#### 72\nno, #### 71"]),
        (r"Thus \boxed{7}. It took 3 steps.", ["7", r"\boxed{7} in 3 steps"], ["3", r"7, so \boxed{8}"]),
        (r"\frac{\sqrt{2}}{2}", [r"\boxed{\frac{1}{\sqrt{2}}}", "sqrt(2)/2"], [r"\boxed{\frac{1}{2}}", "0.7"]),
        ("x^2 + 2x + 1", [r"\boxed{(x+1)^2}"], [r"\boxed{(x+2)^2}"]),
        ("[0, 1)", [r"\boxed{[0,1)}"], [r"\boxed{[0,1]}", r"\boxed{(0,1)}"]),
        (r"\{1, 2\}", [r"\boxed{\{2,1\}}", r"\boxed{1, 2}"], [r"\boxed{\{1,3\}}"]),
        (r"\text{east}", [r"\boxed{\text{east}}"], [r"\boxed{\text{west}}"]),
        ("-5", [r"\boxed{-5}", "-5"], ["5", r"\boxed{5}"]),
        ("1,080", [r"\boxed{1080}", "$1,080$"], [r"\boxed{1}", "80"]),
    ],
)
def test_what_is_the_same_mathematics(reward: MathReward, answer: str, right: list[str], wrong: list[str]) -> None:
    found = [score.value for score in scores(reward, answer, [*right, *wrong])]
    assert found == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("answer", [None, "", "  ", r"\boxed{}", "#### ", "$$"])
def test_nothing_is_no_reference(reward: MathReward, answer: str | None) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        reference_of(answer)
    (score,) = scores(reward, answer, ["7"])
    assert score.failed and "nothing to compare" in str(score.reason)


@pytest.mark.parametrize(
    "hostile",
    [
        r"\boxed{10^{10^{10}}}",
        "9**9**9**9",
        r"\boxed{(10^{9})!}",
        r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        r"\boxed{" * 3000,
        "$" * 20_000,
    ],
    ids=["power", "tower", "factorial", "brackets", "boxes", "dollars"],
)
def test_a_hostile_answer_gets_0_and_the_next_one_its_due(reward: MathReward, hostile: str) -> None:
    assert [score.value for score in scores(reward, "7", [hostile, "7", "8"])] == [0.0, 1.0, 0.0]


def test_an_answer_in_a_thread_is_compared_too(reward: MathReward) -> None:
    """math-verify's own limits are signals, which another thread must not set."""
    found: list[Score] = []
    thread = threading.Thread(target=lambda: found.extend(scores(reward, "7", ["7", "8"])))
    thread.start()
    thread.join()
    assert [score.value for score in found] == [1.0, 0.0]


def test_a_process_that_was_killed_is_replaced_and_costs_no_answer() -> None:
    reward = MathReward("", {})
    scores(reward, "7", ["7"])
    (idle,) = reward._idle
    os.kill(idle.process.pid, signal.SIGKILL)
    idle.process.wait()
    assert scores(reward, "7", ["7"])[0].value == 1.0
    assert len(reward._idle) == 1


def test_a_verdict_that_does_not_come_is_a_failure() -> None:
    process = Comparing(MathOptions())
    os.kill(process.process.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match="no verdict within"):
        process.said('["7", "7"]', 0.2)
    assert process.process.poll() is not None


def test_processes_end_with_the_reward() -> None:
    reward = MathReward("", {})
    scores(reward, "7", ["7"])
    (idle,) = reward._idle
    del reward
    for _ in range(500):
        if idle.process.poll() is not None:
            return
        time.sleep(0.02)
    raise AssertionError("it still runs")


def test_what_math_verify_reads_by_hand() -> None:
    assert answer_of("The answer is (3, 4).") == r"\boxed{(3, 4)}"
    assert answer_of("#### 1\nso\n#### 2/3") == r"\boxed{2/3}"
    assert answer_of(r"The answer is \boxed{2} of 3.") == r"The answer is \boxed{2} of 3."
    assert answer_of("The answer is 5, since 2 < 3") == "The final answer is 5, since 2 < 3"
    assert reference_of("$18") == r"\boxed{18}"
    assert reference_of("$x$") == "$x$"


def test_from_settings_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made = function_reward(RewardSettings(kind="math", name="right", options={"seconds": 3}))
    assert isinstance(made, MathReward)
    assert (made.name, made.options.seconds) == ("right", 3)
    with pytest.raises(ValueError, match=r"'second'.*mean seconds"):
        function_reward(RewardSettings(kind="math", options={"second": 3}))
    (told,) = complaints(RewardSettings(kind="math", deadline=3.0))
    assert "deadline=3.0" in told
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else there(name))
    with pytest.raises(ValueError, match=r"pip install -e '.\[math\]'"):
        function_reward(RewardSettings(kind="math"))


def test_a_run_reads_its_references_before_it_starts_and_trains(make_recipe: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "half?", "answer": "1/2"}\n{"prompt": "what?", "answer": "so ####"}\n')
    more: dict[str, Any] = {"data": {"train": str(file)}, "train": {"steps": 1}}
    for kind, place in (("gsm8k", 1), ("math", 2)):
        with pytest.raises(DataError, match=rf"rows.jsonl:{place}: "):
            run(load_settings(make_recipe("grpo", tmp_path / kind, rewards=[{"kind": kind}], **more)))
    file.write_text('{"prompt": "half?", "answer": "1/2"}\n')
    done = run(load_settings(make_recipe("grpo", tmp_path / "runs", rewards=[{"kind": "math"}], **more)))
    assert done.metrics[0]["reward/failed"] == 0.0
    assert {sample["reward"] for sample in done.samples} <= {0.0, 1.0}
