"""Servers of OpenEnv (package openenv) as environments: each episode is a session of its own.

    environment:
      function: plaudit.adapters.openenv:Client
      options: {url: "http://127.0.0.1:8000", action: message, observation: text}

    reset(seed) -> an observation, after the row's prompt
    the policy's message -> {action: its content} -> an observation, a reward, or the end

Left out: servers of tools (MCP environments), actions of several fields, images, rewards of a reset.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
from openenv import GenericEnvClient

from plaudit.environments.base import Message, Turn


class Client:
    """A session of the server at `url`. `action` names the field of an action that is the policy's message. The policy
    reads the observation's field `observation`, or all of it but its metadata, as JSON.

    A message that the server refuses as an action is answered with an error. All episodes of a step are open at once:
    let the server's max_concurrent_envs be as many, since one too many fails."""

    def __init__(self, url: str, action: str = "message", observation: str | None = None):
        self._url, self._action, self._field = url.rstrip("/"), action, observation
        self._client = GenericEnvClient(base_url=url, message_timeout_s=1e6)  # environment.timeout is over before
        self._socket: Any = None
        """The connection that reset made."""

    async def reset(self, seed: int) -> Sequence[Message]:
        async with httpx.AsyncClient(trust_env=False) as http:
            schema = (await http.get(f"{self._url}/schema")).raise_for_status().json()["action"]
        fields, needed = [*schema.get("properties", ())], {*schema.get("required", ())}
        if self._action not in fields or needed - {self._action}:
            raise ValueError(f"{self._url} takes actions of the fields {', '.join(fields)}, not {self._action} only")
        turn = await self._turn(self._client.reset(seed=seed))
        self._socket = self._client._ws
        return turn.messages

    async def step(self, message: Message) -> Turn:
        try:
            return await self._turn(self._client.step({self._action: message["content"]}))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return Turn(messages=[{"role": "user", "content": f"error: {error}"}])

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    async def _turn(self, asked: Any) -> Turn:
        """Return what the server answers. Raises ConnectionError if the connection broke: openenv then begins another
        session without reset, whose answers are of no use."""
        try:
            result = await asked
        finally:
            if self._socket not in (None, self._client._ws):
                raise ConnectionError("the session broke off between two turns")
        if result.done:
            return Turn(done=True, reward=result.reward)
        return Turn(messages=[{"role": "user", "content": self._read(result.observation)}], reward=result.reward)

    def _read(self, observation: dict[str, Any]) -> str:
        if self._field is None:
            return json.dumps({name: one for name, one in observation.items() if name != "metadata"})
        if self._field not in observation:
            raise ValueError(f"there is no {self._field} in the observation, but {', '.join(observation)}")
        found = observation[self._field]
        return found if isinstance(found, str) else json.dumps(found)
