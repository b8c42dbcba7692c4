import math

import pytest
import torch
from scipy.stats import chisquare

from plaudit.rollout.sampler import Draw, invert, largest, sample, uniforms
from plaudit.types import Sampling

NO_ENDS = torch.tensor([], dtype=torch.int64)
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw_many(sampling: Sampling, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    logits = LOGITS.expand(count, -1).clone()
    return sample(
        logits, Draw.of([sampling] * count), uniforms(sampling, count), emitted=torch.zeros(count), ends=NO_ENDS
    )


def exact(sampling: Sampling) -> list[float]:
    """The distribution written out in plain Python, with the definition of top-p taken from its paper."""
    weights = [math.exp(x / sampling.temperature) for x in LOGITS.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: sampling.top_k or None]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass < sampling.top_p:
            kept.append(i)
        mass += weights[i] / total
    return [weights[i] / sum(weights[j] for j in kept) if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=3.0, seed=3),
        Sampling(top_k=3, seed=4),
        Sampling(top_k=4, temperature=2.0, top_p=0.7, seed=5),
        Sampling(top_p=0.9, seed=6),
        Sampling(top_p=0.01, seed=7),
        Sampling(top_k=99, seed=8),
    ],
)
def test_draws_follow_the_exact_distribution(sampling: Sampling) -> None:
    tokens, logprobs = draw_many(sampling)
    counts, probabilities = tokens.bincount(minlength=6).tolist(), exact(sampling)
    kept = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(counts[i] for i in kept) == len(tokens)
    if len(kept) > 1:
        expected = [probabilities[i] * len(tokens) for i in kept]
        assert chisquare([counts[i] for i in kept], expected).pvalue > 1e-3
    for i in kept:
        if counts[i]:
            assert logprobs[tokens == i][0].item() == pytest.approx(math.log(probabilities[i]), abs=1e-5)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    # Probabilities 0.5, 0.3, 0.2: 0.5 is reached by one token, 0.6 needs two, 0.81 all three.
    logits = torch.tensor([0.3, 0.5, 0.2]).log()
    for top_p, kept in ((0.49, {1}), (0.6, {0, 1}), (0.81, {0, 1, 2})):
        sampling = Sampling(top_p=top_p, seed=3)
        tokens, _ = sample(
            logits.expand(500, -1).clone(),
            Draw.of([sampling] * 500),
            uniforms(sampling, 500),
            emitted=torch.zeros(500),
            ends=NO_ENDS,
        )
        assert set(tokens.tolist()) == kept


@pytest.mark.parametrize(
    ("vocabulary", "spread", "fewest", "most"),
    [(3000, 0.1, 2000, 3000), (3000, 8.0, 1, 20), (20_000, 3.0, 300, 2000), (20_000, 0.5, 3000, 16_000)],
)
def test_top_p_over_a_large_vocabulary(vocabulary: int, spread: float, fewest: int, most: int) -> None:
    """From flat, where most tokens are kept, to steep, where a handful is: every number of candidates is met."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    ordered = logits.double().softmax(dim=-1).sort(descending=True)
    before = ordered.values.cumsum(0) - ordered.values
    kept = set(ordered.indices[before < 0.9].tolist())
    assert fewest <= len(kept) <= most
    mass = sum(logits.double().softmax(dim=-1)[list(kept)].tolist())
    sampling = Sampling(top_p=0.9, seed=2)
    tokens, logprobs = sample(
        logits.expand(400, -1).clone(),
        Draw.of([sampling] * 400),
        uniforms(sampling, 400),
        emitted=torch.zeros(400),
        ends=NO_ENDS,
    )
    assert set(tokens.tolist()) <= kept
    expected = logits.double().log_softmax(dim=-1)[tokens] - math.log(mass)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)


def test_inversion_by_hand() -> None:
    # Cumulative 1, 1, 4, 4 of total 4: below 0.25 is index 0, everything else index 2.
    weights = torch.tensor([1.0, 0.0, 3.0, 0.0]).expand(5, -1)
    uniform = torch.tensor([0.0, 0.24, 0.25, 0.9, 1 - 2**-24])
    assert invert(weights, uniform).tolist() == [0, 0, 2, 2, 2]


def test_a_token_without_mass_is_never_drawn_at_either_end() -> None:
    edges = torch.tensor([0.0, 1 - 2**-24, 1.0])  # 1.0: what rounding could make of the largest
    weights = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    weights[:, :5] = 0
    weights[:, -5:] = 0
    index = invert(weights, edges)
    assert (weights.gather(1, index[:, None]) > 0).all()
    assert invert(torch.tensor([[0.0, 0.0, 1e-38, 0.0]]), torch.tensor([0.999])).tolist() == [2]


def test_inversion_over_blocks_by_hand() -> None:
    # 150 weights are blocks of 64, 64 and 22, here of mass 1, 2 and 5.
    weights = torch.zeros(1, 150)
    weights[0, [10, 63, 64, 149]] = torch.tensor([0.5, 0.5, 2.0, 5.0])
    for uniform, index in (
        (0.0, 10),
        (0.06, 10),
        (0.07, 63),
        (0.12, 63),
        (0.13, 64),
        (0.37, 64),
        (0.38, 149),
        (1.0, 149),
    ):
        assert invert(weights, torch.tensor([uniform])).item() == index


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 200, 1024])
def test_blocks_draw_what_one_running_sum_draws(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(vocab, generator=generator).pow(8)
    uniform = torch.rand(300, generator=generator)
    cumulative = weights.double().cumsum(0)
    expected = torch.searchsorted(cumulative, uniform.double() * cumulative[-1], right=True)
    assert (invert(weights.expand(300, -1), uniform) == expected).float().mean() > 0.99  # rounding, at edges


def test_the_largest_is_the_first_of_equals() -> None:
    generator = torch.Generator().manual_seed(6)
    for vocab in (1, 50, 64, 130, 1024):
        logits = torch.randint(-9, 4, (200, vocab), generator=generator).float() - 5.0
        assert torch.equal(largest(logits), torch.from_numpy(logits.numpy().argmax(axis=1)))


def test_ends_are_banned_until_min_tokens() -> None:
    count = 300
    samplings = [
        Sampling(min_tokens=2),
        Sampling(min_tokens=2, top_k=2),
        Sampling(min_tokens=2, top_p=0.5),
        Sampling(min_tokens=2, temperature=0.0),
    ]
    for sampling in samplings:
        for emitted in range(4):
            tokens, logprobs = sample(
                LOGITS.expand(count, -1).clone(),
                Draw.of([sampling] * count),
                uniforms(sampling, count),
                emitted=torch.full((count,), emitted),
                ends=torch.tensor([0, 5]),
            )
            assert (0 in tokens.tolist()) == (emitted >= 2)
            assert logprobs.isfinite().all()
    # Greedy under the ban: token 1, renormalised over tokens 1 to 4 at temperature 1. Drawn, 0.99 would be token 4.
    tokens, logprobs = sample(
        LOGITS[None].clone(),
        Draw.of(samplings[3:]),
        torch.tensor([0.99]),
        emitted=torch.tensor([0]),
        ends=torch.tensor([0, 5]),
    )
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(1.0 - math.log(sum(math.exp(x) for x in (1.0, 0.5, 0.0, -1.0))), abs=1e-6)


def test_a_row_is_drawn_alike_whoever_is_beside_it() -> None:
    samplings = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_k=3),
        Sampling(top_p=0.8),
        Sampling(top_k=2, top_p=0.9),
        Sampling(temperature=2.0, min_tokens=3),
    ]
    generator = torch.Generator().manual_seed(5)
    logits, uniform = torch.randn(6, 40, generator=generator), torch.rand(6, generator=generator)
    ends = torch.tensor([7])
    together = sample(logits.clone(), Draw.of(samplings), uniform, emitted=torch.ones(6), ends=ends)
    for row, sampling in enumerate(samplings):
        part = slice(row, row + 1)
        alone = sample(logits[part].clone(), Draw.of([sampling]), uniform[part], emitted=torch.ones(1), ends=ends)
        assert alone[0].item() == together[0][row].item()
        assert alone[1].item() == pytest.approx(together[1][row].item(), abs=1e-6)


def test_greedy_rows_take_the_largest_beside_rows_that_are_drawn() -> None:
    # Probabilities 0.2, 0.5, 0.3; at temperature 0.5 their squares over 0.38. 0.77 is behind 0.2 + 0.5, and behind
    # (0.04 + 0.25) / 0.38 = 0.763; the one token that top_k leaves has all of the mass.
    samplings = [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.5), Sampling(top_k=1)]
    tokens, logprobs = sample(
        torch.tensor([0.2, 0.5, 0.3]).log().expand(4, -1).clone(),
        Draw.of(samplings),
        torch.full((4,), 0.77),
        emitted=torch.zeros(4),
        ends=NO_ENDS,
    )
    assert tokens.tolist() == [1, 2, 2, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.3, 0.09 / 0.38, 1.0])


@pytest.mark.parametrize("vocab", [50, 64, 100])
def test_logits_that_are_not_numbers_point_into_the_vocabulary_and_have_no_finite_log_prob(vocab: int) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.9)):
        tokens, logprobs = sample(
            torch.full((2, vocab), math.nan),
            Draw.of([sampling] * 2),
            torch.tensor([0.0, 0.9]),
            emitted=torch.zeros(2),
            ends=NO_ENDS,
        )
        assert (tokens < vocab).all()
        assert not logprobs.isfinite().any()


def test_uniforms_depend_on_the_seed_alone_and_extend() -> None:
    assert uniforms(Sampling(seed=4), 3).tolist() == uniforms(Sampling(seed=4, temperature=2.0), 3).tolist()
    assert uniforms(Sampling(seed=4), 3).tolist() != uniforms(Sampling(seed=5), 3).tolist()
