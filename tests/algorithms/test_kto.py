"""KTO by hand, against TRL's formula on padded rows, and by what must not change it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plaudit import load_settings, run
from plaudit.algorithms.base import Output
from plaudit.algorithms.kto import KTO
from plaudit.batch import Batch
from plaudit.types import Role, Row, Stats

LABELS = (1.0, -1.0, 1.0)
JUDGED, MISMATCHED = (3, 1, 4), (2, 4, 0)  # trained tokens of each row; the last mismatched row has none


def rows(labels: tuple[float, ...] = LABELS) -> list[Row]:
    """Judged and mismatched rows in turn, behind prompts of two tokens and a tool's token that is not trained."""
    made = []
    for label, judged, mismatched in zip(labels, JUDGED, MISMATCHED, strict=True):
        for reward, length in ((label, judged), (0.0, mismatched)):
            made.append(Row(tokens=(0,) * (3 + length), trainable=(False,) * 3 + (True,) * length, reward=reward))
    return made


def column(batch: Batch, values: Tensor) -> Tensor:
    """A token column that has 9 on untrained tokens, which nobody may read."""
    return torch.full(batch.tokens.shape, 9.0, dtype=values.dtype).masked_scatter(batch.trainable, values)


def drawn(seed: int) -> Tensor:
    """Log-probs of all trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    return -2 * torch.rand(sum(JUDGED) + sum(MISMATCHED), generator=generator, dtype=torch.float64)


def step(method: KTO, current: Tensor, reference: Tensor, *, made: list[Row] | None = None) -> tuple[Tensor, Stats]:
    """Loss and figures of one step on the policy's log-probs, which are those before the step too."""
    batch = Batch.of(made or rows(), unit=2)
    batch = batch.with_columns(
        reference=column(batch, reference), proximal=column(batch, current.detach()), behaviour=column(batch, current)
    )
    weighed = method.weigh(batch)
    mine = torch.cat(  # of the judged rows
        torch.split(column(batch, current), batch.lengths.tolist())[::2]
    )
    return method.losses()[Role.POLICY](Output(logprobs=mine), weighed)


def test_by_hand() -> None:
    # Log-ratios of judged rows 1 (good), -1 (bad); of mismatched ones 0.5 and 0.1: z0 = 0.3.
    # beta 1: good 1 - sigma(0.7) = 0.331812; bad 1 - sigma(0.3 + 1) = 0.214165. lambda 1 and 2: 0.760142 / 2.
    made = [Row(tokens=(0, 1), trainable=(False, True), reward=label) for label in (1.0, 0.0, -1.0, 0.0)]
    batch = Batch.of(made, unit=2).with_columns(
        reference=torch.tensor([9.0, -2.0] * 4), proximal=torch.tensor([9.0, -1.0, 9.0, -1.5, 9.0, -3.0, 9.0, -1.9])
    )
    method = KTO(beta=1.0, undesirable=2.0)
    weighed = method.weigh(batch)
    assert (len(weighed), weighed.unit, weighed.reward.tolist()) == (2, 1, [1.0, -1.0])  # type: ignore[union-attr]
    loss, figures = method.losses()[Role.POLICY](Output(logprobs=torch.tensor([9.0, -1.0, 9.0, -3.0])), weighed)
    assert float(loss) == pytest.approx(0.760142 / 2, abs=1e-6)
    assert figures == pytest.approx({"loss/policy": 0.760142 / 2, "accuracy": 1.0, "kl/mismatched": 0.3}, abs=1e-6)
    called = batch.with_columns(reward=-batch.reward)  # type: ignore[operator]
    loss, figures = method.losses()[Role.POLICY](
        Output(logprobs=torch.tensor([9.0, -1.0, 9.0, -3.0])), method.weigh(called)
    )
    assert float(loss) == pytest.approx((2 * (1 - 0.331812) + (1 - 0.214165)) / 2, abs=1e-6)
    assert figures["accuracy"] == 0.0


def test_z0_is_the_mean_over_the_mismatched_rows_of_the_step_and_never_negative() -> None:
    zeros, r = torch.zeros(sum(JUDGED) + sum(MISMATCHED)), torch.zeros(sum(JUDGED) + sum(MISMATCHED))
    r[3:5], r[6:10] = 0.25, 0.5  # the first and second mismatched rows: 0.5 and 2; the third has no tokens
    assert step(KTO(), r, zeros)[1]["kl/mismatched"] == pytest.approx(1.25)
    loss, figures = step(KTO(beta=1.0), -r, zeros)
    assert figures["kl/mismatched"] == 0.0
    assert float(loss) == pytest.approx(0.5)


@pytest.mark.parametrize("method", [KTO(), KTO(beta=0.7, desirable=1.3, undesirable=0.6)])
@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
def test_it_is_what_trl_computes(method: KTO, seeds: tuple[int, int]) -> None:
    """KTOTrainer.kto_loss of TRL 1.16, from sums over padded rows."""
    current, reference = drawn(seeds[0]).requires_grad_(), drawn(seeds[1])
    lengths = [length for both in zip(JUDGED, MISMATCHED, strict=True) for length in both]

    def sums(values: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in torch.split(values, lengths)])

    ratio = sums(current) - sums(reference)
    kl = ratio[[1, 3]].mean().detach().clamp(min=0)
    chosen = 1 - F.sigmoid(method.beta * (ratio[[0, 4]] - kl))
    rejected = 1 - F.sigmoid(method.beta * (kl - ratio[[2]]))
    theirs = torch.cat((method.desirable * chosen, method.undesirable * rejected)).nanmean()
    mine, _ = step(method, current, reference)
    assert float(mine.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    gradients = [torch.autograd.grad(loss, current, allow_unused=True)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-6)
    signs = [part.sign().unique().tolist() for part in torch.split(gradients[0], lengths)]
    assert signs == [[-1.0], [0.0], [1.0], [0.0], [-1.0], []], "good answers rise, bad ones fall, mismatched ones stay"


def test_a_shift_of_both_models_and_the_order_of_prompts_change_nothing_and_a_weight_scales() -> None:
    current, reference = drawn(0), drawn(1)
    whole, _ = step(KTO(), current, reference)
    shifted, _ = step(KTO(), current - 1.0, reference - 1.0)
    assert float(shifted) == pytest.approx(float(whole), abs=1e-6)
    twice, _ = step(KTO(desirable=2.0, undesirable=2.0), current, reference)
    assert float(twice) == pytest.approx(2 * float(whole))
    good, _ = step(KTO(undesirable=0.0), current, reference)
    bad, _ = step(KTO(desirable=0.0), current, reference)
    assert float(good) + float(bad) == pytest.approx(float(whole))
    grouped, _ = step(KTO(), current, reference, made=[replace(row, group=7) for row in rows()])
    assert float(grouped) == float(whole)


@pytest.mark.parametrize("epochs", [1, 8])
@pytest.mark.slow
def test_a_whole_run_tells_good_answers_from_bad_ones(make_recipe: Any, tmp_path: Path, epochs: int) -> None:
    """In several passes over the data, the reference's columns are computed once."""
    data = tmp_path / "answers.jsonl"
    lines = [
        f'{{"prompt": "q{i} ", "completion": "{"fine" if i % 2 else "poor"}", "label": {i % 2}}}'
        for i in range(64 // epochs)
    ]
    data.write_text("\n".join(lines))
    more = {"data": {"train": str(data)}, "algorithm": {"beta": 1.0}}
    done = run(load_settings(make_recipe("kto", tmp_path, **more, train={"steps": 8, "batch_size": 8})))
    first, last = done.metrics[0], done.metrics[-1]
    assert first["loss/policy"] == pytest.approx(0.5, abs=1e-4), "the policy is its reference"
    assert (first["kl/mismatched"], last["accuracy"]) == (pytest.approx(0.0, abs=1e-4), 1.0)
    assert last["loss/policy"] < 0.4


@pytest.mark.slow
def test_micro_batches_change_nothing_of_a_run(make_recipe: Any, tmp_path: Path) -> None:
    losses = []
    for tokens in (20, 100_000):
        recipe = make_recipe("kto", tmp_path / str(tokens), learn={"micro_tokens": tokens})
        losses.append([line["loss/policy"] for line in run(load_settings(recipe)).metrics])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
