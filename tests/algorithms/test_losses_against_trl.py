"""The same log-probs through TRL's own loss code and through ours: loss and gradient agree.

TRL is not among our pins. To run this: pip install --no-deps trl==1.16.0 accelerate psutil. TRL's loss methods are
called on a bare object that holds the settings they read, because its trainers want a whole model to be built.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plaudit.algorithms.base import Objective, Output
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.grpo import GRPO
from plaudit.batch import Batch
from plaudit.types import Role, Row

pytest.importorskip(
    "trl", minversion="1.16", reason="TRL is not installed: pip install --no-deps trl==1.16.0 accelerate psutil"
)

# Answers of these lengths, each behind a prompt of two tokens.
LENGTHS = (3, 5, 1, 2, 4, 4)
WIDTH = max(LENGTHS)
MASK = torch.tensor([[place < length for place in range(WIDTH)] for length in LENGTHS])


def grid(seed: int) -> Tensor:
    """Log-probs of the answers, padded at the right with values that nobody may read."""
    return -2 * torch.rand(len(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CURRENT, OLD, REFERENCE = grid(0), grid(0) + 0.3 * (grid(1) + 1), grid(2)


def ours(method: Objective, **columns: Tensor) -> tuple[Tensor, Tensor]:
    """Our loss and its gradient as a grid. A tool token that is not trained stands in front of every answer."""
    rows = [Row(tokens=(0,) * (3 + n), trainable=(False,) * 3 + (True,) * n) for n in LENGTHS]
    batch = Batch.of(rows, unit=method.unit)

    def column(values: Tensor) -> Tensor:
        return torch.zeros(len(batch.tokens), dtype=torch.float64).masked_scatter(batch.trainable, values[MASK])

    current = CURRENT.clone().requires_grad_()
    batch = batch.with_columns(reference=column(REFERENCE), behaviour=column(OLD))
    if "advantages" in columns:
        batch = batch.with_columns(advantages=columns["advantages"].double()[batch.row] * batch.trainable)
    logprobs = column(current)
    output = Output(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss, _ = method.losses()[Role.POLICY](output, method.weigh(batch))
    return loss.detach(), torch.autograd.grad(loss, current)[0]


def alike(mine: tuple[Tensor, Tensor], theirs: Tensor, current: Tensor) -> None:
    torch.testing.assert_close(mine[0], theirs.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mine[1], torch.autograd.grad(theirs, current)[0], atol=1e-6, rtol=1e-6)
    assert float(mine[1].abs().max()) > 1e-3


def shell(**settings: Any) -> SimpleNamespace:
    """What TRL's loss methods read of their trainer."""

    def same(x: Tensor, **_: Any) -> Tensor:
        return x

    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, reduce=same, num_processes=1
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (DPO(), "sigmoid"),
        (DPO(beta=0.5), "sigmoid"),
        (DPO(loss="hinge", beta=0.5), "hinge"),
        (DPO(loss="robust", label_smoothing=0.1), "robust"),
        (DPO(loss="ipo", length_average=True), "ipo"),
    ],
)
def test_dpo(method: DPO, name: str) -> None:
    from trl import DPOTrainer

    current = CURRENT.clone().requires_grad_()
    order = torch.tensor([0, 2, 4, 1, 3, 5])  # TRL puts all chosen answers before all rejected ones
    trained = (current * MASK)[order]
    reference = (REFERENCE * MASK)[order].sum(1).chunk(2)
    zeros = torch.zeros_like(trained)

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=trained, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer = shell(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=method.beta,
        label_smoothing=method.label_smoothing,
        use_weighting=False,
    )
    mask = torch.cat((torch.zeros(len(LENGTHS), 1, dtype=torch.bool), MASK[order]), 1).long()
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    theirs = DPOTrainer._compute_loss(trainer, model, inputs, False)
    alike(ours(method), theirs, current)


@pytest.mark.parametrize(
    ("method", "name", "level"),
    [
        (GRPO(aggregation="sequence"), "grpo", "token"),
        (GRPO(aggregation="sequence", kl_in_loss=0.04), "grpo", "token"),
        (GRPO(clip=(0.2, 0.28), kl_in_loss=2.0), "bnpo", "token"),
        (GRPO(aggregation="sequence", kl_in_loss=0.04, kl_estimator="k3"), "grpo", "token"),
        (GRPO(clip=(0.2, 0.28)), "bnpo", "token"),
        (GRPO(aggregation=9.0, scale_rewards=False), "dr_grpo", "token"),
        (GRPO(ratio="geometric", aggregation="sequence", clip=(0.03, 0.04)), "grpo", "sequence"),
    ],
)
def test_grpo(method: GRPO, name: str, level: str) -> None:
    from trl import GRPOTrainer

    current = CURRENT.clone().requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5, 0.7, -0.2], dtype=torch.float64)
    trainer = shell(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=method.kl_in_loss,
        args=SimpleNamespace(use_bias_correction_kl=method.kl_estimator == "weighted_k3", delta=None),
        loss_type=name,
        epsilon_low=method.clip[0],
        epsilon_high=method.clip[1],
        use_vllm=False,
        max_completion_length=9,
        _entropy_bonus_enabled=False,
    )
    mask = MASK.long()
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 2, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
    }
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    alike(ours(method, advantages=advantages), theirs, current)
