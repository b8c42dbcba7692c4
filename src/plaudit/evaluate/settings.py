"""Settings of evaluation: which models, which data, which figures; and what contradicts what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plaudit.data.settings import DataSettings, absent, sources
from plaudit.paths import at_home

KINDS = ("perplexity", "generation", "reward", "kl", "comparison", "preference")
DATA = ("prompts", "demonstrations", "preferences")
WHOLE = (
    "is estimated on samples of the whole policy: set sampling.top_p=1, top_k=0, min_tokens=0 and a temperature above 0"
)


@dataclass
class SamplingSettings:
    """How answers are drawn."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_tokens: int = 0
    """The answer may not end before."""
    max_tokens: int = 64
    """Longest answer, in tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer."""
    samples: int = 1
    """Answers to each prompt."""
    slots: int = 64
    """Sequences decoded side by side."""

    @property
    def whole(self) -> bool:
        """Whether the policy's own distribution is drawn from, nothing cut off."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and self.min_tokens == 0

    def problems(self) -> list[str]:
        """What is impossible in itself."""
        found = [
            f"sampling.{name}={getattr(self, name)} must be at least 1"
            for name in ("max_tokens", "samples", "slots")
            if getattr(self, name) < 1
        ]
        if not 0 <= self.temperature < float("inf"):
            found.append(f"sampling.temperature={self.temperature} must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"sampling.top_p={self.top_p} must be in (0, 1]; 1 keeps all")
        if self.top_k < 0:
            found.append(f"sampling.top_k={self.top_k} must be 0 (keep all) or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            found.append(f"sampling.min_tokens={self.min_tokens} must be between 0 and max_tokens={self.max_tokens}")
        if self.temperature == 0 and self.samples > 1:
            found.append(f"sampling.samples={self.samples} greedy answers would all be the same: set samples=1")
        return found


@dataclass
class MeasureSettings:
    """What policies are measured on and with, whether one is looked at or two."""

    gold: str | None = None
    """A reward function as an independent measure: "file.py:function" or "package.module:function"."""
    gold_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments passed to it at every call."""
    prompts: Any = None
    """Prompts to answer: one source or a list, as `data.train` of a run."""
    demonstrations: Any = None
    """Answers whose perplexity is taken, likewise."""
    preferences: Any = None
    """Pairs of answers that a judge should order as labelled, likewise."""
    limit: int | None = 256
    """At most the first this many rows of each source; null takes all."""
    data: DataSettings = field(default_factory=DataSettings)
    """How rows are read and rendered, as in training (templates, lengths, split); its `train` is not used."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    seed: int = 0
    """Of the answers: each prompt has its own stream, the same for every policy."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    score_tokens: int = 16384
    """Tokens in one forward pass."""

    def check(self) -> None:
        """Raise ValueError with every contradiction at once, before anything is loaded."""
        problems = self.problems()
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise ValueError(f"the evaluation's settings contradict themselves:\n{lines}")

    def problems(self) -> list[str]:
        """Every contradiction, each with what to do."""
        problems = [*self.sampling.problems(), *self._about_data()]
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit={self.limit} must be at least 1, or null for all rows")
        if self.score_tokens < 1:
            problems.append(f"score_tokens={self.score_tokens} must be at least 1")
        if self.gold_options and self.gold is None:
            problems.append("gold_options are for a gold function, and there is none: set gold")
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            problems.append(f"device={self.device} is not one of auto, cpu, cuda")
        return problems

    def _about_data(self) -> list[str]:
        problems = []
        if sources(self.data.train) or sources(self.data.validation):
            problems.append("data.train and data.validation are for training: set prompts, demonstrations, preferences")
        problems += [f"{kind}: there is no {name}" for kind in DATA for name in absent(getattr(self, kind))]
        return problems

    def given(self, name: str) -> bool:
        """Whether a field names something."""
        value = getattr(self, name)
        return bool(sources(value)) if name in DATA else value is not None


@dataclass
class BeforeAfterSettings(MeasureSettings):
    """A policy before and after training: gold and judge's rewards, KL, perplexity, and answers side by side."""

    examples: int = 5
    """Prompts whose answers are shown side by side."""

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.given("prompts"):
            problems.append("before and after are compared by their answers: set prompts")
        if not self.sampling.whole:
            problems.append(f"the KL of after from before {WHOLE}")
        if self.examples < 0:
            problems.append(f"examples={self.examples} must be 0 or more")
        return problems


@dataclass
class EvaluationSettings(MeasureSettings):
    """One policy, and whatever it is measured against."""

    model: str | None = None
    """The policy: folder of a Hugging Face checkpoint, or a hub id."""
    reference: str | None = None
    """The policy it was trained from, for kl, and for the preferences that its log-ratios imply."""
    other: str | None = None
    """A second policy that answers the same prompts, for comparison."""
    judge: str | None = None
    """A reward model that scores answers and is tested on preferences."""
    kinds: list[str] = field(default_factory=list)
    """Any of perplexity, generation, reward, kl, comparison, preference; empty: all that models and data allow."""
    out: str | None = None
    """Folder for evaluation.json, generations.jsonl and comparison.jsonl."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register your own dialects or model families."""

    def chosen(self) -> list[str]:
        """The kinds asked for, or all that have what they need."""
        return list(self.kinds) or [kind for kind in KINDS if not self.lacking(kind)]

    def lacking(self, kind: str) -> list[str]:
        """What a kind needs and these settings do not name."""
        needs = {
            "perplexity": ("model", "demonstrations"),
            "generation": ("model", "prompts"),
            "reward": ("model", "prompts", "judge or gold"),
            "kl": ("model", "prompts", "reference"),
            "comparison": ("model", "other", "prompts", "judge or gold"),
            "preference": ("preferences", "judge" if self.model is None else "judge or reference"),
        }
        return [need for need in needs[kind] if not any(self.given(name) for name in need.split(" or "))]

    def problems(self) -> list[str]:
        return [*self._about_kinds(), *super().problems(), *self._about_models()]

    def _about_kinds(self) -> list[str]:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            return [f"kinds={unknown}: there are {', '.join(KINDS)}"]
        problems = [
            f"kinds has {kind}, which needs {' and '.join(lacking)}"
            for kind in self.kinds
            if (lacking := self.lacking(kind))
        ]
        if not self.chosen():
            problems.append(
                "nothing to evaluate: set model and one of demonstrations and prompts, or judge and preferences"
            )
        if "kl" in self.chosen() and not self.sampling.whole:
            problems.append(f"kl {WHOLE}, or name the other kinds in `kinds`")
        return problems

    def _about_models(self) -> list[str]:
        named = {name: getattr(self, name) for name in ("model", "reference", "other", "judge")}
        local = {name: path for name, path in named.items() if path and path.startswith((".", "/", "~"))}
        return [f"{name}: there is no folder {path}" for name, path in local.items() if not at_home(path).is_dir()]
