"""Which stored tensors of a Hugging Face checkpoint make up which parameters of the decoder, and back.

Fused projections are stored apart (query, key, value; gate, up), and GPT-2 stores its matrices transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.families import Family, family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored tensor and the rows of our parameter that it holds."""

    ours: str
    start: int
    size: int | None
    """None for the whole parameter."""
    transposed: bool


def layout(config: DecoderConfig, head: HeadKind, parameters: Iterable[str]) -> dict[str, Part]:
    """Stored name -> part, for parameters named as in `Decoder.named_parameters()`."""
    family = family_of(config.family)
    names = {**family.names, "head": (family.lm_head if head == "lm" else family.scalar_head,)}
    parts: dict[str, Part] = {}
    for ours in parameters:
        module, kind = ours.rsplit(".", 1)
        index = next((piece for piece in module.split(".") if piece.isdigit()), "")
        pattern = module.replace(f".{index}.", ".{}.", 1) if index else module
        if pattern not in names:
            raise ValueError(f"Family {family.model_type!r} has no stored name for {pattern!r}. Add it to its names.")
        stored = names[pattern]
        start = 0
        for name, size in zip(stored, _sizes(config, pattern, len(stored)), strict=True):
            transposed = kind == "weight" and pattern in family.transposed
            parts[f"{name.format(index)}.{kind}"] = Part(ours=ours, start=start, size=size, transposed=transposed)
            start += size or 0
    return parts


def _sizes(config: DecoderConfig, pattern: str, count: int) -> list[int | None]:
    if count == 1:
        return [None]
    if pattern.endswith(".qkv"):
        return [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
    return [config.mlp_width] * count


def stored_tensors(
    config: DecoderConfig, head: HeadKind, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters under their stored names, for checkpoints and other engines."""
    for name, part in layout(config, head, parameters).items():
        tensor = parameters[part.ours].detach()
        tensor = tensor.narrow(0, part.start, part.size) if part.size is not None else tensor
        yield name, (tensor.t() if part.transposed else tensor)


@torch.no_grad()
def fill(target: Tensor, part: Part, stored: Tensor, *, name: str) -> None:
    """Copy one stored tensor into the rows of our parameter `target` that it holds."""
    rows = target.narrow(0, part.start, part.size) if part.size is not None else target
    source = stored.t() if part.transposed and stored.dim() == 2 else stored
    if rows.shape != source.shape:
        expected = tuple(reversed(rows.shape)) if part.transposed else tuple(rows.shape)
        raise ValueError(
            f"Tensor {name} has shape {tuple(stored.shape)}, but config.json says {expected}. "
            "The weights and the config belong to different models."
        )
    rows.copy_(source)


def stored_name(family: Family, name: str, known: Mapping[str, Part]) -> str | None:
    """The layout's name for a tensor found in a file; None for buffers that hold no parameter."""
    if name in known:
        return name
    if family.base_prefix + name in known:
        return family.base_prefix + name
    return None if re.search(family.ignored, name) else name
