"""A reward from HTTP servers that speak the protocol of docs/rewards.md, such as `plaudit serve-reward`.

    score -> waiting items -> a request takes up to `batch` of them -> the least busy server -> one Score each

- A failed request is sent again, if possible to another server. The failed server rests, twice as long each time.
- If a server refuses a request's content, the request is split in half and sent again, until the bad item is alone.
- An item that gets no valid answer has a Score without a value, with the reason.
- Redirects are not followed: content and token are only for the servers that the settings name. Proxies in the
  environment are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.rewards import protocol
from plaudit.rewards.base import completed
from plaudit.rewards.settings import LlmSettings, RewardSettings
from plaudit.runtime.queue import Queue
from plaudit.types import Completion, Prompt, Score

FIRST_REST, LONGEST_REST = 0.5, 15.0
"""Seconds that a server rests after its first failure and after many. Each rest is shortened by up to half."""
LARGEST_ANSWER = 4 << 20
"""Largest size of an answer, in bytes."""
TRY_AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 after which another attempt may succeed."""
OF_CONTENT = frozenset({400, 413, 422})
"""Statuses about the request's content (perhaps one item of it), and not about the server."""


class RewardServerError(RuntimeError):
    """No server of a reward (or of `llm`) can be used, or its token is missing."""


class Failed(Exception):
    """A request failed. `final`: this server would refuse a retry too. `of_content`: but other items might succeed."""

    def __init__(self, reason: str, *, final: bool = False, of_content: bool = False):
        super().__init__(reason)
        self.final, self.of_content = final, of_content


@dataclass(eq=False, slots=True)
class _Item:
    body: str


@dataclass(eq=False, slots=True)
class _Server:
    """A server's load, and its rests: pauses without requests after a failure. `failures` counts rests in a row. A
    failed request counts only if it was sent after the last rest began."""

    url: str
    outstanding: int = 0
    asked: int = 0
    failures: int = 0
    rest_began: float = 0.0
    rest_ends: float = 0.0
    luck: random.Random = field(default_factory=random.Random)

    def failed(self, began: float, now: float) -> None:
        if began < self.rest_began:
            return
        rest = min(LONGEST_REST, FIRST_REST * 2**self.failures) * self.luck.uniform(0.5, 1.0)
        self.failures, self.rest_began, self.rest_ends = self.failures + 1, now, now + rest

    def worked(self) -> None:
        self.failures, self.rest_ends = 0, 0.0


class HttpReward:
    """Gets scores from servers. Connections are open only while scores are awaited."""

    def __init__(self, settings: RewardSettings, *, vocabulary: str = ""):
        """`vocabulary` is the digest of the vocabulary of prompts and completions."""
        self.settings, self.vocabulary = settings, vocabulary
        self.name = settings.name or "http"
        self.servers = [_Server(url.rstrip("/")) for url in settings.urls]
        self._headers = headers_with(settings.token_env, f"reward {self.name!r}")
        self._verify = verify(settings.urls)
        self._queue: Queue[_Item, Score] = Queue(self._send, tasks=settings.concurrency)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return await completed([_asked(prompt, completion) for completion in completions], self._queue.ask)

    async def _send(self) -> None:
        """Takes: waiting items. Waits for: a server's answer. Gives: one Score each. Ends when no item waits."""
        if not self._queue.open:
            return
        async with client_of(self._headers, self._verify) as client:
            while items := self._queue.take(self.settings.batch):
                for item, score in zip(items, await self._scores(client, items), strict=True):
                    self._queue.answer(item, score)

    async def _scores(self, client: Any, items: Sequence[_Item]) -> list[Score]:
        bodies = [item.body for item in items]
        body = protocol.request(bodies, vocabulary=self.vocabulary, options=self.settings.options)
        refused: set[_Server] = set()
        attempts, reason, divisible = 0, "", False
        while attempts <= self.settings.retries and len(refused) < len(self.servers):
            server = await self._least_busy(refused)
            attempts += 1
            try:
                return await self._ask(client, server, body, len(items))
            except Failed as failed:
                reason, divisible = f"{server.url}: {failed}", failed.of_content and len(items) > 1
                if failed.final:
                    refused.add(server)
            if all(server.failures > self.settings.retries for server in self.servers):
                break  # every server has failed too often, also for other requests
        if divisible:  # so that one bad item does not fail the others
            half = len(items) // 2
            return [score for part in (items[:half], items[half:]) for score in await self._scores(client, part)]
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        transient = len(refused) < len(self.servers)
        return [Score(value=None, reason=f"{reason} ({tried})", transient=transient)] * len(items)

    async def _least_busy(self, refused: set[_Server]) -> _Server:
        """Wait until a server does not rest. Return the one with the fewest open requests, then the fewest so far."""
        open_ = [server for server in self.servers if server not in refused]
        while True:
            now = asyncio.get_running_loop().time()
            ready = [server for server in open_ if server.rest_ends <= now]
            if ready:
                return min(ready, key=lambda server: (server.outstanding, server.asked))
            await asyncio.sleep(min(server.rest_ends for server in open_) - now)

    async def _ask(self, client: Any, server: _Server, body: bytes, count: int) -> list[Score]:
        clock = asyncio.get_running_loop().time
        began = clock()
        server.outstanding += 1
        server.asked += 1
        try:
            status, content = await exchanged(client, f"{server.url}/score", body, self.settings.timeout)
            scores = _read(status, content, count)
        except Failed as failed:
            if not failed.of_content:
                server.failed(began, clock())
            raise
        finally:
            server.outstanding -= 1
        server.worked()
        return scores


def _asked(prompt: Prompt, completion: Completion) -> _Item | Score:
    """Return the item to send, or a failed score if the completion cannot be sent."""
    try:
        return _Item(protocol.item(prompt, completion))
    except (ValueError, TypeError) as error:
        return Score(value=None, reason=f"not sent: {error}")


async def exchanged(client: Any, url: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
    """Send a request, GET without a body; return the answer's status and body. Raises Failed if there is none within
    `timeout` seconds for the whole exchange, since a server may send its answer slowly."""
    import httpx2

    try:
        async with (
            asyncio.timeout(timeout),
            client.stream("GET" if body is None else "POST", url, content=body) as response,
        ):
            return response.status_code, await _limited(response)
    except TimeoutError:
        raise Failed(f"no answer within {timeout:g} s") from None
    except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise Failed(f"{type(error).__name__}: {error!s:.200}") from error


async def _limited(response: Any) -> bytes:
    """Read the body. Raises Failed if it exceeds LARGEST_ANSWER or is compressed: decompressed it may be huge."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise Failed("the answer is compressed, which was not asked for", final=True)
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > LARGEST_ANSWER:
            raise Failed(f"the answer has more than {LARGEST_ANSWER >> 20} MiB", final=True)
    return bytes(body)


def _read(status: int, content: bytes, count: int) -> list[Score]:
    if status != 200:
        said = " ".join(content[: protocol.REASON_LENGTH].decode(errors="replace").split())
        final = status < 500 and status not in TRY_AGAIN
        raise Failed(f"status {status}: {said}", final=final, of_content=status in OF_CONTENT)
    try:
        return protocol.read_answer(content, count)
    except protocol.ProtocolError as error:
        raise Failed(str(error)) from None


@contextlib.asynccontextmanager
async def client_of(headers: dict[str, str], verify: Any) -> AsyncIterator[Any]:
    """Open a client without time-outs, since its callers limit the whole exchange."""
    import httpx2

    async with httpx2.AsyncClient(
        headers=headers, verify=verify, timeout=None, trust_env=False, follow_redirects=False
    ) as client:
        yield client


def headers_with(token_env: str, whose: str) -> dict[str, str]:
    """Return headers with the token in the variable `token_env`, unless that is "". Errors call the reader `whose`."""
    found = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
    if token_env:
        token = os.environ.get(token_env, "").strip()
        if not token:
            raise RewardServerError(
                f"{whose} reads its token from the environment variable {token_env} (token_env), which is empty here"
            )
        if not token.isascii() or not token.isprintable():
            raise RewardServerError(
                f"the environment variable {token_env} (token_env) must hold printable ASCII characters only"
            )
        found["authorization"] = f"Bearer {token}"
    return found


def verify(urls: Sequence[str]) -> Any:
    """Return the context that verifies servers' certificates, or False if no address is https; then none are loaded."""
    if not any(url.startswith("https:") for url in urls):
        return False
    import httpx2

    return httpx2.create_ssl_context()


async def check_servers(settings: RewardSettings, patience: float = 10.0) -> list[str]:
    """Ask every server, for at most `patience` seconds, whether it answers: /health, or /models of a language model.
    Return a message for each server with a problem. Called before a model is loaded.

    Raises RewardServerError if every server has one.
    """
    named, keys = f"reward {settings.name or settings.kind!r}", "urls and token_env"
    start = " (`plaudit serve-reward JUDGE`)"
    endpoint: RewardSettings | LlmSettings = settings
    if settings.kind == "llm":
        endpoint, keys, start = settings.llm, "llm.url and llm.token_env", ""
    timeout, asked = min(endpoint.timeout, patience), headers_with(endpoint.token_env, named)
    async with client_of(asked, verify(settings.asked)) as client:
        found = await asyncio.gather(*(_health(client, address, timeout) for address in settings.asked))
    problems = [problem for problem in found if problem is not None]
    if len(problems) == len(settings.asked):
        raise RewardServerError(
            f"no server of {named} can be used: {'; '.join(problems)}. Start one{start}, or correct rewards' {keys}"
        )
    return problems


async def _health(client: Any, address: str, timeout: float) -> str | None:
    """Return what is wrong with a server, or None. Servers other than ours need not have this address."""
    try:
        status, _ = await exchanged(client, address, None, timeout)
    except Failed as failed:
        return f"{address}: {failed}"
    if status in (401, 403):
        return f"{address}: status {status}: the token is missing or wrong (token_env)"
    return None if status in (200, 204, 404, 405) else f"{address}: status {status}"
