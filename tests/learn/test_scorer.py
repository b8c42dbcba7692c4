"""Columns of models that are only asked: aligned with their tokens, whatever runs beside them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import GPT2

from plaudit.batch import Batch
from plaudit.learn.scorer import Scorer
from plaudit.learn.teachers import Teachers
from plaudit.models.base import LanguageModel
from plaudit.models.load import fresh_model
from plaudit.types import Role, Row


def tiny(head: str = "lm", *, seed: int = 0) -> LanguageModel:
    return fresh_model(GPT2, head=head, seed=seed, vocab_size=50)  # type: ignore[arg-type]


def row(*tokens: int, trained: int) -> Row:
    """A row whose last `trained` tokens are trained."""
    return Row(tokens=tokens, trainable=(*(False,) * (len(tokens) - trained), *(True,) * trained))


ROWS = [row(7, 8, 4, 5, 2, trained=3), row(9, 6, 2, trained=2), row(3, 1, 4, 1, 5, 9, trained=4)]


def logits(model: LanguageModel, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), model.packed([len(tokens)]))
        return model.head(hidden)


LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SLIDING = LLAMA | {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 2}


@pytest.mark.parametrize("config", [GPT2, SLIDING], ids=["gpt2", "behind a window"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("budget", [1, 8, 1000])
def test_entry_t_speaks_of_token_t_given_those_before(config: dict[str, Any], temperature: float, budget: int) -> None:
    model = fresh_model(config, seed=0, vocab_size=50)
    scorer = Scorer(model, Role.REFERENCE, temperature=temperature, token_budget=budget)
    column = scorer.annotate(Batch.of(ROWS)).reference
    assert column is not None
    expected: list[float] = []
    for one in ROWS:
        table = (logits(model, one.tokens) / temperature).log_softmax(-1)
        for t, (token, trained) in enumerate(zip(one.tokens, one.trainable, strict=True)):
            expected.append(float(table[t - 1, token]) if trained else 0.0)
    torch.testing.assert_close(column, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [1, 1000])
def test_each_row_is_asked_of_its_own_teacher(budget: int) -> None:
    scorers = [Scorer(tiny(seed=seed), Role.REFERENCE, token_budget=budget) for seed in (0, 1, 2)]
    alone = [scorer.annotate(Batch.of(ROWS)).reference for scorer in scorers]
    numbers = (1, 0, 1)
    rows = [replace(one, teacher=number) for one, number in zip(ROWS, numbers, strict=True)]
    batch = Teachers(scorers).annotate(Batch.of(rows))
    own = Batch.of(rows).row
    for row, number in enumerate(numbers):
        found, expected = batch.reference, alone[number]
        assert found is not None and expected is not None
        torch.testing.assert_close(found[own == row], expected[own == row], atol=1e-6, rtol=0)
    assert Batch.of(ROWS).teacher is None
    first = Teachers(scorers).annotate(Batch.of(ROWS)).reference
    assert first is not None and alone[0] is not None and torch.equal(first, alone[0]), "without numbers the first"


def test_values_are_of_the_state_before_each_token_and_bootstraps_of_the_state_behind_the_last() -> None:
    model = tiny("scalar")
    batch = Scorer(model, Role.CRITIC).annotate(Batch.of(ROWS))
    assert batch.values is not None
    assert batch.bootstrap is not None
    values: list[float] = []
    ends: list[float] = []
    for one in ROWS:
        scores = logits(model, one.tokens)[:, 0]
        values += [float(scores[t - 1]) if trained else 0.0 for t, trained in enumerate(one.trainable)]
        ends.append(float(scores[-1]))
    torch.testing.assert_close(batch.values, torch.tensor(values), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.bootstrap, torch.tensor(ends), atol=1e-5, rtol=0)


def test_a_policy_fills_the_proximal_column_with_the_same_numbers_as_a_reference() -> None:
    model, batch = tiny(), Batch.of(ROWS)
    proximal, reference = (Scorer(model, role).annotate(batch) for role in (Role.POLICY, Role.REFERENCE))
    assert proximal.proximal is not None
    assert reference.reference is not None
    assert torch.equal(proximal.proximal, reference.reference)
    assert proximal.reference is None


@pytest.mark.parametrize("role", [Role.POLICY, Role.REFERENCE, Role.CRITIC])
def test_a_pass_reads_sequences_alone(role: Role) -> None:
    """Nothing else of a batch travels to ranks; what they add survives the way. The sampler's log-probs come back from
    those that were given them."""
    batch = Batch.of([replace(row, logprobs=[0.5] * len(row.tokens), reward=3.0) for row in ROWS])
    scorer = Scorer(tiny(head="scalar" if role is Role.CRITIC else "lm"), role)
    whole, some = scorer.columns(batch), scorer.columns(batch.sequences())
    assert some and whole.keys() == some.keys() | ({"behaviour"} if role is Role.REFERENCE else set())
    for name, column in pickle.loads(pickle.dumps(some)).items():
        assert torch.equal(column, whole[name]), name


def test_blend_moves_by_its_share() -> None:
    """r <- r + 0.25 (p - r), twice: 0.4375 of the way."""
    reference, policy = tiny(seed=0), tiny(seed=1)
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    target = dict(policy.named_parameters())
    scorer = Scorer(reference, Role.REFERENCE)
    for _ in range(2):
        scorer.blend(target.__getitem__, 0.25)
    for name, parameter in reference.named_parameters():
        expected = start[name] + 0.4375 * (target[name].detach() - start[name])
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=1e-6)
    scorer.blend(target.__getitem__, 1.0)
    assert all(torch.equal(parameter, target[name]) for name, parameter in reference.named_parameters())
