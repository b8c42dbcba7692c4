"""An episode that is played before the run, without a model: the policy's turns are written here.

prompt -> player, with Written as its engine: a call of the first tool, then the reference answer -> its chat
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from plaudit.data.chat import Chats
from plaudit.environments.agents import Agents, player_of
from plaudit.environments.answers import decoded
from plaudit.environments.base import World
from plaudit.environments.calls import QUESTION, Message, as_messages
from plaudit.environments.rendered import renderer_of
from plaudit.support.visible import visible
from plaudit.types import Completion, Finish, Prompt, Sampling

TURNS = 3
"""Most turns that are played."""
SHOWN = 200
"""Most characters that are shown of a message."""
PATIENCE = 10.0
"""Most seconds of a call of the environment."""
EXAMPLES = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""Arguments of the call, by the types of the tool's schema."""


class Written:
    """A `Sampler` that answers with given texts, one after the other, and with the last of them from then on."""

    busy = False

    def __init__(self, texts: Sequence[str], chats: Chats):
        self.texts, self.tokenizer = list(texts), chats.tokenizer
        self.end = chats.tokenizer.convert_tokens_to_ids(chats.ends[0]) if chats.ends else 0

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]
        none = [0] * len(tokens)
        one = Completion(tokens=tokens, logprobs=none, versions=none, text=text, finish=Finish.EOS)
        return [one] * len(plan)


def rehearsed(prompt: Prompt, chats: Chats, world: World | Agents) -> list[str]:
    """Return a line for each message of an episode after its prompt, and one of what the environment says that it is
    worth."""
    player = player_of(Written([prompt.answer or "1"], chats), chats, world)
    if world.schemas:
        function = world.schemas[0]["function"]
        arguments = {
            name: EXAMPLES.get(str(one.get("type")), "1") for name, one in function["parameters"]["properties"].items()
        }
        call = {**as_messages([(function["name"], arguments)], first=0), "content": ""}
        text = _written(call, chats, world)
        player.engine.texts.insert(0, text)  # type: ignore[attr-defined]
    own = world.settings
    world.settings = replace(own, max_turns=min(TURNS, own.max_turns), timeout=min(PATIENCE, own.timeout))
    (played,) = asyncio.run(player.play(prompt, [Sampling()]))
    assert played.episode is not None and played.episode.earned is not None
    earned = played.episode.earned
    worth = f"reward {earned.value:g}" if earned.value is not None else str(earned.reason)
    said = [f"{one['role']}: {one['content'] or json.dumps(one.get('tool_calls'))}" for one in played.episode.messages]
    return [visible(line, line=True)[:SHOWN] for line in (*said, worth)]


def _written(call: Message, chats: Chats, world: World | Agents) -> str:
    """Return a call as the policy would write it."""
    if (renderer := renderer_of(world.settings, chats)) is None:
        return chats.completion(chats.prompt([QUESTION], {}), [QUESTION], call, {})
    asked = renderer.render_ids([QUESTION], tools=list(world.schemas), add_generation_prompt=True)
    whole = renderer.render_ids([QUESTION, call], tools=list(world.schemas))
    text, end = decoded(chats.tokenizer, whole[len(asked) :]), chats.ends[0] if chats.ends else ""
    return text.partition(end)[0] if end else text
