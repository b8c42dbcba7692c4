"""Other systems' words for our settings: each is answered with a key that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from told import says

from plaudit.algorithms import ALGORITHMS
from plaudit.settings.recipes import load_settings
from plaudit.settings.spellings import meant, spellings
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.fields import leaves

PAGE = Path(__file__).parents[2] / "docs" / "switching.md"
KEYS = {leaf.key for leaf in leaves(Settings())}
KEYS |= {f"algorithm.{leaf.key}" for method in ALGORITHMS.values() for leaf in leaves(method)}


@pytest.mark.parametrize(("theirs", "ours"), spellings().items())
def test_every_answer_names_keys_that_there_are(theirs: str, ours: str) -> None:
    first = re.match(r"[a-z_.]+", ours)
    assert first is not None
    dotted = re.findall(r"\b[a-z]+\.[a-z_.]*[a-z]\b", ours.partition(" as ")[0])
    assert {first[0], *dotted} <= KEYS
    assert theirs not in KEYS or theirs == first[0]


def test_what_the_page_translates_is_translated_here() -> None:
    """The first column of the page's tables of settings and of methods, where it names a plain key."""
    text = PAGE.read_text(encoding="utf-8").partition("## What counts differently")[2].partition("### The KL")[0]
    text = text.partition("## Data")[0] + text.partition("## Methods")[2]
    named = {word for line in text.splitlines() for word in re.findall(r"`([a-z_0-9]+)`", line.partition(" | ")[0])}
    ours = {key.rpartition(".")[2] for key in KEYS}
    assert len(named) > 40
    assert sorted(word for word in named - ours if not meant(word)) == sorted(NOT_KEYS)


NOT_KEYS = ("margin", "packing", "padding_free", "r", "vllm_importance_sampling_mode")
"""Words of those columns that are values, or that have no setting here."""


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.lr=1e-5", "optimizer.lr: .. optimizer.learning_rate"),
        ("actor_rollout_ref.actor.optim.lr=1e-5", ": .. optimizer.learning_rate"),
        ("per_device_train_batch_size=4", ": .. train.batch_size .. rollout.prompts_per_step"),
        ("data.max_prompt_length=4", ": .. data.max_prompt_tokens"),
        ("mask_truncated_completions=true", ": .. shaping.unfinished=mask_loss"),
        ("data.input_key=x", ": .. data.columns as {prompt: THEIRS}"),
    ],
)
def test_a_key_of_theirs_is_answered_with_ours(override: str, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"method": "grpo"}, [override])
    assert says(caught.value, told)
