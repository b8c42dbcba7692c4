"""`plaudit serve-reward`: serve a judge's checkpoint by the reward protocol, to runs on this machine or others.

    requests -> rewards/server.py -> JudgeService (tokenises texts, batches waiting items) -> a thread with the model

uvicorn handles HTTP. Without a token, only this machine may ask. There is no TLS here:
use a proxy, or a network that you trust.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plaudit.commands.listening import address_of, bounded_protocol, is_loopback, listen, serve_http
from plaudit.evaluate.judge import Judge, JudgeInput
from plaudit.models.device import device_of
from plaudit.rewards.judge import JudgeReward, Tokens
from plaudit.rewards.protocol import RewardItem, vocabulary_digest
from plaudit.types import Score

LEAST_TOKEN = 16
"""Fewest characters of a token."""
GATHERING = 0.001
"""An idle model waits for twice this many seconds for further requests before it scores a batch. While it is busy,
requests gather anyway."""


class JudgeService:
    """Scores items with a reward model. An item that cannot be read gets Score(value=None); others are not affected."""

    def __init__(self, judge: Judge, as_chat: bool | None = None):
        self.judge = judge
        vocabulary = judge.tokenizer.get_vocab()
        self.vocabulary = vocabulary_digest(vocabulary)
        self._largest = max(vocabulary.values())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._reading = JudgeInput(judge.tokenizer, judge.model.special.eos, as_chat)
        self.as_chat = self._reading.as_chat
        self._reward = JudgeReward(self._scored, pause=GATHERING, longest=judge.model.max_positions)

    async def __call__(self, questions: Sequence[RewardItem]) -> list[Score]:
        if all(question.same_vocabulary and not question.prompt.messages for question in questions):
            read = [self._read(question) for question in questions]
        else:  # tokenise in a thread: long texts take seconds, and other requests must be answered meanwhile
            loop = asyncio.get_running_loop()
            read = await loop.run_in_executor(self._reader, lambda: [self._read(question) for question in questions])
        return list(await asyncio.gather(*map(self._score, read)))

    def _read(self, question: RewardItem) -> Tokens | Score:
        """Return the tokens that the judge reads, or a failed score if it cannot read the item."""
        try:
            sequence = self._reading.sequence(question.prompt, question.completion, sampled=question.same_vocabulary)
        except (ValueError, TypeError) as error:  # a text that is no Unicode, a chat that its template refuses
            return Score(value=None, reason=f"cannot be read: {error!s:.100}")
        read = self._reward.refused(sequence)
        if not isinstance(read, Score) and max(read) > self._largest:
            return Score(value=None, reason=f"token {max(read)} is not in the vocabulary")
        return read

    async def _score(self, read: Tokens | Score) -> Score:
        if isinstance(read, Score):
            return read
        (score,) = await self._reward.scored([read])
        return score

    async def _scored(self, sequences: list[Tokens]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.judge.of_sequences, sequences)


def serve_reward(
    path: str,
    *,
    host: str,
    port: int,
    token_env: str,
    allow_hosts: Sequence[str],
    device: str,
    dtype: str,
    threads: int,
    as_chat: bool | None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C, with the options of the command. Open requests are answered first, for at most
    five seconds."""
    token = token_of(host, token_env)
    import torch

    from plaudit.rewards.server import application

    device = device_of(device)
    listening = listen(host, port)
    torch.set_num_threads(threads or torch.get_num_threads())
    judge = Judge.load(path, device=device, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    service = JudgeService(judge, as_chat)
    about = {"model": Path(path).name, "vocabulary": service.vocabulary}
    names = ("localhost", socket.gethostname(), host, *allow_hosts)
    served: Any = application(service, about=about, names=names, token=token)
    say(f"serving {path} on {address_of(listening)}, {'with a' if token else 'without a'} token")
    if judge.tokenizer.chat_template:
        say(f"plain prompts are read as {'chats' if service.as_chat else 'text'} (--chat, --text)")
    serve_http(served, bounded_protocol(), listening)


def token_of(host: str, token_env: str = "") -> str | None:
    """Return the token that clients must have, or None if only this machine may ask. Raises ValueError for an address
    that others can reach without a token, and for a bad token."""
    token = None
    if token_env:
        token = os.environ.get(token_env, "").strip()
        if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"the environment variable {token_env} must hold a token of {LEAST_TOKEN} or more plain "
                f"characters; it holds {len(token)}. `openssl rand -hex 32` makes one"
            )
    elif not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines: give --token-env NAME (an environment "
            "variable with a token), or use --host 127.0.0.1"
        )
    return token
