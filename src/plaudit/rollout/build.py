"""Build the engine that samples completions from a model.

model, tokenizer, settings -> native (a decoder), static (any other model) or vLLM -> Engine
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from typing import Any

from plaudit.models.base import LanguageModel
from plaudit.models.decoder import Decoder
from plaudit.models.lora import merge_lora
from plaudit.rollout.decode.graphs import CudaGraphs, graphs_wanted
from plaudit.rollout.engine import Engine
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.settings import VllmStart
from plaudit.rollout.static import StaticEngine


def build_engine(
    model: LanguageModel,
    tokenizer: Any,
    *,
    slots: int,
    copy: bool = False,
    vllm: VllmStart | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Engine:
    """Return a `VllmEngine`, which always holds its own weights, if `vllm` is given. Otherwise return a `NativeEngine`
    for a `Decoder` and a `StaticEngine` for any other model, on the model's parameters or (`copy`) on a frozen copy. On
    a GPU the native engine repeats recorded steps. `say` is called while vLLM starts."""
    if vllm is not None:
        from plaudit.rollout.vllm import VllmEngine

        return VllmEngine.of(model, tokenizer, slots=slots, settings=vllm, say=say)
    if copy:
        model = copying.deepcopy(model).requires_grad_(False)
        merge_lora(model)  # published weights have adapters merged
    if isinstance(model, Decoder):
        graphs = CudaGraphs if graphs_wanted() and model.device.type == "cuda" else None
        return NativeEngine(model, tokenizer, slots=slots, recorder=graphs)
    return StaticEngine(model, tokenizer, slots=slots)
