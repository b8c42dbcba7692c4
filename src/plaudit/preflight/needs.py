"""Estimate the memory and disk that a run needs, from a model's configuration and the settings.

Left out: time, and what the machine has (`machine.py`).
"""

from __future__ import annotations

from plaudit.models.config import DecoderConfig
from plaudit.models.described import folder_config
from plaudit.models.families import read_config
from plaudit.models.folders import local_folder
from plaudit.models.settings import LoraSettings
from plaudit.rollout.settings import KEPT
from plaudit.settings.tree import Settings
from plaudit.support.paths import is_here
from plaudit.types import Role


def memory(config: DecoderConfig, s: Settings) -> dict[str, float]:
    """Estimate bytes on a training rank's device, by part. Parts of 0 bytes and what is offloaded are left out.

    - A weight takes 2 bytes in bfloat16 and 4 in float32. A trained weight takes 16 more in bfloat16 (float32 master,
      gradient and two moments) and 12 more in float32.
    - With activation checkpointing a pass keeps every layer's input, and the activations of one layer; without it,
      those of all layers: per token some 20 times the hidden size and 3 times the inner size.
    - A cached token takes its keys and values. With an environment, turns that have ended are cached too.
    - References and teachers that have a path have their own sizes if they are here; judges, and others, the policy's.
    """
    width, weights = _width(s), config.parameters
    losses = [role for role in s.objective.losses() if s.runtime.trains(role)]
    waiting = s.runtime.offload
    parts = {"trained": sum(_trained(config, s, s.adapters(Role(role))) for role in losses)}
    if (
        Role.REFERENCE in s.objective.asks
        and "reference" not in waiting
        and s.runtime.trains(Role.REFERENCE)
        and (s.reference.path or not s.model.lora.rank)
    ):
        paths = (s.reference.path, *s.objective.teachers.values())
        parts["reference"] = sum(_referred(config, path) for path in paths) * (4 if s.reference.ema else width)
    judges = [reward for reward in s.rewards if reward.kind == "judge" and not reward.offload]
    parts["judge"] = width * weights * len(judges)
    parts["activations"] = s.learn.micro_tokens * by_token(config, s)
    if s.samples:
        length = s.data.max_prompt_tokens + s.answer_tokens
        groups = config.kv_heads * config.head_dim
        rows = s.rollout.slots * (1 + KEPT if s.environment.on else 1)
        parts["cache"] = rows * length * config.layers * 2 * width * groups
    return {part: float(size) for part, size in parts.items() if size}


def _referred(policy: DecoderConfig, path: str | None) -> int:
    """Number of weights of the reference; the policy's if its folder is not here or its family is not ours."""
    if path is None or not is_here(path):
        return policy.parameters
    try:
        return read_config(folder_config(local_folder(path))).parameters
    except (ValueError, OSError):  # what is wrong with the folder is found where the run loads it
        return policy.parameters


def by_token(config: DecoderConfig, s: Settings) -> int:
    """Return the bytes of activations per token of a pass with gradients."""
    layer = _width(s) * (20 * config.width + 3 * config.mlp_width)
    if s.learn.activation_checkpointing:
        return _width(s) * config.width * config.layers + layer
    return layer * config.layers


def disk(config: DecoderConfig, s: Settings) -> float:
    """Estimate the most bytes of checkpoints at one time, with the one being written; save.keep=0 counts as 1."""
    one = sum(_checkpoint(config, s, s.adapters(Role(role))) for role in s.objective.losses())
    return one * ((s.save.keep or 1) + 1 + (s.evaluate.best is not None))


def _width(s: Settings) -> int:
    return 2 if s.learn.precision == "bfloat16" else 4


def _adapters(config: DecoderConfig, lora: LoraSettings) -> int:
    """Number of LoRA weights, with an adapter on every projection: rank * (in + out) each."""
    width, inner, heads = config.width, config.mlp_width, config.heads * config.head_dim
    groups, ups = config.kv_heads * config.head_dim, 2 if config.mlp == "gated" else 1
    return lora.rank * config.layers * (2 * (width + heads) + 2 * (width + groups) + (ups + 1) * (width + inner))


def _trained(config: DecoderConfig, s: Settings, lora: LoraSettings) -> int:
    whole = (18 if _width(s) == 2 else 16) - (_state(s) if "optimizer" in s.runtime.offload else 0)
    return _width(s) * config.parameters + whole * _adapters(config, lora) if lora.rank else whole * config.parameters


def _checkpoint(config: DecoderConfig, s: Settings, lora: LoraSettings) -> int:
    """Bytes of one checkpoint of a role: its model, and moments (and masters) of the trained weights."""
    trained = _adapters(config, lora) if lora.rank else config.parameters
    return _width(s) * config.parameters + _state(s) * trained


def _state(s: Settings) -> int:
    """Bytes per trained weight: 8 for two moments, and in bfloat16 4 more for the master."""
    return 12 if _width(s) == 2 else 8
