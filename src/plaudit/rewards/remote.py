"""A reward that servers give over HTTP: the protocol of docs/rewards.md, by `plaudit serve-reward` or by anybody.

    score -> items that wait -> a request takes up to `batch` of them -> the least busy server -> one Score each

A request that fails in any way is sent again, to another server where there is one; who fails rests, twice as long each
time. Items that are refused for what they are, are asked about again in halves, until the bad one is alone. What never
got a proper answer is a Score without value and with the reason. Redirects are not followed: what is sent, a token
included, is for the servers that the settings name. Proxies in the environment are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.rewards import protocol
from plaudit.rewards.settings import RewardSettings
from plaudit.types import Completion, Prompt, Score

FIRST_REST, LONGEST_REST = 0.5, 15.0
"""Seconds that a server rests after its first failure and after many; a random half of it is left out each time."""
LARGEST_ANSWER = 4 << 20
"""Bytes."""
TRY_AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 that another attempt may mend."""
OF_CONTENT = frozenset({400, 413, 422})
"""Statuses that speak of what was sent: of one item among others, perhaps, and not of the server."""


class RewardServerError(RuntimeError):
    """No server of a reward answers as one."""


class _Failed(Exception):
    """One request's end. `final`: this server would say so again. `of_content`: of other items perhaps not."""

    def __init__(self, reason: str, *, final: bool = False, of_content: bool = False):
        super().__init__(reason)
        self.final, self.of_content = final, of_content


@dataclass(eq=False, slots=True)
class _Item:
    body: str
    future: asyncio.Future[Score]


@dataclass(eq=False, slots=True)
class _Server:
    """`failures`: rests in a row. What was under way when a rest began tells nothing new about the server."""

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
    """Asks servers. Connections stay open while anybody waits for a score, and no longer."""

    def __init__(self, settings: RewardSettings, *, vocabulary: str = ""):
        """`vocabulary`: the digest of the one that prompts and completions have their tokens from."""
        self.settings, self.vocabulary = settings, vocabulary
        self.name = settings.name or "http"
        self.servers = [_Server(url.rstrip("/")) for url in settings.urls]
        self._headers = headers(settings)
        self._verify = _verify(settings)
        self._waiting: deque[_Item] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return list(await asyncio.gather(*(self._asked(prompt, completion) for completion in completions)))

    async def _asked(self, prompt: Prompt, completion: Completion) -> Score:
        try:
            body = protocol.item(prompt, completion)
        except (ValueError, TypeError) as error:
            return Score(value=None, reason=f"not sent: {error}")
        loop = asyncio.get_running_loop()
        item = _Item(body, loop.create_future())
        self._waiting.append(item)
        self._wake()
        return await item.future

    def _wake(self, done: asyncio.Task[None] | None = None) -> None:
        """A sender for what waits, where there may be one more. One that closes its client takes nothing any longer:
        once it is done, another comes for what was asked meanwhile."""
        if done is not None:
            self._senders.discard(done)
            if done.cancelled():  # the event loop ends, and those who wait with it
                return
        if self._waiting and len(self._senders) < self.settings.concurrency:
            sender = asyncio.get_running_loop().create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._wake)

    async def _send(self) -> None:
        """Takes: items that wait. Waits for: a server's answer. Gives: a Score each. Ends when none waits."""
        if not self._waiting:
            return
        async with _client(self._headers, self._verify) as client:
            while items := self._taken():
                try:
                    scores = await self._scores(client, items)
                except BaseException as error:
                    for item in items:
                        if not item.future.done():
                            item.future.set_exception(error) if isinstance(error, Exception) else item.future.cancel()
                    raise
                for item, score in zip(items, scores, strict=True):
                    if not item.future.done():
                        item.future.set_result(score)

    def _taken(self) -> list[_Item]:
        items: list[_Item] = []
        while self._waiting and len(items) < self.settings.batch:
            item = self._waiting.popleft()
            if not item.future.done():  # not cancelled meanwhile
                items.append(item)
        return items

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
            except _Failed as failed:
                reason, divisible = f"{server.url}: {failed}", failed.of_content and len(items) > 1
                if failed.final:
                    refused.add(server)
            if all(server.failures > self.settings.retries for server in self.servers):
                break  # others have waited long enough for them
        if divisible:  # so that one bad item does not take the others with it
            half = len(items) // 2
            return [score for part in (items[:half], items[half:]) for score in await self._scores(client, part)]
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return [Score(value=None, reason=f"{reason} ({tried})")] * len(items)

    async def _least_busy(self, refused: set[_Server]) -> _Server:
        """A server that does not rest, as soon as there is one; of equally busy ones the one that was asked least."""
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
            status, content = await _exchanged(client, server.url, body, self.settings.timeout)
            scores = _read(status, content, count)
        except _Failed as failed:
            if not failed.of_content:
                server.failed(began, clock())
            raise
        finally:
            server.outstanding -= 1
        server.worked()
        return scores


async def _exchanged(client: Any, url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    """Status and body of an answer. `timeout` is for all of it: a server that trickles is slow too."""
    import httpx2

    try:
        async with (
            asyncio.timeout(timeout),
            client.stream("POST", f"{url}/score", content=body) as response,
        ):
            return response.status_code, await _limited(response)
    except TimeoutError:
        raise _Failed(f"no answer within {timeout:g} s") from None
    except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise _Failed(f"{type(error).__name__}: {error!s:.200}") from error


async def _limited(response: Any) -> bytes:
    """The body as it came: a packed one, which may be huge when unpacked, is not taken."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _Failed("the answer is compressed, which was not asked for", final=True)
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > LARGEST_ANSWER:
            raise _Failed(f"the answer has more than {LARGEST_ANSWER >> 20} MiB", final=True)
    return bytes(body)


def _read(status: int, content: bytes, count: int) -> list[Score]:
    if status != 200:
        said = " ".join(content[: protocol.REASON_LENGTH].decode(errors="replace").split())
        final = status < 500 and status not in TRY_AGAIN
        raise _Failed(f"status {status}: {said}", final=final, of_content=status in OF_CONTENT)
    try:
        return protocol.read_answer(content, count)
    except protocol.ProtocolError as error:
        raise _Failed(str(error)) from None


@contextlib.asynccontextmanager
async def _client(headers: dict[str, str], verify: Any) -> AsyncIterator[Any]:
    """Without time-outs of its own: its callers have one for the whole exchange."""
    import httpx2

    async with httpx2.AsyncClient(
        headers=headers, verify=verify, timeout=None, trust_env=False, follow_redirects=False
    ) as client:
        yield client


def headers(settings: RewardSettings) -> dict[str, str]:
    """Raises RewardServerError where the token is not in the environment."""
    found = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
    if settings.token_env:
        token = os.environ.get(settings.token_env, "").strip()
        if not token:
            raise RewardServerError(
                f"reward {settings.name or settings.kind!r} reads its token from the environment variable "
                f"{settings.token_env} (token_env), which is empty here"
            )
        if not token.isascii() or not token.isprintable():
            raise RewardServerError(f"the environment variable {settings.token_env} holds no token: odd characters")
        found["authorization"] = f"Bearer {token}"
    return found


def _verify(settings: RewardSettings) -> Any:
    """Certificates are read once, and only if they will be needed."""
    if not any(url.startswith("https:") for url in settings.urls):
        return False
    import httpx2

    return httpx2.create_ssl_context()


async def check_servers(settings: RewardSettings) -> list[str]:
    """Ask every server whether it is there; returns what is wrong with some of them.

    Raises RewardServerError where none would score: it is better to know before a model is loaded.
    """
    verify, asked = _verify(settings), headers(settings)
    async with _client(asked, verify) as client:
        found = await asyncio.gather(*(_health(client, url.rstrip("/"), settings.timeout) for url in settings.urls))
    problems = [problem for problem in found if problem is not None]
    if len(problems) == len(settings.urls):
        raise RewardServerError(
            f"no server of reward {settings.name or settings.kind!r} can be asked: {'; '.join(problems)}. Start one "
            "(`plaudit serve-reward JUDGE`), or correct rewards' urls and token_env"
        )
    return problems


async def _health(client: Any, url: str, timeout: float) -> str | None:
    """None for any answer that is no refusal: a server of another make need not have this page."""
    import httpx2

    try:
        async with asyncio.timeout(min(timeout, 10.0)), client.stream("GET", f"{url}/health") as response:
            status = response.status_code
    except TimeoutError:
        return f"{url}/health gave no answer within {min(timeout, 10.0):g} s"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        return f"{url}/health: {type(error).__name__}: {error!s:.200}"
    if status in (401, 403):
        return f"{url}/health: status {status}: the server wants a token, or another one (token_env)"
    return None if status in (200, 204, 404, 405) else f"{url}/health: status {status}"
