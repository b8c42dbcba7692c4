"""Distillation: which tokens the teacher raises and lowers, worked by hand, and the gradient that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plaudit.algorithms import Distill
from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.types import NOT_APPLICABLE, Group, Row, Score

ROW = Row(
    tokens=(7, 8, 4, 5, 3, 2),
    trainable=(False, False, True, True, False, True),  # 3 is a tool's
    logprobs=(0.0, 0.0, -1.0, -2.0, 0.0, -0.5),
    versions=(-1, -1, 0, 0, -1, 0),
    reference=(-4.0, -4.0, -0.25, -2.5, -3.0, -1.5),
)
OURS = [0.75, -0.5, -1.0]
"""log teacher - log student of the three trained tokens: the first is likelier to the teacher."""


def advantages(method: Distill, batch: Batch) -> list[float]:
    found = method.credit(batch, {})[0].advantages
    assert found is not None
    return found.tolist()  # type: ignore[no-any-return]


def test_a_token_that_the_teacher_finds_likelier_has_a_positive_advantage() -> None:
    batch, figures = Distill().credit(Batch.of([ROW]), {})
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0, 0, 0.75, -0.5, 0, -1.0], "none on the prompt and on the tool's token"
    assert figures["kl/reference"] == 0.75  # -0.75 + 0.5 + 1
    assert "groups/equal" not in figures


def test_with_a_discount_a_token_answers_for_the_kl_of_later_ones() -> None:
    # From the end: -1;  -0.5 + -1 / 2 = -1;  0.75 + -1 / 2 = 0.25. The tool's token takes no step.
    assert advantages(Distill(discount=0.5), Batch.of([ROW])) == [0, 0, 0.25, -1.0, 0, -1.0]
    assert advantages(Distill(discount=1.0), Batch.of([ROW])) == [0, 0, -0.75, -1.5, 0, -1.0]


def test_an_episode_of_two_rows_needs_no_group_and_is_one_return() -> None:
    batch = Batch.of([ROW, replace(ROW, further=True)])
    assert advantages(Distill(), batch) == [0, 0, 0.75, -0.5, 0, -1.0] * 2
    assert advantages(Distill(discount=1.0), batch) == [0, 0, -1.5, -2.25, 0, -1.75, 0, 0, -0.75, -1.5, 0, -1.0]


def test_a_reward_counts_by_its_weight_and_against_its_groups_mean() -> None:
    batch = Batch.of([replace(ROW, reward=1.0), replace(ROW, reward=0.0)])
    method = Distill(samples=2, reward_weight=3.0)
    assert advantages(method, batch) == [0, 0, 2.25, 1.0, 0, 0.5, 0, 0, -0.75, -2.0, 0, -2.5]  # 1.5 more, 1.5 less
    assert method.credit(batch, {})[1]["groups/equal"] == 0.0
    assert advantages(Distill(samples=2), batch) == [0, 0, 0.75, -0.5, 0, -1.0] * 2, "without a weight it is only shown"


def test_a_teacher_that_agrees_gives_no_advantage_and_no_gradient() -> None:
    same = replace(ROW, reference=ROW.logprobs)
    for method in (Distill(), Distill(discount=1.0), Distill(samples=2, reward_weight=1.0)):
        batch, figures = method.credit(Batch.of([same, same]), {})
        current = torch.tensor([*(ROW.logprobs or ()), *(ROW.logprobs or ())], requires_grad=True)
        loss, _ = method.policy_loss(Output(logprobs=current, entropy=torch.zeros(12)), method.weigh(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        assert figures["kl/reference"] == figures["advantage/std"] == 0.0
        assert current.grad is not None and not current.grad.any()


STUDENT = torch.tensor([0.1, -0.7, 1.2, 0.4, -1.5], dtype=torch.float64)
TEACHER = torch.tensor([1.0, 0.3, -0.2, -0.9, 0.6], dtype=torch.float64).log_softmax(0)


def reverse_kl(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - TEACHER)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_expected_gradient_is_that_of_the_kl_over_the_whole_vocabulary(temperature: float) -> None:
    """One decision among five tokens: the loss of each, by its probability, against autograd through the exact sum."""
    logits = (STUDENT / temperature).requires_grad_()
    logp, start = logits.log_softmax(0), torch.zeros(1, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(5):
        batch = Batch.of([Row(tokens=(9, token), trainable=(False, True))]).with_columns(
            behaviour=torch.cat((start, logp.detach()[token, None])), reference=torch.cat((start, TEACHER[token, None]))
        )
        batch, figures = Distill().credit(batch, {})
        assert figures["kl/reference"] == pytest.approx(float(logp[token].detach() - TEACHER[token]))
        current = torch.cat((start, logp[token, None]))
        output = Output(logprobs=current, entropy=torch.zeros_like(current))
        total = total + logp[token].detach().exp() * Distill().policy_loss(output, Distill().weigh(batch))[0]
    got = torch.autograd.grad(total, logits)[0]
    exact = (STUDENT / temperature).requires_grad_()
    expected = torch.autograd.grad(reverse_kl(exact), exact)[0]
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert float(total.detach()) == pytest.approx(float(reverse_kl(exact).detach())), "and so is the value"


def given(group: Group, *scores: Score) -> Group:
    responses = zip(group.responses, scores, strict=True)
    return replace(group, responses=tuple(replace(one, score=score, reward=score.value) for one, score in responses))


def test_answers_without_a_reward_have_rows_unless_it_failed_or_they_are_masked(
    make_group: Callable[..., Group],
) -> None:
    absent, failed = Score(value=None, reason=NOT_APPLICABLE), Score(value=None, reason="the judge timed out")
    group = given(make_group([None] * 4), absent, Score(value=1.0), failed, absent)
    assert [row.tokens[3] - 10 for row in Distill().rows(group)] == [0, 1, 3]
    cut = replace(group.responses[1], reward=None, trainable=(False, False))  # shaping.unfinished=mask
    responses = (*group.responses[:1], cut, *group.responses[2:])
    assert [row.tokens[3] - 10 for row in Distill().rows(replace(group, responses=responses))] == [0, 3]
    mixed = Distill(samples=4, reward_weight=1.0)
    assert [row.tokens[3] - 10 for row in mixed.rows(group)] == [1], "0 would count in the baseline"
    none = given(group, absent, absent, failed, absent)
    assert [(row.tokens[3] - 10, row.reward) for row in mixed.rows(none)] == [(0, 0.0), (1, 0.0), (3, 0.0)]


def test_rows_have_the_number_of_their_sources_teacher(make_group: Callable[..., Group]) -> None:
    method, group = Distill(teachers={"b.jsonl": "runs/b", "c.jsonl": "runs/c"}), make_group([None])
    absent = given(group, Score(value=None, reason=NOT_APPLICABLE))
    sources = ("a.jsonl", "b.jsonl", "c.jsonl")
    asked = [replace(absent, prompt=replace(group.prompt, source=source)) for source in sources]
    assert [row.teacher for one in asked for row in method.rows(one)] == [0, 1, 2]


def test_a_baseline_is_needed_only_by_a_reward_that_counts() -> None:
    assert not Distill().uses_rewards and not Distill().has_baseline
    assert Distill(samples=2, reward_weight=0.5).uses_rewards and Distill(samples=2, reward_weight=0.5).has_baseline


def test_over_the_whole_vocabulary_the_loss_is_the_weighed_kl_and_advantages_are_of_rewards_only() -> None:
    batch = Batch.of([replace(ROW, reward=1.0), replace(ROW, reward=0.0)])
    divergence = torch.tensor([0.0, 0.0, 0.5, 0.25, 0.0, 1.5] * 2, requires_grad=True)
    current = torch.tensor([*(ROW.logprobs or ())] * 2, requires_grad=True)
    output = Output(logprobs=current, entropy=torch.zeros(12), divergence=divergence)
    method = Distill(whole_vocabulary=True)
    credited, figures = method.credit(batch, {})
    assert credited.advantages is not None and not credited.advantages.any() and figures["kl/reference"] == 0.75
    loss, figures = method.policy_loss(output, method.weigh(credited))
    loss.backward()  # type: ignore[no-untyped-call]
    assert figures["kl/loss"] == figures["loss/policy"] == pytest.approx(0.75)  # (0.5 + 0.25 + 1.5) / 3
    assert divergence.grad is not None and divergence.grad.tolist() == pytest.approx([0, 0, 1 / 6, 1 / 6, 0, 1 / 6] * 2)
    assert current.grad is None
    mixed = Distill(samples=2, reward_weight=3.0, whole_vocabulary=True)
    credited, _ = mixed.credit(batch, {})
    assert credited.advantages is not None
    assert credited.advantages.tolist() == [0, 0, 1.5, 1.5, 0, 1.5, 0, 0, -1.5, -1.5, 0, -1.5]
    mixed.policy_loss(output, mixed.weigh(credited))[0].backward()  # type: ignore[no-untyped-call]
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([0, 0, -0.25, -0.25, 0, -0.25, 0, 0, 0.25, 0.25, 0, 0.25])
