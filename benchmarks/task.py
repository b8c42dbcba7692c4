"""What one contender is to do: a frozen value that every process of a benchmark reads, in whatever environment it runs.

Standard library only, and torch where a contender begins: the peers' environments import this file too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gate import Gate

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 1024},
    "4M": {"model_type": "gpt2", "n_embd": 224, "n_layer": 6, "n_head": 7, "n_positions": 1024},
    "25M": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
MODELS["25M-50k"] = MODELS["25M"] | {"vocab_size": 50_257}
PRETRAINED = "135M-49k"
"""SmolLM2-135M-Instruct, with its own weights and tokenizer."""
MODELS[PRETRAINED] = MODELS["25M"] | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
MODELS[PRETRAINED] |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152}
"""Hugging Face config keys; the vocabulary of a fresh model is the demo tokenizer's, or larger than that."""

VOCABULARY = 768
"""Of the demo tokenizer: with it a short text has about 46 tokens."""
SAID = 2
"""Tokens of an observation."""
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def vocabulary(model: str) -> int:
    """Entries of its embedding and head."""
    return int(MODELS[model].get("vocab_size", VOCABULARY))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One line of the table for one model and precision, the same for every contender."""

    method: str
    """sft, reward, dpo, grpo, rloo, online-dpo, ppo or generate."""
    model: str
    precision: str
    threads: int
    weights: str
    """Folder of fresh/, policy/ and judge/."""
    data: str
    """JSON Lines file with the rows of the whole run, in the order in which they are used."""
    output: str
    """What contenders write themselves."""
    steps: int
    """Steps of one segment; of generation, passes over the prompts."""
    repeats: int
    """Measured segments; one more goes before them as a warm-up."""
    rows: int
    """Rows of a step: demonstrations, both answers of half as many pairs, completions."""
    samples: int = 1
    """Completions of one prompt."""
    epochs: int = 1
    """Of PPO, over each batch."""
    max_new_tokens: int = 48
    learning_rate: float = 1e-3
    kl: float = 0.04
    """KL coefficient of the methods that have one."""
    lora: int = 0
    """Rank of the adapters that GRPO trains on every projection, with an alpha of 16; 0 trains the whole model."""
    rewards: list[dict[str, Any]] = field(default_factory=lambda: [{"kind": "function", "function": "task:richness"}])
    """Of GRPO, RLOO and online DPO: functions of an answer, as Plaudit's settings name them."""
    tool: str = ""
    """Of GRPO: a function "FILE.py:NAME" that the policy may call, once an answer."""
    seed: int = 0
    saves: bool = False
    """GRPO writes its adapters into `adapter`, in the output's folder, before a segment ends."""
    sorted_rows: bool = False
    """The peer groups rows of similar length, which spares it padding and gives it other batches."""
    greedy: bool = False
    shortest: int = 64
    longest: int = 64
    """Of generation: new tokens of each sequence, drawn evenly between the two; end tokens do not end it."""
    turns: int = 1
    """Of generation: an episode's turns. SAID of each later turn's tokens are an environment's."""
    pause: float = 0.0
    """Seconds that the environment takes for each."""
    slots: int = 0
    """Sequences decoded at once; 0 for as many as there are rows."""
    profile: bool = False
    """Trace the first measured segment."""

    @property
    def total_steps(self) -> int:
        """The warm-up segment and the measured ones."""
        return self.steps * (self.repeats + 1)

    @property
    def needed(self) -> int:
        """Lines of the data file that a run uses."""
        per_step = {"sft": 1, "ppo": 1, "reward": 2, "dpo": 2}.get(self.method, self.samples)
        return self.rows // per_step * (1 if self.method == "generate" else self.total_steps)

    @property
    def dtype(self) -> str:
        return PRECISIONS[self.precision]

    def lengths(self) -> list[int]:
        """New tokens of each sequence of generation."""
        rng = random.Random(0)
        return [rng.randint(self.shortest, self.longest) for _ in range(self.rows)]

    def path(self, name: str) -> Path:
        """A folder of weights."""
        return Path(self.weights) / name

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        return path

    @classmethod
    def read(cls, path: str | Path) -> Task:
        return cls(**json.loads(Path(path).read_text()))


def begin() -> tuple[Task, Gate]:
    """The task that the command line names, and its gate. Torch gets its threads, and nothing is written elsewhere."""
    task = Task.read(sys.argv[1])
    gate = Gate(steps=task.steps, repeats=task.repeats)
    import torch

    torch.set_num_threads(task.threads)
    os.chdir(task.output)
    return task, gate


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def richness(completion: str) -> float:
    """The reward of the online lines: distinct words over 20, and a trace of noise so that no two answers tie."""
    return len(set(completion.split())) / 20 + zlib.crc32(completion.encode()) / 2**32 / 100


def evenness(tokens: Sequence[int]) -> float:
    """Share of even tokens: a reward that random weights can be trained on, whatever the texts."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
