"""Agents for tests: they speak the protocol as any client does, without a library."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx2

Message = dict[str, Any]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def asked(base_url: str, api_key: str, messages: list[Message], **more: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=30) as client:
        body = {"model": "any", "messages": messages, **more}
        return await client.post(
            f"{base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {api_key}"}
        )


async def said(base_url: str, api_key: str, messages: list[Message], **more: Any) -> Message:
    response = await asked(base_url, api_key, messages, **more)
    assert response.status_code == 200, response.text
    message: Message = response.json()["choices"][0]["message"]
    return message


async def echoes(base_url: str, api_key: str, messages: list[Message]) -> dict[str, float]:
    """As worlds.Echo: says back how long each answer was, three times."""
    lengths = list[int]()
    for _ in range(3):
        answer = await said(base_url, api_key, messages)
        lengths.append(len(answer["content"]))
        messages += [answer, {"role": "user", "content": f"{lengths[-1]} letters"}]
    return {"reward": sum(lengths) / 100, "turns": 3.0}


def waits(base_url: str, api_key: str, messages: list[Message]) -> float:
    """A sync one."""
    with httpx2.Client(timeout=30) as client:
        response = client.post(
            f"{base_url}/chat/completions",
            json={"messages": messages, "temperature": 0.001, "top_p": 0},
            headers={"authorization": f"Bearer {api_key}"},
        )
    return float(response.json()["usage"]["prompt_tokens"])


async def letters(base_url: str, api_key: str, messages: list[Message], seed: int, prompt: str) -> float:
    """As worlds.Letters: prefers some letter, by the row. Half of the episodes end in a question out of the blue."""
    wanted, spoken = "aeinorst"[(seed + len(prompt)) % 8], ""
    for number in range(3):
        answer = await said(base_url, api_key, messages)
        spoken += answer["content"]
        messages = [*messages, answer, {"role": "user", "content": f"{number} said."}]
    if len(spoken) % 2:
        spoken += (await said(base_url, api_key, [{"role": "user", "content": "Well?"}]))["content"]
    return spoken.count(wanted) / (1 + len(spoken))


async def forgets(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Drops its first question from what it asks next."""
    answer = await said(base_url, api_key, messages)
    await said(base_url, api_key, [answer, {"role": "user", "content": "And then?"}])
    return 1.0


async def repeats(base_url: str, api_key: str, messages: list[Message]) -> float:
    """1 if the same request has the same reply, and one with another seed another; both at once."""
    same = await asyncio.gather(*(said(base_url, api_key, messages) for _ in range(2)))
    other = await said(base_url, api_key, messages, seed=5)
    return float(same[0] == same[1] != other)


async def splits(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Goes on in two ways from one answer, at once."""
    messages += [await said(base_url, api_key, messages)]
    ways = ([*messages, {"role": "user", "content": f"Way {way}?"}] for way in "ab")
    await asyncio.gather(*(said(base_url, api_key, way) for way in ways))
    return 2.0


async def adds(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Gives the policy a tool, and calls it."""
    answer = await said(base_url, api_key, messages, tools=[ADD])
    (call,) = answer["tool_calls"]
    assert call["function"]["name"] == "add"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    trimmed = {"role": "assistant", "content": None, "tool_calls": answer["tool_calls"]}  # as clients write it
    last = await said(base_url, api_key, [*messages, trimmed, result], tools=[ADD])
    return float(last["content"] == "It is 5.")


async def endless(base_url: str, api_key: str, messages: list[Message], answer: str) -> float:
    while True:
        messages += [await said(base_url, api_key, messages), {"role": "user", "content": "again"}]


async def patient(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Sees the limit, and returns what it has."""
    response = await asked(base_url, api_key, messages)
    while response.status_code == 200:
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        response = await asked(base_url, api_key, messages)
    assert response.json()["error"]["code"] in ("turn_limit", "context_length_exceeded")
    return 0.25


async def silent(base_url: str, api_key: str, messages: list[Message]) -> float:
    await said(base_url, api_key, messages)
    await asyncio.sleep(60)
    return 1.0


async def fails(base_url: str, api_key: str, messages: list[Message]) -> float:
    await said(base_url, api_key, messages)
    raise KeyError("board")


async def stubborn(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Makes the same request until it is refused, and takes no failure for one."""
    for _ in range(30):
        response = await asked(base_url, api_key, messages)
        if response.status_code != 200:
            return float(response.status_code)
    return 1.0


async def cancels(base_url: str, api_key: str, messages: list[Message]) -> float:
    task = asyncio.ensure_future(said(base_url, api_key, messages))
    task.cancel()
    await task
    return 1.0


async def changes(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Changes what it was given."""
    await said(base_url, api_key, messages)
    messages[0]["content"] += "!"
    messages.append(messages[0])
    return float(len(messages) + messages[0]["content"].count("!"))


async def recovers(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Asks a question that is too long, then a shorter one."""
    long = {"role": "user", "content": "very long " * 200}
    assert (await asked(base_url, api_key, [long])).status_code == 400
    await said(base_url, api_key, messages)
    return 1.0


async def verbose(base_url: str, api_key: str, messages: list[Message]) -> float:
    await said(base_url, api_key, [{"role": "system", "content": "very long " * 200}, *messages])
    return 1.0


LEFT: list[int] = []
"""Statuses of requests whose agent had gone."""


async def leaves(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Returns while a request of its is open."""
    await said(base_url, api_key, messages)

    def late() -> None:
        LEFT.append(asyncio.run(asked(base_url, api_key, messages, seed=1)).status_code)

    threading.Thread(target=late).start()
    await asyncio.sleep(0.2)
    return 1.0


async def thinks(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Goes on from the first of two answers that differ in their thoughts alone, with them."""
    first, _ = [await said(base_url, api_key, messages, seed=seed) for seed in (1, 2)]
    await said(base_url, api_key, [*messages, first, {"role": "user", "content": "Why?"}])
    return 1.0


async def idle(base_url: str) -> float:
    return 1.0


async def stranger(base_url: str, messages: list[Message]) -> float:
    return float((await asked(base_url, "a key of my own", messages)).status_code)


async def streams(base_url: str, api_key: str, messages: list[Message]) -> float:
    response = await asked(base_url, api_key, messages, stream=True)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return float(lines[-1] == "data: [DONE]" and any('"content": "' in line for line in lines))


async def libraries(client: Any, messages: list[Message]) -> float:
    """With the library's own client."""
    lengths = list[int]()
    for _ in range(3):
        answer = (await client.chat.completions.create(model="gpt-4o", messages=messages)).choices[0].message
        lengths.append(len(answer.content or ""))
        messages += [answer, {"role": "user", "content": f"{lengths[-1]} letters"}]
    return sum(lengths) / 100


def lacks(base_url: str, colour: str) -> float:
    return 1.0


def asks_nothing(row: str) -> float:
    return 1.0


async def drifts(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Asks otherwise in every call."""
    messages += [{"role": "user", "content": f"It is {time.monotonic_ns()}."}]
    for _ in range(2):
        messages += [await said(base_url, api_key, messages), {"role": "user", "content": "again"}]
    return 1.0


async def shouts(base_url: str, api_key: str, messages: list[Message]) -> float:
    """Sends what is no request, with a key of its own."""
    await said(base_url, api_key, messages)
    async with httpx2.AsyncClient(timeout=30) as client:
        headers = {"authorization": "Bearer mine", "content-type": "application/json"}
        response = await client.post(f"{base_url}/chat/completions", content=b"no json", headers=headers)
    return float(response.status_code)
