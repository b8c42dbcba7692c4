"""The expected gradient of each method's loss is the gradient of E[reward] - beta KL, exactly.

A task small enough to list every answer: two tokens and an end, at most two steps, so seven answers. The expectation is
a sum over them (or over all pairs), so a wrong sign, shift or mask anywhere between rows and loss shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from plaudit.algorithms.base import Algorithm, Objective, Output
from plaudit.algorithms.distill import Distill
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.rloo import RLOO
from plaudit.algorithms.sft import SFT
from plaudit.batch import Batch
from plaudit.types import Role, Row

END = 2
ANSWERS = [(END,), *product((0, 1), (0, 1, END))]
# One line a state: at the start, after token 0, after token 1. In quarters, so that 16 rows hold the distribution.
POLICY = torch.tensor([[1, 1, 2], [2, 1, 1], [1, 2, 1]], dtype=torch.float64) / 4
OTHER = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.3, 0.6], [0.3, 0.3, 0.4]], dtype=torch.float64)
REWARD = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.5, -0.7, 0.1], dtype=torch.float64)
BETA = 0.4


def steps(answer: Sequence[int]) -> list[tuple[int, int]]:
    """(state, token) of each decision: state 0 at the start, then 1 + the token before."""
    return [(0, answer[0])] + [(1 + answer[0], token) for token in answer[1:]]


def per_token(logp: Tensor, answers: Sequence[int]) -> Tensor:
    """The column of log-probs of rows prompt | answer, (n,): 0 on the prompt."""
    entries = []
    for number in answers:
        entries.append(torch.zeros((), dtype=torch.float64))
        entries.extend(logp[state, token] for state, token in steps(ANSWERS[number]))
    return torch.stack(entries)


def chance(table: Tensor) -> Tensor:
    """Probability of each answer, (7,)."""
    return torch.stack([torch.stack([table[state, token] for state, token in steps(y)]).prod() for y in ANSWERS])


def objective_gradient(beta: float) -> Tensor:
    """d (E[reward] - beta KL(policy || OTHER)) / d logits, by autograd through the exact sums."""
    logits = POLICY.log().clone().requires_grad_()
    p = chance(torch.softmax(logits, -1))
    total = (p * (REWARD - beta * (p.log() - chance(OTHER).log()))).sum()
    return torch.autograd.grad(total, logits)[0]


def batch_of(answers: Sequence[int], *, sampler: Tensor = POLICY) -> Batch:
    """Rows of one group; what the sampler and the reference say of them in double precision."""
    rows = [Row(tokens=(9, *ANSWERS[y]), trainable=(False, *(True,) * len(ANSWERS[y]))) for y in answers]
    return Batch.of(rows).with_columns(
        behaviour=per_token(sampler.log(), answers),
        reference=per_token(OTHER.log(), answers),
        reward=REWARD[list(answers)],
    )


def loss_of(method: Objective, batch: Batch, answers: Sequence[int], logits: Tensor) -> Tensor:
    current = per_token(torch.log_softmax(logits, -1), answers)
    output = Output(logprobs=current, entropy=torch.zeros_like(current))
    return method.losses()[Role.POLICY](output, method.weigh(batch))[0]


def expected_gradient(method: Algorithm, size: int, *, sampler: Tensor = POLICY, **columns: Tensor) -> Tensor:
    """The gradient of the loss, averaged over every batch of `size` answers with its probability."""
    logits = POLICY.log().clone().requires_grad_()
    p = chance(sampler)
    total = torch.zeros((), dtype=torch.float64)
    for answers in product(range(len(ANSWERS)), repeat=size):
        batch = batch_of(answers, sampler=sampler)
        if columns:
            batch = batch.with_columns(**{name: column_of(column, answers) for name, column in columns.items()})
        batch, _ = method.credit(batch, {})
        total = total + p[list(answers)].prod() * loss_of(method, batch, answers, logits)
    return torch.autograd.grad(total, logits)[0]


def column_of(table: Tensor, answers: Sequence[int]) -> Tensor:
    """A per-answer table (7,) as a row column, a per-state one (3,) as a token column."""
    if len(table) == len(ANSWERS):
        return table[list(answers)]
    entries: list[float] = []
    for number in answers:
        entries += [99.0, *(float(table[state]) for state, _ in steps(ANSWERS[number]))]
    return torch.tensor(entries, dtype=torch.float64)


EVERYONE = [y for y, p in enumerate(chance(POLICY).tolist()) for _ in range(round(16 * p))]
"""16 rows in which every answer stands as often as its probability says."""


def whole_gradient(method: Objective) -> tuple[Tensor, Batch]:
    """The gradient on the one batch that is the distribution itself, and that batch after credit."""
    logits = POLICY.log().clone().requires_grad_()
    batch = batch_of(EVERYONE)
    if isinstance(method, Algorithm):
        batch, _ = method.credit(batch, {})
    return torch.autograd.grad(loss_of(method, batch, EVERYONE, logits), logits)[0], batch


def close(got: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.01  # or the comparison says nothing
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def state_values() -> Tensor:
    """The true value of each state: what is still to come, reward and KL penalty, under the policy."""
    cost = BETA * (POLICY.log() - OTHER.log())
    values = torch.zeros(3, dtype=torch.float64)
    for state in (1, 2):
        rewards = torch.stack([REWARD[ANSWERS.index((state - 1, token))] for token in range(3)])
        values[state] = (POLICY[state] * (rewards - cost[state])).sum()
    ends = torch.stack([values[1], values[2], REWARD[0]])
    values[0] = (POLICY[0] * (ends - cost[0])).sum()
    return values


@pytest.mark.parametrize(
    ("trace", "critic"), [(0.0, state_values()), (0.5, state_values()), (1.0, state_values()), (1.0, torch.zeros(3))]
)
def test_ppo_with_the_true_critic_at_any_lambda_and_without_one(trace: float, critic: Tensor) -> None:
    """A value read one token off would bias every lambda below 1."""
    method = PPO(kl_coefficient=BETA, trace=trace, whiten_advantages=False, aggregation=1.0)
    got = expected_gradient(method, 1, values=critic, bootstrap=torch.zeros(7, dtype=torch.float64))
    close(got, -objective_gradient(BETA))


def test_ppo_of_answers_cut_after_one_token_bootstraps_from_the_true_value() -> None:
    """Every answer that would go on is cut after its first token: its true value stands in for the rest."""
    values = state_values()
    method = PPO(kl_coefficient=BETA, trace=0.9, whiten_advantages=False, aggregation=1.0)
    logits = POLICY.log().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        cut = token != END
        row = Row(tokens=(9, token), trainable=(False, True), continues=cut)
        start = torch.zeros(1, dtype=torch.float64)
        batch = Batch.of([row]).with_columns(
            behaviour=torch.cat((start, POLICY[0, token].log()[None])),
            reference=torch.cat((start, OTHER[0, token].log()[None])),
            reward=torch.zeros(1, dtype=torch.float64) if cut else REWARD[:1],
            values=torch.cat((start, values[:1])),
            bootstrap=values[1 + token : 2 + token] if cut else torch.full((1,), 50.0, dtype=torch.float64),
        )
        batch, _ = method.credit(batch, {})
        current = torch.cat((start, torch.log_softmax(logits, -1)[0, token][None]))
        output = Output(logprobs=current, entropy=torch.zeros_like(current))
        total = total + POLICY[0, token] * method.policy_loss(output, method.weigh(batch))[0]
    got = torch.autograd.grad(total, logits)[0]
    close(got[0], -objective_gradient(BETA)[0])


@pytest.mark.parametrize(
    "method",
    [
        RLOO(samples=2, kl_coefficient=BETA, aggregation=1.0),
        RLOO(samples=2, kl_coefficient=BETA, aggregation="sequence", ratio="sequence"),
    ],
    ids=["tokens", "sequences"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_rloo(method: RLOO, size: int) -> None:
    close(expected_gradient(method, size), -objective_gradient(BETA))


def test_remax() -> None:
    greedy = REWARD[0].expand(7)  # the most likely first token is the end
    method = ReMax(kl_coefficient=BETA, aggregation=1.0)
    close(expected_gradient(method, 1, baseline=greedy), -objective_gradient(BETA))
    paper = replace(method, centre_advantages=False)
    close(expected_gradient(paper, 2, baseline=greedy), -objective_gradient(BETA))
    close(expected_gradient(method, 2, baseline=greedy), -objective_gradient(BETA) / 2)  # (n - 1) / n


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce(group_baseline: bool) -> None:
    """Whitening is an affine map of the batch: on the whole distribution it divides by the deviation and no more."""
    method = Reinforce(samples=2, kl_coefficient=BETA, group_baseline=group_baseline, aggregation=1.0)
    got, batch = whole_gradient(method)
    returns = []
    shift = REWARD[EVERYONE].mean() if group_baseline else 0.0
    for y in EVERYONE:
        costs = [BETA * float(POLICY[s, a].log() - OTHER[s, a].log()) for s, a in steps(ANSWERS[y])]
        returns += [float(REWARD[y] - shift) - sum(costs[t:]) for t in range(len(costs))]
    close(got * torch.tensor(returns, dtype=torch.float64).std(), -objective_gradient(BETA))
    assert batch.advantages is not None
    assert float(batch.advantages[batch.trainable].mean()) == pytest.approx(0.0, abs=1e-6)


def test_distillation_with_a_discount_of_1_is_the_kl_of_whole_answers() -> None:
    kl = objective_gradient(0.0) - objective_gradient(1.0)
    close(expected_gradient(Distill(discount=1.0, aggregation=1.0), 1), kl)
    mixed = Distill(samples=2, discount=1.0, reward_weight=2.0, aggregation=1.0)  # 2 (k - 1) / k = 1
    close(expected_gradient(mixed, 2), kl - objective_gradient(0.0))


def test_distillation_by_token_is_the_kl_in_every_state_visited() -> None:
    logits = POLICY.log().clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    visits = torch.tensor([1.0, 0.25, 0.25], dtype=torch.float64)
    total = (visits * (logp.exp() * (logp - OTHER.log())).sum(-1)).sum()
    close(expected_gradient(Distill(aggregation=1.0), 1), torch.autograd.grad(total, logits)[0])


def test_dr_grpo_is_short_by_its_own_share_of_the_mean() -> None:
    method = GRPO(samples=2, scale_rewards=False, aggregation=1.0)
    close(expected_gradient(method, 2), -objective_gradient(0.0) / 2)  # (k - 1) / k
    close(expected_gradient(method, 3), -objective_gradient(0.0) * 2 / 3)


def test_grpo_divides_by_the_deviation_of_the_group() -> None:
    got, _ = whole_gradient(GRPO(aggregation=1.0))
    close(got * (REWARD[EVERYONE].std() + 1e-4), -objective_gradient(0.0))


@pytest.mark.parametrize("correction", ["truncate", "cispo"])
def test_a_token_mean_is_the_same_direction_on_the_whole_distribution(correction: str) -> None:
    """With cispo too: its value is another one, but on fresh samples every weight is 1."""
    got, batch = whole_gradient(GRPO(scale_rewards=False, correction=correction))
    close(got * int(batch.trainable.sum()) / 16, -objective_gradient(0.0))


def test_old_samples_are_corrected_by_the_ratio_of_sequences() -> None:
    """Drawn from another policy: E_mu[rho A] is E_pi[A] where nothing is clipped."""
    method = RLOO(samples=2, kl_coefficient=0.0, ratio="sequence", aggregation="sequence", clip=(1.0, 1e9))
    close(expected_gradient(method, 2, sampler=OTHER), -objective_gradient(0.0))


def test_cispo_corrects_old_samples_by_the_ratio_of_sequences() -> None:
    method = RLOO(samples=2, kl_coefficient=0.0, ratio="sequence", aggregation=1.0, correction="cispo")
    method = replace(method, correction_cap=1e9)
    close(expected_gradient(method, 2, sampler=OTHER), -objective_gradient(0.0))


@pytest.mark.parametrize("estimator", ["weighted_k3", "k2", "k3"])
def test_kl_in_the_loss_pulls_towards_the_reference(estimator: str) -> None:
    """In every state visited: the KL's own gradient, but by k3 that of KL(reference || policy)."""
    plain, _ = whole_gradient(GRPO(aggregation=1.0))
    held, _ = whole_gradient(GRPO(aggregation=1.0, kl_in_loss=BETA, kl_estimator=estimator))
    logits = POLICY.log().clone().requires_grad_()
    logp, reference = torch.log_softmax(logits, -1), OTHER.log()
    reverse, forward = (logp.exp() * (logp - reference)).sum(-1), (OTHER * (reference - logp)).sum(-1)
    visits = torch.tensor([1.0, 0.25, 0.25], dtype=torch.float64)
    total = BETA * (visits * (forward if estimator == "k3" else reverse)).sum()
    close(held - plain, torch.autograd.grad(total, logits)[0])


SEVEN = torch.tensor([0.32, 0.21, 0.16, 0.12, 0.09, 0.06, 0.04], dtype=torch.float64)
TARGET = torch.tensor([0.03, 0.05, 0.09, 0.13, 0.18, 0.22, 0.30], dtype=torch.float64)
SAMPLER = torch.tensor([0.10, 0.10, 0.20, 0.20, 0.10, 0.10, 0.20], dtype=torch.float64)
BETWEEN = torch.tensor([0.20, 0.15, 0.20, 0.15, 0.10, 0.10, 0.10], dtype=torch.float64)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("sampler", "proximal", "exact"),
    [
        (SEVEN, None, {"weighted_k3", "k2"}),
        (SAMPLER, None, {"weighted_k3"}),
        (SAMPLER, SEVEN, {"weighted_k3"}),
        (SAMPLER, BETWEEN, {"weighted_k3"}),
    ],
    ids=["on-policy", "older samples", "recomputed", "recomputed, later update"],
)
def test_the_gradient_of_each_kl_estimator_in_a_loss_against_the_exact_one(
    sampler: Tensor, proximal: Tensor | None, exact: set[str], level: str
) -> None:
    """Seven answers of one token, each with the probability that it was sampled with, for a policy whose logits are
    log SEVEN: the gradient of KL(policy || TARGET) is p (log p - log q - KL)."""
    d = SEVEN.log() - TARGET.log()
    kl = (SEVEN * d).sum()
    gradient = SEVEN * (d - kl)
    start = torch.zeros(7, 1, dtype=torch.float64)

    def column(p: Tensor) -> Tensor:
        return torch.cat((start, p.log()[:, None]), 1).reshape(-1)

    batch = Batch.of([Row(tokens=(9, token), trainable=(False, True)) for token in range(7)])
    batch = batch.with_columns(behaviour=column(sampler), reference=column(TARGET), advantages=0 * column(sampler))
    batch = batch.with_columns(proximal=None if proximal is None else column(proximal))
    found: dict[str, tuple[float, float]] = {}
    for estimator in ("weighted_k3", "k2", "k3"):
        method = GRPO(kl_in_loss=1.0, kl_estimator=estimator, ratio=level, correction_cap=1e6)
        weighed = method.weigh(batch)
        weighed = weighed.with_columns(weight=torch.stack((0 * sampler, sampler), 1).reshape(-1))
        logits = SEVEN.log().clone().requires_grad_()
        current = torch.cat((start, torch.log_softmax(logits, 0)[:, None]), 1).reshape(-1)
        loss, _ = method.policy_loss(Output(logprobs=current, entropy=0 * current), weighed)
        off = float((torch.autograd.grad(loss, logits)[0] - gradient).abs().max())
        found[estimator] = off, abs(float(loss.detach() - kl))
    assert {estimator for estimator, (off, _) in found.items() if off < 1e-9} == exact
    assert found["weighted_k3"][1] < 1e-9, "its value is the KL as well"
    assert all(off > 0.05 for estimator, (off, _) in found.items() if estimator not in exact)


def test_sft_is_at_rest_on_its_own_distribution_and_moves_towards_another() -> None:
    rest, _ = whole_gradient(SFT())
    torch.testing.assert_close(rest, torch.zeros_like(rest), atol=1e-7, rtol=0)
    logits = OTHER.log().clone().requires_grad_()
    moved = torch.autograd.grad(loss_of(SFT(), batch_of(EVERYONE), EVERYONE, logits), logits)[0]
    close(moved[0], (OTHER - POLICY)[0] * 16 / 24)  # cross-entropy in the first state; 24 tokens, 16 of them first


def test_entropy_bonus_raises_entropy() -> None:
    batch = batch_of(EVERYONE)
    method = GRPO(entropy_bonus=0.3)
    batch, _ = method.credit(batch, {})
    entropy = torch.zeros(len(batch.tokens), dtype=torch.float64, requires_grad=True)
    assert batch.behaviour is not None
    loss, _ = method.policy_loss(Output(logprobs=batch.behaviour, entropy=entropy), method.weigh(batch))
    gradient = torch.autograd.grad(loss, entropy)[0]
    torch.testing.assert_close(gradient, -0.3 / 24 * batch.trainable.double(), atol=1e-7, rtol=0)


def test_each_token_of_another_policys_samples_is_weighed_by_its_own_ratio() -> None:
    """With a cap that nothing reaches, and against the gradient written out; without the correction it is another."""
    proximal = POLICY.log()

    def gradient(correction: str) -> Tensor:
        method = RLOO(samples=2, kl_coefficient=0.0, aggregation=1.0, correction=correction, correction_cap=1e6)
        logits = POLICY.log().clone().requires_grad_()
        p = chance(OTHER)
        total = torch.zeros((), dtype=torch.float64)
        for answers in product(range(len(ANSWERS)), repeat=2):
            batch = batch_of(answers, sampler=OTHER).with_columns(proximal=per_token(proximal, answers))
            batch, _ = method.credit(batch, {})
            total = total + p[list(answers)].prod() * loss_of(method, batch, answers, logits)
        return torch.autograd.grad(total, logits)[0]

    expected = token_corrected()
    close(gradient("truncate"), expected)
    assert float((gradient("none") - expected).abs().max()) > 0.01


def test_older_samples_are_corrected_by_weights_of_whole_answers_where_the_ratio_is_theirs() -> None:
    """With the learner's own log-probs in the ratio E_mu[w A grad log pi] is E_pi's where w is of the answer, as
    `ratio` is. Weights by token miss how likely the other tokens were."""

    def gradient(how: str) -> Tensor:
        ours = {"ratio": "sequence", "aggregation": "sequence", "correction": how, "correction_cap": 1e6}
        method = RLOO(samples=2, kl_coefficient=0.0, **ours)  # type: ignore[arg-type]
        logits = POLICY.log().clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for answers in product(range(len(ANSWERS)), repeat=2):
            batch = batch_of(answers, sampler=OTHER).with_columns(proximal=per_token(POLICY.log(), answers))
            batch, _ = method.credit(batch, {})
            total = total + chance(OTHER)[list(answers)].prod() * loss_of(method, batch, answers, logits)
        return torch.autograd.grad(total, logits)[0]

    close(gradient("truncate"), -objective_gradient(0.0))
    assert float((gradient("token_truncate") + objective_gradient(0.0)).abs().max()) > 0.01


def token_corrected() -> Tensor:
    """Sum over pairs of answers drawn from OTHER, tokens weighed by policy / OTHER each, of -A d log policy / 2."""
    total = torch.zeros(3, 3, dtype=torch.float64)
    p = chance(OTHER)
    for first, second in product(range(len(ANSWERS)), repeat=2):
        for mine, other in ((first, second), (second, first)):
            advantage = REWARD[mine] - REWARD[other]
            for state, token in steps(ANSWERS[mine]):
                direction = -POLICY[state].clone()
                direction[token] += 1.0  # d log softmax(logits)[token] / d logits
                weight = POLICY[state, token] / OTHER[state, token]
                total[state] -= p[first] * p[second] * weight * advantage * direction / 2
    return total
