"""What an environment or a policy does wrong ends one episode with a reason, and never the run."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest
import worlds
from chat_shapes import SPECIAL, train_tokenizer
from test_template_turns import TOOLS, hermes, played

from plaudit import Turn
from plaudit.data.chat import Chats
from plaudit.data.settings import DataSettings
from plaudit.environments.base import World
from plaudit.environments.settings import EnvironmentSettings


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(bos_token="<bos>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    return made


class Does:
    """Does in its step what `how` says."""

    def __init__(self, how: str):
        self.how = how

    def step(self, message: dict[str, Any]) -> Any:
        if self.how == "exits":
            sys.exit("enough")
        return {
            "no parts": Turn(done=True, parts=None),  # type: ignore[arg-type]
            "no messages": Turn(messages=None),  # type: ignore[arg-type]
            "a dict": Turn(messages={"role": "user", "content": "x"}),  # type: ignore[arg-type]
            "no role": Turn(messages=[{"content": "x"}]),
            "half a character": "a\ud800b",
            "numpy": Turn(done=True, reward=np.float32(1), parts={"found": 1.0}),
            "a score": Turn(messages=[{"role": "user", "content": "x"}], reward={"reward": 0.5, "found": 1}),  # type: ignore[arg-type]
            "no number": Turn(done=True, reward="much"),  # type: ignore[arg-type]
        }[self.how]


class Resets(Does):
    def reset(self) -> Any:
        return {"texts": ["x"], "no role": [{"content": "x"}]}[self.how]


class Slow:
    def __init__(self) -> None:
        time.sleep(0.5 if Slow.made else 0)
        Slow.made += 1

    made = 0

    def step(self, message: dict[str, Any]) -> str:
        return "x"


class Changes:
    """Changes what it is given: each episode must have its own."""

    def __init__(self, marks: list[int]):
        self.marks = marks

    @property
    def rate(self) -> float:
        return 1 / 0

    def reset(self, board: list[int]) -> None:
        board.append(1)
        self.marks.append(1)
        self.board = board

    def step(self, message: dict[str, Any]) -> Turn:
        return Turn(done=True, reward=float(len(self.board) + len(self.marks)))


HERE = __file__


def episode_of(tokenizer: Any, name: str, texts: list[str], how: str | None = None, **settings: Any) -> Any:
    chats = Chats(tokenizer, DataSettings(chat_template="default"))
    options = {} if how is None else {"options": {"how": how}}
    return played(chats, texts, name, file=HERE, **options, **settings)[1]


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("Does", "exits", "step: RuntimeError: SystemExit enough"),
        ("Does", "no parts", "the parts None"),
        ("Does", "no messages", "None: messages are"),
        ("Does", "a dict", "messages are a list of dicts"),
        ("Does", "no role", "with role and content"),
        ("Resets", "texts", "reset returned ['x']"),
        ("Resets", "no role", "with role and content"),
        ("Does", "no number", "step returned the reward 'much'"),
    ],
)
def test_it_fails_the_episode(name: str, how: str, reason: str, tokenizer: Any) -> None:
    episode = episode_of(tokenizer, name, ["A.<eos>"], how)
    assert episode.earned.failed
    assert reason in episode.earned.reason


def test_half_a_character_becomes_a_question_mark(tokenizer: Any) -> None:
    episode = episode_of(tokenizer, "Does", ["A.<eos>", "B.<eos>"], "half a character", max_turns=2)
    assert [one["content"] for one in episode.messages] == ["A.", "a?b", "B."]


def test_a_reward_of_numpy_keeps_its_parts(tokenizer: Any) -> None:
    episode = episode_of(tokenizer, "Does", ["A.<eos>"], "numpy")
    assert (episode.earned.value, episode.earned.parts) == (1.0, {"found": 1.0})


def test_turns_earn_together_and_each_where_it_ended(tokenizer: Any) -> None:
    """Both turns earn 0.5; the end of the first is a process reward."""
    episode = episode_of(tokenizer, "Does", ["A.<eos>", "B.<eos>"], "a score", max_turns=2)
    assert (episode.earned.value, episode.earned.parts) == (1.0, {"found": 1.0})
    assert episode.earned.process == tuple((place, 0.5) for place in episode.ends)


def test_a_class_that_is_made_too_slowly_fails_its_episode(tokenizer: Any) -> None:
    episode = episode_of(tokenizer, "Slow", ["A.<eos>"], timeout=0.1)
    assert "the class took more than 0.1 s" in episode.earned.reason


def test_each_episode_has_rows_and_options_of_its_own(tokenizer: Any) -> None:
    prompt = {"board": [0]}
    chats = Chats(tokenizer, DataSettings(chat_template="default"))
    for _ in range(2):
        _, episode, _ = played(chats, ["A.<eos>"], "Changes", file=HERE, extra=prompt, options={"marks": []})
        assert episode.earned is not None and episode.earned.value == 3.0


@pytest.mark.parametrize("text", ["<tool_call>" + "[" * 2000, hermes(arguments='{"a": "\\ud800", "b": 1}')])
def test_calls_that_break_a_parser_or_a_tokenizer_end_no_run(text: str, tokenizer: Any) -> None:
    chats = Chats(tokenizer, DataSettings(chat_template="default"), (), TOOLS)
    _, episode, _ = played(chats, [f"{text}<eos>", "Done.<eos>"], "Sums")
    assert episode.counts["calls"] + episode.counts["unread_calls"] == 1


def test_a_message_whose_call_cannot_be_read_is_whole(tokenizer: Any) -> None:
    chats = Chats(tokenizer, DataSettings(chat_template="default"), (), TOOLS)
    text = "I think <tool_call>{bad}</tool_call> it is 42"
    answer, episode, _ = played(chats, [f"{text}<eos>"], "Sums")
    assert answer.text == text == episode.messages[0]["content"]


def test_a_turn_that_a_stop_string_ends_has_its_call_once(tokenizer: Any) -> None:
    chats = Chats(tokenizer, DataSettings(chat_template="default"), (), TOOLS)
    _, episode, engine = played(chats, [hermes(), "It is 5.<eos>"], "Sums", stop=("</tool_call>",))
    assert tokenizer.decode(engine.asked[1]).count("<tool_call>") == 1
    assert [start for start, _ in episode.restarts] == [len(tokenizer(hermes())["input_ids"])]


@pytest.mark.parametrize("special", [False, True])
def test_others_read_a_turn_as_the_engine_writes_answers(special: bool, tokenizer: Any) -> None:
    """Up to the stop string, and without special tokens unless they are asked for."""
    chats = Chats(tokenizer, DataSettings(chat_template="default"))
    answer, episode, _ = played(
        chats, ["Hi<bos>there. Stop"], "Hears", file=HERE, stop=("Stop",), special_tokens=special
    )
    assert answer.text == ("Hi<bos>there. " if special else "Hithere. ")
    assert episode.earned is not None and episode.earned.value == len(answer.text)
    assert episode.messages[0]["content"] == "Hi<bos>there. Stop", "as it was sampled"


def test_a_rows_own_tools_and_arguments_are_shown_in_every_turn(tokenizer: Any) -> None:
    template = "{% for t in tools or [] %}{{ t.name }} {{ t.description }} {% endfor %}[{{ style }}]" + SAID
    chats = Chats(tokenizer, DataSettings(chat_template=template), tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    extra = {"tools": '[{"name": "look", "description": "dd"}]', "chat_template_kwargs": {"style": "short"}}
    given = {"tools": [{"name": "look", "description": "dd"}], "style": "short"}
    _, episode, engine = played(
        chats, ["A.<|im_end|>"] * 3, "Listener", engine_ends(tokenizer), extra=extra, arguments=given
    )
    assert episode.restarts == ()
    assert all(tokenizer.decode(asked).startswith("look dd [short]") for asked in engine.asked)


SAID = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def engine_ends(tokenizer: Any) -> list[int]:
    return list(tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools"):
        World(EnvironmentSettings(function=f"{worlds.__file__}:Sums", tools=[f"{HERE}:add"]))


def add(a: int) -> int:
    """Add.

    Args:
        a: One.
    """
    return a


class Hears:
    def step(self, message: dict[str, Any]) -> Turn:
        return Turn(done=True, reward=float(len(message["content"])))
