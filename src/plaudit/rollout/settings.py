"""Settings of rollout: what is sampled, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from plaudit.support.fields import Section, setting

ENGINES = ("native", "vllm")
LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower ones to this."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class VllmSettings:
    """Settings of vLLM, for rollout.engine=vllm."""

    dtype: str = setting("auto", choices=DTYPES)
    """auto is the model's own; bfloat16 is faster, and its log-probs differ from the learner's by up to 0.05."""
    max_length: int | None = setting(None, least=1, unit="tokens")
    """Longest prompt and answer together; null takes the model's positions, all of which the cache has to hold."""
    memory: float = setting(0.4, above=0, below=1)
    """Share of a GPU's memory for weights and cache."""
    cpu_cache_gib: float = setting(0.25, above=0, unit="GiB")
    """Size of the KV cache on a CPU."""
    block_size: int | None = setting(None, least=1, unit="tokens")
    """Tokens of a cache block; null is 32 on a CPU and vLLM's choice on a GPU."""
    eager: bool | None = None
    """Without compilation and CUDA graphs; null is true on a CPU and false on a GPU."""
    sleep_level: int = setting(2, choices=(0, 1, 2))
    """What it gives up while the learner works, with rollout.share_devices: 2 its cache and weights, 1 the cache, while
    the weights wait in host memory, 0 nothing."""


@dataclass
class RolloutSettings(Section):
    """How answers are drawn from the policy."""

    engine: str = setting("native", choices=ENGINES)
    """native computes on the learner's own weights (or a copy, with lag), vllm has its own (docs/vllm.md)."""
    vllm: VllmSettings = field(default_factory=VllmSettings)
    prompts_per_step: int = setting(32, least=1)
    """Prompts of one training step (each has the method's number of samples)."""
    max_tokens: int = setting(64, least=1, unit="tokens")
    """Longest answer."""
    min_tokens: int = setting(0, least=0, unit="tokens")
    """The answer may not end before; biases ratios unless algorithm.recompute_old is set."""
    temperature: float = setting(1.0, least=0)
    """Divides the logits before they become probabilities; 0 is greedy."""
    top_p: float = setting(1.0, above=0, most=1)
    """Draw from the likeliest tokens that hold this share of the probability; 1 keeps all."""
    top_k: int = setting(0, least=0)
    """Draw from this many of the likeliest tokens; 0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer; they may hold special tokens."""
    special_tokens: bool = False
    """Rewards and samples show the special tokens in an answer, such as <|channel|>; its end token is never shown."""
    slots: int = setting(64, least=1)
    """Sequences decoded side by side, by each worker."""
    cuda_graphs: bool = True
    """native on GPUs: steps of decoding are recorded once and repeated, at one launch each (vllm has vllm.eager)."""
    workers: int = setting(1, least=1)
    """Rollout workers; more than one needs runtime=ray."""
    workers_max: int = setting(0, least=0)
    """ray: workers beyond `workers`, up to this many, are used while nodes have room for them; 0 starts none."""
    max_lag: int = setting(0, least=0)
    """Policy versions that a sample may be old; 0 is synchronous."""
    share_devices: bool = False
    """Learner and engine take turns: the engine gives its memory up while the learner works, and the learner's moments
    wait in host memory while the engine does. Needs max_lag=0."""
    interrupt: bool = True
    """New weights take over answers under way; false lets those end first, and begins no other meanwhile. Only with
    max_lag."""
    max_redraw: float = setting(3.0, least=0)
    """Prompts drawn for a step, at most, as a multiple of prompts_per_step, to replace groups without a signal."""
    max_failed: float = setting(0.1, least=0, most=1)
    """Share of a step's rewards that may fail: they are masked. Where more do, training pauses and asks again."""
    reward_patience: float = setting(1800.0, least=0, unit="seconds")
    """How long training pauses for rewards that fail for reasons that may pass; then the run ends, saved."""
    record: bool = False
    """Write what each step learns from into the run's folder, for a replay."""
    replay: str | None = None
    """The folder of a run that was recorded: learn from its samples, in place of any drawn now."""

    def for_vllm(self) -> VllmSettings | None:
        """Return vLLM's settings, None for the native engine. An engine with its own device need not sleep."""
        if self.engine != "vllm":
            return None
        return self.vllm if self.share_devices else replace(self.vllm, sleep_level=0)

    @property
    def reshaped(self) -> bool:
        """True if answers are drawn from a part of the policy's distribution: log-probs are then not the policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_tokens > 0

    def contradictions(self) -> Iterator[str]:
        if self.engine == "vllm" and not self.cuda_graphs:
            yield "cuda_graphs=false has no effect with rollout.engine=vllm: set rollout.vllm.eager=true"
        if self.engine == "vllm" and 0 < self.temperature < LEAST_TEMPERATURE:
            yield (
                f"temperature={self.temperature} is below vLLM's least, {LEAST_TEMPERATURE}: give 0 (greedy), a larger "
                "one, or set rollout.engine=native"
            )
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens={self.min_tokens} exceeds rollout.max_tokens={self.max_tokens}: lower it"
        if 0 < self.workers_max < self.workers:
            yield (
                f"workers_max={self.workers_max} is below rollout.workers={self.workers}: raise it, or set 0 for no "
                "more than those"
            )
        if self.share_devices and self.max_lag > 0:
            yield (
                f"max_lag={self.max_lag} cannot be used with rollout.share_devices=true: the engine sleeps while the "
                "learner works. Set max_lag=0, or share_devices=false with devices for both"
            )
        if self.share_devices and self.workers_max:
            yield (
                f"workers_max={self.workers_max} cannot be used with rollout.share_devices=true: rollout workers are "
                "where training ranks are, and no others join. Set only one of them"
            )
