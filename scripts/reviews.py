"""Controlled sentiment on real film reviews, as in figure 2 of the DPO paper (https://arxiv.org/abs/2305.18290).

    FOLDER (imdb-train, imdb-unlabelled, imdb-test) -> files of review_data.py
    SmolLM2-135M-Instruct -> SFT on passages -> answers to prompts, pairs labelled by gold, with noise or not -> judges
    SFT policy -> PPO on gold and on a judge, GRPO, RLOO, DPO, KTO, SFT on the preferred -> gold against KL
               -> best of n by gold and by the judge
    another seed's labels and judge -> DPO and GRPO at two rates -> gold on other prompts: how the rate was chosen

`python scripts/results.py --reviews FOLDER --only reviews` runs it; needs scikit-learn. Seeds share files and SFT
policy; labels, judges and policies are each seed's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import EXAMPLES, SEEDS, WITH_WORDS, Stage, Task, Variant, bench, kept, measure
from polarity import load_gold
from review_data import extremes, label_answers, make_reviews

from plaudit.commands import smollm2
from plaudit.data.write import write_rows

SOURCE = "PLAUDIT_REVIEWS"  # variable of the environment: the folder of reviews
DRAWN = (2, 4, 16)  # answers of best of n
COMPARED = 8  # answers to a prompt, of which gold's best and worst are labelled
FOLDER = Path("data/reviews")
HELD_OUT = FOLDER / "prompts_test.jsonl"
GOLD = {"folder": str(FOLDER / "gold")}


def files(folder: Path, seed: int) -> None:
    """Write what can be written before there is a policy, and link the model."""
    accuracy = make_reviews(Path(os.environ[SOURCE]), folder, seed=seed)
    (folder / "model.gguf").unlink(missing_ok=True)
    (folder / "model.gguf").symlink_to(smollm2.fetched())
    (folder / "about.json").write_text(json.dumps({"gold accuracy": round(accuracy, 4)}) + "\n", encoding="utf-8")


def label(folder: Path, seed: int) -> None:
    """Label answers of the SFT policy to each prompt: gold's best and worst of `COMPARED`, drawn once for all seeds,
    and which of them a person would prefer."""
    path = folder / "answers.jsonl"
    if not path.exists():
        groups = drawn(folder / "prompts.jsonl", COMPARED, seed)
        answered = ((group[0].prompt.text, [answer.completion.text for answer in group]) for group in groups)
        write_rows(path, extremes(answered, load_gold(folder / "gold")))
    label_answers(folder, map(json.loads, path.read_text(encoding="utf-8").splitlines()), seed=seed)


def drawn(prompts: Path, samples: int, seed: int, *, limit: int | None = None, judge: str | None = None) -> Any:
    """The SFT policy's answers to the prompts of a file, scored by gold and a judge."""
    from plaudit.runs.records import Run

    asked = bench(TASK, samples, prompts=str(prompts), limit=limit, seed=seed)
    policy = asked.policy(str(Run("runs/sft").model))
    return asked.scored_answers(policy, judge, name="answers")


TASK = Task(
    folder=str(FOLDER),
    make=files,
    label=label,
    first=(("reviews/sft", "sft", ("threads=2",)), ("reviews/reward", "reward", ())),
    gold="scripts/polarity.py:gold_probability",
    options=GOLD,
    prompts=str(HELD_OUT),
    max_tokens=24,
    figures=WITH_WORDS,
    shared=True,
)
EXACT = ("data.train=data/reviews/exact.jsonl", "data.validation=data/reviews/exact_validation.jsonl")
JUDGE: Stage = ("reviews/reward", "reward_exact", EXACT)
"""The judge that learns from labels without noise."""
REVIEWS = tuple(
    Variant(name=name, recipe=f"reviews/{name.removesuffix('_exact')}", every=every, task=TASK, **how)
    for name, every, how in (
        ("ppo_gold", 8, {}),
        ("ppo", 8, {}),
        ("grpo", 8, {}),
        ("rloo", 8, {}),
        ("dpo", 19, {}),
        ("kto", 19, {}),
        ("preferred", 19, {}),
        ("ppo_exact", 8, {"needs": (JUDGE,), "judge": "reward_exact"}),
        ("dpo_exact", 19, {"overrides": EXACT}),
    )
)
TITLES = {
    "ppo_gold": "PPO, gold reward",
    "ppo": "PPO, judge",
    "grpo": "GRPO, judge",
    "rloo": "RLOO, judge",
    "dpo": "DPO",
    "kto": "KTO",
    "preferred": "SFT on the preferred",
    "ppo_exact": "PPO, judge of exact labels",
    "dpo_exact": "DPO, exact labels",
}
TUNING_SEED = 0
RATES = ("5.0e-4", "1.0e-3")
TRIALS = tuple(
    Variant(
        name=f"{name}_at_{rate}",
        recipe=f"reviews/{name}",
        overrides=(f"optimizer.learning_rate={rate}",),
        task=replace(TASK, prompts=str(FOLDER / "prompts_tuning.jsonl")),
    )
    for name in ("dpo", "grpo")
    for rate in RATES
)
"""What the rate was chosen by, on prompts and labels that report nothing."""


def best_of(seed: int) -> dict[str, dict[str, list[list[float]]]]:
    """Gold of the best of n answers of the SFT policy, by gold and by the judge: points of n, KL and gold. The KL is
    log n - (n - 1) / n, an upper bound."""
    from plaudit.runs.records import Run

    judge = str(Run("runs/reward").model)
    groups = drawn(HELD_OUT, max(DRAWN), seed, judge=judge)

    def point(by: str, n: int) -> list[float]:
        best = [max(group[:n], key=lambda answer: answer.scores[by].value) for group in groups]
        gold = sum(answer.scores["gold"].value for answer in best) / len(best)
        return [n, round(math.log(n) - (n - 1) / n, 4), round(gold, 4)]

    return {f"best_of_n_{by}": {str(seed): [point(by, n) for n in DRAWN]} for by in ("gold", "judge")}


def sft_texts() -> list[str]:
    """The SFT policy's answers to the first prompts."""
    return [answer.completion.text for (answer,) in drawn(HELD_OUT, 1, SEEDS[0], limit=EXAMPLES)]


def measured(lab: Path, seeds: Sequence[int], *, jobs: int) -> None:
    """Measure all variants and best of n, as far as they were not yet, and keep some of the SFT policy's answers."""
    measure(REVIEWS, lab, seeds, jobs=jobs)
    measure(TRIALS, lab, (TUNING_SEED,), jobs=jobs)
    for seed in seeds:
        _written(lab, f"best_of_n_{seed}", seed, best_of, seed)
    _written(lab, "sft_texts", SEEDS[0], sft_texts)


def _written(lab: Path, name: str, seed: int, make: Callable[..., Any], *given: Any) -> None:
    path = lab.resolve() / "measured" / f"{name}.json"
    if not path.exists():
        with chdir(lab / f"seed{seed}"):
            path.write_text(json.dumps(make(*given)) + "\n", encoding="utf-8")


def found(lab: Path, seeds: Sequence[int]) -> dict[str, dict[str, list[list[float]]]]:
    """Points by variant and seed, best of n among them."""
    points = kept(REVIEWS, lab, seeds) | kept(TRIALS, lab, (TUNING_SEED,))
    for seed in seeds:
        path = lab / "measured" / f"best_of_n_{seed}.json"
        for name, own in json.loads(path.read_text(encoding="utf-8")).items() if path.exists() else ():
            points.setdefault(name, {}).update(own)
    return points


def side_by_side(lab: Path) -> dict[str, list[str]]:
    """The first prompts, and answers of the first seed."""
    if not (prompts := lab / f"seed{SEEDS[0]}" / HELD_OUT).exists():
        return {}
    rows = prompts.read_text(encoding="utf-8").splitlines()[:EXAMPLES]
    shown = {"prompt": [json.loads(row)["prompt"] for row in rows]}
    if (before := lab / "measured" / "sft_texts.json").exists():
        shown["SFT policy"] = json.loads(before.read_text(encoding="utf-8"))
    for name, title in TITLES.items():
        path = lab / "measured" / f"{name}_{SEEDS[0]}.json"
        if path.exists():
            shown[title] = json.loads(path.read_text(encoding="utf-8"))["texts"]
    return shown
