"""A tiny model, and rewards for runs of models that know nothing: they differ between any two answers."""

from __future__ import annotations

import random
import time

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}


def varied(tokens: tuple[int, ...]) -> float:
    """From -1 to 1, by no reason that a model could learn in a few steps."""
    return sum(tokens) % 11 / 5 - 1


def of_text(completion: str) -> float:
    """The same without tokens."""
    return sum(map(ord, completion)) % 11 / 5 - 1


def often_equal(tokens: tuple[int, ...]) -> float:
    """Most groups agree on it."""
    return float(tokens[0] % 8 == 0)


def chance(prompt: str) -> float:
    """Another one in every run, but the same for all answers to one prompt in three."""
    return random.SystemRandom().random() if sum(map(ord, prompt)) % 3 else 0.0


def slow(tokens: tuple[int, ...]) -> float:
    """As `varied`, but a run of it lasts long enough to be disturbed."""
    time.sleep(0.005)
    return varied(tokens)
