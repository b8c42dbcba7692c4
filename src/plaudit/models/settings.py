"""Settings of the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plaudit.support.fields import refuse, setting


@dataclass
class LoraSettings:
    """Low-rank adapters that are trained in place of a model's weights."""

    rank: int = setting(0, least=0)
    """Rank of the adapters; 0 trains the whole model."""
    alpha: float = setting(16.0, above=0)
    """The adapters' output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Projections that get an adapter, by Hugging Face's names (q_proj, v_proj; c_attn); empty: all of them."""


@dataclass
class ModelSettings:
    """Where the trained model comes from: a checkpoint, or only a configuration."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint, or a hub id."""
    config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config keys of a fresh model, such as {model_type: gpt2, n_embd: 128, n_layer: 4, n_head: 4}."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; null takes the checkpoint's."""
    lora: LoraSettings = field(default_factory=LoraSettings)


@dataclass(frozen=True)
class Longest:
    """The longest sequence that a run will train on or sample."""

    tokens: int
    what: str
    """Description of the sequence for messages."""

    def unfit(self, whose: str, room: int) -> list[str]:
        """Return a problem if the sequence does not fit a model with `room` positions; else []."""
        if self.tokens <= room:
            return []
        advice = "lower data.max_tokens, data.max_prompt_tokens or rollout.max_tokens"
        return [f"{self.what} take {self.tokens} tokens together, {whose} has room for {room}: {advice}"]

    def check(self, whose: str, room: int) -> None:
        """Raise SettingsError if the sequence does not fit a model with `room` positions."""
        refuse(self.unfit(whose, room), plain=True)
