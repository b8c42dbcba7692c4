"""From rewards to advantages: numbers by hand, then properties."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plaudit.maths.advantages import (
    equal_groups,
    generalised_advantages,
    group_centred,
    leave_one_out,
    return_to_go,
    token_rewards,
    whiten,
)

REWARDS = st.lists(st.integers(-50, 50), min_size=2, max_size=8)


def close(got: Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=tolerance, rtol=0)


def one_row(
    rewards: list[float], values: list[float], bootstrap: float, mask: list[bool], *, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    return generalised_advantages(
        torch.tensor(rewards),
        torch.tensor(values),
        torch.tensor([bootstrap]),
        torch.tensor(mask),
        torch.zeros(len(mask), dtype=torch.int64),
        discount=discount,
        trace=trace,
    )


def test_token_rewards_by_hand() -> None:
    # Rows: prompt a b | a b tool | prompt. beta = 0.1; the scalar lands on the last *trained* token of its row.
    trainable = torch.tensor([False, True, True, False, True, False, False])
    row = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    kl = torch.tensor([9.0, 0.5, 0.25, 9.0, 1.0, 9.0, 9.0])
    rewards = token_rewards(torch.tensor([2.0, -1.0, 7.0]), kl, trainable, row, coefficient=0.1)
    # -0.05 | 2 - 0.025 || -1 - 0.1 || a row without trained tokens gets nothing
    close(rewards, [0.0, -0.05, 1.975, 0.0, -1.1, 0.0, 0.0])


def test_gae_by_hand() -> None:
    # gamma 0.9, lambda 0.5. delta_1 = 1 + 0.9 * 2 - 0.25 = 2.55; delta_0 = 0 + 0.9 * 0.25 - 0.5 = -0.275
    # A_1 = 2.55; A_0 = -0.275 + 0.45 * 2.55 = 0.8725; R = A + V
    advantages, returns = one_row([0.0, 1.0], [0.5, 0.25], 2.0, [True, True], discount=0.9, trace=0.5)
    close(advantages, [0.8725, 2.55])
    close(returns, [1.3725, 2.8])


def test_gae_by_hand_with_a_tool_in_the_middle_and_two_rows() -> None:
    # The row above with prompt and tool tokens around, beside a row of one token: delta = 3 + 0 - 1 = 2.
    trainable = torch.tensor([False, True, False, False, True, False, True, False])
    row = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 3.0, 0.0])
    values = torch.tensor([9.0, 0.5, 9.0, 9.0, 0.25, 9.0, 1.0, 9.0])
    bootstrap = torch.tensor([2.0, 0.0])
    advantages, returns = generalised_advantages(rewards, values, bootstrap, trainable, row, discount=0.9, trace=0.5)
    close(advantages, [0.0, 0.8725, 0.0, 0.0, 2.55, 0.0, 2.0, 0.0])
    close(returns, [0.0, 1.3725, 0.0, 0.0, 2.8, 0.0, 3.0, 0.0])


def test_a_short_row_bootstraps_from_its_own_end_beside_a_longer_one() -> None:
    # gamma 0.9: the row of one token has delta = 1 + 0.9 * 2 - 0.5 = 2.3, however long its neighbour is.
    row = torch.tensor([0, 1, 1, 1])
    rewards, values = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.5, 0.0, 0.0, 0.0])
    everywhere = torch.ones(4, dtype=torch.bool)
    advantages, _ = generalised_advantages(
        rewards, values, torch.tensor([2.0, 0.0]), everywhere, row, discount=0.9, trace=0.5
    )
    close(advantages, [2.3, 0.0, 0.0, 0.0])


def test_gae_of_a_row_without_trained_tokens_is_nothing() -> None:
    advantages, returns = one_row([1.0, 2.0], [3.0, 4.0], 5.0, [False, False], discount=0.9, trace=0.5)
    close(advantages, [0.0, 0.0])
    close(returns, [0.0, 0.0])


@given(st.integers(0, 10_000), st.lists(st.booleans(), min_size=1, max_size=9))
def test_gae_skips_untrained_tokens_as_if_they_were_not_there(seed: int, mask: list[bool]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(mask), generator=generator).tolist()
    kept = [index for index, on in enumerate(mask) if on]
    whole, _ = one_row(rewards, values, 0.7, mask, discount=0.9, trace=0.8)
    if kept:
        compact, _ = one_row(
            [rewards[i] for i in kept], [values[i] for i in kept], 0.7, [True] * len(kept), discount=0.9, trace=0.8
        )
        torch.testing.assert_close(whole[kept], compact)
    assert not whole[~torch.tensor(mask)].any()


@given(st.integers(0, 10_000), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_gae_with_lambda_one_is_return_minus_value_and_with_zero_is_delta(seed: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, rows = sum(lengths), len(lengths)
    row = torch.arange(rows).repeat_interleave(torch.tensor(lengths))
    trainable = torch.rand(n, generator=generator) < 0.7
    rewards, values = torch.randn(2, n, generator=generator).unbind(0)
    none = torch.zeros(rows)
    advantages, returns = generalised_advantages(rewards, values, none, trainable, row, discount=1.0, trace=1.0)
    future = return_to_go(rewards, trainable, row, rows, discount=1.0)
    torch.testing.assert_close(advantages, (future - values) * trainable, atol=1e-5, rtol=0)
    torch.testing.assert_close(returns, future, atol=1e-5, rtol=0)  # R = A + V is then the return itself
    _, target = generalised_advantages(rewards, values, none, trainable, row, discount=0.9, trace=0.0)
    for number in range(rows):
        mine = ((row == number) & trainable).nonzero()[:, 0].tolist()
        after = [*(float(values[place]) for place in mine[1:]), 0.0]
        for here, following in zip(mine, after, strict=False):
            assert float(target[here]) == pytest.approx(float(rewards[here]) + 0.9 * following, abs=1e-5)


def test_a_perfect_critic_leaves_no_advantage() -> None:
    # V_t = return-to-go of (1, 2, 4) with gamma 0.5: 4; 2 + 2 = 4; 1 + 2 = 3
    advantages, returns = one_row([1.0, 2.0, 4.0], [3.0, 4.0, 4.0], 0.0, [True] * 3, discount=0.5, trace=0.3)
    close(advantages, [0.0, 0.0, 0.0])
    close(returns, [3.0, 4.0, 4.0])


def test_return_to_go_by_hand() -> None:
    # gamma 0.5 over (1, -, 2, 4): 4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3
    mask = torch.tensor([True, False, True, True])
    row = torch.zeros(4, dtype=torch.int64)
    close(return_to_go(torch.tensor([1.0, 9.0, 2.0, 4.0]), mask, row, 1, discount=0.5), [3.0, 0.0, 4.0, 4.0])


def test_whitening_by_hand() -> None:
    # Of 1, 2, 3 (the 100 is masked out): mean 2, unbiased std 1.
    mask = torch.tensor([True, True, False, True])
    x = torch.tensor([1.0, 2.0, 100.0, 3.0])
    close(whiten(x, mask), [-1.0, 0.0, 0.0, 1.0])
    close(whiten(x, mask, shift_mean=False), [1.0, 2.0, 0.0, 3.0])


def test_whitening_leaves_a_single_entry_as_it_is() -> None:
    close(whiten(torch.tensor([5.0, 7.0]), torch.tensor([False, True])), [0.0, 7.0])
    close(whiten(torch.tensor([5.0]), torch.tensor([False])), [0.0])


@given(st.integers(0, 10_000), st.floats(0.01, 100.0), st.floats(-100.0, 100.0))
def test_whitened_has_mean_zero_and_std_one_whatever_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, generator=generator, dtype=torch.float64)
    mask = torch.rand(40, generator=generator) < 0.6
    white = whiten(x, mask)
    assert float(white[mask].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white[mask].std()) == pytest.approx(1.0, abs=1e-6)
    assert not white[~mask].any()
    torch.testing.assert_close(whiten(scale * x + shift, mask), white, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("value", "count"), [(0.1, 7), (2.7, 7), (100.3, 50), (1000.1, 999)])
def test_equal_entries_carry_no_signal_exactly(value: float, count: int) -> None:
    # The float32 mean of 7 times 2.7 is not 2.7: divided by 1e-8 that rounding would be an advantage of about -0.9.
    x, everywhere = torch.full((count,), value), torch.ones(count, dtype=torch.bool)
    assert not whiten(x, everywhere).any()
    assert not group_centred(x, torch.zeros(count, dtype=torch.int64), scale=True).any()


def test_group_baseline_by_hand() -> None:
    # Group 7: 1 and 3, mean 2, unbiased std sqrt(2). Group 2: alone. Group 5: equal.
    group = torch.tensor([7, 2, 7, 5, 5])
    reward = torch.tensor([1.0, 4.0, 3.0, 6.0, 6.0])
    close(group_centred(reward, group, scale=False), [-1.0, 0.0, 1.0, 0.0, 0.0])
    unit = 1.0 / (2**0.5 + 1e-4)  # 0.70706
    close(group_centred(reward, group, scale=True), [-unit, 0.0, unit, 0.0, 0.0])


def test_leave_one_out_by_hand() -> None:
    # 1 - (2 + 6) / 2 = -3;  2 - (1 + 6) / 2 = -1.5;  6 - (1 + 2) / 2 = 4.5; one alone has no others.
    group = torch.tensor([3, 3, 9, 3])
    close(leave_one_out(torch.tensor([1.0, 2.0, 8.0, 6.0]), group), [-3.0, -1.5, 0.0, 4.5])


@pytest.mark.parametrize(("count", "value"), [(16, 123.4), (8, -12.3), (7, 0.1)])
def test_equal_rewards_are_no_signal(count: int, value: float) -> None:
    """Not even what float32 rounds off, of which an optimizer that normalises would make whole steps."""
    reward, group = torch.full((count,), value), torch.zeros(count, dtype=torch.int64)
    for advantage in (leave_one_out, partial(group_centred, scale=False), partial(group_centred, scale=True)):
        assert advantage(reward, group).tolist() == [0.0] * count


@given(REWARDS, REWARDS, st.integers(-100, 100))
def test_group_baselines_sum_to_zero_and_do_not_see_a_shift(a: list[int], b: list[int], shift: int) -> None:
    reward = torch.tensor([*a, *b], dtype=torch.float64)
    group = torch.tensor([4] * len(a) + [1] * len(b))
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(len(a)))
    for advantage in (leave_one_out, partial(group_centred, scale=False), partial(group_centred, scale=True)):
        mine = advantage(reward, group)
        for number in (1, 4):
            assert float(mine[group == number].sum()) == pytest.approx(0.0, abs=1e-6)
        torch.testing.assert_close(advantage(reward + shift, group), mine, atol=1e-6, rtol=0)
        torch.testing.assert_close(advantage(reward[order], group[order]), mine[order])  # where rows lie is no matter


@given(REWARDS, st.integers(2, 20))
def test_scaling_rewards(rewards: list[int], scale: int) -> None:
    reward, group = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    torch.testing.assert_close(leave_one_out(scale * reward, group), scale * leave_one_out(reward, group))
    plain = group_centred(reward, group, scale=True)
    torch.testing.assert_close(group_centred(scale * reward, group, scale=True), plain, atol=1e-3, rtol=0)
    k = len(rewards)  # Dr.GRPO's advantage is RLOO's times (k - 1) / k
    torch.testing.assert_close(
        group_centred(reward, group, scale=False), leave_one_out(reward, group) * (k - 1) / k, atol=1e-9, rtol=0
    )


def test_share_of_equal_groups_by_hand() -> None:
    # Of the groups of several, 0 is equal and 1 is not; 2 and 3 are one answer each and say nothing of it.
    group = torch.tensor([0, 0, 1, 1, 2, 3])
    assert equal_groups(torch.tensor([1.0, 1.0, 1.0, 2.0, 5.0, 5.0]), group) == 0.5
    assert equal_groups(torch.tensor([1.0, 1.0]), torch.tensor([0, 1])) == 0.0
