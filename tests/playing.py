"""A tiny model around which episodes are played, and what they look like."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import worlds

from plaudit.data.chat import Chats
from plaudit.data.settings import DataSettings
from plaudit.environments.base import World
from plaudit.environments.episodes import Player
from plaudit.environments.settings import EnvironmentSettings
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.tokenizer import load_tokenizer
from plaudit.rollout.native import NativeEngine
from plaudit.types import Completion, Episode, Prompt, Sampling

WORLDS = str(Path(worlds.__file__))
DATA = DataSettings(chat_template="default")


class Table:
    """A tiny model with its engine and tokenizer, around which episodes are played."""

    def __init__(self, tokenizer: str):
        self.tokenizer = load_tokenizer(tokenizer)
        self.chats = Chats(self.tokenizer, DATA)
        size = len(self.tokenizer)
        keys = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
        model = fresh_model(keys, vocab_size=size, seed=3)
        assert isinstance(model, Decoder)
        self.model = model
        end = self.tokenizer.eos_token_id
        row = model.embedding.weight[end].detach()
        with torch.no_grad():
            model.norm.bias += row * (4 / row.square().sum())  # its logit grows by 4: a turn ends soon
        self.engine = NativeEngine(model, self.tokenizer, ends=[end])
        self.asked = ({"role": "user", "content": "The acting"},)
        text = self.chats.prompt(self.asked, {})
        tokens = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        self.prompt = Prompt(id="p", text=text, tokens=tokens, messages=self.asked, answer="4")

    def play(self, name: str, count: int = 2, most: int = 6, **settings: Any) -> list[Completion]:
        own = EnvironmentSettings(function=f"{WORLDS}:{name}", **{"max_tokens": 300, "timeout": 1.0, **settings})
        plan = [Sampling(seed=seed, max_tokens=most) for seed in range(count)]
        return asyncio.run(Player(self.engine, self.chats, World(own)).play(self.prompt, plan))


def of(answer: Completion) -> Episode:
    assert answer.episode is not None
    return answer.episode


def plain(table: Table, text: str) -> str:
    """As the environment hears it: without special tokens."""
    for token in table.tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text


def turns_of(table: Table, episode: Completion) -> list[tuple[bool, str]]:
    """The episode's runs of sampled tokens (without their end token) and of others, decoded."""
    marks = of(episode).sampled
    runs = groupby(zip(marks, episode.tokens, strict=True), key=lambda pair: bool(pair[0]))
    found = [(mine, [token for _, token in pairs]) for mine, pairs in runs]
    return [
        (mine, table.tokenizer.decode(tokens[:-1] if mine else tokens, skip_special_tokens=False))
        for mine, tokens in found
    ]
