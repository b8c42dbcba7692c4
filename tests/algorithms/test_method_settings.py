"""Hyperparameters: published defaults, refusals that say what is allowed, the early stop, the registry."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from plaudit import Settings, SettingsError
from plaudit.algorithms import ALGORITHMS, Objective, register_algorithm
from plaudit.algorithms.best_of_k import BestOfK
from plaudit.algorithms.distill import Distill
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.kto import KTO
from plaudit.algorithms.online_dpo import OnlineDPO
from plaudit.algorithms.orpo import ORPO
from plaudit.algorithms.policy_gradient import PolicyGradient
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.reward_model import RewardModel
from plaudit.algorithms.rloo import RLOO
from plaudit.algorithms.sft import SFT
from plaudit.algorithms.simpo import SimPO
from plaudit.settings.recipes import completed
from plaudit.support.fields import complaints


def test_defaults_are_the_published_ones() -> None:
    ppo = PPO()
    assert (ppo.clip, ppo.value_clip) == ((0.2, 0.2), 0.2)
    assert (ppo.trace, ppo.discount, ppo.kl_coefficient, ppo.value_coefficient) == (0.95, 1.0, 0.05, 0.1)
    assert ppo.updates() == (1, 4)
    assert (GRPO().samples, GRPO().kl_in_loss, GRPO().scale_rewards, GRPO().updates()) == (8, 0.0, True, (1, 1))
    assert (RLOO().samples, RLOO().kl_coefficient, RLOO().ratio) == (4, 0.05, "token")
    assert (DPO().beta, OnlineDPO().beta, DPO().loss) == (0.1, 0.1, "sigmoid")
    assert PPO().kl_estimator == "weighted_k3" and PPO().aggregation == "token"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPO(aggregation="mean"), "aggregation=mean"),
        (lambda: PPO(ratio="word"), "ratio=word"),
        (lambda: PPO(kl_estimator="k4"), "kl_estimator=k4"),
        (lambda: GRPO(kl_in_loss=0.1, kl_estimator="k1"), "kl_estimator=k1"),
        (lambda: GRPO(correction="word_mask"), "correction=word_mask"),
        (lambda: GRPO(correction="cispo", recompute_old=True), "correction=cispo .*recompute_old"),
        (lambda: RLOO(correction="cispo", dual_clip=3.0), "correction=cispo .*dual_clip"),
        (lambda: PPO(samples=0), "samples=0"),
        (lambda: PPO(clip=(0.2, -0.1)), "clip"),
        (lambda: PPO(clip=(0.2, float("nan"))), "clip"),
        (lambda: PPO(dual_clip=0.5), "dual_clip=0.5"),
        (lambda: PPO(aggregation=0.0), "aggregation=0.0"),
        (lambda: PPO(kl_in_loss=-1.0), "kl_in_loss=-1.0"),
        (lambda: PPO(epochs=0), "epochs=0"),
        (lambda: PPO(minibatches=0), "minibatches=0"),
        (lambda: PPO(early_stop_ratio=0.9), "early_stop_ratio=0.9"),
        (lambda: PPO(kl_coefficient=-0.1), "kl_coefficient=-0.1"),
        (lambda: PPO(kl_target=0.0), "kl_target=0.0"),
        (
            lambda: PPO(kl_target=6.0, kl_coefficient=0.0),
            "kl_coefficient=0.0 .*kl_target",
        ),
        (lambda: PPO(discount=1.1), "discount=1.1"),
        (lambda: PPO(trace=-0.1), "trace=-0.1"),
        (lambda: PPO(value_clip=-0.1), "value_clip=-0.1"),
        (lambda: PPO(value_coefficient=-1.0), "value_coefficient=-1.0"),
        (lambda: PPO(kl_coefficient=math.inf), "kl_coefficient=inf"),
        (lambda: GRPO(entropy_bonus=math.nan), "entropy_bonus=nan"),
        (lambda: DPO(beta=math.inf), "beta=inf"),
        (lambda: GRPO(samples=1), "samples=1"),
        (lambda: RLOO(samples=1), "samples=1"),
        (lambda: RLOO(kl_coefficient=-0.1), "kl_coefficient=-0.1"),
        (lambda: ReMax(kl_coefficient=-0.1), "kl_coefficient=-0.1"),
        (lambda: Reinforce(kl_coefficient=-0.1), "kl_coefficient=-0.1"),
        (lambda: Reinforce(discount=2.0), "discount=2.0"),
        (lambda: Reinforce(group_baseline=True), "samples=1 .*2.*group_baseline"),
        (lambda: Distill(discount=2.0), "discount=2.0"),
        (lambda: Distill(reward_weight=-1.0), "reward_weight=-1"),
        (lambda: Distill(reward_weight=0.5), "samples=1 .*2.*reward_weight=0.5"),
        (lambda: Distill(whole_vocabulary=True, discount=0.5), "whole_vocabulary=true .*discount"),
        (lambda: OnlineDPO(samples=1), "samples=1"),
        (lambda: OnlineDPO(beta=0.0), "beta=0.0"),
        (lambda: BestOfK(samples=0), "samples=0"),
        (lambda: RewardModel(centring=-0.1), "centring=-0.1"),
        (lambda: DPO(loss="kto"), "loss=kto"),
        (lambda: DPO(label_smoothing=0.5), "label_smoothing=0.5"),
        (lambda: DPO(loss="ipo", label_smoothing=0.1), "label_smoothing=0.1 .*loss=ipo"),
        (lambda: DPO(loss="hinge", label_smoothing=0.1), "label_smoothing=0.1 .*loss=hinge"),
        (lambda: DPO(loss="robust"), "loss=robust .*label_smoothing"),
        (lambda: DPO(length_average=True), "length_average=true .*loss=sigmoid"),
        (lambda: KTO(beta=0), "beta=0"),
        (lambda: KTO(undesirable=-1.0), "undesirable=-1"),  # with desirable=1 a sum of 0, and no two weights of 0
        (lambda: KTO(desirable=-0.5, undesirable=0.5), "desirable=-0.5"),
        (lambda: KTO(desirable=0.0, undesirable=0.0), "desirable=0 and algorithm.undesirable=0 leave nothing"),
        (lambda: ORPO(odds_weight=-1.0), "odds_weight=-1"),
        (lambda: SimPO(beta=0), "beta=0"),
        (lambda: SimPO(target_margin=-1.0), "target_margin=-1"),
        (lambda: SimPO(likelihood_weight=-1.0), "likelihood_weight=-1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Objective], message: str) -> None:
    (told,) = complaints(make())
    assert re.match(rf"{message}\b", told)


@pytest.mark.parametrize("method", [PPO, GRPO, RLOO, ReMax, Reinforce, Distill])
def test_every_policy_gradient_has_the_checks_of_all(method: type[PolicyGradient]) -> None:
    assert [told.split()[0] for told in complaints(method(ratio="word"))] == ["ratio=word"]
    assert [told.split()[0] for told in complaints(method(correction="cispo", dual_clip=3.0))] == ["correction=cispo"]


def test_bounds_that_may_be_infinite() -> None:
    method = PPO(clip=(0.2, math.inf), correction_cap=math.inf, entropy_bonus=-0.1)
    assert complaints(method) == []


def test_early_stop_by_the_mean_ratio_in_both_directions() -> None:
    method = PPO(early_stop_ratio=2.0)
    assert method.halt({"ratio/mean": 1.9}) is None
    assert method.halt({"ratio/mean": 0.51}) is None
    assert "2.1" in (method.halt({"ratio/mean": 2.1}) or "")
    assert "0.49" in (method.halt({"ratio/mean": 0.49}) or "")
    assert method.halt({"ratio/mean": float("nan")}) is not None
    assert method.halt({"loss/critic": 1.0}) is None  # the critic's figures know no ratio
    assert PPO().halt({"ratio/mean": 100.0}) is None
    assert SFT().halt({"ratio/mean": 100.0}) is None


def test_a_method_can_be_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(SFT):
        pass

    monkeypatch.setattr("plaudit.algorithms.ALGORITHMS", dict(ALGORITHMS))
    assert register_algorithm("mine", Mine) is Mine
    assert register_algorithm("mine", Mine) is Mine  # a reloaded plug-in
    with pytest.raises(ValueError, match=r"'mine' .*Mine"):
        register_algorithm("mine", SFT)


def test_a_class_that_is_made_again_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a notebook's cell. Settings of its older form would train by that: they are refused."""
    monkeypatch.setattr("plaudit.algorithms.ALGORITHMS", dict(ALGORITHMS))

    def cell() -> type[Objective]:
        @dataclass(frozen=True)
        class Mine(SFT):
            pass

        return register_algorithm("mine", Mine)

    older, newer = cell(), cell()
    assert newer is not older
    assert completed(Settings(method="mine")).algorithm == newer()
    with pytest.raises(SettingsError, match=r"method=mine.*Mine"):
        completed(Settings(method="mine", algorithm=older()))


def test_a_method_whose_fields_would_not_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the decorator its `samples` stands in the class, and 1 in every instance."""

    class Bare(PPO):
        kind: ClassVar[str] = "bare"
        samples: int = 8

    monkeypatch.setattr("plaudit.algorithms.ALGORITHMS", dict(ALGORITHMS))
    assert Bare().samples == 1
    with pytest.raises(ValueError, match=r"Bare .*samples.*frozen=True"):
        register_algorithm("bare", Bare)
    assert register_algorithm("bare", dataclass(frozen=True)(Bare))().samples == 8  # type: ignore[attr-defined]


def test_old_logprobs_are_recomputed_where_samples_may_be_off_policy() -> None:
    assert PPO().adapted(off_policy=True).recompute_old is True
    assert PPO().adapted(off_policy=False).recompute_old is False
    assert PPO(recompute_old=False).adapted(off_policy=True).recompute_old is False
    assert PPO(recompute_old=True).adapted(off_policy=False).recompute_old is True
    assert not DPO().recompute_old
    assert DPO().adapted(off_policy=True) == DPO()
