"""The interface of every language model: hidden states of flat tokens, one head, and its Hugging Face form.

It is the native `Decoder`, or any other causal LM through transformers (`fallback.py`). The learner and the scorer do
not know which; each kind has an engine of its own (`rollout/build.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plaudit.compute.axis import ALONE, Axis
from plaudit.compute.context import Context, Packed
from plaudit.models.config import HeadKind
from plaudit.models.mesh import WHOLE, Mesh, Stage
from plaudit.models.share import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids that a checkpoint names. Several `eos` ids all end an answer."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of generation_config.json, such as default sampling: saved again, but not used by Plaudit."""


class LanguageModel(nn.Module, ABC):
    """The implementer sets `head`, `head_kind` and `special`, and computes each sequence independently of the other
    sequences in a pass."""

    caches: ClassVar[bool]
    """True if contexts with a KV cache are supported; otherwise `forward` takes only whole sequences (`Packed`)."""
    turn: int = 0
    """Rows up to this many tokens are computed separately from longer ones (longrope); 0: all rows together."""
    head: nn.Module
    """Hidden states (tokens, width) to logits (tokens, vocab_size), or to one number a token (tokens, 1)."""
    head_kind: HeadKind
    special: SpecialTokens
    axis: Axis = ALONE
    """The ranks that each hold a part of every matrix (tensor parallel); ALONE: matrices are whole."""
    context_axis: Axis = ALONE
    """The ranks that share the tokens of each pass (context parallel); ALONE: this rank computes all."""
    stage: Stage = WHOLE
    """This rank's pipeline stage, which says which layers it has; WHOLE: all."""
    pending: list[Callable[[Share], None]] | None = None
    """For a model without memory yet: functions that fill a rank's share once memory is allocated, in order."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Longest sequence, in tokens."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The layers in order, as units of sharding and of activation checkpointing; () if they are not known."""
        return ()

    @property
    def window(self) -> int | None:
        """Sliding attention window that contexts must apply, None for full attention."""
        return None

    @abstractmethod
    def forward(self, tokens: Tensor, context: Context, read: Tensor | None = None) -> Tensor:
        """Return hidden states after the last norm, (tokens, width), for int64 token ids (tokens,). With `read` (m,),
        return only those of the tokens at these indices, (m, width), in that order."""

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """Return the content of a config.json that transformers reads as this model, head included."""

    @abstractmethod
    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter once, by Hugging Face name, detached and as a view if possible."""

    @abstractmethod
    def save_weights(self, folder: Path, *, max_shard_bytes: float) -> None:
        """Write the weights, as safetensors, beside config.json."""

    def share(self, mesh: Mesh, rank: int, tensors: Mapping[str, Tensor]) -> Share | None:
        """Return a rank's share of the model: its `tensors` by our names, whose boxes follow from `mesh` and `rank`.
        None for a model that cannot be read or written in boxes."""
        return None

    def among(self, replicas: int, number: int, *, data: int = 1) -> tuple[Mesh, int]:
        """Return the mesh of `replicas` copies of the model, each in `data` shards, and this rank's number in it, which
        is `number` among the ranks with its layers and its part of each matrix."""
        mesh = replace(self.stage.mesh, replicas=replicas, data=data, tensor=self.axis.size)
        return mesh, (self.stage.number * replicas * data + number) * self.axis.size + self.axis.rank

    def tie(self) -> None:
        """Make tied parameters share their memory again, after each got memory of its own."""

    def packed(self, lengths: Sequence[int]) -> Packed:
        """Return the context of whole sequences laid end to end, on this model's device and with its window."""
        return Packed(lengths, device=self.device, window=self.window)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype
