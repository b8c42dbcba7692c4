"""What docs/results.md measures on the demo's task: the variants of each study, and their pictures.

    STUDIES -> lab.measured -> docs/results/STUDY.json -> docs/results/STUDY.png and tables

A study's file holds every measured point, so pictures and tables are made again without a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lab import WITH_WORDS, Point, Stage, Variant

from plaudit.evaluate.statistics import mean_interval

Found = Mapping[str, Mapping[str, Sequence[Point]]]
"""Variant -> seed -> its points."""

FAMILIES = {
    "credit by critic, batch or greedy answer": {
        "ppo": "PPO",
        "rloo": "RLOO",
        "remax": "ReMax",
        "reinforce": "REINFORCE++",
        "reinforce_baseline": "REINFORCE++-baseline",
    },
    "GRPO and its settings": {"grpo": "GRPO", "dr_grpo": "Dr.GRPO", "dapo": "DAPO", "gspo": "GSPO"},
    "preferences, and best of k": {
        "online_dpo": "online DPO",
        "best_of_k": "best of k",
        "dpo": "DPO",
        "kto": "KTO",
        "orpo": "ORPO",
        "simpo": "SimPO",
    },
}
METHODS = {recipe: title for family in FAMILIES.values() for recipe, title in family.items()}
PAIRED = ("dpo", "kto", "orpo", "simpo")
FRONTIER = tuple(Variant(name=r, recipe=r, every=100 if r in PAIRED else 20) for r in METHODS)

SIZES = {"small": (32, 1), "medium": (96, 2)}
"""Width and layers of the judges that are smaller than the recipe's (192, 3)."""
PAIRS = (1000, 4000)
"""Pairs of the judges that read fewer than the recipe's."""
OVER = ("algorithm.kl_coefficient=0", "train.steps=90", "optimizer.learning_rate=2e-4", "critic.path=runs/reward")


def _sized(name: str, width: int, layers: int) -> tuple[Stage, ...]:
    shape = (f"model.config.n_embd={width}", f"model.config.n_layer={layers}")
    return ("sft", f"sft_{name}", shape), ("reward", f"judge_{name}", (f"model.path=runs/sft_{name}",))


def _judged(name: str, needs: tuple[Stage, ...]) -> Variant:
    judge = f"judge_{name}" if needs else "reward"
    return Variant(name=f"over_{name}", recipe="ppo", overrides=OVER, every=6, needs=needs, judge=judge)


OPTIMISED = (
    _judged("whole", ()),
    *(_judged(name, _sized(name, *shape)) for name, shape in SIZES.items()),
    *(_judged(f"{n}", (("reward", f"judge_{n}", (f"data.limit={n}",)),)) for n in PAIRS),
)

MINIBATCHES = (1, 2, 4, 8, 16, 32, 64)
LAGS = (2, 8)
CORRECTIONS = {
    "naive": ("algorithm.recompute_old=true", "algorithm.correction=none"),
    "clipped at the sampler": ("algorithm.recompute_old=false",),
    "truncated": ("algorithm.recompute_old=true", "algorithm.correction=truncate"),
    "decoupled": ("algorithm.recompute_old=true", "algorithm.correction=truncate", "algorithm.correction_cap=inf"),
    "CISPO": ("algorithm.correction=cispo",),
    "token mask": ("algorithm.recompute_old=true", "algorithm.correction=mask"),
    "sequence mask": ("algorithm.recompute_old=true", "algorithm.correction=sequence_mask"),
}


def lagging(lag: int, how: str) -> str:
    """Name of a variant whose samples may be so many versions old."""
    return f"lag_{lag}_{how.replace(' ', '_')}"


def _grpo(name: str, *overrides: str, behind: bool = False) -> Variant:
    return Variant(name=name, recipe="grpo", overrides=("train.steps=60", *overrides), behind=behind)


OFF_POLICY = (
    *(_grpo(f"minibatches_{n}", f"algorithm.minibatches={n}") for n in MINIBATCHES),
    *(
        _grpo(lagging(lag, how), "algorithm.minibatches=4", f"rollout.max_lag={lag}", *words, behind=True)
        for lag in LAGS  # each version is some optimizer steps from the last, so that age tells
        for how, words in CORRECTIONS.items()
    ),
)
SAMPLED = (2, 4, 8, 16, 32)
ANSWERS = 128
"""Answers of a step, whatever the number of samples."""
SAMPLES = tuple(
    _grpo(f"samples_{k}", f"algorithm.samples={k}", f"rollout.prompts_per_step={ANSWERS // k}") for k in SAMPLED
)
STUDIES = {"frontier": FRONTIER, "over": OPTIMISED, "off_policy": OFF_POLICY, "samples": SAMPLES}


def last(points: Mapping[str, Sequence[Point]], figure: str) -> list[float]:
    """A figure of each seed's last point."""
    return [own[-1][WITH_WORDS.index(figure)] for own in points.values()]


def over_seeds(points: Mapping[str, Sequence[Point]], figure: str) -> list[float]:
    """A figure's mean over the seeds, at each step that all of them have."""
    place, runs = WITH_WORDS.index(figure), [{point[0]: point for point in own} for own in points.values()]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    return [fmean(run[step][place] for run in runs) for step in steps]


def interval(values: Sequence[float]) -> str:
    """Mean and half the 95 % interval; one value has none."""
    found = mean_interval(values)
    return f"{found.value:.2f}" + (f" ± {found.high - found.value:.2f}" if found.count > 1 else "")


def gao(points: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Least squares of r = d (alpha - beta log d) with d = sqrt(KL): alpha, beta and the share of variance that it
    explains, then the share that a straight line in d explains, which has as many parameters.

    Gao et al. 2022, https://arxiv.org/abs/2210.10760, for RL. `points` are one run's (KL, reward less that at KL 0),
    since a mean of runs is smoother than any of them and fits better.
    """
    import numpy

    kl, gained = numpy.array([(kl, r) for kl, r in points if kl > 0.01]).T
    d = numpy.sqrt(kl)

    def fitted(*columns: Any) -> tuple[Any, float]:
        matrix = numpy.stack(columns, axis=1)
        found, *_ = numpy.linalg.lstsq(matrix, gained, rcond=None)
        missed = gained - matrix @ found
        return found, float(1 - missed @ missed / ((gained - gained.mean()) @ (gained - gained.mean())))

    (alpha, minus_beta), explained = fitted(d, d * numpy.log(d))
    return float(alpha), float(-minus_beta), explained, fitted(numpy.ones_like(d), d)[1]
