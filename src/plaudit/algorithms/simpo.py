"""Simple preference optimisation: the reward is the policy's own mean log-prob, without a reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.algorithms.pairs import Imitating, by_pair, likelihood, pair_figures
from plaudit.batch import Batch
from plaudit.maths.losses import simpo
from plaudit.maths.ragged import row_mean
from plaudit.support.fields import setting
from plaudit.types import Stats


@dataclass(frozen=True)
class SimPO(Imitating):
    """Nothing is sampled. The chosen answer of each pair is good. The loss -log sigma(beta d - target margin) is
    minimised: d is by how much its mean log-prob exceeds the rejected one's. Meng et al. 2024,
    https://arxiv.org/abs/2405.14734. With `likelihood_weight` the chosen answer is imitated too, as in CPO (Xu et al.
    2024, https://arxiv.org/abs/2401.08417)."""

    beta: float = setting(2.0, above=0)
    """Scale of mean log-probs; the paper takes 2 to 2.5, since means are smaller than DPO's sums."""
    target_margin: float = setting(1.0, least=0)
    """gamma, by how much the chosen answer's scaled mean should win; the paper takes 0.25 to 1.6."""
    likelihood_weight: float = setting(0.0, least=0)
    """alpha, the weight of the chosen answers' negative log-likelihood (mean over tokens); CPO-SimPO takes 1."""

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        assert output.logprobs is not None
        chosen, rejected = by_pair(row_mean(output.logprobs, batch.trainable, batch.row, len(batch)))
        (weight, _), scaled = by_pair(batch.row_weight), self.beta * (chosen - rejected)
        imitated = likelihood(output, batch)
        loss = (simpo(scaled, target_margin=self.target_margin) * weight).sum() + self.likelihood_weight * imitated
        figures = {"loss/policy": float(loss.detach()), "nll/chosen": float(imitated.detach())}
        return loss, figures | pair_figures(scaled.detach(), weight)
