"""Episodes: the policy and an environment in turn.

    prompt -> reset -> sampled turn -> tools or step -> what stands between turns -> sampled turn -> ... -> Completion

Left out: the tokens (`transcript.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plaudit.data.chat import Chats
from plaudit.environments.base import EpisodeError, Message, Turn, World
from plaudit.environments.rendered import forms_of, renderer_of, transcript
from plaudit.environments.transcript import Transcript
from plaudit.environments.workers import EnvironmentWorkers, Playing
from plaudit.rollout.engine import Sampler
from plaudit.runtime.coroutines import together
from plaudit.types import Completion, Finish, Prompt, Sampling, Score
from plaudit.types.distant import here


class Player:
    """Plays an episode for each entry of a plan. Raises DataError for a chat template that cannot show its turns, and
    ValueError for a renderer that cannot be made."""

    def __init__(self, engine: Sampler, chats: Chats, world: World, workers: EnvironmentWorkers | None = None):
        """`workers`: the environment's processes; None: it runs in this one."""
        self.engine, self.chats, self.world, self._begins = engine, chats, world, workers or world
        self.forms = forms_of(chats, world.schemas, renderer_of(world.settings, chats))

    async def play(self, prompt: Prompt, plan: Sequence[Sampling]) -> list[Completion]:
        """Return an episode for each entry. Each depends on its seed, the prompt, the weights and its environment,
        which has the same `seed` in all of them."""
        return await together(self._played(prompt, sampling, plan[0].seed) for sampling in plan)

    async def _played(self, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        episode = transcript(prompt, self.chats, self.forms, most=self.world.settings.max_tokens)
        number = hashed(sampling.seed, *prompt.tokens)
        try:
            environment = await self._begins.begin()
            try:
                episode.ask(await environment.reset(row_of(prompt, seed)))
                await self._turns(episode, environment, replace(sampling, episode=number))
                earned = await environment.score()
            finally:
                await environment.close()
        except EpisodeError as error:
            earned = Score(value=None, reason=str(error))
        return episode.completion(earned)

    async def _turns(self, episode: Transcript, environment: Playing, sampling: Sampling) -> None:
        """Play turns until the environment says that it is done, or until a limit is reached."""
        for number in range(self.world.settings.max_turns):
            room = min(sampling.max_tokens, episode.room)
            seed = turn_seed(sampling.seed, number)
            own = replace(sampling, seed=seed, max_tokens=room, first=episode.first)
            (answer,) = here(await self.engine.generate(tuple(episode.context), [own]))
            episode.answered(answer, own)
            if not answer.finished:
                return
            turn = await said(environment, episode)
            if turn.reward is not None and not turn.done:
                episode.process.append((len(episode.tokens) - 1, float(turn.reward)))
            if turn.done:
                return
            if number + 1 == self.world.settings.max_turns:
                episode.finish = Finish.TURNS
            elif not episode.observe(turn.messages):
                episode.finish = Finish.LENGTH
                return


async def said(environment: Playing, episode: Transcript) -> Turn:
    """Return what the environment says to the policy's last message: its tools' results, or what its step returns."""
    message = episode.messages[-1]
    if not (calls := message.get("tool_calls")):
        return await environment.step({**message, "content": episode.last})
    results: list[Message] = []
    done, rewards = False, list[float]()
    for call in calls:
        name = call["function"]["name"]
        turn, worked = await environment.call(name, call["function"]["arguments"])
        episode.counts["failed_calls"] += not worked
        done = done or turn.done
        rewards += [] if turn.reward is None else [float(turn.reward)]
        results += [{**one, "role": "tool", "name": name, "tool_call_id": call["id"]} for one in turn.messages]
    return Turn(messages=results, done=done, reward=sum(rewards) if rewards else None)


def row_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """Return what an episode's reset may ask for: seed (of 32 bits), prompt, answer, and the row's other columns."""
    return {"seed": seed % (1 << 32), "prompt": prompt.text, "answer": prompt.answer, **prompt.extra}


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of an episode's turn; that of the first is the episode's own, as for an answer of one turn."""
    return hashed(seed, turn) if turn else seed


def hashed(*numbers: int) -> int:
    """Return 63 bits that depend on these numbers."""
    whole = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(whole.encode(), digest_size=8).digest(), "little") >> 1
