"""Groups of scored responses, as rollout hands them to a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from plaudit.types import Completion, Finish, Group, Prompt, Response, Score

MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> MakeGroup:
    """group(rewards): the response at place i is the tokens (10 + i, 2), unfinished where `cut` says so."""

    def make(rewards: Sequence[float | None], *, cut: Sequence[int] = (), index: int = 0) -> Group:
        responses = []
        for place, reward in enumerate(rewards):
            finish = Finish.LENGTH if place in cut else Finish.EOS
            completion = Completion(
                tokens=(10 + place, 2), logprobs=(-1.0 - place, -0.5), versions=(6, 7), text="", finish=finish
            )
            score = Score(value=reward, reason=None if reward is not None else "the judge timed out")
            responses.append(Response(completion=completion, trainable=(True, True), score=score, reward=reward))
        prompt = Prompt(id=f"p{index}", text="", tokens=(5, 6, 7))
        return Group(index=index, prompt=prompt, responses=tuple(responses))

    return make
