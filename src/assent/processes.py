"""What rollout workers and judges are made of, in whatever process they are to run (`trainer.py` is the ranks')."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assent.evaluate.judge import Judge
from assent.models.load import load_tokenizer
from assent.rollout.build import build_engine
from assent.rollout.worker import RolloutWorker
from assent.runtime import stage
from assent.runtime.memory import keep_freed_memory
from assent.settings import Settings
from assent.trainer import device_of, dtype_of, initial_model


def make_rollout_worker(recipe: Mapping[str, Any]) -> RolloutWorker:
    """In its own process: an engine that waits for its first weights."""
    from assent.recipes import load_settings

    keep_freed_memory()
    settings = load_settings(recipe)
    tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
    rollout = settings.rollout
    vllm = rollout.for_vllm()
    device = device_of(settings) if vllm is None else "cpu"  # vLLM copies the model to its own
    model = initial_model(settings, tokenizer, device).requires_grad_(False)
    engine = build_engine(model, tokenizer, slots=rollout.slots, vllm=vllm, say=stage.enter)
    return RolloutWorker(engine, interrupt=rollout.interrupt)


def make_judge(recipe: Mapping[str, Any], path: str) -> Judge:
    """In its own process."""
    from assent.recipes import load_settings

    keep_freed_memory()
    return load_judge(load_settings(recipe), path)


def load_judge(settings: Settings, path: str) -> Judge:
    """On the run's device, in its precision."""
    device, dtype = device_of(settings), dtype_of(settings)
    return Judge.load(path, device=device, dtype=dtype, token_budget=settings.learn.score_tokens)
