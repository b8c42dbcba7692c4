import asyncio
from collections.abc import Sequence

import pytest

from plaudit.rewards.base import Reward
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.weighted import WeightedReward
from plaudit.types import NOT_APPLICABLE, Completion, Finish, Prompt, Score

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


FAILED = f"inverse: ZeroDivisionError: division by zero (test_weighted.py, line {inverse.__code__.co_firstlineno + 1})"


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
    assert bad.reason == FAILED
    assert bad.parts == {"letters": 2.0}


def test_a_failed_part_of_weight_0_counts_for_nothing_as_any_of_that_weight() -> None:
    reward = WeightedReward([(FunctionReward(letters), 1.0, "letters"), (FunctionReward(inverse), 0.0, "inverse")])
    good, shown = score(reward, "a", "bb")
    assert (good.value, shown.value, shown.reason) == (1.0, 2.0, None)
    assert good.parts == {"letters": 1.0, "inverse": 1.0, "inverse/count": 1.0}
    assert shown.parts == {"letters": 2.0}


def code(completion: str) -> float | None:
    """Of programs only."""
    return None if completion.isalpha() else 2.0


def prose(completion: str) -> float | None:
    return 3.0 if completion.isalpha() else None


def test_what_does_not_apply_is_left_out_of_the_sum_or_its_weight_given_to_the_others() -> None:
    """Weights 1, -0.5 and 0.5: 2 in all. Of words: 3 x -0.5 + 0.5 x letters, x 2 / (0.5 + 0.5) renormalised. Of
    programs: 2 x 1 + 0.5 x letters, x 2 / (1 + 0.5)."""
    parts: list[tuple[Reward, float, str]] = [
        (FunctionReward(code), 1.0, "code"),
        (FunctionReward(prose), -0.5, "prose"),
        (FunctionReward(letters), 0.5, "letters"),
    ]
    words, program = score(WeightedReward(parts), "ab", "1;")
    assert (words.value, words.parts) == (-0.5, {"prose": 3.0, "letters": 2.0})
    assert (program.value, program.parts) == (3.0, {"code": 2.0, "letters": 2.0})
    assert [one.value for one in score(WeightedReward(parts, renormalise=True), "ab", "1;")] == [-1.0, 4.0]


def test_where_all_apply_renormalising_changes_nothing() -> None:
    parts: list[tuple[Reward, float, str]] = [(FunctionReward(letters), 0.1, "a"), (FunctionReward(inverse), 0.7, "b")]
    plain, scaled = (score(WeightedReward(parts, renormalise=on), "a", "aab") for on in (False, True))
    assert plain == scaled


@pytest.mark.parametrize("renormalise", [False, True])
def test_no_reward_with_a_weight_applies(renormalise: bool) -> None:
    parts: list[tuple[Reward, float, str]] = [(FunctionReward(code), 1.0, "code"), (FunctionReward(letters), 0.0, "n")]
    words, program = score(WeightedReward(parts, renormalise=renormalise), "ab", "1;")
    assert (words.value, words.failed, words.applicable, words.reason) == (None, False, False, NOT_APPLICABLE)
    assert words.parts == {"n": 2.0}
    assert (program.value, program.applicable) == (2.0, True)


def test_a_failure_is_not_hidden_by_a_reward_that_does_not_apply() -> None:
    reward = WeightedReward([(FunctionReward(code), 1.0, "code"), (FunctionReward(inverse), 1.0, "inverse")])
    (bad,) = score(reward, "bb")
    assert (bad.failed, bad.reason) == (True, FAILED)


def test_a_part_or_a_sum_that_is_not_finite_is_no_reward() -> None:
    class Odd:
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            return [Score(value=float(completion.text)) for completion in completions]

    nan, large, small = score(WeightedReward([(Odd(), 10.0, "odd")]), "nan", "1e308", "1")
    assert (nan.value, nan.reason) == (None, "odd: its value is nan")
    assert (large.value, large.reason) == (None, "the weighted sum is inf")
    assert small.value == 10.0


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="'x'"):
        WeightedReward([(FunctionReward(letters), 1.0, "x"), (FunctionReward(letters), 1.0, "x")])


def test_a_sum_may_be_asked_for_again_if_all_that_failed_of_it_may_pass() -> None:
    def away(completion: str) -> float:
        raise ConnectionError("gone")

    parts = {"away": FunctionReward(away), "inverse": FunctionReward(inverse), "letters": FunctionReward(letters)}

    def transient(*names: str, text: str = "b") -> bool:
        return score(WeightedReward([(parts[name], 1.0, name) for name in names]), text)[0].transient

    assert transient("away", "letters")
    assert not transient("away", "inverse")
    assert not transient("inverse", "letters")
    large = WeightedReward([(FunctionReward(lambda completion: 1e308), 10.0, "large")])
    assert not score(large, "b")[0].transient
