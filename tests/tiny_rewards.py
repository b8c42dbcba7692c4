"""Rewards for runs of models that know nothing: they differ between any two answers."""

from __future__ import annotations


def varied(tokens: tuple[int, ...]) -> float:
    """From -1 to 1, by no reason that a model could learn in a few steps."""
    return sum(tokens) % 11 / 5 - 1


def often_equal(tokens: tuple[int, ...]) -> float:
    """Most groups agree on it."""
    return float(tokens[0] % 8 == 0)
