"""Settings of rollout: what is sampled, and how much of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

ENGINES = ("native", "vllm")
LEAST_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this in silence."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class VllmSettings:
    """What vLLM is told where rollout.engine is vllm."""

    dtype: str = "auto"
    """auto is the model's own; bfloat16 is faster, and its log-probs differ from the learner's by up to 0.05."""
    max_length: int | None = None
    """Longest prompt and answer together; null takes the model's positions, all of which the cache has to hold."""
    memory: float = 0.4
    """Share of a GPU's memory for weights and cache."""
    cpu_cache_gib: float = 0.25
    """GiB of the KV cache on a CPU."""
    block_size: int | None = None
    """Tokens of a cache block; null is 32 on a CPU and vLLM's choice on a GPU."""
    eager: bool | None = None
    """Without compilation and CUDA graphs; null is true on a CPU and false on a GPU."""
    prefix_caching: bool = True
    """Prompts' beginnings are computed once, in whole blocks."""
    sleep_level: int = 2
    """What it gives up while the learner works, with rollout.share_devices: 2 its cache and weights, 1 the cache, while
    the weights wait in host memory, 0 nothing."""


@dataclass
class RolloutSettings:
    """How answers are drawn from the policy."""

    engine: str = "native"
    """native computes on the learner's own weights (or a copy, with lag), vllm has its own (docs/vllm.md)."""
    vllm: VllmSettings = field(default_factory=VllmSettings)
    prompts_per_step: int = 32
    """Prompts of one training step (each has the method's number of samples)."""
    max_tokens: int = 64
    """Longest answer, in tokens."""
    min_tokens: int = 0
    """The answer may not end before; biases ratios unless algorithm.recompute_old is set."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer."""
    slots: int = 64
    """Sequences decoded side by side, by each worker."""
    cuda_graphs: bool = True
    """native on GPUs: steps of decoding are recorded once and repeated, at one launch each (vllm has vllm.eager)."""
    workers: int = 1
    """Rollout workers; more than one needs runtime=ray."""
    workers_max: int = 0
    """ray: workers beyond `workers`, up to this many, are used while nodes have room for them; 0 starts none."""
    max_lag: int = 0
    """Policy versions that a sample may be old; 0 is synchronous."""
    share_devices: bool = False
    """Learner and engine take turns: the engine gives its memory up while the learner works, and the learner's moments
    wait in host memory while the engine does. Needs max_lag=0."""
    interrupt: bool = True
    """New weights take over answers under way; false lets those end first, and begins no other meanwhile. Only with
    max_lag."""
    max_redraw: float = 3.0
    """Prompts drawn for a step, at most, as a multiple of prompts_per_step, to replace groups without a signal."""
    max_failed: float = 0.1
    """Share of a step's rewards that may fail before the run stops."""
    record: bool = False
    """Write what each step learns from into the run's folder, for a replay."""
    replay: str | None = None
    """The folder of a run that was recorded: learn from its samples, in place of any drawn now."""

    def for_vllm(self) -> VllmSettings | None:
        """What vLLM is told, None for the native engine. What shares no device need not be able to sleep."""
        if self.engine != "vllm":
            return None
        return self.vllm if self.share_devices else replace(self.vllm, sleep_level=0)

    @property
    def reshaped(self) -> bool:
        """Answers are drawn from a part of the policy's distribution, so that their log-probs are not the policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_tokens > 0

    def problems(self) -> list[str]:
        """What is wrong with the choice of an engine."""
        problems, vllm = [], self.vllm
        if self.engine not in ENGINES:
            problems.append(f"rollout.engine={self.engine} is not one of {', '.join(ENGINES)}")
        if self.engine == "vllm" and not self.cuda_graphs:
            problems.append(
                "rollout.cuda_graphs=false has no effect with rollout.engine=vllm: set rollout.vllm.eager=true"
            )
        if self.engine == "vllm" and 0 < self.temperature < LEAST_TEMPERATURE:
            problems.append(
                f"rollout.temperature={self.temperature} is below vLLM's least, {LEAST_TEMPERATURE}: give 0 (greedy), "
                "a larger one, or set rollout.engine=native"
            )
        if vllm.dtype not in DTYPES:
            problems.append(f"rollout.vllm.dtype={vllm.dtype} is not one of {', '.join(DTYPES)}")
        if vllm.sleep_level not in (0, 1, 2):
            problems.append(f"rollout.vllm.sleep_level={vllm.sleep_level} is not one of 0, 1, 2")
        if self.share_devices and self.max_lag > 0:
            problems.append(
                f"rollout.max_lag={self.max_lag} cannot be used with rollout.share_devices=true: the engine sleeps "
                "while the learner works. Set max_lag=0, or share_devices=false with devices for both"
            )
        if self.share_devices and self.workers_max:
            problems.append(
                f"rollout.workers_max={self.workers_max} cannot be used with rollout.share_devices=true: rollout "
                "workers are where training ranks are, and no others join. Set one of them alone"
            )
        if not 0 < vllm.memory < 1:
            problems.append(f"rollout.vllm.memory={vllm.memory} is a share of a GPU's memory: 0 < memory < 1")
        above = {"max_length": vllm.max_length, "block_size": vllm.block_size, "cpu_cache_gib": vllm.cpu_cache_gib}
        for name, value in above.items():
            if value is not None and not 0 < value < float("inf"):
                problems.append(f"rollout.vllm.{name}={value} must be above 0")
        return problems
