"""Read recipes (YAML) of async_rlhf, which uses TRL's trainers of 2024. `async_rlhf.yaml` maps its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit.importers import trl
from plaudit.importers.table import Found, Translation, Work, imported, table
from plaudit.importers.trl import divided, length, of_a_step, plain_loss
from plaudit.settings.imported import Imported

TELLING = {"rloo_k", "total_episodes", "response_length", "num_ppo_epochs", "sft_model_path", "kl_coef"}
"""Keys by which a file of async_rlhf is recognised; one suffices."""


def recipe(tree: Mapping[str, Any], method: str) -> Imported:
    """Turn such a file into a recipe of `plaudit METHOD`. Raises SettingsError with everything that cannot be used."""
    return imported(trl.reading(table("async_rlhf", "trl", "async_rlhf"), tree, method), WORK)


def steps(r: Translation) -> Found:
    """Yield the settings of prompts per step and number of steps. As in TRL before 0.12, an episode is an answer in
    RLOO and PPO, and a prompt elsewhere."""
    size = of_a_step(r) * r("num_mini_batches")
    split = r("rloo_k") if r.method in ("rloo", "ppo") else 1
    yield "rollout.prompts_per_step", divided(r, "rloo_k", size, split)
    if (total := r("total_episodes")) is None:
        yield from length(r)
    else:
        yield "train.steps", max(total // size, 1)


def updates(r: Translation) -> Found:
    """Yield the settings of passes over a batch of answers, and of optimizer steps per pass."""
    epochs, minibatches = r("num_ppo_epochs"), r("num_mini_batches")
    if r.method in ("online-dpo", "best-of-k"):
        for key in ("num_ppo_epochs", "num_mini_batches"):
            if r(key) != 1:
                r.refuse(key, f"{r.method} makes one optimizer step per batch of answers: set it to 1")
        return
    yield from {"algorithm.epochs": epochs, "algorithm.minibatches": minibatches}.items()


def critic(r: Translation) -> Found:
    if r.method == "ppo":
        yield "critic.learning_rate", r("learning_rate")


def start(r: Translation) -> Found:
    path, tokenizer = r("sft_model_path", r("model_name_or_path")), r("model_name_or_path")
    yield "model.path", path
    if tokenizer not in (None, path):
        yield "model.tokenizer", tokenizer


def lengths(r: Translation) -> Found:
    if (most := r("max_length")) is not None:
        yield "data.max_prompt_tokens", most
        yield "data.overlong", "drop"


def loss(r: Translation) -> Found:
    if r.method == "online-dpo":
        yield from plain_loss(r)
    clip = r("cliprange", 0.2)
    yield "algorithm.clip", [clip, clip]
    if r.method == "rloo":
        yield from {"algorithm.ratio": "sequence", "algorithm.aggregation": "sequence"}.items()


def endings(r: Translation) -> Found:
    if r("stop_token", "eos") != "eos":
        r.refuse("stop_token", "an answer ends with the tokenizer's end token: set eos, or stop texts in rollout.stop")
    if r("non_eos_penalty"):
        yield "shaping.unfinished", r("penalty_reward_value", -1.0)


def vllm(r: Translation) -> Found:
    if r("vllm"):
        yield "rollout.engine", "vllm"
        yield "rollout.max_lag", 0 if r("sync", True) else 1


WORK: Mapping[str, Work] = {
    **trl.WORK,
    **{work.__name__: work for work in (steps, updates, critic, start, lengths, loss, endings, vllm)},
}
