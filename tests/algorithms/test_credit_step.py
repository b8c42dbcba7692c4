"""Credit, beside slow re-implementations in plain Python loops that share nothing with the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor

from plaudit.algorithms.base import Algorithm, Memory
from plaudit.algorithms.distill import Distill
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.ppo import KL_HORIZON, PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.rloo import RLOO
from plaudit.batch import Batch
from plaudit.rewards.settings import ShapingSettings
from plaudit.rewards.shaping import shaped
from plaudit.types import Completion, Finish, Group, Prompt, Row, Score

SEEDS = range(6)
Naive = list[list[float]]


def ragged(seed: int) -> Batch:
    """Eleven rows of four groups in mixed order: tools in the middle and at the end, one row without trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for group in (2, 0, 2, 1, 0, 1, 2, 7, 0, 1, 2):
        prompt, answer = torch.randint(1, 5, (2,), generator=generator).tolist()
        size = prompt + 2 * answer
        trained = torch.rand(size - prompt, generator=generator) < 0.6
        if group != 7:
            trained[0] = True
        else:
            trained[:] = False
        rows.append(
            Row(
                tokens=tuple(range(size)),
                trainable=(*(False,) * prompt, *trained.tolist()),
                logprobs=tuple((-3 * torch.rand(size, generator=generator)).tolist()),
                versions=(0,) * size,
                reference=tuple((-3 * torch.rand(size, generator=generator)).tolist()),
                group=group,
                reward=float(torch.randn(1, generator=generator)),
                baseline=float(torch.randn(1, generator=generator)),
                continues=bool(torch.rand(1, generator=generator) < 0.5),
            )
        )
    batch = Batch.of(rows)
    n, r = len(batch.tokens), len(batch)
    values, bootstrap = torch.randn(n, generator=generator), torch.randn(r, generator=generator)
    return batch.with_columns(values=values, bootstrap=bootstrap)


def credited(method: Algorithm, batch: Batch, memory: Memory | None = None) -> Batch:
    return method.credit(batch, {} if memory is None else memory)[0]


def spans(batch: Batch) -> list[list[int]]:
    """Trained token indices of each row, in order."""
    result, start = [], 0
    for length in batch.lengths.tolist():
        result.append([t for t in range(start, start + length) if batch.trainable[t]])
        start += length
    return result


def k1(batch: Batch, t: int) -> float:
    assert batch.behaviour is not None and batch.reference is not None
    return float(batch.behaviour[t]) - float(batch.reference[t])


def groups(batch: Batch) -> list[list[int]]:
    numbers = batch.group.tolist()
    return [[row for row, other in enumerate(numbers) if other == number] for number in numbers]


def naive_rewards(batch: Batch, scalar: list[float], beta: float) -> Naive:
    rewards = []
    for row, tokens in enumerate(spans(batch)):
        mine = [-beta * k1(batch, t) for t in tokens]
        if mine:
            mine[-1] += scalar[row]
        rewards.append(mine)
    return rewards


def naive_gae(batch: Batch, beta: float, gamma: float, trace: float) -> tuple[Naive, Naive]:
    assert batch.reward is not None and batch.values is not None
    assert batch.bootstrap is not None and batch.continues is not None
    advantages, returns = [], []
    for row, (tokens, rewards) in enumerate(
        zip(spans(batch), naive_rewards(batch, batch.reward.tolist(), beta), strict=True)
    ):
        values = [float(batch.values[t]) for t in tokens]
        after = float(batch.bootstrap[row]) if batch.continues[row] else 0.0
        deltas = []
        for place, reward in enumerate(rewards):
            following = values[place + 1] if place + 1 < len(values) else after
            deltas.append(reward + gamma * following - values[place])
        # The definition as a sum, not the recursion that the code uses.
        mine = [
            sum((gamma * trace) ** (later - place) * deltas[later] for later in range(place, len(deltas)))
            for place in range(len(deltas))
        ]
        advantages.append(mine)
        returns.append([a + v for a, v in zip(mine, values, strict=True)])
    return advantages, returns


def naive_whitened(advantages: Naive) -> Naive:
    every = [a for row in advantages for a in row]
    middle, spread = mean(every), stdev(every)
    return [[(a - middle) / (spread + 1e-8) for a in row] for row in advantages]


def naive_spread(batch: Batch, scalar: list[float]) -> Naive:
    return [[scalar[row]] * len(tokens) for row, tokens in enumerate(spans(batch))]


def assert_column(batch: Batch, column: Tensor | None, expected: Naive) -> None:
    assert column is not None
    wanted = torch.zeros(len(batch.tokens))
    for tokens, mine in zip(spans(batch), expected, strict=True):
        for t, value in zip(tokens, mine, strict=True):
            wanted[t] = value
    torch.testing.assert_close(column, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo(seed: int) -> None:
    batch = ragged(seed)
    method = PPO(kl_coefficient=0.3, discount=0.9, trace=0.7, whiten_advantages=False)
    advantages, returns = naive_gae(batch, 0.3, 0.9, 0.7)
    after = credited(method, batch)
    assert_column(batch, after.advantages, advantages)
    assert_column(batch, after.returns, returns)
    white = credited(PPO(kl_coefficient=0.3, discount=0.9, trace=0.7), batch)
    assert_column(batch, white.advantages, naive_whitened(advantages))
    assert_column(batch, white.returns, returns)  # whitening is the policy's affair: value targets stay


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_with_normalised_values(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Running mean 2 and deviation 3 (second moment 13): the critic's v stands for 3 v + 2.
    batch = ragged(seed)
    assert batch.values is not None and batch.bootstrap is not None
    memory: Memory = {"values/first": 1.0, "values/second": 6.5, "values/debias": 0.5}
    real = batch.with_columns(values=3 * batch.values + 2, bootstrap=3 * batch.bootstrap + 2)
    advantages, returns = naive_gae(real, 0.05, 1.0, 0.95)
    monkeypatch.setattr("plaudit.algorithms.ppo.NORMALISATION_DECAY", 0.9)
    method = PPO(normalise_values=True, whiten_advantages=False)
    after = credited(method, batch, memory)
    assert_column(batch, after.advantages, advantages)
    every = [target for row in returns for target in row]
    first, second = 0.9 + 0.1 * mean(every), 0.9 * 6.5 + 0.1 * mean(target**2 for target in every)
    debias = 0.45 + 0.1
    middle = first / debias
    spread = math.sqrt(second / debias - middle**2)
    assert memory == pytest.approx({"values/first": first, "values/second": second, "values/debias": debias}, rel=1e-5)
    assert_column(batch, after.returns, [[(target - middle) / spread for target in row] for row in returns])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", [True, False])
def test_grpo(seed: int, scale: bool) -> None:
    batch = ragged(seed)
    assert batch.reward is not None
    rewards = batch.reward.tolist()
    scalar = []
    for row, members in enumerate(groups(batch)):
        mine = [rewards[member] for member in members]
        centred = rewards[row] - mean(mine)
        spread = stdev(mine) if len(mine) > 1 else 0.0
        scalar.append(centred / (spread + 1e-4) if scale else centred)
    assert_column(batch, credited(GRPO(scale_rewards=scale), batch).advantages, naive_spread(batch, scalar))


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo(seed: int) -> None:
    batch = ragged(seed)
    assert batch.reward is not None
    penalty = [0.3 * sum(k1(batch, t) for t in tokens) for tokens in spans(batch)]
    total = [reward - cost for reward, cost in zip(batch.reward.tolist(), penalty, strict=True)]
    scalar = []
    for row, members in enumerate(groups(batch)):
        others = [total[member] for member in members if member != row]
        scalar.append(total[row] - mean(others) if others else 0.0)
    assert_column(batch, credited(RLOO(kl_coefficient=0.3), batch).advantages, naive_spread(batch, scalar))


@pytest.mark.parametrize("seed", SEEDS)
def test_remax(seed: int) -> None:
    batch = ragged(seed)
    assert batch.reward is not None and batch.baseline is not None
    scalar = [
        float(batch.reward[row]) - 0.3 * sum(k1(batch, t) for t in tokens) - float(batch.baseline[row])
        for row, tokens in enumerate(spans(batch))
    ]
    paper = ReMax(kl_coefficient=0.3, centre_advantages=False)
    assert_column(batch, credited(paper, batch).advantages, naive_spread(batch, scalar))
    centred = [advantage - mean(scalar) for advantage in scalar]
    assert_column(batch, credited(ReMax(kl_coefficient=0.3), batch).advantages, naive_spread(batch, centred))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce(seed: int, group_baseline: bool) -> None:
    batch = ragged(seed)
    assert batch.reward is not None
    rewards = batch.reward.tolist()
    if group_baseline:
        rewards = [
            rewards[row] - mean([rewards[member] for member in members]) for row, members in enumerate(groups(batch))
        ]
    returns = []
    for mine in naive_rewards(batch, rewards, 0.3):
        returns.append([sum(0.9 ** (t - now) * mine[t] for t in range(now, len(mine))) for now in range(len(mine))])
    method = Reinforce(kl_coefficient=0.3, discount=0.9, samples=3, group_baseline=group_baseline)
    assert_column(batch, credited(method, batch).advantages, naive_whitened(returns))


UNFINISHED = {
    "score": ShapingSettings(unfinished="score"),
    "penalty": ShapingSettings(unfinished="penalty"),
    "bootstrap": ShapingSettings(unfinished="bootstrap"),
    "mask": ShapingSettings(unfinished="mask"),
}


def answered(settings: ShapingSettings, finishes: Sequence[Finish], *, size: int) -> Batch:
    """What PPO learns from answers of `size` tokens that are scored 1 each; without a KL."""
    group = Group(index=0, prompt=Prompt(id="p", text="", tokens=(9,)), responses=())
    responses = [
        shaped(
            Completion(tokens=(5,) * size, logprobs=(0.0,) * size, versions=(0,) * size, text="", finish=finish),
            Score(value=1.0),
            settings,
        )
        for finish in finishes
    ]
    rows = PPO().rows(replace(group, responses=tuple(responses)))
    batch = Batch.of(rows)
    return batch.with_columns(reference=torch.zeros(len(batch.tokens)))


@pytest.mark.parametrize(
    ("unfinished", "advantages", "returns"),
    [
        ("score", (0.5, 0.6), (0.7, 1.0)),  # deltas 0.4 - 0.2 and 1 - 0.4
        ("penalty", (-0.5, -1.4), (-0.3, -1.0)),  # -1 - 0.4
        ("bootstrap", (0.3, 0.2), (0.5, 0.6)),  # 0.6 - 0.4
    ],
)
def test_gae_of_an_unfinished_answer_by_hand(
    unfinished: str, advantages: tuple[float, float], returns: tuple[float, float]
) -> None:
    """Values 0.2 and 0.4, 0.6 after the cut, lambda 1/2: A_1 = (0.4 - 0.2) + A_2 / 2."""
    batch = answered(UNFINISHED[unfinished], [Finish.LENGTH], size=2)
    batch = batch.with_columns(values=torch.tensor([7.0, 0.2, 0.4]), bootstrap=torch.tensor([0.6]))
    batch = credited(PPO(trace=0.5, whiten_advantages=False), batch)
    assert batch.advantages is not None and batch.returns is not None
    assert batch.advantages[1:].tolist() == pytest.approx(advantages)
    assert batch.returns[1:].tolist() == pytest.approx(returns)


@pytest.mark.parametrize(
    ("unfinished", "value", "ending"),
    [("score", 1.0, 0.0), ("penalty", -0.08, 1.08), ("bootstrap", 1.0, 0.0), ("mask", 1.0, 0.0)],
)
def test_the_critics_fixed_point_where_every_score_is_1(unfinished: str, value: float, ending: float) -> None:
    """54 of 100 answers are cut, and what follows a cut is worth as much as the start. Then v = 1 by scores,
    0.46 - 0.54 with a penalty of -1, v = 0.46 + 0.54 v by the value, and 1 over the
    finished ones. A score and the value after it gave v = 1 + 0.54 v = 2.17, and more for being cut than for ending."""
    finishes = [Finish.LENGTH] * 54 + [Finish.EOS] * 46
    batch = answered(UNFINISHED[unfinished], finishes, size=1)
    v = 0.0
    for _ in range(60):
        batch = batch.with_columns(values=torch.full((2 * len(batch),), v), bootstrap=torch.full((len(batch),), v))
        batch = credited(PPO(whiten_advantages=False), batch)
        assert batch.returns is not None
        v = float(batch.returns[batch.trainable].mean())
    assert v == pytest.approx(value, abs=1e-3)
    assert batch.advantages is not None
    finished = batch.advantages[batch.trainable][-46:]
    assert finished.tolist() == pytest.approx([ending] * 46, abs=1e-3)


def test_remax_answers_below_the_greedy_one_are_not_all_pushed_down() -> None:
    # Samples of 0.2, 0.6 and 0.1 against greedy 1: -0.8, -0.4, -0.9, and -0.1, 0.3, -0.2 about their mean of -0.7.
    row = Row(tokens=(1, 2), trainable=(False, True), logprobs=(0.0, 0.0), reference=(0.0, 0.0), versions=(-1, 0))
    rows = [replace(row, reward=reward, baseline=1.0, group=group) for group, reward in enumerate((0.2, 0.6, 0.1))]
    for centre, expected, average in ((True, (-0.1, 0.3, -0.2), 0.0), (False, (-0.8, -0.4, -0.9), -0.7)):
        batch, figures = ReMax(centre_advantages=centre).credit(Batch.of(rows), {})
        assert batch.advantages is not None
        assert batch.advantages[1::2].tolist() == pytest.approx(expected)
        assert figures["advantage/mean"] == pytest.approx(average, abs=1e-6)
    lone, _ = ReMax().credit(Batch.of(rows[:1]), {})
    assert lone.advantages is not None and lone.advantages[1].item() == pytest.approx(-0.8)


METHODS: list[Callable[[], Algorithm]] = [
    PPO,
    GRPO,
    RLOO,
    ReMax,
    Reinforce,
    lambda: Reinforce(samples=2, group_baseline=True),
    lambda: Distill(samples=2, reward_weight=0.5),
]


@pytest.mark.parametrize("make", [GRPO, RLOO, METHODS[-2], METHODS[-1]])
def test_a_shift_of_rewards_changes_nothing_for_group_methods(make: Callable[[], Algorithm]) -> None:
    batch = ragged(2)
    assert batch.reward is not None
    here = credited(make(), batch).advantages
    there = credited(make(), batch.with_columns(reward=batch.reward + 4.0)).advantages
    torch.testing.assert_close(there, here, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", METHODS)
def test_kl_is_measured_against_the_old_policy_of_the_ratio(make: Callable[[], Algorithm]) -> None:
    """With recomputed log-probs the penalty is of those: the sampler's are not read."""
    batch = ragged(3)
    assert batch.behaviour is not None
    swapped = batch.with_columns(proximal=batch.behaviour, behaviour=batch.behaviour - 5.0)
    torch.testing.assert_close(credited(make(), swapped).advantages, credited(make(), batch).advantages)


def test_adaptive_kl_starts_at_the_setting_and_remembers() -> None:
    batch = ragged(4)
    penalty = mean(sum(k1(batch, t) for t in tokens) for tokens in spans(batch))
    target = abs(penalty) / 1.1 if penalty > 0 else 1.0
    error = min(max(penalty / target - 1.0, -0.2), 0.2)
    method = PPO(kl_coefficient=0.3, kl_target=target)
    memory: Memory = {}
    _, figures = method.credit(batch, memory)
    assert figures["kl/coefficient"] == 0.3
    assert memory["kl_coefficient"] == pytest.approx(0.3 * (1 + error * len(batch) / KL_HORIZON), rel=1e-9)
    _, figures = method.credit(batch, memory)
    assert figures["kl/coefficient"] != 0.3
    fixed: Memory = {}
    PPO().credit(batch, fixed)
    assert fixed == {}


def test_figures_by_hand() -> None:
    # Group 0: rewards 1 and 1 (equal). Group 1: 0 and 2. KL per row: 0.5 each trained token, two a row.
    row = Row(
        tokens=(1, 2, 3),
        trainable=(False, True, True),
        logprobs=(0.0, -1.0, -1.0),
        reference=(0.0, -1.5, -1.5),
        versions=(-1, 0, 0),
    )
    batch = Batch.of([row] * 4).with_columns(
        group=torch.tensor([0, 0, 1, 1]), reward=torch.tensor([1.0, 1.0, 0.0, 2.0])
    )
    _, figures = RLOO(kl_coefficient=0.5).credit(batch, {})
    # Advantages 0 0 -2 2, each on two tokens: mean 0, unbiased std sqrt(16 / 7)
    assert figures == pytest.approx(
        {
            "advantage/mean": 0.0,
            "advantage/std": math.sqrt(16 / 7),
            "length/trained": 2.0,
            "groups/equal": 0.5,
            "kl/reference": 1.0,
        }
    )
    assert GRPO(kl_in_loss=0.1).credit(batch, {})[1]["kl/reference"] == pytest.approx(1.0)
    assert "kl/reference" not in GRPO().credit(batch, {})[1]
    valued = batch.with_columns(values=torch.zeros(12), bootstrap=torch.zeros(4))
    for method in (PPO(), ReMax(), Reinforce()):
        assert method.credit(valued, {})[1]["kl/reference"] == pytest.approx(1.0)
    for trained, deviation in (((False, True, False), 0.0), ((False, True, True), math.sqrt(2))):
        few = Batch.of([replace(row, trainable=trained, reward=2.0)]).with_columns(values=torch.zeros(3))
        method = PPO(whiten_advantages=False, kl_coefficient=0.0, trace=0.0)  # all of the reward on the last token
        figures = method.credit(few.with_columns(bootstrap=torch.zeros(1)), {})[1]
        assert figures["advantage/std"] == pytest.approx(deviation), "one number has none"


def test_equal_groups_are_counted_where_they_carry_no_signal() -> None:
    # Rewards: group 0 all 1, group 1 all 0. The greedy answers' are 0 and 0: all of group 0 beat theirs.
    row = Row(tokens=(1, 2), trainable=(False, True), logprobs=(0.0, 0.0), reference=(0.0, 0.0), versions=(-1, 0))
    batch = Batch.of([row] * 6).with_columns(
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        reward=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        baseline=torch.zeros(6),
        values=torch.zeros(12),
        bootstrap=torch.zeros(6),
    )
    found = {
        name: method.credit(batch, {})[1].get("groups/equal")
        for name, method in {
            "grpo": GRPO(),
            "rloo": RLOO(),
            "baseline": Reinforce(samples=3, group_baseline=True),
            "remax": ReMax(samples=3),
            "reinforce": Reinforce(samples=3),
            "ppo": PPO(samples=3),
        }.items()
    }
    assert found == {"grpo": 1.0, "rloo": 1.0, "baseline": 1.0, "remax": 0.5, "reinforce": None, "ppo": None}
    _, figures = ReMax().credit(batch.split(2)[0].with_columns(group=torch.arange(3)), {})
    assert figures["groups/equal"] == 0.0  # one sample each, and each beats the greedy answer


def test_explained_variance_by_hand() -> None:
    # One token a row, gamma 1: returns are the rewards 0, 2, 4. Values 0, 2, 4 explain all; 1, 1, 1 nothing;
    # 0, 1, 2 leave residuals 0, 1, 2 of variance 2/3 against 8/3.
    row = Row(tokens=(1, 2), trainable=(False, True), logprobs=(0.0, 0.0), reference=(0.0, 0.0), versions=(-1, 0))
    batch = Batch.of([row] * 3).with_columns(bootstrap=torch.zeros(3))
    reward = torch.tensor([0.0, 2.0, 4.0])
    for values, expected in (([0.0, 2.0, 4.0], 1.0), ([1.0, 1.0, 1.0], 0.0), ([0.0, 1.0, 2.0], 0.75)):
        for scale in (1.0, 0.01):  # of whatever size they are
            column = scale * torch.tensor([[9.0, value] for value in values]).reshape(-1)
            _, figures = PPO().credit(batch.with_columns(values=column, reward=scale * reward), {})
            assert figures["explained_variance"] == pytest.approx(expected, abs=1e-6)
    _, figures = PPO().credit(batch.with_columns(values=torch.ones(6), reward=torch.ones(3)), {})
    assert figures["explained_variance"] == 0.0, "equal returns have no variance to explain"
