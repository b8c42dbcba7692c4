"""How single losses become one number."""

from __future__ import annotations

import torch

from plaudit.maths.aggregate import Aggregation, token_weights, unit_weights

# Rows: prompt a b | prompt a | prompt
TRAINABLE = torch.tensor([False, True, True, False, True, False])
ROW = torch.tensor([0, 0, 0, 1, 1, 2])


def test_token_weights_by_hand() -> None:
    third = 1 / 3  # three trained tokens in all
    torch.testing.assert_close(
        token_weights(TRAINABLE, ROW, 3, Aggregation.TOKEN), torch.tensor([0, third, third, 0, third, 0])
    )


def test_sequence_weights_by_hand() -> None:
    # Three rows, 1/3 each, split over two tokens and over one: the one without trained tokens counts, and has none.
    expected = torch.tensor([0, 1 / 6, 1 / 6, 0, 1 / 3, 0])
    torch.testing.assert_close(token_weights(TRAINABLE, ROW, 3, Aggregation.SEQUENCE), expected)


def test_constant_weights_by_hand() -> None:
    # 1 / (3 rows * 4): the row without trained tokens counts, as an answer of no tokens would.
    torch.testing.assert_close(
        token_weights(TRAINABLE, ROW, 3, Aggregation.CONSTANT, constant=4.0),
        torch.tensor([0, 1 / 12, 1 / 12, 0, 1 / 12, 0]),
    )


def test_nothing_trained_weighs_nothing() -> None:
    nothing = torch.zeros(6, dtype=torch.bool)
    for how in Aggregation:
        assert token_weights(nothing, ROW, 3, how).tolist() == [0.0] * 6


def test_unit_weights_by_hand() -> None:
    # Pairs of weight 1/2, 1/2 (one prompt) and 1 (another): each prompt is half of the mean. Both rows carry it.
    weights = unit_weights(torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0]), 2)
    assert weights.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert unit_weights(torch.tensor([1.0, 3.0]), 1).tolist() == [0.25, 0.75]
