"""Torch as in a fresh process, whatever a notebook or a library has set for work of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def usual_torch() -> Iterator[None]:
    """Within it gradients are computed, nothing is cast by itself, and tensors are made as float32 on the CPU where
    nothing else is said. What was set before holds again behind it."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        yield
