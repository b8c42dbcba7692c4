"""Each method's own loss and figures by hand: that its settings, weights and columns reach the formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plaudit.algorithms.base import Algorithm, Output
from plaudit.algorithms.best_of_k import BestOfK
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.online_dpo import OnlineDPO
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reward_model import RewardModel
from plaudit.algorithms.sft import SFT
from plaudit.batch import Batch
from plaudit.rewards.settings import ShapingSettings
from plaudit.rewards.shaping import shaped
from plaudit.types import Completion, Finish, Group, Prompt, Role, Row, Score

# prompt a b | prompt a: three trained tokens, at places 1, 2 and 4.
ROWS = [Row(tokens=(0, 1, 2), trainable=(False, True, True)), Row(tokens=(0, 1), trainable=(False, True))]


def column(a: float, b: float, c: float) -> Tensor:
    """A token column of the three trained tokens, with 9 on the prompts, which nobody may read."""
    return torch.tensor([9.0, a, b, 9.0, c])


def test_value_loss_is_a_token_mean_whatever_the_policy_aggregates() -> None:
    # V 1, 0, 2; R 0, 0, 1; nothing clipped: (1/2 + 0 + 1/2) / 3 = 1/3, times the coefficient 0.1.
    batch = Batch.of(ROWS).with_columns(values=column(1.0, 0.0, 2.0), returns=column(0.0, 0.0, 1.0))
    for aggregation in ("token", "sequence", 7.0):
        method = PPO(value_coefficient=0.1, aggregation=aggregation)
        output = Output(values=column(1.0, 0.0, 2.0))
        loss, figures = method.losses()[Role.CRITIC](output, method.weigh(batch))
        assert float(loss) == pytest.approx(0.1 / 3)
        assert figures == {"loss/critic": pytest.approx(1 / 3)}


def test_value_loss_clips_around_the_value_at_rollout() -> None:
    # V 1, V_old 0.5, R 0 on every token, eps 0.2: 1/2 max(1, 0.7^2) = 0.5. V 0.6, V_old 1, R 0.5: 1/2 0.3^2 = 0.045.
    batch = Batch.of(ROWS).with_columns(values=column(0.5, 1.0, 1.0), returns=column(0.0, 0.5, 0.5))
    output = Output(values=column(1.0, 0.6, 0.6))
    for clip, expected in ((0.2, (0.5 + 0.045 + 0.045) / 3), (None, (0.5 + 0.005 + 0.005) / 3)):
        method = PPO(value_coefficient=1.0, value_clip=clip)
        assert float(method.value_loss(output, method.weigh(batch))[0]) == pytest.approx(expected)


def cut_step(method: GRPO, unfinished: str) -> tuple[Batch, Tensor]:
    """One group's step: answers of 3, 1, 2, 2 tokens after one of the prompt, with rewards 1, 0, 0, 1. The second and
    the last are cut. Returns the weighed batch without what is not trained, and its loss's gradient by token."""
    responses = []
    for reward, size, finish in ((1.0, 3, "eos"), (0.0, 1, "length"), (0.0, 2, "eos"), (1.0, 2, "length")):
        tokens, versions, logprobs = (1,) * size, (0,) * size, (-1.0,) * size
        answer = Completion(tokens=tokens, logprobs=logprobs, versions=versions, text="", finish=Finish(finish))
        responses.append(shaped(answer, Score(value=reward), ShapingSettings(unfinished=unfinished)))
    rows = method.rows(Group(index=0, prompt=Prompt(id="p", text="", tokens=(0,)), responses=tuple(responses)))
    batch = method.weigh(method.credit(Batch.of(rows), {})[0]).trained()
    assert batch.behaviour is not None
    current = batch.behaviour.clone().requires_grad_()
    loss, _ = method.policy_loss(Output(logprobs=current, entropy=torch.zeros(len(current))), batch)
    return batch, torch.autograd.grad(loss, current)[0]


def of_trl(kind: str, most: int) -> Tensor:
    """The gradient of TRL 1.16's GRPOTrainer._compute_loss for that step, its lines retyped: rows 1 and 3 are zeroed in
    `mask`, where `mask_truncated_completions` does so, and advantages are +-1/2."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    current = torch.full((4, 3), -1.0, requires_grad=True)
    ratio = (current - current.detach()).exp()
    loss = -torch.tensor([[0.5], [-0.5], [-0.5], [0.5]]) * (current if kind == "cispo" else ratio)
    if kind == "grpo":
        total = ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    elif kind == "dr_grpo":
        total = (loss * mask).sum() / (loss.size(0) * most)
    else:  # bnpo, dapo, cispo
        total = (loss * mask).sum() / mask.sum().clamp(min=1.0)
    return torch.autograd.grad(total, current)[0][mask.bool()]


@pytest.mark.parametrize(
    ("kind", "method", "first", "third", "factor"),
    [  # gradients of a token of the first and of the third answer: -A times its weight
        ("grpo", GRPO(aggregation="sequence"), -0.5 / (4 * 3), 0.5 / (4 * 2), 2.0),
        ("dr_grpo", GRPO(aggregation=8.0), -0.5 / (4 * 8), 0.5 / (4 * 8), 2.0),
        ("bnpo", GRPO(), -0.5 / 5, 0.5 / 5, 1.0),
        ("dapo", GRPO(clip=(0.2, 0.28)), -0.5 / 5, 0.5 / 5, 1.0),
        ("cispo", GRPO(correction="cispo", correction_cap=5.0), -0.5 / 5, 0.5 / 5, 1.0),
        ("grpo", GRPO(ratio="geometric", aggregation="sequence"), -0.5 / (4 * 3), 0.5 / (4 * 2), 2.0),  # GSPO
    ],
)
def test_cut_answers_that_only_the_loss_masks_stay_in_its_divisor_as_in_trl(
    kind: str, method: GRPO, first: float, third: float, factor: float
) -> None:
    method = replace(method, scale_rewards=False)
    batch, gradient = cut_step(method, "mask_loss")
    assert len(batch) == 2, "what is not trained is not computed"
    found = gradient[batch.trainable]
    assert found.tolist() == pytest.approx([first] * 3 + [third] * 2)
    torch.testing.assert_close(found, of_trl(kind, most=8))
    fewer, gradient = cut_step(method, "mask")  # as if they had not been drawn: the group's mean is 1/2 here too
    torch.testing.assert_close(gradient[fewer.trainable], factor * found)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (GRPO(), -(2 + 2 - 1) / 3),
        (GRPO(aggregation="sequence"), -(2 - 1) / 2),  # rows of mean 2 and -1
        (GRPO(aggregation=8.0), -(4 - 1) / (2 * 8)),  # sums 4 and -1
    ],
    ids=["token", "sequence", "constant"],
)
def test_policy_loss_and_figures(method: GRPO, expected: float) -> None:
    advantages = torch.tensor([0.0, 2.0, 2.0, 0.0, -1.0])
    batch = Batch.of(ROWS).with_columns(behaviour=column(-1.0, -1.0, -1.0), advantages=advantages)
    output = Output(logprobs=column(-1.0, -1.0, -1.0), entropy=torch.tensor([0.0, 0.3, 0.6, 0.0, 0.9]))
    loss, figures = method.policy_loss(output, method.weigh(batch))
    assert float(loss) == pytest.approx(expected)
    by_hand = {"loss/policy": expected, "entropy": 0.6, "ratio/mean": 1.0, "ratio/max": 1.0, "clip_fraction": 0.0}
    assert {name: figures[name] for name in by_hand} == pytest.approx(by_hand)


def test_policy_loss_reads_its_clip_settings_and_figures() -> None:
    # rho 1.5, 0.5, 1 with A 1, -1, 1 and the clip at [0.9, 1.28]: -1.28, 0.9, -1.
    advantages = torch.tensor([0.0, 1.0, -1.0, 0.0, 1.0])
    batch = Batch.of(ROWS).with_columns(behaviour=column(0.0, 0.0, 0.0), advantages=advantages)
    output = Output(logprobs=column(math.log(1.5), math.log(0.5), 0.0), entropy=torch.zeros(5))
    method = GRPO(clip=(0.1, 0.28))
    loss, figures = method.policy_loss(output, method.weigh(batch))
    assert float(loss) == pytest.approx((-1.28 + 0.9 - 1.0) / 3)
    assert (figures["ratio/mean"], figures["ratio/max"]) == (pytest.approx(1.0), pytest.approx(1.5))
    assert figures["clip_fraction"] == pytest.approx(2 / 3)


def test_cispo_bounds_the_ratio_to_the_sampler_and_counts_what_it_bounds() -> None:
    # w = min(policy / sampler, 1.2): 1.2, 0.5, 1.2 with A 1, -1, -1 and log pi log 1.5, log 0.5, log 5.
    batch = Batch.of(ROWS).with_columns(
        behaviour=column(0.0, 0.0, 0.0), advantages=torch.tensor([0.0, 1.0, -1.0, 0.0, -1.0])
    )
    output = Output(logprobs=column(math.log(1.5), math.log(0.5), math.log(5.0)), entropy=torch.zeros(5))
    method = GRPO(correction="cispo", correction_cap=1.2).adapted(off_policy=True)
    assert method.recompute_old is False, "its ratio needs no other log-probs than the sampler's"
    loss, figures = method.policy_loss(output, method.weigh(batch))
    by_hand = -1.2 * math.log(1.5) + 0.5 * math.log(0.5) + 1.2 * math.log(5.0)
    assert float(loss) == pytest.approx(by_hand / 3)
    assert figures["clip_fraction"] == pytest.approx(2 / 3)
    assert figures["ratio/max"] == pytest.approx(5.0)


K3 = (math.exp(-1), math.exp(-2) + 1, math.e - 2)
"""Of the log-ratios 1, 2 and -1."""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (GRPO(recompute_old=True, correction="none"), -1.2 + 0.8 + 5.0),
        (GRPO(correction="none", dual_clip=3.0), -1.2 + 0.8 + 3.0),
        (GRPO(correction="none", entropy_bonus=0.1), 4.6 - 0.1 * (0.3 + 0.6 + 0.9)),
        (GRPO(correction="none", kl_in_loss=0.5, kl_estimator="k2"), 4.6 + 0.5 * (0.5 + 2.0 + 0.5)),
        (GRPO(correction="none", kl_in_loss=0.5, kl_estimator="k3"), 4.6 + 0.5 * sum(K3)),
        (GRPO(correction="none", kl_in_loss=0.5), 4.6 + 0.5 * (1.5 * K3[0] + 0.5 * K3[1] + 5 * K3[2])),
        (GRPO(kl_in_loss=0.5), -1.2 * 2 + 0.8 * 0.5 + 5 + 0.5 * (2 * 1.5 * K3[0] + 0.5 * 0.5 * K3[1] + 5 * K3[2])),
        (GRPO(), -1.2 * 2 + 0.8 * 0.5 + 5.0),
        (GRPO(correction_cap=4.0), -1.2 * 3 + 0.8 * 0.5 + 5.0),
        (GRPO(kl_in_loss=0.5, kl_estimator="k2"), -1.2 * 2 + 0.8 * 0.5 + 5.0 + 0.5 * 3.0),
        (GRPO(correction="mask", correction_cap=2.5), 0.8 + 5.0),
        (GRPO(correction="sequence_mask", correction_cap=1.4), 5.0),
        (GRPO(correction="sequence_mask", correction_cap=1.6), 4.6),
        (GRPO(correction="sequence_truncate", correction_cap=1.3), (-1.2 + 0.8) * 1.3 + 5.0),
        (GRPO(correction="geometric_truncate"), (-1.2 + 0.8) * 1.5**0.5 + 5.0),
    ],
    ids=[
        *(
            "plain",
            "dual",
            "entropy",
            "k2",
            "k3",
            "weighted-k3",
            "truncate-weighted-k3",
            "truncate",
            "cap",
            "truncate-k2",
        ),
        *("mask", "mask-rows", "mask-rows-within", "truncate-rows", "truncate-means"),
    ],
)
def test_every_term_of_the_policy_loss(method: GRPO, expected: float) -> None:
    """rho 1.5, 0.5, 5 with A 1, -1, -1: -1.2, 0.8, 5. Log policy - log reference is 1, 2, -1. The learner found the
    tokens 3, 1/2 and once as likely as the sampler: 1.5 and 1 for whole rows. That corrects the clipped loss and, of
    the KL terms, weighted_k3."""
    current = torch.tensor([1.5, 0.5, 5.0]).log()
    batch = Batch.of(ROWS).with_columns(
        behaviour=column(-math.log(3), math.log(2), 0.0),
        proximal=column(0.0, 0.0, 0.0),
        reference=column(*(current - torch.tensor([1.0, 2.0, -1.0])).tolist()),
        advantages=torch.tensor([0.0, 1.0, -1.0, 0.0, -1.0]),
    )
    output = Output(logprobs=column(*current.tolist()), entropy=column(0.3, 0.6, 0.9))
    loss, figures = method.policy_loss(output, method.weigh(batch))
    assert float(loss) == pytest.approx(expected / 3)
    level, _, how = method.correction.rpartition("_")
    whole = {"sequence": 1.5, "geometric": 1.5**0.5}.get(level)
    weights = (whole, whole, 1.0) if whole else (3.0, 0.5, 1.0)
    if how == "mask":
        weights = tuple(float(max(w, 1 / w) <= method.correction_cap) for w in weights)
    weights = () if method.correction == "none" else tuple(min(w, method.correction_cap) for w in weights)
    found = {name: figures[name] for name in ("correction/mean", "correction/min") if name in figures}
    by_hand = {"correction/mean": sum(weights) / 3, "correction/min": min(weights)} if weights else {}
    assert found == pytest.approx(by_hand)
    if method.kl_in_loss and method.kl_estimator == "k2":
        assert figures["kl/loss"] == pytest.approx(3.0 / 3)
    assert ("kl/loss" in figures) == bool(method.kl_in_loss)


def test_supervised_loss_and_figures() -> None:
    batch = SFT().weigh(Batch.of(ROWS))
    output = Output(logprobs=column(-1.0, -2.0, -6.0), entropy=column(0.3, 0.6, 0.9))
    loss, figures = SFT().losses()[Role.POLICY](output, batch)
    assert float(loss) == pytest.approx(3.0)
    assert figures == pytest.approx({"loss/policy": 3.0, "entropy": 0.6})


def test_best_of_k_is_held_to_the_reference_by_k2() -> None:
    # d is 1, 0 and -2, so k2 is 1/2, 0 and 2: a mean of 5/6. The mean negative log-likelihood is 3.
    method = BestOfK(kl_in_loss=0.6)
    batch = method.weigh(Batch.of(ROWS)).with_columns(reference=column(-2.0, -2.0, -4.0))
    output = Output(logprobs=column(-1.0, -2.0, -6.0).requires_grad_(), entropy=column(0.3, 0.6, 0.9))
    loss, figures = method.losses()[Role.POLICY](output, batch)
    assert loss.item() == pytest.approx(3.0 + 0.6 * 5 / 6)
    assert figures["kl/loss"] == pytest.approx(5 / 6)
    assert figures["loss/policy"] == pytest.approx(3.5)
    loss.backward()
    assert output.logprobs is not None and output.logprobs.grad is not None
    slopes = output.logprobs.grad[batch.trainable].tolist()
    assert slopes == pytest.approx([(0.6 * d - 1) / 3 for d in (1.0, 0.0, -2.0)])


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (DPO(beta=0.5), 0.313262),  # beta h = 1
        (DPO(beta=0.5, label_smoothing=0.1), 0.413262),
        (DPO(beta=0.5, loss="robust", label_smoothing=0.1), 0.188262),
        (DPO(beta=0.25, loss="hinge"), 0.5),
        (DPO(beta=0.5, loss="ipo"), 1.0),  # (2 - 1)^2
        (DPO(beta=0.5, loss="ipo", length_average=True), 0.25),  # (1.5 - 1)^2
    ],
    ids=["sigmoid", "conservative", "robust", "hinge", "ipo", "ipo-average"],
)
def test_preference_loss(method: DPO, expected: float) -> None:
    # Chosen a b: log-ratios 0.5 and 0.5, sum 1, mean 0.5. Rejected: -1. h = 2, or 1.5 of means.
    batch = Batch.of(ROWS, unit=2).with_columns(reference=column(-1.5, -2.5, -2.0))
    output = Output(logprobs=column(-1.0, -2.0, -3.0))
    loss, figures = method.losses()[Role.POLICY](output, method.weigh(batch))
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert figures["accuracy"] == 1.0
    assert figures["margin"] == pytest.approx(method.beta * (1.5 if method.length_average else 2.0))
    assert figures["logratio/chosen"] == pytest.approx(1.0)


@pytest.mark.parametrize("method", [GRPO(), OnlineDPO(), BestOfK()], ids=["grpo", "online-dpo", "best-of-k"])
def test_the_gap_between_sampler_and_learner(method: Algorithm) -> None:
    # The sampler found the first token twice as likely as the learner: k3 is 1/2 - 1 + log 2 there, 0 on the others.
    batch = Batch.of(ROWS, unit=method.unit).with_columns(
        behaviour=column(-1.0, -2.0, -3.0), reference=column(-1.0, -2.0, -3.0), advantages=torch.ones(5)
    )
    output = Output(logprobs=column(-1.0 - math.log(2), -2.0, -3.0), entropy=torch.zeros(5))
    _, figures = method.losses()[Role.POLICY](output, method.weigh(batch))
    assert figures["kl/old"] == pytest.approx((math.log(2) - 1 / 2) / 3)


def test_reward_model_loss_and_figures() -> None:
    # Two pairs of one prompt (1/2 each) and one of another. Scores (1, 0), (0, 1), (2, 2); margins 0, 0, 0.5.
    # -log sigma: 1 -> 0.313262, -1 -> 1.313262, -0.5 -> 0.974077. (0.813262 + 0.974077) / 2. A tie is half right.
    halves = [Row(tokens=(0,), trainable=(False,), weight=0.5)] * 4
    last = [Row(tokens=(0,), trainable=(False,), margin=0.5), Row(tokens=(0,), trainable=(False,))]
    batch = RewardModel().weigh(Batch.of([*halves, *last], unit=2))
    output = Output(scores=torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0]))
    loss, figures = RewardModel().losses()[Role.JUDGE](output, batch)
    assert float(loss) == pytest.approx(0.8936695, abs=1e-6)
    assert figures["accuracy"] == pytest.approx((0.5 * 1 + 0.5 * 0 + 1 * 0.5) / 2)
    assert figures["score/mean"] == pytest.approx((0.5 * 0.5 + 0.5 * 0.5 + 1 * 2) / 2)
    wider = Output(scores=torch.tensor([3.0, 0.0, 0.0, 1.0, 2.0, 2.0]))
    figures = RewardModel().losses()[Role.JUDGE](wider, batch)[1]
    assert figures["margin"] == pytest.approx((0.5 * 3 - 0.5 * 1 + 0) / 2)
    centred, _ = RewardModel(centring=0.1).losses()[Role.JUDGE](output, batch)
    assert float(centred - loss) == pytest.approx(0.1 * (0.5 * 1 + 0.5 * 1 + 1 * 16) / 2)  # sums 1, 1, 4
