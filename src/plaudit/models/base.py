"""What every language model here offers: hidden states of a flat run of tokens, one head, and its Hugging Face form.

The learner, the scorer and the engine hold a `LanguageModel` and never ask which kind it is: the native `Decoder`, or
any other causal LM through transformers (`fallback.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plaudit.models.config import HeadKind
from plaudit.models.context import Context, Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids that a checkpoint names. Several `eos` ids all end an answer."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    """What else its generation_config.json says: how others sample by default. It is kept, and not read here."""


class LanguageModel(nn.Module, ABC):
    """The implementer sets `head`, `head_kind` and `special`, and computes a sequence alike whatever lies beside it."""

    caches: ClassVar[bool]
    """Whether contexts with a KV cache are understood; if not, `forward` takes whole sequences (`Packed`) alone."""
    turn: int = 0
    """Length up to which rows are computed apart from longer ones; 0 if all are computed alike."""
    head: nn.Module
    """Hidden states (tokens, width) to logits (tokens, vocab_size), or to one number a token (tokens, 1)."""
    head_kind: HeadKind
    special: SpecialTokens

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Longest sequence, in tokens."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, one after another: units of sharding and of recomputation."""
        return ()

    @property
    def window(self) -> int | None:
        """Sliding attention window that contexts must apply, None for full attention."""
        return None

    @abstractmethod
    def forward(self, tokens: Tensor, context: Context, read: Tensor | None = None) -> Tensor:
        """Hidden states after the last norm, (tokens, width), for int64 token ids (tokens,); with `read` (m,) those of
        the tokens at these places alone, (m, width), in that order."""

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """Content of config.json that transformers reads as this model, head included."""

    @abstractmethod
    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, a shared one once; views where possible, detached."""

    @abstractmethod
    def save_weights(self, folder: Path, *, max_shard_bytes: float) -> None:
        """Write config.json's companions: the weights, as safetensors."""

    def packed(self, lengths: Sequence[int]) -> Packed:
        """The context of whole sequences laid end to end, on this model's device and with its window."""
        return Packed(lengths, device=self.device, window=self.window)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype
