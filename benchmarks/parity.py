"""Compare every loss, every estimator and one optimizer step of each method with TRL's own code (`make parity`).

    problems (random; odd lengths, padding, extremes) -> ours, theirs -> values, gradients, weights after AdamW -> table

Exits with 1 if a relative error is beyond its row's tolerance. Rows of another definition have no tolerance, but both
sides' value (the largest entry of an estimator's) of the first problem.
TRL's code is called, or its lines are run (`parity_trl.py`). Formulas of verl and OpenRLHF are retyped here and their
rows say so: their packages want CUDA. Left out: best-of-k, which no other system has.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import parity_trl as trl
import torch
from parity_problem import Problem, problem
from torch import Tensor, nn

from plaudit.algorithms.base import Objective, Output
from plaudit.algorithms.dpo import DPO
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
from plaudit.learn.optim import Optimizer
from plaudit.learn.settings import OptimizerSettings
from plaudit.types import Row

RATE, LIMIT = 1e-2, 1.0
BEFORE = 3
"""Tokens of a prompt, the last one a tool's."""

Side = Callable[[Problem, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A loss (with gradient and optimizer step) or an estimator (its value only)."""

    name: str
    peer: str
    ours: Side
    theirs: Side
    note: str = ""
    tolerance: float | None = 1e-6


def batch_of(given: Problem, method: Objective) -> tuple[Batch, Callable[[Tensor], Tensor]]:
    """The problem as a batch, and how a grid becomes a column."""
    rows = [
        Row(tokens=(0,) * (BEFORE + n), trainable=[False] * BEFORE + trained[:n], group=place // given.group)
        for place, (n, trained) in enumerate(zip(given.lengths, given.mask.tolist(), strict=True))
    ]
    batch = Batch.of(rows, unit=method.unit)

    def column(grid: Tensor) -> Tensor:
        return torch.zeros(len(batch.tokens), dtype=grid.dtype).masked_scatter(batch.trainable, grid[given.mask])

    grids = {"reference": given.reference, "behaviour": given.old, "values": given.values, "returns": given.returns}
    columns = {name: column(grid) for name, grid in grids.items()}
    columns["bootstrap"] = torch.zeros(len(batch), dtype=torch.float64)
    columns["advantages"] = given.advantages[batch.row] * batch.trainable
    columns["margin"] = given.margins.repeat_interleave(2)
    return batch.with_columns(reward=given.rewards, **columns), column


def ours(method: Objective, given: Problem, current: Tensor) -> Tensor:
    """The sum of the method's losses. A judge's scores are the grid's first column, a critic's values are a shift."""
    batch, column = batch_of(given, method)
    weighed = method.weigh(batch)
    kept = slice(None) if len(weighed) == len(batch) else batch.row % 2 == 0  # KTO's odd rows only give z0
    logprobs = column(current)[kept]
    output = Output(
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs),
        scores=current[:, 0],
        values=column(shifted(given, current))[kept],
    )
    losses = [loss(output, weighed)[0] for loss in method.losses().values()]
    return torch.stack(losses).sum()


def shifted(given: Problem, current: Tensor) -> Tensor:
    """Values that depend on the weights, some of them beyond the clip."""
    return given.values + 0.5 * (current - given.base)


def online(given: Problem, current: Tensor) -> Tensor:
    """Best against worst of two answers: the rows that `OnlineDPO.rows` chooses."""
    rewards = trl.untied(given).view(-1, 2)
    order = torch.cat((rewards.argmax(1, keepdim=True), rewards.argmin(1, keepdim=True)), 1)
    places = (order + 2 * torch.arange(len(rewards))[:, None]).reshape(-1)
    chosen = replace(
        given,
        lengths=tuple(given.lengths[place] for place in places),
        mask=given.mask[places],
        reference=given.reference[places],
        old=given.old[places],
        values=given.values[places],
        returns=given.returns[places],
        base=given.base[places],
    )
    return ours(OnlineDPO(samples=2), chosen, current[places])


def credit(method: Any, given: Problem, current: Tensor, *, rows: bool = False, column: str = "advantages") -> Tensor:
    """Advantages or returns of every trained token, or of every row."""
    batch, _ = batch_of(given, method)
    if isinstance(method, ReMax):
        batch = batch.with_columns(baseline=given.rewards.flip(0))
    result = getattr(method.credit(batch, {})[0], column)
    return result[batch.ends] if rows else result[batch.trainable]


def answers(grid: Tensor, given: Problem) -> Tensor:
    return grid[given.mask]


def dual_clip(given: Problem, current: Tensor) -> Tensor:
    """verl, core_algos.compute_policy_loss."""
    advantages = given.advantages[:, None]
    ratio = (current - given.old).clamp(-20.0, 20.0).exp()
    usual = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    held = torch.minimum(usual, -advantages * 3.0)
    return torch.where(advantages < 0, held, usual)[given.mask].mean()


def returns_to_go(given: Problem) -> Tensor:
    """Reward less KL by token, summed from the end, as a grid."""
    rewards = -0.05 * (given.old - given.reference) * given.mask
    rewards[torch.arange(len(rewards)), torch.tensor(given.lengths) - 1] += given.rewards
    return rewards.flip(1).cumsum(1).flip(1)


def reinforce_plus_plus(given: Problem, current: Tensor) -> Tensor:
    """OpenRLHF, experience_maker: returns, normalised over the batch."""
    returns = returns_to_go(given)[given.mask]
    variance = (returns - returns.mean()).square().mean()
    return (returns - returns.mean()) * variance.clamp(min=1e-8).rsqrt()


def remax(given: Problem, current: Tensor) -> Tensor:
    """OpenRLHF: the return of the sample less the greedy answer's reward; its KL as in ours, of the whole answer."""
    kl = ((given.old - given.reference) * given.mask).sum(1)
    return given.rewards - 0.05 * kl - given.rewards.flip(0)


def controller(given: Problem, current: Tensor) -> Tensor:
    """verl, AdaptiveKLController.update."""
    steps = len(given.lengths)
    kl = float((given.old - given.reference)[given.mask].sum()) / steps
    error = min(max(kl / 6.0 - 1.0, -0.2), 0.2)
    return torch.tensor(0.05 * (1.0 + error * steps / 10_000.0))


def adapted(given: Problem, current: Tensor) -> Tensor:
    memory: dict[str, float] = {}
    method = PPO(kl_target=6.0)
    method.credit(batch_of(given, method)[0], memory)
    return torch.tensor(memory["kl_coefficient"])


def case(name: str, ours: Side, theirs: Side, note: str = "") -> Case:
    """A comparison with TRL's newest version."""
    return Case(name, "TRL 1.16.0", ours, theirs, note)


def differs(name: str, ours: Side, theirs: Side, why: str) -> Case:
    """Another definition than TRL's, which `why` names."""
    return Case(name, "TRL 1.16.0", ours, theirs, f"by definition: TRL's {why}", None)


def offline_cases() -> list[Case]:
    def dpo(name: str, *, beta: float = 0.1, smoothing: float = 0.0) -> Side:
        return partial(trl.dpo, name=name, beta=beta, smoothing=smoothing)

    def both(method: Objective, theirs: Any, **how: float) -> tuple[Side, Side]:
        return partial(ours, method), partial(theirs, **how)

    rounds, weighted = "TRL computes in float32", KTO(desirable=1.2, undesirable=0.7)
    prompted = both(ORPO(), trl.orpo, beta=0.1, prompt=True)
    imitating = both(SimPO(likelihood_weight=0.5), trl.simpo, beta=2.0, gamma=1.0, imitated=0.5)
    return [
        case("SFT", partial(ours, SFT()), trl.sft, f"transformers' loss; {rounds}"),
        case("reward model, margins", *both(RewardModel(centring=0.01), trl.reward, centring=0.01)),
        case("DPO, sigmoid", partial(ours, DPO()), dpo("sigmoid")),
        case("DPO, beta 0.5", partial(ours, DPO(beta=0.5)), dpo("sigmoid", beta=0.5)),
        case("DPO, hinge", partial(ours, DPO(loss="hinge")), dpo("hinge")),
        case("DPO, robust", partial(ours, DPO(loss="robust", label_smoothing=0.1)), dpo("robust", smoothing=0.1)),
        case("DPO, IPO on means", partial(ours, DPO(loss="ipo", length_average=True)), dpo("ipo")),
        differs("DPO, IPO on sums (default)", partial(ours, DPO(loss="ipo")), dpo("ipo"), "IPO averages over tokens"),
        case("KTO", *both(weighted, trl.kto, beta=0.1, desirable=1.2, undesirable=0.7)),
        case("ORPO", *both(ORPO(), trl.orpo, beta=0.1, prompt=False), f"no prompt; {rounds}"),
        differs("ORPO behind a prompt", *prompted, "likelihood counts the prompt's tokens"),
        case("SimPO", *both(SimPO(), trl.simpo, beta=2.0, gamma=1.0)),
        case("SimPO with CPO's likelihood", *imitating),
        case("online DPO", online, partial(trl.online_dpo, beta=0.1), "TRL's lines; no ties, which ours drops"),
    ]


def online_cases(ppo: trl.OfPPO) -> list[Case]:
    grpo, clip = trl.grpo, (0.2, 0.28)
    gspo = GRPO(ratio="geometric", aggregation="sequence", clip=(0.03, 0.04))
    policies = [
        ("GRPO", GRPO(aggregation="sequence"), partial(grpo, name="grpo")),
        ("GRPO, KL corrected", GRPO(aggregation="sequence", kl_in_loss=0.04), partial(grpo, name="grpo", kl=0.04)),
        (
            "GRPO, KL by k3",
            GRPO(aggregation="sequence", kl_in_loss=0.04, kl_estimator="k3"),
            partial(grpo, name="grpo", kl=0.04, corrected=False),
        ),
        ("DAPO", GRPO(clip=clip), partial(grpo, name="dapo", clip=clip)),
        ("GRPO, bnpo", GRPO(clip=clip), partial(grpo, name="bnpo", clip=clip)),
        ("Dr.GRPO", GRPO(aggregation=9.0, scale_rewards=False), partial(grpo, name="dr_grpo")),
        ("CISPO", GRPO(correction="cispo", correction_cap=5.0), partial(grpo, name="cispo", clip=(0.2, 5.0))),
        ("GSPO", gspo, partial(grpo, name="grpo", level="sequence", clip=(0.03, 0.04))),
        ("RLOO, ratio by sequence", RLOO(ratio="sequence", aggregation="sequence"), trl.rloo),
    ]

    def ppo_loss(given: Problem, current: Tensor) -> Tensor:
        return ppo.loss(given, current, shifted(given, current), factor=0.1)

    def half(side: Side) -> Side:
        return lambda given, current: side(trl.cut(given), current)

    def turns(side: Side) -> Side:
        return lambda given, current: side(trl.episodes(given), current)

    def half_of_rloo(given: Problem, current: Tensor) -> Tensor:
        masked = given.advantages[~trl.cut(given).mask[:, 0]]
        return half(trl.rloo)(given, current) + masked.sum() / len(given.lengths)

    small = "weights are float32, and in one problem the losses nearly cancel"
    with_kl = "GRPO, KL corrected", "GRPO, KL by k3"
    rloo, clipped = policies[-1][1], partial(ours, GRPO(dual_clip=3.0))
    cut_note = "less what TRL's value has of cut answers, whose ratio is 1"
    return [
        *(case(name, partial(ours, method), theirs) for name, method, theirs in policies),
        *(
            case(f"{name}, half of the answers cut", half(partial(ours, method)), half(theirs))
            for name, method, theirs in policies[:-1]
            if name not in with_kl
        ),
        *(
            Case(f"{name}, episodes with tools", "TRL 1.16.0", turns(partial(ours, method)), turns(theirs), small, 1e-5)
            for name, method, theirs in policies[:-1]
        ),
        case("RLOO, half of the answers cut", half(partial(ours, rloo)), half_of_rloo, cut_note),
        differs("RLOO, ratio by token (default)", partial(ours, RLOO()), trl.rloo, "ratio is the sequence's"),
        Case("PPO, policy and critic", "TRL 1.12.0", partial(ours, PPO()), ppo_loss, "TRL's lines"),
        Case("dual clip", "verl, retyped", clipped, dual_clip, "their ratio is held at e^20"),
    ]


def estimators(ppo: trl.OfPPO) -> list[Case]:
    by_row = partial(credit, rows=True)
    method, lines, old = PPO(discount=0.99), "TRL's lines", "TRL 1.12.0"

    def theirs(name: str, given: Problem, current: Tensor) -> Tensor:
        return answers(ppo.credit(given, beta=0.05, discount=0.99, trace=0.95)[name], given)

    def white(given: Problem, current: Tensor) -> Tensor:
        return answers(ppo.whiten(returns_to_go(given), given.mask), given)

    def group(scale: str, given: Problem, current: Tensor) -> Tensor:
        return trl.group_advantages(given, scale=scale)

    def leave_one_out(given: Problem, current: Tensor) -> Tensor:
        return trl.rloo_advantages(given, beta=0.05)

    plain, openrlhf = GRPO(scale_rewards=False), "OpenRLHF, retyped"
    whitened, reinforce = partial(theirs, "advantages"), partial(credit, Reinforce())
    over_n = "by definition: their deviation is over n, ours over n - 1"
    return [
        case("advantages: GRPO", partial(by_row, GRPO()), partial(group, "group"), lines),
        case("advantages: Dr.GRPO", partial(by_row, plain), partial(group, "none"), lines),
        case("advantages: RLOO, KL inside", partial(by_row, RLOO()), leave_one_out, lines),
        Case("advantages: PPO (KL, GAE, white)", old, partial(credit, method), whitened, lines),
        Case("returns: PPO", old, partial(credit, method, column="returns"), partial(theirs, "returns"), lines),
        Case("advantages: REINFORCE++", old, reinforce, white, "returns retyped; TRL's whitening"),
        Case("advantages: REINFORCE++", openrlhf, reinforce, reinforce_plus_plus, over_n, None),
        Case("advantages: ReMax, not centred", openrlhf, partial(by_row, ReMax(centre_advantages=False)), remax),
        Case("adaptive KL", "verl, retyped", adapted, controller),
    ]


class Weights(nn.Module):
    def __init__(self, weights: Tensor):
        super().__init__()
        self.weights = nn.Parameter(weights.clone())


def stepped(weights: Tensor, gradient: Tensor) -> Tensor:
    """Our optimizer's weights after one step."""
    settings = OptimizerSettings(learning_rate=RATE, weight_decay=0.1, max_gradient_norm=LIMIT)
    model = Weights(weights)
    optimizer = Optimizer(model, settings)
    model.weights.grad = gradient
    optimizer.collect()
    optimizer.gradient_norm()
    optimizer.step()
    return model.weights.detach()


@dataclass(slots=True)
class Errors:
    """The largest over all problems; relative ones are to the largest entry of the peer's tensor."""

    absolute: float = 0.0
    relative: float = 0.0

    def add(self, mine: Tensor, theirs: Tensor) -> None:
        assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
        gap, size = float((mine - theirs).abs().max()), float(theirs.abs().max())
        gap = gap if math.isfinite(gap) else math.inf
        self.absolute = max(self.absolute, gap)
        self.relative = max(self.relative, gap / max(size, 1e-12))

    def beyond(self, tolerance: float) -> bool:
        return not self.relative <= tolerance


def compare(case: Case, problems: list[Problem], *, loss: bool) -> dict[str, Errors]:
    errors = {name: Errors() for name in (("value", "gradient", "step") if loss else ("value",))}
    for given in problems:
        weights = given.weights.clone().requires_grad_()
        current = given.current(weights)
        mine, theirs = case.ours(given, current), case.theirs(given, current)
        errors["value"].add(mine.detach(), theirs.detach())
        if not loss:
            continue
        by_entry = [torch.autograd.grad(side, current, retain_graph=True)[0] for side in (mine, theirs)]
        errors["gradient"].add(*by_entry)
        gradient = torch.autograd.grad(mine, weights, retain_graph=True)[0]
        errors["step"].add(stepped(given.weights, gradient), trl.adamw(weights, theirs, rate=RATE, limit=LIMIT))
    return errors


def line(case: Case, errors: dict[str, Errors], first: Problem) -> str:
    figures = [
        f"{one.absolute:.0e} / {one.relative:.0e}" if (one := errors.get(name)) else "-"
        for name in ("value", "gradient", "step")
    ]
    if case.tolerance is not None:
        return "| " + " | ".join((case.name, case.peer, *figures, f"{case.tolerance:.0e}", case.note)) + " |"
    current = first.current(first.weights)
    mine, theirs = (float(side(first, current).abs().max()) for side in (case.ours, case.theirs))
    note = f"{case.note}; ours {mine:.4g}, theirs {theirs:.4g}"
    return "| " + " | ".join((case.name, case.peer, *figures, "other definition", note)) + " |"


def failed(case: Case, errors: dict[str, Errors]) -> bool:
    if case.tolerance is None:
        return False
    return any(one.beyond(case.tolerance) for one in errors.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ppo", type=Path, required=True, help="folder of the TRL that has PPO")
    parser.add_argument("--problems", type=int, default=12, help="random problems; half of them are of extremes")
    given = parser.parse_args()
    ppo = trl.OfPPO(given.ppo)
    problems = [problem(seed, extreme=seed % 3 == 2 or seed % 4 == 1) for seed in range(given.problems)]
    print("| what | peer | value | gradient | weights after a step | tolerance | remark |")
    print("|---|---|---:|---:|---:|---:|---|")
    wrong = []
    for cases, loss in ((offline_cases() + online_cases(ppo), True), (estimators(ppo), False)):
        for case in cases:
            errors = compare(case, problems, loss=loss)
            print(line(case, errors, problems[0]), flush=True)
            wrong += [case.name] if failed(case, errors) else []
    print(f"\nbeyond tolerance: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
