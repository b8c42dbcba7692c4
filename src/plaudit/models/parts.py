"""Map the stored tensors of a Hugging Face checkpoint to the decoder's parameters, and back.

Fused projections are stored separately (query, key, value; gate, up), and GPT-2 stores matrices transposed. `layout.py`
says what each rank holds of them; both are plain data, without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.families import Family, family_of

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored tensor and the rows of our parameter that it holds."""

    ours: str
    start: int
    size: int | None
    """Number of rows; None for the whole parameter."""
    transposed: bool


def parts_of(config: DecoderConfig, head: HeadKind, parameters: Iterable[str]) -> dict[str, Part]:
    """Return {stored name: part} of parameters named as in `Decoder`. Raises ValueError for one without stored name."""
    family = family_of(config.family)
    names = {**family.names, "head": (family.lm_head if head == "lm" else family.scalar_head,)}
    parts: dict[str, Part] = {}
    for ours in parameters:
        module, kind = ours.rsplit(".", 1)
        index, pattern = numbered(module)
        if pattern not in names:
            raise ValueError(f"Family {family.model_type!r} has no stored name for {pattern!r}. Add it to its names.")
        stored = names[pattern]
        start = 0
        for name, size in zip(stored, _sizes(config, pattern, len(stored)), strict=True):
            transposed = kind == "weight" and pattern in family.transposed
            parts[f"{name.format(index)}.{kind}"] = Part(ours=ours, start=start, size=size, transposed=transposed)
            start += size or 0
    return parts


def numbered(name: str) -> tuple[str, str]:
    """Return the layer's number in a name ("" if there is none), and the name with {} in place of the number."""
    index = next((piece for piece in name.split(".") if piece.isdigit()), "")
    return index, name.replace(f".{index}.", ".{}.", 1) if index else name


def blocks(config: DecoderConfig, module: str) -> list[int]:
    """Return the numbers of rows of the blocks that a fused projection joins; [] for other modules."""
    if module.endswith(".qkv"):
        return [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
    if module.endswith(".mlp.up"):
        return [config.mlp_width] * (2 if config.mlp == "gated" else 1)
    return []


def shapes(config: DecoderConfig, head: HeadKind) -> dict[str, Shape]:
    """Return the whole shape of each of our parameters, in the order of `Decoder.named_parameters()`."""
    width, inner = config.width, config.heads * config.head_dim
    found: dict[str, Shape] = {"embedding.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        found["position_embedding.weight"] = (config.max_positions, width)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = (width,)
        if config.norm == "layer":
            found[f"{name}.bias"] = (width,)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)

    for number in range(config.layers):
        layer = f"layers.{number}"
        norm(f"{layer}.attention_norm")
        linear(f"{layer}.attention.qkv", sum(blocks(config, ".qkv")), width, config.qkv_bias)
        linear(f"{layer}.attention.output", width, inner, config.output_bias)
        if config.qk_norm:
            found |= {f"{layer}.attention.{which}_norm.weight": (config.head_dim,) for which in ("query", "key")}
        norm(f"{layer}.mlp_norm")
        linear(f"{layer}.mlp.up", sum(blocks(config, ".mlp.up")), width, config.mlp_bias)
        linear(f"{layer}.mlp.down", width, config.mlp_width, config.mlp_bias)
    norm("norm")
    if not (head == "lm" and config.tied):
        found["head.weight"] = (config.vocab_size if head == "lm" else 1, width)
    return found


def _sizes(config: DecoderConfig, pattern: str, count: int) -> Sequence[int | None]:
    return blocks(config, pattern) if count > 1 else [None]


def stored_tensors(
    config: DecoderConfig, head: HeadKind, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (stored name, tensor) for checkpoints and other engines; tensors are views of our parameters."""
    for name, part in parts_of(config, head, parameters).items():
        tensor = parameters[part.ours].detach()
        tensor = tensor.narrow(0, part.start, part.size) if part.size is not None else tensor
        yield name, (tensor.t() if part.transposed else tensor)


def stored_name(family: Family, name: str, known: Mapping[str, Part]) -> str | None:
    """Return the known name of a tensor in a file; None for a buffer without parameters; else `name` unchanged."""
    if name in known:
        return name
    if family.base_prefix + name in known:
        return family.base_prefix + name
    return None if re.search(family.ignored, name) else name
