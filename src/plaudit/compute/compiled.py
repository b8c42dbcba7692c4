"""Compile functions of a few elementwise operations and sums into one kernel on a GPU, by torch.compile.

Uncompiled, such a function reads and writes its tensors once an operation. Compiling takes some seconds when a
kind of call first occurs; torch keeps the result on disk. Left out: the CPU, which has kernels of our own, and whole
layers, whose compilation takes minutes.
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
"""The error of a failed compilation, after which this process compiles nothing; [] before."""


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return `function`, compiled by torch if its first argument is on a GPU, unless PLAUDIT_TORCH_COMPILE=off. If that
    fails, the error is logged, and from then on this process runs all such functions uncompiled."""
    fast = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(first: Tensor, *others: Any) -> Result:
        if not first.is_cuda or _refused or os.environ.get("PLAUDIT_TORCH_COMPILE", "on").lower() in OFF:
            return function(first, *others)
        return by_compiler(fast(), function, first, *others)

    return call


def by_compiler(fast: Callable[..., Result], plain: Callable[..., Result], *arguments: Any) -> Result:
    """Call `fast`, which is compiled once for any number of rows; if compiling fails, log it and call `plain`."""
    from torch._dynamo.decorators import maybe_mark_dynamic
    from torch._dynamo.exc import TorchDynamoException

    for tensor in arguments:
        if isinstance(tensor, Tensor):
            maybe_mark_dynamic(tensor, 0)
    try:
        return fast(*arguments)
    except TorchDynamoException as error:
        _refused.append(str(error))
        log.warning("torch.compile fails, so operations run one by one, as by PLAUDIT_TORCH_COMPILE=off: %s", error)
        return plain(*arguments)
