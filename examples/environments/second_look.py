"""An agent: it asks for an answer, then for a second look at it, and is paid if that is right."""

from typing import Any

from openai import AsyncOpenAI


async def solve(client: AsyncOpenAI, messages: list[Any], answer: str) -> dict[str, float]:
    """Return the reward, and whether the first answer was right too."""
    first = await client.chat.completions.create(model="policy", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Check this. End with the number."}]
    second = await client.chat.completions.create(model="policy", messages=messages)
    right = [answer in (reply.choices[0].message.content or "") for reply in (first, second)]
    return {"reward": float(right[1]), "right_at_first": float(right[0])}
