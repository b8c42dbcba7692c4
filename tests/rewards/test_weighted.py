import asyncio
from collections.abc import Sequence

import pytest

from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.weighted import WeightedReward
from plaudit.types import Completion, Finish, Prompt, Score

PROMPT = Prompt(id="f:1", text="p", tokens=(1,))


def score(reward: WeightedReward, *texts: str) -> list[Score]:
    completions = [
        Completion(tokens=(0,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS) for text in texts
    ]
    return asyncio.run(reward.score(PROMPT, completions))


def letters(completion: str) -> float:
    return len(completion)


def inverse(completion: str) -> dict[str, float]:
    return {"reward": 1 / completion.count("a"), "count": completion.count("a")}


def test_the_sum_and_its_parts() -> None:
    reward = WeightedReward([(FunctionReward(letters), 0.5, "letters"), (FunctionReward(inverse), -2.0, "inverse")])
    long, short = score(reward, "aabb", "a")
    assert long.value == 0.5 * 4 - 2 * 0.5
    assert long.parts == {"letters": 4.0, "inverse": 0.5, "inverse/count": 2.0}
    assert short.value == 0.5 * 1 - 2 * 1


def test_a_failed_part_fails_the_sum_and_says_so() -> None:
    reward = WeightedReward([(FunctionReward(letters), 1.0, "letters"), (FunctionReward(inverse), 0.5, "inverse")])
    good, bad = score(reward, "a", "bb")
    assert good.value == 1.5
    assert bad.value is None
    assert bad.reason == "inverse: ZeroDivisionError: division by zero"
    assert bad.parts == {"letters": 2.0}


def test_a_failed_part_of_weight_0_counts_for_nothing_as_any_of_that_weight() -> None:
    reward = WeightedReward([(FunctionReward(letters), 1.0, "letters"), (FunctionReward(inverse), 0.0, "inverse")])
    good, shown = score(reward, "a", "bb")
    assert (good.value, shown.value, shown.reason) == (1.0, 2.0, None)
    assert good.parts == {"letters": 1.0, "inverse": 1.0, "inverse/count": 1.0}
    assert shown.parts == {"letters": 2.0}


def test_a_part_or_a_sum_that_is_not_finite_is_no_reward() -> None:
    class Odd:
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            return [Score(value=float(completion.text)) for completion in completions]

    nan, large, small = score(WeightedReward([(Odd(), 10.0, "odd")]), "nan", "1e308", "1")
    assert (nan.value, nan.reason) == (None, "odd: its value is nan")
    assert (large.value, large.reason) == (None, "the weighted sum is inf")
    assert small.value == 10.0


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="Two rewards are called 'x'"):
        WeightedReward([(FunctionReward(letters), 1.0, "x"), (FunctionReward(letters), 1.0, "x")])
    with pytest.raises(ValueError, match="at least one"):
        WeightedReward([])
