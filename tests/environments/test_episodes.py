"""Episodes are sampled turns and observations as tokens; only what was sampled is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from playing import WORLDS, Table, of, plain, turns_of

from plaudit.environments.episodes import turn_seed
from plaudit.rollout.native import NativeEngine
from plaudit.support.plugins import load_object
from plaudit.types import Finish

Recipe = Callable[..., dict[str, Any]]


def test_an_episode_is_sampled_turns_and_what_the_template_writes_between_them(table: Table) -> None:
    for episode in table.play("Echo", count=4, most=40):
        assert episode.finish is Finish.EOS
        turns = turns_of(table, episode)
        assert [mine for mine, _ in turns] == [True, False, True, False, True]
        chat = list(table.asked)
        for (_, said), (_, heard) in zip(turns[::2], turns[1::2], strict=False):
            count = len(plain(table, said))
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{count} letters"}]
            assert table.chats.prompt(chat, {}).endswith(heard)
            assert heard == f"\n<|user|>\n{count} letters\n<|assistant|>\n"
        assert of(episode).earned is not None
        assert of(episode).earned.value == pytest.approx(sum(len(plain(table, said)) for _, said in turns[::2]) / 100)
        assert episode.text == plain(table, turns[-1][1])
        assert of(episode).earned.parts == {"turns": 3.0}


def test_every_episode_is_closed_once_and_late_errors_change_nothing(table: Table) -> None:
    closed = load_object(f"{WORLDS}:Closes.closed")
    values = [of(table.play("Closes", count=1, most=40)[0]).earned for _ in range(3)]
    assert closed == [3, 3, 0], "turns of each episode; the third one failed"
    assert [value is not None and value.failed for value in values] == [False, False, True]


def test_only_sampled_tokens_have_log_probs_and_they_are_the_policys(table: Table) -> None:
    (episode,) = table.play("Echo", count=1, most=40)
    sampled = of(episode).sampled
    assert episode.length == sum(sampled) < len(episode.tokens)
    tokens = torch.tensor([*table.prompt.tokens, *episode.tokens])
    with torch.no_grad():
        hidden = table.model(tokens, table.model.packed([len(tokens)]))
        logp = table.model.head(hidden).float().log_softmax(dim=-1)
    before = len(table.prompt.tokens)
    for place, (mine, logprob, version) in enumerate(zip(sampled, episode.logprobs, episode.versions, strict=True)):
        at = before + place
        if mine:
            assert version >= 0
            assert logprob == pytest.approx(float(logp[at - 1, tokens[at]]), abs=1e-5)
        else:
            assert (version, logprob) == (-1, 0.0)


def test_an_episode_depends_on_its_seed_alone(table: Table) -> None:
    two, four = table.play("Echo", count=2, most=40), table.play("Echo", count=4, most=40)
    assert [one.tokens for one in two] == [one.tokens for one in four[:2]]
    assert four[0].tokens != four[1].tokens
    assert turn_seed(5, 0) == 5
    assert len({turn_seed(5, number) for number in range(9)}) == 9


def test_a_question_of_the_environment_goes_into_the_last_turn(table: Table) -> None:
    (episode,) = table.play("Waiting", count=1, most=40)
    ((start, prefix),) = of(episode).restarts
    assert start == 0
    assert of(episode).messages[0] == {"role": "user", "content": "The acting\nBegin with answer."}
    assert table.tokenizer.decode(prefix).endswith("The acting\nBegin with answer.\n<|assistant|>\n")
    assert of(episode).earned is not None and of(episode).earned.value is not None


@pytest.mark.parametrize(
    ("settings", "finish", "turns"),
    [({"max_turns": 2}, Finish.TURNS, 2), ({"max_turns": 50, "max_tokens": 60}, Finish.LENGTH, None)],
)
def test_an_episode_that_reaches_a_limit_is_unfinished(
    table: Table, settings: dict[str, Any], finish: Finish, turns: int | None
) -> None:
    for episode in table.play("Endless", most=40, **settings):
        assert episode.finish is finish
        assert not episode.finished
        assert len(episode.tokens) <= settings.get("max_tokens", 300)
        mine = [turn for turn, _ in turns_of(table, episode)]
        assert mine[-1], "the last tokens are the policy's: an observation that nothing answers is not trained on"
        assert turns is None or mine.count(True) == turns


def test_an_answer_that_is_cut_off_ends_its_episode(table: Table) -> None:
    never = copy.copy(table)
    never.engine = NativeEngine(table.model, table.tokenizer, ends=())
    (episode,) = never.play("Echo", count=1, most=5)
    assert (episode.finish, len(episode.tokens), sum(of(episode).sampled)) == (Finish.LENGTH, 5, 5)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "step: KeyError: 'board'"),
        ("returns", "step returned a int"),
        ("is silent", "neither messages nor done"),
        ("hangs", "step took more than 2 s"),
    ],
)
def test_an_environment_that_fails_fails_its_episode_alone(table: Table, how: str, reason: str) -> None:
    load_object(f"{WORLDS}:Sometimes").made = 0
    timeout = {"timeout": 2.0} if how == "hangs" else {}
    first, second = table.play("Sometimes", most=40, options={"how": how}, **timeout)
    assert of(first).earned is not None and of(first).earned.failed
    assert reason in str(of(first).earned.reason)
    assert of(second).earned is not None and not of(second).earned.failed
