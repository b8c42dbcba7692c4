"""However an optimizer step is cut into micro-batches or spread over ranks, its gradient is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plaudit.algorithms import ALGORITHMS
from plaudit.algorithms.base import Algorithm, Objective
from plaudit.algorithms.best_of_k import BestOfK
from plaudit.algorithms.distill import Distill
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.figures import merge_stats
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.kto import KTO
from plaudit.algorithms.online_dpo import OnlineDPO
from plaudit.algorithms.orpo import ORPO
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.reward_model import RewardModel
from plaudit.algorithms.rloo import RLOO
from plaudit.algorithms.sft import SFT
from plaudit.algorithms.simpo import SimPO
from plaudit.batch import Batch
from plaudit.learn.readout import READOUTS
from plaudit.models.config import DecoderConfig
from plaudit.models.decoder import Decoder
from plaudit.types import Role, Row, Stats

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=13,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    max_positions=32,
    positions="rotary",
    norm="rms",
    norm_eps=1e-5,
    mlp="gated",
    activation="silu",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    tied=True,
    init_std=0.3,
)
CASES: dict[str, Callable[[], Objective]] = {
    "sft": SFT,
    "reward": lambda: RewardModel(centring=0.01),
    "dpo": DPO,
    "dpo-conservative": lambda: DPO(label_smoothing=0.1),
    "ipo": lambda: DPO(loss="ipo"),
    "ipo-average": lambda: DPO(loss="ipo", length_average=True),
    "hinge": lambda: DPO(loss="hinge"),
    "robust": lambda: DPO(loss="robust", label_smoothing=0.1),
    "kto": lambda: KTO(undesirable=2.0),
    "orpo": ORPO,
    "simpo": SimPO,
    "ppo": PPO,
    "ppo-everything": lambda: PPO(
        dual_clip=1.5, kl_in_loss=0.1, kl_estimator="k2", entropy_bonus=0.05, value_clip=None, normalise_values=True
    ),
    "grpo": lambda: GRPO(kl_in_loss=0.04),
    "dr-grpo": lambda: GRPO(scale_rewards=False, aggregation=8.0),
    "dapo": lambda: GRPO(clip=(0.2, 0.28), dynamic_sampling=True),
    "gspo": lambda: GRPO(ratio="geometric", aggregation="sequence", clip=(3e-2, 4e-2)),
    "rloo": RLOO,
    "rloo-sequence": lambda: RLOO(ratio="sequence", aggregation="sequence"),
    "remax": ReMax,
    "reinforce": Reinforce,
    "reinforce-baseline": lambda: Reinforce(samples=2, group_baseline=True),
    "distill": Distill,
    "distill-rewarded": lambda: Distill(samples=2, reward_weight=0.5, discount=0.9),
    "online-dpo": OnlineDPO,
    "best-of-k": BestOfK,
    "best-of-k-kl": lambda: BestOfK(kl_in_loss=0.4),
}
CUTS: dict[str, Callable[[Batch], list[Batch]]] = {
    "micro-batches of 20 tokens": lambda batch: batch.micro(20),
    "micro-batches of whole prompts": lambda batch: batch.micro(24, together=True),
    "one unit each": lambda batch: batch.micro(1),
    "two ranks": lambda batch: batch.shards(2),
    "three ranks, micro-batches of 12": lambda batch: [part for shard in batch.shards(3) for part in shard.micro(12)],
    "shuffled": lambda batch: [batch.units(torch.arange(len(batch) // batch.unit).flip(0))],
}


def step_of(method: Objective) -> Batch:
    """One optimizer step: twelve rows of three groups, tools in between, one row without trained tokens, weighed."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(12):
        prompt, answer = torch.randint(1, 6, (2,), generator=generator).tolist()
        trained = (torch.rand(answer, generator=generator) < 0.7).tolist()
        trained[0] = number != 5
        tokens = torch.randint(CONFIG.vocab_size, (prompt + answer,), generator=generator).tolist()
        if number == 5:
            trained = [False] * answer
        rows.append(
            Row(
                tokens=tuple(tokens),
                trainable=(*(False,) * prompt, *trained),
                group=number // 4,
                reward=float(torch.randn(1, generator=generator)),
                baseline=float(torch.randn(1, generator=generator)),
                weight=0.5 if number < 4 else 1.0,
                margin=0.3 * (number % 3),
                continues=number % 4 == 1,
            )
        )
    batch = Batch.of(rows, unit=method.unit)
    # The sampler is the policy with some noise, so that the clip holds some tokens and not others.
    logprobs = READOUTS[Role.POLICY](model(Role.POLICY), batch, 1.0).logprobs
    assert logprobs is not None

    def noise(scale: float, size: int) -> Tensor:
        return scale * torch.randn(size, generator=generator)

    n, r = len(batch.tokens), len(batch)
    batch = batch.with_columns(
        behaviour=(logprobs.detach() + noise(0.3, n)) * batch.trainable,
        reference=(logprobs.detach() + noise(0.5, n)) * batch.trainable,
        values=noise(1.0, n) * batch.trainable,
        bootstrap=noise(1.0, r),
    )
    if isinstance(method, Algorithm):
        batch, _ = method.credit(batch, {})
    return method.weigh(batch)


def model(role: Role) -> Decoder:
    decoder = Decoder(CONFIG, head="lm" if role is Role.POLICY else "scalar")
    decoder.initialise(7)
    return decoder


def gradient_of(method: Objective, role: Role, parts: list[Batch]) -> tuple[Tensor, Stats]:
    """The summed gradient over the parts, as a learner accumulates it and ranks add it, and the merged figures."""
    trained = model(role)
    figures = []
    for part in parts:
        loss, stats = method.losses()[role](READOUTS[role](trained, part, 1.0), part)
        loss.backward()  # type: ignore[no-untyped-call]
        figures.append(stats)
    gradients = [p.grad.reshape(-1) for p in trained.parameters() if p.grad is not None]
    return torch.cat(gradients), merge_stats(figures)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_does_not_depend_on_the_cut(name: str) -> None:
    method = CASES[name]()
    batch = step_of(method)
    for role in method.losses():
        whole, figures = gradient_of(method, role, [batch])
        assert float(whole.abs().max()) > 1e-3
        scale = max(1.0, float(whole.abs().max()))
        for cut, divide in CUTS.items():
            parts = divide(batch)
            got, merged = gradient_of(method, role, parts)
            worst = float((got - whole).abs().max())
            assert worst <= 1e-6 * scale, f"{role}, {cut}: off by {worst:.1e}"
            assert merged == pytest.approx(figures, abs=1e-5), f"{role}, {cut}"
            assert cut == "shuffled" or len(parts) > 1


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr-grpo", "gspo", "sft", "dpo", "reward"])
def test_weighing_a_minibatch_again_is_as_weighing_it_alone(name: str) -> None:
    """A step of several mini-batches weighs each as a whole of its own."""
    method = CASES[name]()
    for part in step_of(method).split(3):
        once = method.weigh(part)
        again = method.weigh(once)
        assert once.weight is not None and once.token_share is not None and once.row_weight is not None
        torch.testing.assert_close(again.weight, once.weight)
        torch.testing.assert_close(again.row_weight, once.row_weight)
        assert float(once.token_share.sum()) == pytest.approx(1.0)
        assert float(once.row_weight.view(-1, method.unit)[:, 0].sum()) == pytest.approx(1.0)


def test_the_clip_is_at_work_in_the_step_above() -> None:
    method = GRPO()
    _, figures = gradient_of(method, Role.POLICY, [step_of(method)])
    assert 0.05 < figures["clip_fraction"] < 0.95


def test_every_method_has_a_case() -> None:
    ours = {name: kind for name, kind in ALGORITHMS.items() if kind.__module__.startswith("plaudit.")}
    assert {name: type(CASES[name]()) for name in ours} == ours
