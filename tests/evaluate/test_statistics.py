import math
from itertools import combinations
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.evaluate.length import length_controlled
from plaudit.evaluate.statistics import bootstrap, mean_interval, pass_at_k, ratio_interval, wilson

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


def test_one_value_resampled_is_itself() -> None:
    assert bootstrap([2.0], seed=0).json() == {"value": 2.0, "low": 2.0, "high": 2.0, "count": 1}


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


def test_wilson_by_hand() -> None:
    # 8 of 10, z^2 = 3.8415: centre (0.8 + 0.19207) / 1.38415 = 0.71674, reach sqrt(0.38415 * 0.16 + 0.03689) / 1.38415
    found = wilson(8, 10)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    # the share 0 of n: [0, z^2 / (n + z^2)]
    assert wilson(0, 10).low == 0.0
    assert wilson(0, 10).high == pytest.approx(3.841459 / 13.841459)


@given(st.integers(1, 500), st.data())
def test_wilson_holds_its_share_and_mirrors(count: int, data: st.DataObject) -> None:
    wins = data.draw(st.integers(0, 2 * count)) / 2  # ties count half
    found, mirrored = wilson(wins, count), wilson(count - wins, count)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert (found.low, found.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))


def test_bootstrap_agrees_with_the_normal_interval_and_its_seed() -> None:
    wins = [1.0] * 60 + [0.0] * 40
    found = bootstrap(wins, seed=3)
    assert found.value == pytest.approx(0.6)
    reach = 1.96 * math.sqrt(0.6 * 0.4 / 100)  # 0.096
    assert (found.low, found.high) == pytest.approx((0.6 - reach, 0.6 + reach), abs=0.015)
    assert bootstrap(wins, seed=3) == found
    assert bootstrap([0.5] * 7, seed=0).json() == {"value": 0.5, "low": 0.5, "high": 0.5, "count": 7}


@pytest.mark.parametrize("seed", [0, 1])
def test_bootstrap_in_chunks_covers_all_resamples(seed: int) -> None:
    values = [float(k % 7) for k in range(3000)]  # more than one chunk of a million draws
    found, mean = bootstrap(values, seed=seed, resamples=1000), mean_interval(values)
    assert (found.low, found.high) == pytest.approx((mean.low, mean.high), abs=0.02)


def test_nothing_to_estimate_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="more than 0"):
        ratio_interval([1.0], [0.0])
    with pytest.raises(ValueError, match="out of 0"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="resample"):
        bootstrap([], seed=0)


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
