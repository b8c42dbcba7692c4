"""Functions of a few elementwise operations and sums, each one kernel on a GPU: torch.compile writes it.

Operation by operation such a function reads and writes its tensors many times over, which on a GPU takes longer than
the matrix products around it leave. Compiling takes some seconds when a kind of call first occurs; torch keeps the
result on disk. Left out: the CPU, which has kernels of our own, and whole layers, whose compiler takes minutes.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from plaudit.compute.library import OFF

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_refused: list[str] = []
"""Why nothing is compiled any more."""


def compiling_wanted() -> bool:
    """False with PLAUDIT_TORCH_COMPILE=off, for a compiler that has trouble with a GPU."""
    return os.environ.get("PLAUDIT_TORCH_COMPILE", "on").lower() not in OFF


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let torch compile `function` where its first argument is on a GPU. The number of rows of each tensor may change
    from call to call. If compiling fails, that is reported once, and torch computes operation by operation."""

    @functools.cache
    def fast() -> Callable[..., Result]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(first: Tensor, *others: Any) -> Result:
        if not first.is_cuda or _refused or not compiling_wanted():
            return function(first, *others)
        return by_compiler(fast(), function, first, *others)

    return call


def by_compiler(fast: Callable[..., Result], plain: Callable[..., Result], *given: Any) -> Result:
    from torch._dynamo.decorators import maybe_mark_dynamic
    from torch._dynamo.exc import TorchDynamoException

    for one in given:
        if isinstance(one, Tensor) and one.dim():
            maybe_mark_dynamic(one, 0)
    try:
        return fast(*given)
    except TorchDynamoException as error:
        _refused.append(str(error))
        log.warning("torch.compile fails here, so operations run one by one (PLAUDIT_TORCH_COMPILE=off): %s", error)
        return plain(*given)
