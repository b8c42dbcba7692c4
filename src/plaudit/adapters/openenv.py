"""A client of OpenEnv's servers (package openenv) as an environment; each episode has a session of its own.

    environment:
      function: plaudit.adapters.openenv:Client
      options: {url: "http://127.0.0.1:8000", action: message, observation: text}

    reset(seed) -> the observation, after the row's prompt
    the policy's message -> {action: content} -> the observation, what the message earned, or the end

Left out: tools (servers of MCP environments are refused), actions of several fields, images.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from openenv import GenericEnvClient

from plaudit.environments.base import Turn

FOREVER = 1e6
"""Seconds that openenv waits for a reply: environment.timeout is over before."""


class Client:
    """One session of the server at `url`. `action` names the field of its actions that holds the policy's message. The
    policy reads the field `observation`, or the whole observation without its metadata, as JSON.

    A message that the server refuses as an action is answered with `error: ...`. Let the server's max_concurrent_envs
    be at least the number of episodes that are open at once."""

    def __init__(self, url: str, action: str = "message", observation: str | None = None):
        self._url, self._action, self._field = url.rstrip("/"), action, observation
        self._client = GenericEnvClient(base_url=url, message_timeout_s=FOREVER)
        self._begun: float | None = None
        """What reset earned."""
        self._socket: Any = None

    async def reset(self, seed: int) -> str:
        await self._check()
        result = await self._answer(self._client.reset(seed=seed))
        if result.done:
            await self._client.close()
            raise ValueError("the server's episode is over after reset")
        self._begun, self._socket = result.reward, self._client._ws
        return self._read(result.observation)

    async def step(self, message: dict[str, Any]) -> str | Turn:
        try:
            result = await self._answer(self._client.step({self._action: message["content"]}))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return f"error: {error}"
        if result.done:
            await self._client.close()
            return Turn(done=True, reward=result.reward)
        said = {"role": "user", "content": self._read(result.observation)}
        return Turn(messages=[said], reward=result.reward)

    async def get_reward(self) -> float | None:
        await self._client.close()
        return self._begun

    async def _check(self) -> None:
        """Raise ValueError if the server's actions are not this one field: only its schema tells that from an answer
        that the server refuses."""
        async with httpx.AsyncClient(trust_env=False) as http:
            schema = (await http.get(f"{self._url}/schema")).raise_for_status().json()["action"]
        fields, needed = [*schema.get("properties", ())], {*schema.get("required", ())}
        if self._action not in fields or needed - {self._action}:
            raise ValueError(f"{self._url} takes actions of the fields {', '.join(fields)}, not {self._action} only")

    async def _answer(self, asked: Any) -> Any:
        """Return the server's answer; end the session if there is none, or if it is of another session: openenv begins
        one, without reset, where the last broke off."""
        result, error = None, None
        try:
            result = await asked
        except Exception as found:  # noqa: BLE001 - raised below
            error = found
        if self._socket not in (None, self._client._ws):
            error = ConnectionError("the session broke off between two turns")
        if error is None:
            return result
        if "VALIDATION_ERROR" not in str(error):
            await self._client.close()
        raise error

    def _read(self, observation: dict[str, Any]) -> str:
        if self._field is None:
            return json.dumps({name: one for name, one in observation.items() if name != "metadata"})
        if self._field not in observation:
            raise ValueError(f"there is no {self._field} in the observation, but {', '.join(observation)}")
        found = observation[self._field]
        return found if isinstance(found, str) else json.dumps(found)
