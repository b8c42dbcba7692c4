"""An agent whose task has a user: verifiers' interaction asks for a second answer."""

from __future__ import annotations

from typing import Any

from environments.verifiers_agent import Question, QuestionData, seat, worth


async def solve(base_url: str, api_key: str, messages: list[Any], answer: str) -> dict[str, float]:
    task = Question(QuestionData(prompt=messages, answer=answer))
    with seat(base_url, api_key) as agent:
        async with agent.interaction(task) as user:
            await user.turn()
            await user.turn("Are you sure?")
    return worth(user.trace)
