"""Turn rewards into advantages. Pure functions; columns are per token (n,) or per row (r,); rows lie end to end."""

from __future__ import annotations

import torch
from torch import Tensor

from plaudit.maths.ragged import from_grid, last_in_row, row_sum, to_grid


def token_rewards(
    reward: Tensor, kl: Tensor, trainable: Tensor, row: Tensor, *, coefficient: float, process: Tensor | None = None
) -> Tensor:
    """r_t = -beta k_t on every trained token, plus the row's scalar reward on its last trained token. (n,)

    The scalar lands on the end token or, for an answer cut off by length, on its last token. `process` (n,) is the part
    of it that stands at earlier tokens.
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 2.
    """
    rows = reward.shape[0]
    rewards = torch.where(trainable, -coefficient * kl, torch.zeros_like(kl))
    last = last_in_row(trainable, row, rows)
    has = last >= 0
    if process is not None:
        rewards, reward = rewards + process, reward - row_sum(process, row, rows)
    return rewards.index_add(0, last[has], reward[has].to(rewards.dtype))


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    trainable: Tensor,
    row: Tensor,
    *,
    discount: float,
    trace: float,
) -> tuple[Tensor, Tensor]:
    """GAE: delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  R = A + V. Return A, R, (n,).

    t+1 is the next trained token of the row; prompt and tool tokens in between are skipped, and A and R are 0 on them.
    `bootstrap` (r,) is V after the last token: 0 where a reward ends the return, else the critic's value.
    Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.
    """
    rows = bootstrap.shape[0]
    reward, place = to_grid(rewards, trainable, row, rows)
    value, _ = to_grid(values, trainable, row, rows)
    real = to_grid(torch.ones_like(values), trainable, row, rows)[0] > 0
    steps = reward.shape[1]
    following = bootstrap.to(value.dtype)
    advantage = torch.zeros_like(following)
    advantages = torch.zeros_like(value)
    for t in reversed(range(steps)):
        delta = reward[:, t] + discount * following - value[:, t]
        advantage = torch.where(real[:, t], delta + discount * trace * advantage, advantage)
        following = torch.where(real[:, t], value[:, t], following)
        advantages[:, t] = advantage
    flat = from_grid(advantages, place)
    return flat, torch.where(trainable, flat + values, torch.zeros_like(flat))


def return_to_go(rewards: Tensor, trainable: Tensor, row: Tensor, rows: int, *, discount: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over trained tokens, (n,): GAE with no critic and lambda 1 (Williams 1992)."""
    zero = torch.zeros_like(rewards)
    none = rewards.new_zeros(rows)
    return generalised_advantages(rewards, zero, none, trainable, row, discount=discount, trace=1.0)[0]


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / (std + 1e-8) with mean and unbiased std over the entries in the mask; 0 outside the mask.

    With `shift_mean=False` only the scale changes. Fewer than two entries are returned unchanged: they have no std.
    """
    chosen = x[mask].double()  # float32 would round the mean of equal entries, and / 1e-8 make that a signal
    if chosen.numel() < 2:
        return torch.where(mask, x, torch.zeros_like(x))
    mean, std = chosen.mean(), chosen.std()
    centre = mean if shift_mean else torch.zeros_like(mean)
    return torch.where(mask, ((x.double() - centre) / (std + 1e-8)).to(x.dtype), torch.zeros_like(x))


def group_centred(reward: Tensor, group: Tensor, *, scale: bool) -> Tensor:
    """r - mean(group), (r,); with `scale`, divided by (std(group) + 1e-4), std unbiased.

    GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300; without the scale Dr.GRPO, Liu et al. 2025,
    https://arxiv.org/abs/2503.20783. A group of equal rewards gives 0: it carries no signal.
    """
    group, groups = _numbered(group)
    exact = reward.double()  # float32 would round the mean of equal rewards, and / 1e-4 make that a signal
    size = row_sum(torch.ones_like(exact), group, groups)
    centred = exact - (row_sum(exact, group, groups) / size)[group]
    if not scale:
        return centred.to(reward.dtype)
    variance = row_sum(centred.square(), group, groups) / (size - 1).clamp(min=1.0)
    return (centred / (variance.sqrt()[group] + 1e-4)).to(reward.dtype)


def by_turn(process: Tensor, trainable: Tensor, answer: Tensor, group: Tensor, *, scale: bool) -> Tensor:
    """Each token's share of its turn's process rewards: those of turn k, centred over the group's answers that have a
    turn k as by `group_centred`, (n,); 0 on tokens that are not trained.

    process, trainable, answer (n,): rewards, and the number of each token's answer, 0, 1, ... in order; group (a,). A
    turn is a run of trained tokens. Zeng et al. 2025, https://arxiv.org/abs/2505.11821, without the outcome's part.
    """
    begins = trainable & ~torch.cat((trainable.new_zeros(1), trainable[:-1] & (answer[1:] == answer[:-1])))
    count = begins.cumsum(0)
    first = torch.zeros_like(group).scatter_reduce(0, answer, count - begins.long(), "amin", include_self=False)
    turn = (count - 1).clamp(min=0)  # (n,) number in the batch; tokens between two turns count to the former
    if not bool(begins.any()):
        return torch.zeros_like(process)
    whole = row_sum(process, turn, int(count[-1]))
    owner = answer[begins]
    place = torch.arange(len(owner), device=owner.device) - first[owner]
    pairs = torch.stack((group[owner], place), dim=1)
    own = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return torch.where(trainable, group_centred(whole, own, scale=scale)[turn], torch.zeros_like(process))


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """r_i - mean of the other rewards of its group, (r,); a group of one has no others and gives 0.

    RLOO: Kool et al. 2019; Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
    """
    group, groups = _numbered(group)
    exact = reward.double()  # as in `group_centred`: AdamW would make whole steps of a rounding error
    size = row_sum(torch.ones_like(exact), group, groups)[group]
    total = row_sum(exact, group, groups)[group]
    others = (total - exact) / (size - 1).clamp(min=1.0)
    return torch.where(size > 1, exact - others, torch.zeros_like(exact)).to(reward.dtype)


def equal_groups(reward: Tensor, group: Tensor) -> float:
    """Return the share of groups with equal rewards, which give no gradient, among groups of two or more; 0 if none."""
    group, groups = _numbered(group)
    several = row_sum(torch.ones_like(reward), group, groups) > 1
    if not bool(several.any()):
        return 0.0
    high = reward.new_full((groups,), -torch.inf).scatter_reduce(0, group, reward, reduce="amax")
    low = reward.new_full((groups,), torch.inf).scatter_reduce(0, group, reward, reduce="amin")
    return float((high == low)[several].float().mean())


def _numbered(group: Tensor) -> tuple[Tensor, int]:
    unique, index = torch.unique(group, return_inverse=True)
    return index, int(unique.shape[0])
