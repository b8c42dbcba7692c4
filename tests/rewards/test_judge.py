import asyncio
import math
from collections.abc import Sequence

import pytest

from plaudit.rewards.judge import JudgeReward, Tokens
from plaudit.types import Completion, Finish, Prompt, Score

EOS = 9


def prompt(*tokens: int) -> Prompt:
    return Prompt(id="p", text="p", tokens=tokens)


def completion(*tokens: int, finish: Finish = Finish.EOS) -> Completion:
    return Completion(
        tokens=tokens, logprobs=(0.0,) * len(tokens), versions=(0,) * len(tokens), text="t", finish=finish
    )


class Recorder:
    """Scores a sequence with the sum of its tokens, and keeps what each call was asked."""

    def __init__(self) -> None:
        self.calls: list[list[Tokens]] = []

    def __call__(self, sequences: list[Tokens]) -> list[float]:
        self.calls.append(sequences)
        return [float(sum(sequence)) for sequence in sequences]


def score_all(reward: JudgeReward, groups: Sequence[tuple[Prompt, list[Completion]]]) -> list[list[Score]]:
    async def run() -> list[list[Score]]:
        return list(await asyncio.gather(*(reward.score(*group) for group in groups)))

    return asyncio.run(run())


def test_groups_are_scored_together_and_answered_apart() -> None:
    judge = Recorder()
    cut = completion(6, finish=Finish.LENGTH)  # read as it is
    groups = [(prompt(1, 2), [completion(3, EOS), completion(4, EOS)]), (prompt(5), [cut])]
    scores = score_all(JudgeReward(judge), groups)
    assert judge.calls == [[(1, 2, 3, EOS), (1, 2, 4, EOS), (5, 6)]]
    assert [[score.value for score in group] for group in scores] == [[15.0, 16.0], [11.0]]


def test_a_busy_engine_is_waited_for_until_the_batch_is_full() -> None:
    judge, busy = Recorder(), True
    reward = JudgeReward(judge, batch=2, busy=lambda: busy)

    async def run() -> None:
        nonlocal busy
        first = asyncio.create_task(reward.score(prompt(1), [completion(2)]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert judge.calls == []  # one of two, and more may come
        await asyncio.gather(first, reward.score(prompt(3), [completion(4)]))
        assert judge.calls == [[(1, 2), (3, 4)]]
        last = asyncio.create_task(reward.score(prompt(5), [completion(6)]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(judge.calls) == 1
        busy = False
        await last
        assert judge.calls[1:] == [[(5, 6)]]

    asyncio.run(run())


def test_an_answer_that_cannot_be_written_for_the_judge_gets_no_score_and_says_why() -> None:
    def encode(asked: Prompt, answer: Completion) -> Tokens:
        if answer.tokens == (4,):
            raise ValueError("the chat template refuses the turns system, user")
        return answer.tokens

    judge = Recorder()
    [scores] = score_all(JudgeReward(judge, encode=encode), [(prompt(1), [completion(3), completion(4)])])
    assert [score.value for score in scores] == [3.0, None]
    assert scores[1].reason == "cannot be read: the chat template refuses the turns system, user"
    assert judge.calls == [[(3,)]]


def test_a_text_that_the_judge_has_no_positions_for_takes_no_other_with_it() -> None:
    judge = Recorder()
    reward = JudgeReward(judge, longest=4)
    cut, fits, long = completion(3, 4, 5, 6, finish=Finish.LENGTH), completion(3, 4, EOS), completion(3, 4, 5, EOS)
    [scores, alone] = score_all(reward, [(prompt(1), [cut, fits, long]), (prompt(1, 2), [cut])])
    assert [score.value for score in scores] == [None, 1.0 + 3 + 4 + EOS, None]
    assert "5 tokens" in scores[0].reason
    assert "6 tokens" in alone[0].reason
    assert judge.calls == [[(1, 3, 4, EOS)]]


def test_a_score_that_is_no_number_masks_its_response_alone() -> None:
    reward = JudgeReward(lambda sequences: [math.nan, 2.0, math.inf])
    [[first, second, third]] = score_all(reward, [(prompt(1), [completion(2)] * 3)])
    assert (first.value, second.value, third.value) == (None, 2.0, None)
    assert first.reason is not None and "nan" in first.reason and second.reason is None


def test_the_judges_error_reaches_all_who_wait_and_the_next_may_ask_again() -> None:
    calls = 0

    def judge(sequences: list[Tokens]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("judge is gone")
        return [0.0] * len(sequences)

    reward = JudgeReward(judge)

    async def run() -> None:
        both = [reward.score(prompt(i), [completion(2)]) for i in range(2)]
        errors = await asyncio.gather(*both, return_exceptions=True)
        assert [type(error) for error in errors] == [ConnectionError] * 2
        assert [score.value for score in await reward.score(prompt(1), [completion(2)])] == [0.0]

    asyncio.run(run())


def test_too_few_scores_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"2 sequences .* 1 scores"):
        score_all(JudgeReward(lambda sequences: [0.0]), [(prompt(1), [completion(2)] * 2)])


def test_a_cancelled_request_is_not_scored() -> None:
    judge, busy = Recorder(), True
    reward = JudgeReward(judge, busy=lambda: busy)

    async def run() -> None:
        nonlocal busy
        gone = asyncio.create_task(reward.score(prompt(1), [completion(2)]))
        stays = asyncio.create_task(reward.score(prompt(3), [completion(4)]))
        await asyncio.sleep(0)
        gone.cancel()
        busy = False
        assert [score.value for score in await stays] == [7.0]

    asyncio.run(run())
    assert judge.calls == [[(3, 4)]]
