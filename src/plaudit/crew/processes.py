"""Make rollout workers and judges in their processes (`trainer.py` makes ranks)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit.crew.trainer import dtype_of, initial_model
from plaudit.evaluate.judge import Judge
from plaudit.models.device import device_of
from plaudit.models.load import load_tokenizer
from plaudit.models.lora import add_lora, merged_copy
from plaudit.rollout.build import build_engine
from plaudit.rollout.content import Adapters, Content
from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime import stage
from plaudit.runtime.memory import keep_freed_memory
from plaudit.settings.tree import Settings
from plaudit.weights.collective import Receiver


def make_rollout_worker(recipe: Mapping[str, Any]) -> RolloutWorker:
    """Make an engine, in its own process, that waits for its first weights."""
    from plaudit.settings.recipes import load_settings

    keep_freed_memory()
    settings = load_settings(recipe)
    tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
    rollout = settings.rollout
    vllm = rollout.for_vllm(longest_prompt=settings.data.max_prompt_tokens)
    device = device_of(settings.device) if vllm is None else "cpu"  # vLLM copies the model to its own
    model, content = initial_model(settings, tokenizer, device), Content()
    if settings.model.lora.rank > 0:
        adapted = add_lora(model, settings.model.lora, seed=settings.seed)
        # As in one process: without lag the engine computes what the learner does, else on merged weights.
        shared = vllm is None and rollout.max_lag == 0
        model, content = adapted if shared else merged_copy(adapted), Adapters(adapted, shared=shared)
    model = model.requires_grad_(False)
    engine = build_engine(model, tokenizer, slots=rollout.slots, vllm=vllm, say=stage.enter)
    return RolloutWorker(engine, content, Receiver(device_of(settings.device)), interrupt=rollout.interrupt)


def make_judge(recipe: Mapping[str, Any], path: str) -> Judge:
    """Make a judge in its own process."""
    from plaudit.settings.recipes import load_settings

    keep_freed_memory()
    return load_judge(load_settings(recipe), path)


def load_judge(settings: Settings, path: str) -> Judge:
    """Load a judge on the run's device, in its precision."""
    device, dtype = device_of(settings.device), dtype_of(settings)
    offload = any(reward.offload for reward in settings.rewards if reward.path == path)
    return Judge.load(path, device=device, dtype=dtype, token_budget=settings.learn.score_tokens, offload=offload)
