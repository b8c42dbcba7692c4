"""An episode in the form of a real renderer: calls as tags, which no chat template says how to read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import worlds
from chat_shapes import SPECIAL, train_tokenizer
from scripted import Scripted

pytest.importorskip("renderers", reason="pip install renderers")

from plaudit.data.chat import Chats
from plaudit.data.settings import DataSettings
from plaudit.environments.base import World
from plaudit.environments.episodes import Player
from plaudit.environments.rendered import renderer_of
from plaudit.environments.settings import EnvironmentSettings
from plaudit.types import Prompt, Sampling

EXAMPLE = Path(__file__).parents[2] / "examples" / "environments" / "qwen_renderer.py"
TOKENS = "<|im_start|> <|im_end|> <|endoftext|> <think> </think>".split()
TOKENS += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TOKENS += [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
ASK = {"role": "user", "content": "Two and three?"}
CALL = (
    "Adding.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)


def test_a_folder_of_qwen_plays_in_its_own_form() -> None:
    tokenizer = train_tokenizer(bos_token="<bos>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:], *TOKENS]})
    chats = Chats(tokenizer, DataSettings(chat_template="default"), ())
    settings = EnvironmentSettings(function=f"{Path(worlds.__file__)}:Sums", renderer=f"{EXAMPLE}:qwen35")
    world, engine = World(settings), Scripted(tokenizer, [CALL, "Easy.\n</think>\n\nIt is 5.<|im_end|>"])
    prompt = Prompt(id="p", text="", tokens=(5,), messages=(ASK,))
    (answer,) = asyncio.run(Player(engine, chats, world).play(prompt, [Sampling(max_tokens=200)]))
    assert answer.episode is not None and answer.episode.earned is not None
    assert answer.episode.earned.value == 5.0, answer.episode.earned
    assert answer.episode.counts == {"turns": 2, "calls": 1, "failed_calls": 0, "unread_calls": 0}
    assert answer.text == "It is 5."
    renderer = renderer_of(settings, chats)
    assert renderer is not None
    chat = [ASK, *answer.episode.messages[:2]]
    assert "add" in tokenizer.decode(engine.asked[0]), "the renderer shows the tools"
    assert list(engine.asked[1]) == renderer.render_ids(chat, tools=world.schemas, add_generation_prompt=True)
    assert len(answer.episode.restarts) == 1, "one row: the thought stays while tools are called"
