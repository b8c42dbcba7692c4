import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plaudit.rewards import functions
from plaudit.rewards.functions import FunctionReward
from plaudit.types import Completion, Finish, Prompt, Score

PROMPT = Prompt(id="f:1", text="2 + 2 =", tokens=(1, 2), answer="4", messages=({"role": "user"},), extra={"level": 3})


def completion(text: str, *, tokens: int = 2, finish: Finish = Finish.EOS) -> Completion:
    zeros = (0,) * tokens
    return Completion(tokens=zeros, logprobs=(0.0,) * tokens, versions=zeros, text=text, finish=finish)


def scores(function: Callable[..., Any], *texts: str, prompt: Prompt = PROMPT, **settings: Any) -> list[Score]:
    reward = FunctionReward(function, **settings)
    return asyncio.run(reward.score(prompt, [completion(text) for text in texts]))


def values(function: Callable[..., Any], *texts: str, **settings: Any) -> list[float | None]:
    return [score.value for score in scores(function, *texts, **settings)]


def raised(function: Callable[..., Any], line: int = 1) -> str:
    """What a reason says of the place, so many lines below a function's first."""
    return f" (test_functions.py, line {function.__code__.co_firstlineno + line})"


def test_two_texts_by_name_or_by_position() -> None:
    assert values(lambda prompt, completion: len(prompt) + 10 * len(completion), "", "abc") == [7, 37]
    assert values(lambda p, c: len(p) + 10 * len(c), "", "abc") == [7, 37]
    assert values(lambda p, c, /: len(p) + 10 * len(c), "abc") == [37]
    assert values(lambda completion: len(completion), "abc") == [3]
    assert values(lambda text, prompt: len(prompt) - len(text), "abc") == [4]


def test_the_whole_prompt_by_annotation() -> None:
    def by_name(prompt: Prompt, text: str) -> float:
        return len(prompt.tokens) + len(text)

    def by_string(question: "Prompt", reply: str) -> float:
        return len(question.tokens) + len(reply)

    def beside_an_answer(item: Prompt, answer: str) -> float:
        return len(item.tokens) + len(answer)

    def alone(item: Prompt, *, finished: bool) -> float:
        return len(item.tokens) + finished

    def behind(reply: str, item: Prompt) -> float:
        return 0.0

    assert values(by_name, "abc") == values(by_string, "abc") == [5]
    assert values(beside_an_answer, "abc") == values(alone, "abc") == [3]
    assert "neither a column of the rows" in FunctionReward(behind).lacking([PROMPT])  # not the prompt's text


def test_everything_else_by_name_and_options() -> None:
    def function(*, answer: str, messages: Any, extra: Any, tokens: Any, finished: bool, bonus: int) -> float:
        return int(answer) + len(messages) + extra["level"] + len(tokens) + finished + bonus

    assert values(function, "x", options={"bonus": 100}) == [4 + 1 + 3 + 2 + 1 + 100]
    assert values(lambda completion, **rest: len(completion) + len(rest), "ab", options={"a": 1, "b": 2}) == [4]
    assert values(lambda completion, factor=3: factor * len(completion), "ab") == [6]


def test_wrong_signatures_are_refused_at_once() -> None:
    assert "mean answer" in FunctionReward(lambda prompt, completion, answr: 0.0).lacking([PROMPT])
    with pytest.raises(ValueError, match="does not take"):
        FunctionReward(lambda prompt, completion: 0.0, options={"weight": 2})
    with pytest.raises(TypeError, match="callable"):
        FunctionReward(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [
        lambda response: 0.0,  # would have had the prompt
        lambda response, answer: 0.0,
        lambda c, /: 0.0,
        lambda completion, truth: 0.0,  # would have had the completion again
        lambda reply, factor: 0.0,
    ],
)
def test_a_name_that_could_mean_either_text_is_refused(function: Callable[..., Any]) -> None:
    options = {"factor": 2} if "factor" in function.__code__.co_varnames else {}
    with pytest.raises(ValueError, match=r"'(response|c|truth|reply)'"):
        raise ValueError(FunctionReward(function, options=options).lacking([PROMPT]))


def test_a_parameter_may_be_a_column_of_the_rows() -> None:
    def by_column(completion: str, level: int, unit: str = "cm", *, kind: str = "b") -> float:
        return len(completion) + 10 * level + 100 * (unit == "cm") + 1000 * (kind == "a")

    rows = [
        PROMPT,
        replace(PROMPT, extra={"unit": "m", "kind": "a", "level": 5}),
        replace(PROMPT, extra={"level": None}),
    ]
    assert FunctionReward(by_column).lacking(rows) == ""
    assert [values(by_column, "abc", prompt=one) for one in rows[:2]] == [[3 + 30 + 100], [3 + 50 + 1000]]
    assert "'level'" in FunctionReward(by_column).lacking([replace(PROMPT, extra={"unit": "m"})])
    assert values(by_column, "abc", options={"level": 1}) == [3 + 10 + 100], "options come first"
    for unsure in (
        lambda completion, output: 0.0,
        lambda completion, output="": 0.0,
    ):  # the answer's column, or its text
        assert "neither a column" in FunctionReward(unsure).lacking([PROMPT])
        assert FunctionReward(unsure).lacking([replace(PROMPT, extra={"output": "4"})]) == ""
    taken = FunctionReward(lambda level, text: 0.0).lacking([PROMPT])
    assert "by its position" in taken
    assert "column of the rows: call the parameter `prompt`" in taken


@pytest.mark.parametrize(
    ("function", "whose"),
    [
        (lambda queries, prompts, labels: [0.0], "OpenRLHF"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, "verl"),
        (lambda solution_str, ground_truth, method="strict": 0.0, "verl"),
    ],
)
def test_functions_of_other_systems_are_told_apart(function: Callable[..., Any], whose: str) -> None:
    """By their place `completions` and `solution_str` would have been the prompt, `ground_truth` the completion."""
    with pytest.raises(ValueError, match=f"as {whose}|what {whose}"):
        FunctionReward(function)


def test_a_batch_is_called_once_with_lists() -> None:
    calls: list[Any] = []

    def trl(
        prompts: Any, completions: Any, completion_ids: Any, answer: Any, level: Any = None, absent: Any = 7
    ) -> Any:
        calls.append((completions, absent, level))
        return [
            len(text) + len(ids) + int(right)
            for text, ids, right in zip(completions, completion_ids, answer, strict=True)
        ]

    plain = Prompt(id="f:1", text="2 + 2 =", tokens=(1, 2), answer="4", extra={"level": 3})
    reward = FunctionReward(trl)
    found = asyncio.run(reward.score(plain, [completion("a"), completion("abc")]))
    assert [score.value for score in found] == [1 + 2 + 4, 3 + 2 + 4]
    assert calls == [(["a", "abc"], 7, [3, 3])]
    assert reward.reads_tokens


@pytest.mark.parametrize("thread", [False, True])
def test_a_batch_has_none_for_what_it_is_not_meant_for_and_fails_as_one(thread: bool) -> None:
    def some(completions: Any, **kwargs: Any) -> Any:
        return [None if one == [{"role": "assistant", "content": ""}] else 1 for one in completions]

    assert [(score.value, score.reason) for score in scores(some, "", "a", thread=thread)] == [
        (None, "not applicable"),
        (1.0, None),
    ]
    for wrong, told in (
        (lambda completions: 1.0, "TypeError: function returned 1.0"),
        (lambda completions: [1.0], "ValueError: function returned 1 numbers for 2"),
        (lambda completions: [1.0, "x"], "TypeError: the reward is a str"),
        (lambda completions: {}["x"], "KeyError: 'x'"),
    ):
        reasons = {str(score.reason) for score in scores(wrong, "a", "b", thread=thread)}
        assert len(reasons) == 1 and reasons.pop().startswith(told)


def test_what_is_logged_of_a_batch_becomes_parts() -> None:
    def logs(completions: Any, log_extra: Any, log_metric: Any) -> Any:
        log_extra("words", ["a", "b"])
        log_extra("size", [1, 2])
        log_metric("share", 0.5)
        return [3, None]

    one, two = scores(logs, "a", "b")
    assert one == Score(value=3.0, parts={"size": 1.0, "share": 0.5})
    assert (two.value, two.parts, two.reason) == (None, {"size": 2.0, "share": 0.5}, "not applicable")


def test_a_decorator_that_hides_the_names_gets_all() -> None:
    def hidden(*args: Any, **kwargs: Any) -> Any:
        return [float(len(kwargs["completions"]) + len(kwargs["level"])) for _ in kwargs["completions"]]

    assert values(hidden, "a", "b") == [4.0, 4.0]


def test_what_a_function_may_return() -> None:
    returned: dict[str, Any] = {
        "float": 0.25,
        "bool": True,
        "dict": {"reward": 2, "style": 0.5, "facts": False},
        "none": None,
        "nan": math.nan,
        "inf": -math.inf,
        "text": "0.5",
        "no reward": {"style": 1.0},
        "unknown": {"reward": None, "style": 1.0},
        "score": Score(value=None, reason="too hard", parts={"style": 1.0}),
        "bytes": b"0.5",
    }
    found = dict(zip(returned, scores(lambda completion: returned[completion], *returned), strict=True))
    assert (found["float"].value, found["bool"].value) == (0.25, 1.0)
    assert found["dict"] == Score(value=2.0, parts={"style": 0.5, "facts": 0.0})
    for name, reason in {
        "none": "not applicable",
        "nan": "function returned nan",
        "inf": "function returned -inf",
        "text": "TypeError: the reward is a str, not a number: '0.5'",
        "no reward": "TypeError: function returned a dict without the key 'reward'; it has ['style']",
        "unknown": "not applicable",
        "score": "too hard",
        "bytes": "TypeError: the reward is a bytes, not a number: b'0.5'",
    }.items():
        assert found[name].value is None
        assert found[name].reason == reason
        assert found[name].failed == (name not in ("none", "unknown"))
    assert found["unknown"].parts == found["score"].parts == {"style": 1.0}


def test_one_failure_leaves_the_others_alone() -> None:
    def sync(completion: str) -> float:
        return 1 / len(completion)

    async def later(completion: str) -> float:
        await asyncio.sleep(0.01 / (1 + len(completion)))  # the last one comes first
        return 1 / len(completion)

    places = raised(sync), raised(later, 2)
    for found in (scores(sync, "a", "", "ab"), scores(later, "a", "", "ab"), scores(sync, "a", "", "ab", thread=True)):
        assert [score.value for score in found] == [1.0, None, 0.5]
        assert found[1].reason in [f"ZeroDivisionError: division by zero{place}" for place in places]


class Unparsed(ValueError):
    """As json.JSONDecodeError: no class of Python's own."""


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionRefusedError("gone"), True),
        (TimeoutError("late"), True),
        (RuntimeError("the grader is down"), True),
        (Unparsed("<html>busy</html>"), True),
        (TypeError("no number"), False),
        (KeyError("answer"), False),
        (ValueError("odd"), False),
        (RecursionError("deep"), False),
        (SystemExit(1), False),
    ],
)
def test_which_errors_of_a_function_may_pass(error: BaseException, transient: bool) -> None:
    def fails(completion: str) -> float:
        raise error

    async def fails_later(completion: str) -> float:
        raise error

    found = [scores(fails, "x"), scores(fails_later, "x"), scores(fails, "x", thread=True)]
    assert [score.transient for (score,) in found] == [transient] * 3


def stubborn(completion: str) -> float:
    """Takes so many seconds, whatever is raised meanwhile."""
    until = time.monotonic() + float(completion)
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            time.sleep(0.01)
    return 1.0


def test_deadline_of_functions_that_run_inline() -> None:
    """Whatever the function catches; and the timer is gone when it has answered."""
    before = signal.getsignal(signal.SIGALRM)
    fast, slow, last = scores(stubborn, "0", "5", "0", deadline=0.5)
    assert (fast.value, last.value) == (1.0, 1.0)
    assert (slow.value, slow.reason, slow.transient) == (None, "no answer within 0.5 s", True)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_deadline_of_inline_functions_outside_the_main_thread() -> None:
    """A notebook's runs are in one: a reward that hung held up the run for ever, and the cell with it."""
    found: list[Score] = []

    thread = threading.Thread(target=lambda: found.extend(scores(stubborn, "0", "5", "0", deadline=0.5)))
    before = threading.active_count()
    thread.start()
    thread.join(4)
    assert [score.value for score in found] == [1.0, None, 1.0]
    assert found[1].reason == "no answer within 0.5 s"
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= before  # whoever watched has ended


def test_functions_that_run_inline_for_long_let_others_run_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "PATIENCE", 0.005)
    order: list[str] = []

    async def other() -> None:
        for _ in range(2):
            order.append("other")
            await asyncio.sleep(0)

    def reward(completion: str) -> float:
        order.append(completion)
        time.sleep(0.01)
        return float(completion)

    async def both() -> list[Score]:
        beside = asyncio.ensure_future(other())
        found = await FunctionReward(reward).score(PROMPT, [completion(text) for text in "123"])
        await beside
        return found

    assert [score.value for score in asyncio.run(both())] == [1.0, 2.0, 3.0]
    assert order == ["1", "other", "2", "other", "3"]


@pytest.mark.slow
def test_deadline_of_async_functions_and_threads() -> None:
    async def sleeps(completion: str) -> float:
        await asyncio.sleep(float(completion))
        return 1.0

    def blocks(completion: str) -> float:
        time.sleep(float(completion))
        return 1.0

    async def gives_up(completion: str) -> float:
        raise TimeoutError("the server said so")

    for settings in ({"function": sleeps}, {"function": blocks, "thread": True}):
        fast, slow = scores(settings.pop("function"), "0", "3", deadline=1.0, **settings)
        assert fast.value == 1.0
        assert (slow.value, slow.reason) == (None, "no answer within 1 s")
    assert scores(gives_up, "x")[0].reason == f"TimeoutError: the server said so{raised(gives_up)}"


def test_threads_that_hang_hold_up_neither_others_nor_the_end(environment: dict[str, str]) -> None:
    """More hanging calls than may run at once, then one that answers; the process ends although they all still hang."""
    script = """
import asyncio, threading
from plaudit.rewards.functions import THREADS, FunctionReward
from plaudit.types import Completion, Finish, Prompt

def reward(completion):
    if completion == "hang":
        threading.Event().wait()
    return 1.0

texts = ["hang"] * (2 * THREADS + 1) + ["answer"]
found = asyncio.run(FunctionReward(reward, thread=True, deadline=0.2).score(
    Prompt(id="p", text="p", tokens=(1,)),
    [Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS) for text in texts],
))
assert {(score.value, score.reason) for score in found[:-1]} == {(None, "no answer within 0.2 s")}, found
print(found[-1].value)
"""
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "1.0\n"), ended.stderr


def test_the_place_of_a_failure_is_the_users_own_line() -> None:
    """Of an error in a library the line that called it, of one in a function of their own that line; of none of
    theirs, and of what was returned, no place."""

    def calls(completion: str) -> Any:
        return np.array([1.0]).reshape(2, 2)

    def inner(completion: str) -> Any:
        raise ValueError(completion)

    def outer(completion: str) -> Any:
        return inner(completion)

    def returns(completion: str) -> Any:
        return "text"

    assert str(scores(calls, "x")[0].reason).endswith(raised(calls))
    assert scores(outer, "x")[0].reason == f"ValueError: x{raised(inner)}"
    assert scores(returns, "x")[0].reason == "TypeError: the reward is a str, not a number: 'text'"


def test_what_a_future_refuses_is_the_reason_too() -> None:
    def stops(completion: str) -> float:
        raise StopIteration("empty")

    assert scores(stops, "x", thread=True)[0].reason == "RuntimeError: StopIteration: empty"


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("elsewhere")])
def test_what_would_end_a_process_or_a_task_is_a_reason_too(error: BaseException) -> None:
    def sync(completion: str) -> float:
        if not completion:
            raise error
        return 1.0

    async def later(completion: str) -> float:
        await asyncio.sleep(0)
        return sync(completion)

    for found in (scores(sync, "a", "", "b"), scores(sync, "a", "", "b", thread=True), scores(later, "a", "", "b")):
        assert [score.value for score in found] == [1.0, None, 1.0]
        assert str(found[1].reason).startswith(type(error).__name__)


def test_a_score_that_is_not_finite_is_none() -> None:
    def function(completion: str) -> Score:
        return Score(value=float(completion), parts={"style": 1.0})

    def of_numpy(completion: str) -> Any:
        return Score(value=np.float32(completion), parts={"style": np.float32(0.5)})  # type: ignore[arg-type,dict-item]

    (one,) = scores(of_numpy, "1.5")
    assert [type(number) for number in (one.value, one.parts["style"])] == [float, float], "JSON knows no others"
    (text,) = scores(lambda completion: Score(value=1.0, parts={"style": completion}), "good")  # type: ignore[dict-item]
    assert text.reason == "TypeError: part 'style' is a str, not a number: 'good'"
    nan, infinite, two = scores(function, "nan", "-inf", "2")
    assert (nan.value, nan.reason, nan.parts) == (None, "function returned nan", {"style": 1.0})
    assert (infinite.value, infinite.reason) == (None, "function returned -inf")
    assert two.value == 2.0


def test_sync_functions_run_inline_unless_asked() -> None:
    seen: list[str] = []

    def function(completion: str) -> float:
        seen.append(threading.current_thread().name)
        return 0.0

    scores(function, "a", "b")
    assert set(seen) == {threading.main_thread().name}
    seen.clear()
    scores(function, "a", "b", thread=True)
    assert threading.main_thread().name not in seen


def test_objects_with_an_async_call() -> None:
    class Model:
        async def __call__(self, completion: str) -> float:
            return len(completion)

    reward = FunctionReward(Model())
    assert reward.name == "Model"
    assert values(Model(), "abc") == [3]


def test_cancelling_is_not_a_failed_score() -> None:
    async def forever(completion: str) -> float:
        await asyncio.sleep(3600)
        return 0.0

    async def main() -> None:
        task = asyncio.create_task(FunctionReward(forever).score(PROMPT, [completion("x")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
