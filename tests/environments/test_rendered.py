"""Episodes whose chat a renderer writes and reads: `environment.renderer`, by the contract of the package renderers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import rendering
import worlds
from chat_shapes import CALLERS, SPECIAL, train_tokenizer
from scripted import Scripted

from plaudit.data.chat import Chats
from plaudit.data.fields import DataError
from plaudit.data.settings import DataSettings
from plaudit.environments.base import World
from plaudit.environments.episodes import Player
from plaudit.environments.rehearsal import rehearsed
from plaudit.environments.rendered import forms_of, renderer_of
from plaudit.environments.settings import EnvironmentSettings
from plaudit.types import Episode, Prompt, Sampling

ASK = {"role": "user", "content": "Two and three?"}
TOLD = "tool: add\ntool: wait\nuser> Two and three?\nassistant> "
SAID = ("2 so 3!add(2, 3)", "It is 5.")


@pytest.fixture(scope="module")
def chats() -> Chats:
    """A template whose calls cannot be read off it."""
    tokenizer = train_tokenizer(bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    name = next(name for name in CALLERS if name not in ("hermes", "escapes"))
    return Chats(tokenizer, DataSettings(chat_template=CALLERS[name][0]), ())


def settings(kind: str, **more: Any) -> EnvironmentSettings:
    function = f"{Path(worlds.__file__)}:Sums"
    return EnvironmentSettings(function=function, renderer=f"{Path(rendering.__file__)}:{kind}", **more)


def played(chats: Chats, kind: str, *texts: str, **more: Any) -> tuple[Episode, list[str], Prompt]:
    """The episode, and what the policy was asked with each time."""
    tokens = tuple(chats.tokenizer("Two", add_special_tokens=False)["input_ids"])
    prompt = Prompt(id="p", text="Two", tokens=tokens, messages=(ASK,))
    engine = Scripted(chats.tokenizer, list(texts))
    player = Player(engine, chats, World(settings(kind, **more)))
    (answer,) = asyncio.run(player.play(prompt, [Sampling(max_tokens=99)]))
    assert answer.episode is not None
    return answer.episode, [chats.tokenizer.decode(tokens) for tokens in engine.asked], prompt


def test_a_renderer_writes_the_chat_and_reads_thoughts_and_calls(chats: Chats) -> None:
    episode, asked, _ = played(chats, "Lines", *SAID)
    assert episode.earned is not None and episode.earned.value == 5.0, episode.earned
    assert episode.counts == {"turns": 2, "calls": 1, "failed_calls": 0, "unread_calls": 0}
    first, result, last = episode.messages
    assert (first["reasoning_content"], first["content"]) == ("2", "3")
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert (result["role"], result["content"], last["content"]) == ("tool", "5", "It is 5.")
    assert asked == [TOLD, f"{TOLD}{SAID[0]}<eos>\ntool> 5\nassistant> "], "appended to what was sampled"
    assert len(episode.restarts) == 1, "one row, which begins with the renderer's own prompt"


@pytest.mark.parametrize("kind", ["Again", "Forgets"])
def test_a_chat_that_cannot_be_appended_to_goes_on_as_a_further_row(kind: str, chats: Chats) -> None:
    """The second row begins with the chat as the renderer writes it now: without the thought, with the call."""
    episode, asked, prompt = played(chats, kind, *SAID)
    assert asked == [TOLD, TOLD + "3!add(2, 3)\ntool> 5\nassistant> "]
    assert [place for place, _ in episode.restarts] == [0, sum(episode.sampled[: episode.restarts[1][0]])]
    rows = [chats.tokenizer.decode(prefix) for prefix, _ in episode.sequences(prompt.tokens)]
    assert rows == asked and all(episode.sampled), "each row has one answer, and nothing of the environment's"


def test_calls_that_a_renderer_cannot_read_are_counted(chats: Chats) -> None:
    episode, _, _ = played(chats, "Lines", "!add(2, 3)!add(2", "Done.")
    assert (episode.counts["calls"], episode.counts["unread_calls"]) == (1, 1)


def test_tools_that_a_renderer_shows_count_as_tokens_after_the_prompt(chats: Chats) -> None:
    episode, asked, _ = played(chats, "Lines", *SAID, max_tokens=10)
    assert not asked and episode.earned is not None
    assert "leaves no room for an answer within environment.max_tokens" in str(episode.earned.reason)


def test_a_renderer_that_raises_fails_the_episode_with_its_reason(chats: Chats) -> None:
    episode, _, _ = played(chats, "Breaks", *SAID)
    assert episode.earned is not None
    assert episode.earned.reason == "environment.renderer: parse_response: KeyError: 'unknown form'"


def test_the_check_plays_a_call_in_the_renderers_form(chats: Chats) -> None:
    world = World(settings("Lines"))
    assert not world.shown, "the chat template need not show the tools"
    with pytest.raises(DataError):
        forms_of(chats, world.schemas)
    prompt = Prompt(id="p", text="Two", tokens=(5,), messages=(ASK,), answer="5")
    lines = rehearsed(prompt, chats, world)
    assert lines[0].startswith("assistant: [") and lines[1:] == ["tool: 2", "assistant: 5", "reward 2"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [("nothing", "has no render_ids and no parse_response and no bridge_to_next_turn"), ("absent", "absent")],
)
def test_what_makes_no_renderer_is_refused(kind: str, says: str, chats: Chats) -> None:
    with pytest.raises(ValueError, match=rf"environment\.renderer=.*{says}"):
        renderer_of(settings(kind), chats)
    alone = EnvironmentSettings(renderer="renderers:create_renderer")
    assert list(alone.contradictions()) == ["renderer is for episodes, and there are none: set function or tools"]
