"""Losses by hand, and as our own methods compute them on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from calling import shifted, tiny
from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.sft import SFT
from plaudit.batch import Batch
from plaudit.learn.scorer import Scorer
from plaudit.training_api.asked import options_of
from plaudit.training_api.losses import LOSSES, batch_of, loss_of
from plaudit.training_api.wire import Datum
from plaudit.types import Role, Row

OLD, NOW = (-1.0, -2.0), (-0.5, -2.5)
ADVANTAGES = (2.0, -1.0)
UP, DOWN = math.exp(0.5), math.exp(-0.5)
BY_HAND = {
    "importance_sampling": -2 * UP + DOWN,
    "ppo": -2 * 1.2 + 0.8,  # both ratios are beyond the clip, on their advantage's side
    "cispo": -1.2 * 2 * -0.5 + 0.8 * -2.5,
    "dro": -(2 * -0.5 - 1 * -2.5) + 0.5 * 0.05 * (0.25 + 0.25),
}


def datum(tokens: Sequence[int], inputs: Mapping[str, Sequence[float]]) -> Datum:
    columns = {
        name: np.asarray(one, np.int64 if name == "target_tokens" else np.float32) for name, one in inputs.items()
    }
    return Datum(tokens=np.asarray(tokens, np.int64), inputs=columns)


def summed(batch: Batch, name: str, now: Tensor) -> Tensor:
    return loss_of(name, options_of(name, {}), {})(Output(logprobs=now), batch)[0]


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_is_that_of_its_formula(name: str) -> None:
    one = datum([4, 5], {"target_tokens": [5, 6], "logprobs": OLD, "advantages": ADVANTAGES})
    batch = batch_of([one], name, vocabulary=60, positions=128)
    found = summed(batch, name, torch.tensor([0.0, *NOW]))
    assert float(found) == pytest.approx(BY_HAND[name], rel=1e-6)


def test_clipped_tokens_have_no_gradient_in_ppo_and_one_in_cispo() -> None:
    one = datum([4, 5], {"target_tokens": [5, 6], "logprobs": OLD, "advantages": ADVANTAGES})
    for name, gradient in (("ppo", [0, 0]), ("cispo", [-1.2 * 2, 0.8 * 1])):
        now = torch.tensor([0.0, *NOW], requires_grad=True)
        summed(batch_of([one], name, vocabulary=60, positions=128), name, now).backward()
        assert now.grad is not None and now.grad.tolist() == pytest.approx([0, *gradient]), name


def test_the_correction_is_not_off() -> None:
    """A server that took the ratio as 1 would give -sum(A) here."""
    one = datum([4, 5], {"target_tokens": [5, 6], "logprobs": OLD, "advantages": ADVANTAGES})
    batch = batch_of([one], "importance_sampling", vocabulary=60, positions=128)
    assert float(summed(batch, "importance_sampling", torch.tensor([0.0, *NOW]))) != pytest.approx(-sum(ADVANTAGES))


ROWS = ((3, 9, 27, 21, 3), (8, 4, 2), (11, 50, 40, 30))


def current(batch: Batch) -> Tensor:
    return Scorer(tiny(), Role.POLICY).columns(batch)["proximal"]


def test_cross_entropy_is_our_sft() -> None:
    """SFT's mean over trained tokens is the sum with weights of 1 / their number."""
    count = 2 * len(ROWS)
    given = []
    for row in ROWS:
        tokens, inputs = shifted(row, 2)
        given.append(datum(tokens, {**inputs, "weights": [one / count for one in inputs["weights"]]}))
    batch = batch_of(given, "cross_entropy", vocabulary=60, positions=128)
    rows = [Row(tokens=row, trainable=[0] * (len(row) - 2) + [1, 1]) for row in ROWS]
    ours = SFT().weigh(Batch.of(rows))
    expected, _ = SFT().losses()[Role.POLICY](
        Output(logprobs=current(ours), entropy=torch.zeros(len(ours.tokens))), ours
    )
    assert float(summed(batch, "cross_entropy", current(batch))) == pytest.approx(float(expected), abs=1e-6)


def test_ppo_is_our_clipped_loss() -> None:
    random = np.random.default_rng(0)
    old = [random.normal(-4, 0.5, len(row) - 1) for row in ROWS]
    advantages = [random.normal(0, 1, len(row) - 1) for row in ROWS]
    given = [
        datum(row[:-1], {"target_tokens": row[1:], "logprobs": one, "advantages": credit})
        for row, one, credit in zip(ROWS, old, advantages, strict=True)
    ]
    batch = batch_of(given, "ppo", vocabulary=60, positions=128)
    method = GRPO()
    rows = [
        Row(tokens=row, trainable=[0] + [1] * (len(row) - 1), logprobs=[0.0, *one])
        for row, one in zip(ROWS, old, strict=True)
    ]
    flat = torch.tensor([x for credit in advantages for x in (0.0, *credit)], dtype=torch.float32)
    ours = method.weigh(Batch.of(rows)).with_columns(advantages=flat)
    output = Output(logprobs=current(ours), entropy=torch.zeros(len(ours.tokens)))
    mean, _ = method.losses()[Role.POLICY](output, ours)
    expected = float(mean) * int(ours.trainable.sum())
    assert float(summed(batch, "ppo", current(batch))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "given", "says"),
    [
        ("gspo", {}, "gspo.* is not served"),
        ("ppo", {"beta": 0.1}, "ppo has 'beta'.*clip_low_threshold"),
        ("cross_entropy", {"beta": 0.1}, "cross_entropy has 'beta'.*none"),
        ("dro", {"beta": -1.0}, "beta=-1.0 must be at least 0"),
        ("dro", {"beta": "much"}, "beta=much must be a number"),
    ],
)
def test_unknown_losses_and_options_are_refused(loss: str, given: dict[str, float | str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options_of(loss, given)


TARGETS = {"target_tokens": [5, 6]}


@pytest.mark.parametrize(
    ("tokens", "inputs", "says"),
    [
        ([4, 5], TARGETS, r"\['target_tokens'\]; the loss takes target_tokens, weights"),
        ([4, 5], {**TARGETS, "weights": [1, 1], "mask": [1, 1]}, "'mask'"),
        ([4, 60], {"target_tokens": [60, 6], "weights": [1, 1]}, "vocabulary, 0 to 59"),
        ([4, 5], {"target_tokens": [5, -1], "weights": [1, 1]}, "vocabulary"),
        ([4, 5], {"target_tokens": [9, 6], "weights": [1, 1]}, "differs from the next token"),
        ([4, 5], {**TARGETS, "weights": [math.nan, 1]}, "not finite"),
        ([], {"target_tokens": [], "weights": []}, "0 tokens: give 1 to 127"),
        ([4] * 128, {"target_tokens": [4] * 128, "weights": [1] * 128}, "128 tokens: give 1 to 127"),
    ],
)
def test_data_that_do_not_fit_are_refused(tokens: list[int], inputs: dict[str, list[float]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        batch_of([datum(tokens, inputs)], "cross_entropy", vocabulary=60, positions=128)


def test_every_loss_is_tried_here() -> None:
    assert {*LOSSES} == {*BY_HAND, "cross_entropy"}
