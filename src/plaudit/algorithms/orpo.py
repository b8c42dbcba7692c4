"""Odds-ratio preference optimisation: imitation and preference in one stage, without a reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.algorithms.pairs import Imitating, by_pair, likelihood, pair_figures
from plaudit.batch import Batch
from plaudit.maths.losses import log_odds, odds_ratio
from plaudit.maths.ragged import row_mean
from plaudit.support.fields import setting
from plaudit.types import Stats


@dataclass(frozen=True)
class ORPO(Imitating):
    """Nothing is sampled. The chosen answer of each pair is good. Its negative log-likelihood, a mean over tokens, plus
    lambda times -log sigma(d) is minimised: d is by how much its log-odds exceed the rejected one's. Hong et al. 2024,
    https://arxiv.org/abs/2403.07691."""

    odds_weight: float = setting(0.1, least=0)
    """lambda, the weight of the odds-ratio loss; the paper takes 0.1 to 0.25."""

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Return the negative log-likelihood, a mean over tokens, plus lambda * odds-ratio loss, a mean over pairs."""
        assert output.logprobs is not None
        imitated = likelihood(output, batch)
        mean = row_mean(output.logprobs, batch.trainable, batch.row, len(batch))
        (chosen, rejected), (weight, _) = by_pair(mean), by_pair(batch.row_weight)
        loss = imitated + self.odds_weight * (odds_ratio(chosen, rejected) * weight).sum()
        odds, rejected_odds = by_pair(log_odds(mean.detach()))
        figures = {"loss/policy": float(loss.detach()), "nll/chosen": float(imitated.detach())}
        return loss, figures | pair_figures(odds - rejected_odds, weight)
