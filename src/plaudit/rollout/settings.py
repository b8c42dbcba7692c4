"""Settings of rollout: what is sampled, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from plaudit.support.fields import Section, setting, shown
from plaudit.types import Sampling

ENGINES = ("native", "vllm")
KEPT = 2
"""Finished turns of episodes whose KV caches wait for the next turns, a slot. The oldest is dropped first."""
LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this."""


@dataclass
class VllmSettings:
    """Settings of vLLM, for rollout.engine=vllm."""

    memory: float = setting(0.4, above=0, below=1)
    """Share of a GPU's memory for weights and cache."""


@dataclass
class VllmStart(VllmSettings):
    """The arguments that vLLM is started with: its settings, and values that follow from the run's other settings."""

    dtype: str = "auto"
    """auto: the dtype of learn.precision. With another dtype log-probs differ from the learner's by up to 0.05."""
    max_length: int | None = None
    """Longest prompt and answer together, in tokens; None: the model's positions. The cache must hold all of them."""
    sleeps: bool = True
    """True if the engine must free device memory in `sleep`, because a learner uses the same device."""
    devices: int = 1
    """Processes of vLLM that share each matrix (its tensor_parallel_size)."""


@dataclass
class DrawSettings(Section):
    """How answers are drawn."""

    max_tokens: int = setting(64, least=1, unit="tokens")
    """Longest answer."""
    min_tokens: int = setting(0, least=0, unit="tokens")
    """Shortest answer."""
    temperature: float = setting(1.0, least=0)
    """Divides the logits before they become probabilities; 0 is greedy."""
    top_p: float = setting(1.0, above=0, most=1)
    """Draw from the likeliest tokens that hold this share of the probability; 1 keeps all."""
    top_k: int = setting(0, least=0)
    """Draw from this many of the likeliest tokens; 0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer; they may contain special tokens."""
    special_tokens: bool = False
    """Show rewards and samples the special tokens of an answer, such as <|channel|>, but never its end token."""

    @property
    def reshaped(self) -> bool:
        """True if answers are drawn from a part of the policy's distribution: log-probs are then not the policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_tokens > 0

    def draw(self) -> Sampling:
        """Return the Sampling of one answer, with the default seed."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            special_tokens=self.special_tokens,
            stop=tuple(self.stop),
        )

    def contradictions(self) -> Iterator[str]:
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: lower it"


@dataclass
class RolloutSettings(DrawSettings):
    """How answers are drawn from the policy."""

    engine: str = setting("native", choices=ENGINES)
    """native samples with the learner's weights (with max_lag, a copy of them); vllm has its own (docs/vllm.md)."""
    vllm: VllmSettings = field(default_factory=VllmSettings)
    prompts_per_step: int = setting(32, least=1)
    """Prompts of one training step (each has the method's number of samples)."""
    min_tokens: int = setting(0, least=0, unit="tokens")
    """Shortest answer; above 0 it biases ratios unless algorithm.recompute_old is set."""
    slots: int = setting(64, least=1)
    """Sequences that each worker decodes at once. With an environment, twice as many finished turns keep their caches
    for the turns that follow."""
    workers: Any = 1
    """Number of rollout workers; more than one needs runtime=ray. With [2, 6] a run starts with two, and uses up to six
    while nodes have free resources."""
    max_lag: int = setting(0, least=0)
    """Largest number of policy versions by which a sample may be older than the policy; 0 is synchronous."""
    interrupt: bool = True
    """With max_lag: load new weights while answers are being decoded, and continue these with them. False finishes
    them with the old weights first, and starts no others meanwhile."""
    max_failed: float = setting(0.1, least=0, most=1)
    """Share of a step's rewards that may fail; their answers are masked. Above it, training pauses and asks again."""
    reward_patience: float = setting(1800.0, least=0, unit="seconds")
    """Longest pause for rewards that failed transiently, such as of a server; after it the run saves and ends."""
    record: bool = False
    """Record what each step learns from in the run's folder, for a replay."""
    replay: str | None = None
    """Folder of a recorded run: learn from its samples instead of drawing new ones."""

    def for_vllm(self, *, longest_prompt: int, sleeps: bool, devices: int = 1) -> VllmStart | None:
        """Return the arguments that vLLM is started with; None for the native engine. `longest_prompt` is in tokens. An
        engine with its own device need not sleep (`sleeps`)."""
        if self.engine != "vllm":
            return None
        return VllmStart(
            **asdict(self.vllm),
            max_length=longest_prompt + self.max_tokens,
            sleeps=sleeps,
            devices=devices,
        )

    @property
    def workers_range(self) -> tuple[int, int]:
        """Return (least, most): the rollout workers that a run starts with, and the most that it uses."""
        least, most = self.workers if isinstance(self.workers, list | tuple) else (self.workers, self.workers)
        return least, most

    def contradictions(self) -> Iterator[str]:
        if self.engine == "vllm" and 0 < self.temperature < LEAST_TEMPERATURE:
            yield (
                f"temperature={self.temperature} is below vLLM's least, {LEAST_TEMPERATURE}: give 0 (greedy), a larger "
                "one, or set rollout.engine=native"
            )
        yield from super().contradictions()
        asked = self.workers if isinstance(self.workers, list | tuple) else [self.workers] * 2
        whole = len(asked) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n <= 2**64 for n in asked)
        if not whole or not 1 <= asked[0] <= asked[1]:
            yield f"workers={shown(self.workers)} must be a number of at least 1, or [least, most]"
