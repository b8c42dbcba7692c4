import math
from itertools import combinations
from statistics import stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.evaluate.length import length_controlled
from plaudit.evaluate.statistics import mean_interval, pass_at_k, ratio_interval, share_interval

numbers = st.floats(-100, 100)


@pytest.mark.parametrize(
    ("count", "quantile"),
    [
        (2, math.tan(math.pi * 0.475)),  # one degree of freedom: Cauchy
        (3, 0.95 * math.sqrt(2 / (1 - 0.95**2))),  # two: t = a * sqrt(2 / (1 - a^2)), a = 2p - 1 = 0.95
        (32, 2.0395),  # tables
        (121, 1.9799),
    ],
)
def test_a_mean_reaches_as_far_as_students_t(count: int, quantile: float) -> None:
    values = [float(k) for k in range(count)]
    found = mean_interval(values)
    assert (found.high - found.value) / (stdev(values) / math.sqrt(count)) == pytest.approx(quantile, rel=1e-4)


def test_mean_by_hand() -> None:
    # 1 2 3 4: mean 2.5, unbiased variance 5/3, standard error sqrt(5/12) = 0.6455, t(3) = 3.1824
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (found.value, found.count) == (2.5, 4)
    assert (found.low, found.high) == pytest.approx((2.5 - 2.0543, 2.5 + 2.0543), abs=1e-4)


def test_a_single_value_has_no_interval() -> None:
    for found in (mean_interval([3.0]), ratio_interval([6.0], [2.0])):
        assert (found.low, found.high) == (-math.inf, math.inf)
        assert found.json() == {"value": 3.0, "low": None, "high": None, "count": 1}


def test_ratio_by_hand() -> None:
    # a = 2 1, b = 2 4: R = 1/2; residuals 2 - 1 = 1 and 1 - 2 = -1; se = sqrt(2/1 * 2) / 6 = 1/3; t(1) = 12.7062
    found = ratio_interval([2.0, 1.0], [2.0, 4.0])
    assert found.value == 0.5
    assert found.high - 0.5 == pytest.approx(12.7062 / 3)


@given(st.lists(numbers, min_size=2, max_size=20))
def test_a_ratio_over_ones_is_a_mean(values: list[float]) -> None:
    ratio, mean = ratio_interval(values, [1.0] * len(values)), mean_interval(values)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((mean.value, mean.low, mean.high), abs=1e-6)


def test_a_share_by_hand() -> None:
    # Wilson, 8 of 10, z^2 = 3.8415: centre (0.8 + 0.19207) / 1.38415 = 0.71674, reach sqrt(0.38415 * 0.16 + 0.03689) /
    # 1.38415
    found = share_interval([1.0] * 8 + [0.0] * 2)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    # the share 0 of n: [0, z^2 / (n + z^2)]
    none = share_interval([0.0] * 10)
    assert none.low == 0.0
    assert none.high == pytest.approx(3.841459 / 13.841459)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=60))
def test_a_share_is_in_its_interval_which_mirrors(values: list[float]) -> None:
    found, mirrored = share_interval(values), share_interval([1 - value for value in values])
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert (found.low, found.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))
    assert found.low < found.high, "nothing is certain"


def test_ties_count_for_more_than_wins_and_losses() -> None:
    """All ties: p = 1/2 and no variance, so N = n (n + z^2) / z^2, 10 * 13.841459 / 3.841459 = 36.03, and the reach is
    z / (2 sqrt(N + z^2)) = 1.95996 / (2 * 6.3143) = 0.15520."""
    found = share_interval([0.5] * 10)
    assert (found.low, found.high) == pytest.approx((0.5 - 0.15520, 0.5 + 0.15520), abs=1e-5)
    # Of 100, half of them ties: effect (1/4 * 1/2) / (1/4) = 1/2, N = 100 * 103.84146 / 53.84146 = 192.865.
    half = share_interval([0.5] * 50 + [1.0] * 25 + [0.0] * 25)
    assert half.high - half.value == pytest.approx(1.959964 / (2 * math.sqrt(192.865 + 3.841459)), abs=1e-5)


@pytest.mark.parametrize("count", [8, 32, 128])
@pytest.mark.parametrize(
    ("win", "tie"),
    [(0.5, 0.0), (0.8, 0.0), (0.95, 0.0), (0.99, 0.0), (0.35, 0.3), (0.2, 0.7), (0.85, 0.1), (0.9, 0.1), (0.01, 0.99)],
)
@pytest.mark.slow
def test_a_share_is_covered_as_often_as_promised(count: int, win: float, tie: float) -> None:
    """Simulated: 2,000 evaluations each. Quantiles of resampled means covered a rate of 0.95 at 32 prompts 79 times in
    100, and Student's t 81 times."""
    draw = np.random.default_rng(1)
    outcomes = draw.choice([1.0, 0.5, 0.0], p=[win, tie, max(0.0, 1 - win - tie)], size=(2000, count))
    found = [share_interval(row) for row in outcomes.tolist()]
    covered = sum(one.low <= win + tie / 2 <= one.high for one in found) / len(found)
    assert covered >= (0.94 if count > 8 else 0.915)
    if tie and count == 128:  # Wilson's of n covers 96 to 100 in 100 here: it is too wide
        binary = [
            share_interval([1.0] * (wins := round(sum(row))) + [0.0] * (count - wins)) for row in outcomes.tolist()
        ]
        assert sum(one.high - one.low for one in found) < 0.97 * sum(one.high - one.low for one in binary)


@pytest.mark.parametrize(("samples", "alike"), [(4, 2.0), (8, 0.3), (16, 50.0)])
def test_means_over_a_prompts_answers_are_covered_too(samples: int, alike: float) -> None:
    """Prompts differ in how often an answer wins: beta-distributed around 0.9."""
    draw = np.random.default_rng(2)
    rates = draw.beta(0.9 * alike, 0.1 * alike, size=(2000, 32))
    found = [share_interval(row) for row in (draw.binomial(samples, rates) / samples).tolist()]
    assert sum(one.low <= 0.9 <= one.high for one in found) / len(found) >= 0.93


@pytest.mark.parametrize("theta", [0.0, 3.0])
def test_a_length_controlled_rate_is_covered(theta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantiles of resamples covered sigmoid(3) = 0.953 66 times in 100."""
    monkeypatch.setattr("plaudit.evaluate.length.RESAMPLES", 200)
    draw, rate = np.random.default_rng(3), 1 / (1 + math.exp(-theta))
    covered = 0
    for _ in range(120):
        gaps = draw.normal(0, 100, 32)
        wins = (draw.random(32) < 1 / (1 + np.exp(-theta - np.tanh(gaps / gaps.std())))).astype(float)
        found = length_controlled([[win] for win in wins.tolist()], [[gap] for gap in gaps.tolist()], seed=0)
        assert found is not None
        covered += found.low <= rate <= found.high
    assert covered / 120 >= 0.92


def test_nothing_to_estimate_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="more than 0"):
        ratio_interval([1.0], [0.0])
    for values in ([], [0.5, 1.5]):
        with pytest.raises(ValueError, match="from 0 to 1"):
            share_interval(values)


@given(st.lists(numbers, min_size=2, max_size=20), st.floats(-50, 50))
def test_a_shift_moves_the_interval(values: list[float], shift: float) -> None:
    plain, moved = mean_interval(values), mean_interval([value + shift for value in values])
    assert (moved.low, moved.high) == pytest.approx((plain.low + shift, plain.high + shift), abs=1e-6)


def test_pass_at_k_by_hand() -> None:
    """5 answers, 2 pass: of the 10 pairs 3 hold no passing one, of the 10 triples 1."""
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / 10)
    assert pass_at_k(5, 2, 4) == pass_at_k(5, 5, 1) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    for n, c, k in ((4, 5, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(n, c, k)


def test_pass_at_k_is_the_share_of_subsets_and_unbiased() -> None:
    for n, c, k in ((6, 1, 2), (7, 3, 4), (9, 4, 3)):
        subsets = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    n, p, k = 8, 0.3, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)
    assert pass_at_k(20_000, 3, 100) == pytest.approx(1 - (1 - 100 / 20_000) ** 3, abs=1e-5)


def test_length_is_controlled_for_by_hand() -> None:
    """8 pairs in which ours is longer, of which 6 win; 2 in which it is shorter, of which 1 wins. Two coefficients fit
    two rates: theta + phi z = logit(3/4), theta - phi z' = 0, with z, z' the squashed gaps."""
    wins = [[1.0]] * 6 + [[0.0]] * 2 + [[1.0], [0.0]]
    gaps = [[10.0]] * 8 + [[-10.0]] * 2
    found = length_controlled(wins, gaps, seed=0)
    assert found is not None
    assert found.value == pytest.approx(1 / (1 + math.exp(-math.log(3) / 2)), abs=2e-3)
    assert found.low < found.value < found.high
    assert found.count == 10
    assert length_controlled(wins, gaps, seed=0) == found
    other = length_controlled(
        [[1 - w for w in group] for group in wins], [[-g for g in group] for group in gaps], seed=0
    )
    assert other is not None
    assert other.value == pytest.approx(1 - found.value, abs=1e-6)


def test_a_policy_that_only_writes_more_has_no_advantage_left() -> None:
    """The longer answer wins 8 times in 9, and ours is longer twice in three: it wins 17 of 27."""
    gaps = [[10.0]] * 18 + [[-10.0]] * 9
    wins = [[1.0]] * 16 + [[0.0]] * 2 + [[1.0]] + [[0.0]] * 8
    found = length_controlled(wins, gaps, seed=1)
    assert found is not None
    assert found.value == pytest.approx(0.5, abs=2e-3)
    assert length_controlled(wins, [[3.0]] * len(wins), seed=1) is None
    always = length_controlled([[1.0]] * 4, [[1.0], [-1.0], [2.0], [-2.0]], seed=0)
    assert always is not None
    assert always.value > 0.99


def test_pairs_of_one_prompt_weigh_as_one() -> None:
    doubled = length_controlled([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]], [[3.0, 3.0], [-1.0, -1.0], [-2.0, -2.0]], seed=0)
    single = length_controlled([[1.0], [0.0], [1.0]], [[3.0], [-1.0], [-2.0]], seed=0)
    assert doubled is not None
    assert single is not None
    assert doubled.value == pytest.approx(single.value)
