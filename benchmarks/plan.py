"""What is measured: one frozen value that every process of a benchmark reads, whatever environment it runs in.

Standard library only: TRL's environments import this file too.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-4m": {"model_type": "gpt2", "n_embd": 224, "n_layer": 6, "n_head": 7, "n_positions": 256},
    "llama-25m": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}
"""Hugging Face config keys of fresh models; the vocabulary is the demo tokenizer's."""


READY = "ready"
"""The file that a finished workload has; it says what it was made for."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes and hyperparameters, the same for every contender."""

    folder: str
    """Weights and data."""
    output: str
    """What contenders write themselves."""
    model: str = "gpt2-4m"
    threads: int = 2
    repeats: int = 3
    """Measured segments of each contender; one more goes before them as a warm-up."""
    step_scale: float = 1.0
    """Multiplies the steps of every segment."""
    rows: int = 32
    """Rows of a step: demonstrations, both answers of half as many pairs, completions."""
    samples: int = 4
    """Completions a prompt in GRPO."""
    max_new_tokens: int = 48
    prompts: int = 64
    """Prompts of one pass of generation."""
    learning_rate: float = 1e-3
    """Of SFT, which starts from random weights; reward and DPO take a tenth of it, PPO and GRPO a thousandth, so that
    their answers stay as long as they are."""
    kl_in_loss: float = 0.04
    """Coefficient of the KL term in GRPO; with it both need reference log-probs."""
    ppo_epochs: int = 4
    warm_start_steps: int = 80
    """SFT steps before the online lines, so that answers end where they should."""
    vocabulary: int = 768
    """Of the demo tokenizer: with it a row has about 46 tokens."""

    def steps(self, line: str) -> int:
        """Steps of one segment of a line; for generation, passes over the prompts."""
        usual = {"sft": 8, "sft-sorted": 8, "reward": 8, "dpo": 6, "grpo": 6, "ppo": 2}.get(line, 2)
        return max(1, round(usual * self.step_scale))

    def total_steps(self, line: str) -> int:
        """Steps of a whole run of a line: the warm-up segment and the measured ones."""
        return self.steps(line) * (self.repeats + 1)

    def rate(self, line: str) -> float:
        """Learning rate of a line."""
        return self.learning_rate * {"reward": 0.1, "dpo": 0.1, "grpo": 0.001, "ppo": 0.001}.get(line, 1.0)

    def path(self, name: str) -> Path:
        """A file or folder of the workload."""
        return Path(self.folder) / name

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @property
    def ready(self) -> bool:
        """Whether the workload is there, made for the same sizes."""
        mark = self.path(READY)
        return mark.exists() and mark.read_text() == self.sizes()

    def sizes(self) -> str:
        """All that the workload depends on."""
        apart = ("output", "threads", "ppo_epochs", "kl_in_loss")
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if name not in apart})

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        return cls(**json.loads(Path(path).read_text()))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def richness(completion: str) -> float:
    """The reward of the GRPO line, cheap and never equal for all answers: distinct words over 20."""
    return len(set(completion.split())) / 20
