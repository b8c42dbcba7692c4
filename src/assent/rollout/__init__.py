"""Rollout: engines that sample completions, and the rollouter that turns prompts into scored groups."""

from __future__ import annotations

from typing import Any

from assent.models.base import LanguageModel
from assent.rollout.engine import Engine


def build_engine(model: LanguageModel, tokenizer: Any, *, slots: int, copy: bool = False) -> Engine:
    """The engine for a model: the native one on a decoder's own parameters (or a copy of them), else a static one."""
    import copy as copying

    from assent.models.decoder import Decoder
    from assent.rollout.native import NativeEngine

    if copy:
        model = copying.deepcopy(model).requires_grad_(False)
    if isinstance(model, Decoder):
        return NativeEngine(model, tokenizer, slots=slots)
    from assent.rollout.static import StaticEngine

    return StaticEngine(model, tokenizer, slots=slots)
