"""`plaudit serve-reward`: a judge's checkpoint as a server of the reward protocol, for runs on this machine or others.

    requests -> RewardApplication -> JudgeService (texts are read; what waits is one batch) -> a thread with the model

uvicorn does the HTTP (`pip install plaudit[serve]`). Without a token only this machine may ask. Transport security is
left to a proxy in front, or to the network.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.evaluate.judge import Judge
from plaudit.models.device import device_of
from plaudit.rewards.judge import JudgeReward, Tokens
from plaudit.rewards.protocol import Question, vocabulary_digest
from plaudit.rewards.server import Guard, RewardApplication
from plaudit.types import Score

LEAST_TOKEN = 16
"""Characters."""
GATHERING = 0.001
"""Seconds, twice, in which requests that come together meet in a batch. Later ones meet while the model is at work."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What `plaudit serve-reward` is told."""

    host: str = "127.0.0.1"
    port: int = 8008
    """0 takes a free one."""
    token_env: str = ""
    """Name of the environment variable that holds the token; empty: none is asked for, on this machine only."""
    allow_hosts: tuple[str, ...] = ()
    """Names by which clients call this server, beside addresses, localhost and this machine's name."""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    """CPU threads; 0 takes all cores."""
    token_budget: int = 16384
    """Tokens that the model reads at once."""


class JudgeService:
    """Scores of questions. A question that the judge cannot be asked gets no score, and harms no other."""

    def __init__(self, judge: Judge):
        self.judge = judge
        vocabulary = judge.tokenizer.get_vocab()
        self.vocabulary = vocabulary_digest(vocabulary)
        self._largest = max(vocabulary.values())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        end = judge.tokenizer.eos_token_id
        most = judge.model.max_positions
        self._of_tokens = JudgeReward(self._scored, pause=GATHERING, append_eos=end, longest=most)
        self._of_texts = JudgeReward(self._scored, encode=judge.encode, append_eos=end)

    async def __call__(self, questions: Sequence[Question]) -> list[Score]:
        if all(question.same_vocabulary for question in questions):
            read = [self._read(question) for question in questions]
        else:  # texts: long ones take seconds to read, in which nobody else would be answered
            loop = asyncio.get_running_loop()
            read = await loop.run_in_executor(self._reader, lambda: [self._read(question) for question in questions])
        return list(await asyncio.gather(*map(self._score, read)))

    def _read(self, question: Question) -> Tokens | Score:
        """What the judge is to read, or the score of what it cannot."""
        reader = self._of_tokens if question.same_vocabulary else self._of_texts
        try:
            sequence = reader.sequence(question.prompt, question.completion)
        except (ValueError, TypeError) as error:  # a text that is no Unicode
            return Score(value=None, reason=f"cannot be read: {error!s:.100}")
        if (refused := self._of_tokens.refused(sequence)) is not None:
            return refused
        if max(sequence) > self._largest:
            return Score(value=None, reason=f"token {max(sequence)} is not in the vocabulary")
        return sequence

    async def _score(self, read: Tokens | Score) -> Score:
        if isinstance(read, Score):
            return read
        (score,) = await self._of_tokens.scored([read])
        return score

    async def _scored(self, sequences: list[Tokens]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.judge.of_sequences, sequences)


def serve_reward(path: str, settings: ServeSettings, *, say: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or Ctrl-C. What is under way then is answered first, for at most five seconds."""
    guard = make_guard(settings)
    try:
        import uvicorn
    except ImportError:
        raise ImportError("serving needs uvicorn: pip install 'plaudit[serve]'") from None
    import torch

    device = device_of(settings.device)
    listening = _listen(settings)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    judge = Judge.load(path, device=device, dtype=dtype, token_budget=settings.token_budget)
    service = JudgeService(judge)
    about = {"model": Path(path).name, "vocabulary": service.vocabulary}
    application: Any = RewardApplication(service, guard, about=about)
    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=512,
        timeout_graceful_shutdown=5,
    )
    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    say(f"serving {path} on http://{address}, {'with a' if guard.token else 'without a'} token")
    uvicorn.Server(config).run(sockets=[listening])


def make_guard(settings: ServeSettings) -> Guard:
    """Raises ValueError for an address that others reach without a token, and for a token that is none."""
    token = None
    if settings.token_env:
        token = os.environ.get(settings.token_env, "").strip()
        if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"the environment variable {settings.token_env} must hold a token of {LEAST_TOKEN} or more plain "
                f"characters; it holds {len(token)}. `openssl rand -hex 32` makes one"
            )
    elif not _is_loopback(settings.host):
        raise ValueError(
            f"--host {settings.host} can be reached from elsewhere, where anybody could ask: give --token-env NAME, an "
            "environment variable with a token, or keep to --host 127.0.0.1"
        )
    names = {"localhost", socket.gethostname(), settings.host, *settings.allow_hosts}
    return Guard(token=token, hosts=frozenset(name.lower() for name in names))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(settings: ServeSettings) -> socket.socket:
    """Before the model is loaded: a port that is taken should not cost a minute."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}. Give another --host or --port"
        ) from error
