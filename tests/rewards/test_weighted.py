import asyncio

import pytest

from assent.rewards.functions import FunctionReward
from assent.rewards.weighted import WeightedReward
from assent.types import Completion, Finish, Prompt, Score

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
    reward = WeightedReward([(FunctionReward(letters), 1.0, "letters"), (FunctionReward(inverse), 0.0, "inverse")])
    good, bad = score(reward, "a", "bb")
    assert good.value == 1.0
    assert bad.value is None
    assert bad.reason == "inverse: ZeroDivisionError: division by zero"
    assert bad.parts == {"letters": 2.0}


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="Two rewards are called 'x'"):
        WeightedReward([(FunctionReward(letters), 1.0, "x"), (FunctionReward(letters), 1.0, "x")])
    with pytest.raises(ValueError, match="at least one"):
        WeightedReward([])
