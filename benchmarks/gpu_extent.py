"""How large the parts of `gpu.py` are, and what they all use: clocks, memory, a model.

A GPU works behind the host's back, so clocks stop only once it is done.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from floor import Size

Figure = dict[str, Any]
"""what, value, unit; `share` of the best possible and `of` what, `mib` at most, `note`."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How large everything is."""

    device: str
    dtype: str
    config: dict[str, Any]
    products: tuple[int, ...]
    """Sides of square matrices."""
    mib: tuple[int, ...]
    """Memory that is read at once."""
    rows: int
    """Of a training step, `length` tokens each."""
    length: int
    micro: tuple[int, ...]
    """Tokens of a micro-batch, each tried."""
    steps: int
    slots: tuple[int, ...]
    """Sequences decoded side by side, each tried, in groups of `samples`."""
    samples: int
    prompt: int
    answer: int
    prompts: int
    """Of a GRPO step."""
    sampled: int
    """Tokens of its answers."""
    updates: int
    """GRPO steps that are measured."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def size(self) -> Size:
        return Size.of(self.config, self.config["vocab_size"])

    @property
    def precision(self) -> str:
        return "bf16" if self.dtype == "bfloat16" else "fp32"


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(act: Callable[[], object], device: str) -> float:
    """That it takes, its work on the device included."""
    wait(device)
    began = time.perf_counter()
    act()
    wait(device)
    return time.perf_counter() - began


def best_rate(work: float, act: Callable[[], object], device: str, *, tries: int = 5, repeats: int = 10) -> float:
    """Work a second at its best."""

    def often() -> None:
        for _ in range(repeats):
            act()

    often()
    return work * repeats / min(seconds(often, device) for _ in range(tries))


@contextmanager
def memory(device: str, *used: torch.nn.Module) -> Iterator[list[float]]:
    """Filled with the MiB that torch held at most within, without what lay there before: `model` keeps what it made.
    Models that are `used` count."""
    found: list[float] = []
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - sum(map(parameter_bytes, used))
    yield found
    if device == "cuda":
        found.append((torch.cuda.max_memory_allocated() - others) / 2**20)


def parameter_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


@cache
def model_of(device: str, dtype: torch.dtype, **config: Any) -> Any:
    """Random weights, made once, on the device: the host would draw a billion numbers for half a minute."""
    from plaudit.models.load import fresh_model

    one = fresh_model(config, dtype=dtype, device=device, deferred=True)
    one.pending = None
    one.to_empty(device=device)
    one.tie()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return one


def model(extent: Extent) -> Any:
    return model_of(extent.device, extent.torch_dtype, **extent.config)


def folder_of(extent: Extent) -> Path:
    """The model on disk, as transformers reads it: drawing its numbers again would take half a minute."""
    from plaudit.models.load import save_model

    folder = Path(scratch().name) / f"{extent.dtype}-{extent.config['hidden_size']}"
    if not folder.exists():
        save_model(model(extent), folder)
    return folder


@cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Goes with the process."""
    return tempfile.TemporaryDirectory(prefix="plaudit-gpu-")


def rated(what: str, rate: float, share: float, of: str, held: list[float]) -> Figure:
    return {"what": what, "value": rate, "unit": "tok/s", "share": share, "of": of, "mib": held[0] if held else None}
