"""Environments of other packages, played as an episode is, with the packages themselves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plaudit.environments.base import Environment, Turn, World
from plaudit.environments.settings import EnvironmentSettings

ROOT = Path(__file__).parents[2]


def world(function: str, **options: Any) -> World:
    return World(EnvironmentSettings(function=function, options=options))


def played(of: World, row: dict[str, Any], moves: Sequence[str]) -> tuple[list[str], Turn, Any]:
    """What is said to these moves, the last turn, and the episode's score."""

    async def whole() -> tuple[list[str], Turn, Any]:
        game = await of.begin()
        heard = [one["content"] for one in await game.reset(row)]
        turn = Turn()
        for move in moves:
            turn = await game.step({"role": "assistant", "content": move})
            heard += [str(one["content"]) for one in turn.messages]
        return heard, turn, await game.score()

    return asyncio.run(whole())


def test_a_game_of_textarena_says_what_is_new_and_ends_with_its_own_reward() -> None:
    pytest.importorskip("textarena")
    guess = world("plaudit.adapters.textarena:Game", game="GuessTheNumber-v0")
    rules, *hints = played(guess, {"seed": 3}, ["[1]", "It may be [9].", "[5]"])[0]
    assert "between 1 and 20" in rules and "[1]" not in "".join(hints)
    assert [hint.split()[-1] for hint in hints] == ["higher.", "lower.", "higher."]
    found = [played(guess, {"seed": 3}, [f"[{number}]"])[2].value for number in range(1, 21)]
    assert found.count(1.0) == 1, "the same number in every episode with this seed"
    right = found.index(1.0) + 1
    _, turn, score = played(guess, {"seed": 3}, ["[1]", f"[{right}]"])
    assert turn.done and score.value == 1.0 and score.parts["turn_count"] >= 1
    assert 5 < right < 9


def test_games_at_once_do_not_disturb_one_another() -> None:
    """They draw from Python's own random numbers, whose state is left as it was."""
    pytest.importorskip("textarena")
    cards = world("plaudit.adapters.textarena:Game", game="Blackjack-v0")
    alone = [played(cards, {"seed": seed}, ["[Hit]", "[Stand]", "[Hit]"])[0] for seed in (1, 2)]
    assert alone[0] != alone[1]

    async def together() -> list[list[str]]:
        games: list[Environment] = [await cards.begin() for _ in range(2)]
        heard = [[one["content"] for one in await game.reset({"seed": seed})] for seed, game in enumerate(games, 1)]
        for move in ("[Hit]", "[Stand]", "[Hit]"):
            for said, game in zip(heard, games, strict=True):
                said += [str(one["content"]) for one in (await game.step({"content": move})).messages]
        return heard

    random.seed(5)
    before = random.getstate()
    assert asyncio.run(together()) == alone
    assert random.getstate() == before


def test_a_game_that_is_none_is_refused_with_its_neighbours() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match=r"no game 'GuessTheNumber-v9'.*GuessTheNumber-v0"):
        world("plaudit.adapters.textarena:Game", game="GuessTheNumber-v9")


def test_a_question_of_reasoning_gym_may_be_tried_again() -> None:
    pytest.importorskip("reasoning_gym")
    from plaudit.support.gym import questions

    row = next(iter(questions("reasoning_gym:chain_sum?size=10", "train")))
    tries = world("plaudit.adapters.reasoning_gym:Tries", tries=3)
    assert set(tries.needed) == {"answer", "reasoning_gym", "index"}
    for moves, value, at_first in (([row["answer"]], 1.0, 1.0), (["0.5", row["answer"]], 0.5, 0.0)):
        heard, turn, score = played(tries, row, moves)
        assert turn.done and score.value == value and score.parts == {"solved": 1.0, "at_first": at_first}
        assert len(heard) == len(moves) - 1
    heard, turn, score = played(tries, row, ["0.5", "no", "0.25"])
    assert turn.done and len(heard) == 2 and 0 <= score.value < 0.25 and score.parts["solved"] == 0.0


def test_a_world_of_gymnasium_takes_a_few_lines() -> None:
    pytest.importorskip("gymnasium")
    lake = world(f"{ROOT}/examples/environments/frozen_lake.py:FrozenLake")
    way = ["down", "Down!", "right", "right", "down", "right"]
    heard, turn, score = played(lake, {"seed": 1}, way)
    assert turn.done and score.value == 1.0 and "S" in heard[0] and len(heard) == len(way)
    heard, turn, score = played(lake, {"seed": 1}, ["right", "left or right", "down"])
    assert heard[2] == "Say one of left, down, right, up." and turn.done and score.value == 0.0, "a hole"
