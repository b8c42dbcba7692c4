"""Settings of evaluation: models, data, figures, and what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import maxsize
from typing import Any

from plaudit.data.settings import DataSettings, absent, sources
from plaudit.environments.settings import EnvironmentSettings
from plaudit.rewards.settings import LlmSettings, RewardSettings
from plaudit.rollout.settings import DrawSettings
from plaudit.support.fields import DEVICE, Section, check, setting
from plaudit.support.paths import at_home, is_here

KINDS = ("perplexity", "generation", "reward", "kl", "comparison", "preference")
DATA = ("prompts", "demonstrations", "preferences")
WHOLE = (
    "is estimated on samples of the whole policy: set sampling.top_p=1, top_k=0, min_tokens=0 and a temperature above 0"
)


@dataclass
class ComputeSettings(Section):
    """Device and threads for the models, and plugins that are loaded first."""

    device: str = setting("auto", **DEVICE)
    """cpu, cuda, or auto."""
    threads: int | None = setting(None, least=1)
    """CPU threads. Null takes all cores."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register your own dialects, rewards or model families."""

    def check(self) -> None:
        """Raise SettingsError with everything that is wrong, before anything is loaded."""
        check(self)


@dataclass
class SamplingSettings(DrawSettings):
    """How answers are drawn."""

    samples: int = setting(1, least=1)
    """Answers to each prompt."""
    slots: int = setting(64, least=1)
    """Sequences that are decoded at once."""

    @property
    def whole(self) -> bool:
        """True if answers are drawn from the policy's whole distribution."""
        return self.temperature > 0 and not self.reshaped

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.temperature == 0 and self.samples > 1:
            yield f"samples={self.samples} greedy answers would all be the same: set samples=1"


@dataclass
class ScoringSettings(ComputeSettings):
    """Rewards that score answers, besides a judge's checkpoint; figures of each have its name."""

    gold: str | None = None
    """A reward function as an independent measure: "file.py:function" or "package.module:function"."""
    gold_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that `gold` gets at every call."""
    rewards: list[RewardSettings] = field(default_factory=list)
    """Further measures, written as rewards of a run: rules, functions, judges, HTTP servers."""
    score_tokens: int = setting(16384, least=1, unit="tokens")
    """Most tokens of one forward pass."""

    def contradictions(self) -> Iterator[str]:
        if self.gold_options and self.gold is None:
            yield "gold_options are for a gold function, and there is none: set gold"
        for number, reward in enumerate(self.rewards):
            idle = {"weight": reward.weight != 1, "workers": reward.workers, "resources": reward.resources}
            for name in (name for name, value in {**idle, "offload": reward.offload}.items() if value):
                yield f"rewards.{number}.{name} is read by runs only: here every reward is a measure by itself"


@dataclass
class GenerateSettings(ComputeSettings):
    """Settings of `plaudit generate`, which draws answers of one policy."""

    model: str = ""
    """The policy: folder of a run or of a Hugging Face checkpoint, or a hub id."""
    prompts: Any = None
    """Prompts to answer: one source or a list, as `data.train` of a run. --prompt gives a text itself."""
    limit: int | None = setting(None, least=1)
    """Most rows of each source, from its beginning. Null takes all."""
    data: DataSettings = field(default_factory=lambda: DataSettings(max_prompt_tokens=maxsize, shuffle=False))
    """How rows are read and rendered, as in training; its `train` is not used. Prompts are not cut."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    seed: int = 0
    """Seed of the answers. Each prompt has its own random stream."""
    output: str | None = None
    """File of JSON lines for the answers. Null prints them."""
    overwrite: bool = False
    """Replace an `output` that exists."""

    def contradictions(self) -> Iterator[str]:
        yield from (f"prompts: there is no {name}; --prompt gives a text itself" for name in absent(self.prompts))


@dataclass
class MeasureSettings(ScoringSettings):
    """What policies are measured on and with, for one policy or two."""

    prompts: Any = None
    """Prompts to answer: one source or a list, as `data.train` of a run."""
    demonstrations: Any = None
    """Answers whose perplexity is measured: one source or a list."""
    preferences: Any = None
    """Pairs of answers that a judge should order as labelled: one source or a list."""
    limit: int | None = setting(256, least=1)
    """Most rows of each source, from its beginning. Null takes all."""
    data: DataSettings = field(default_factory=DataSettings)
    """How rows are read and rendered, as in training (templates, lengths, split); its `train` is not used."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """What plays with the policy, as in a run: each answer is then an episode."""
    pass_at: list[int] = setting(list, least=1)
    """pass@k for these k, such as [1, 8], by gold and every entry of `rewards` that is not a judge."""
    pass_score: float = 1.0
    """Least score of an answer that passes."""
    seed: int = 0
    """Seed of the answers. Each prompt has its own random stream, the same for every policy."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.data.train or self.data.validation:
            yield "data.train and data.validation are for training: set prompts, demonstrations, preferences"
        if self.environment.workers:
            yield "environment.workers are read by runs only: here environments run in the command's own process"
        if self.environment.on and vars(self).get("judge") is not None:
            yield "judge: a judge reads no episodes: set gold or rewards, or remove environment"
        if self.pass_at and max(self.pass_at) > self.sampling.samples:
            yield f"pass_at={self.pass_at} takes as many answers to a prompt: set sampling.samples={max(self.pass_at)}"
        if self.pass_at and self.gold is None and all(reward.kind == "judge" for reward in self.rewards):
            yield f"pass_at={self.pass_at} is by a rule: set gold or rewards"
        yield from (f"{kind}: there is no {name}" for kind in DATA for name in absent(vars(self)[kind]))

    def is_set(self, name: str) -> bool:
        """True if the field `name` has a value."""
        value = vars(self)[name]
        return bool(sources(value)) if name in DATA else value not in (None, [], LlmSettings())


@dataclass
class BeforeAfterSettings(MeasureSettings):
    """A policy before and after training: gold and judge's rewards, KL, perplexity, and answers side by side."""

    examples: int = setting(5, least=0)
    """Prompts whose answers are shown side by side."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.is_set("prompts"):
            yield "prompts: before and after are compared by their answers: set prompts"
        if not self.sampling.whole:
            yield f"sampling: the KL of after from before {WHOLE}"


@dataclass
class CompareSettings(MeasureSettings):
    """Compare several runs. Prompts, data settings, sampling and rewards default to those of the first run."""

    judge: str | None = None
    """A reward model that scores the answers."""
    llm: LlmSettings = field(default_factory=LlmSettings)
    """A language model that compares each run's answers with the first run's."""
    reference: str | None = None
    """The reference policy: the KL of every run's policy to it is measured."""
    examples: int = setting(5, least=0)
    """Prompts whose answers are shown side by side."""
    output: str | None = None
    """Folder of the results. Null makes one in `comparisons`, beside the first run."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.reference is not None and not self.sampling.whole:
            yield f"sampling: the KL to reference {WHOLE}"


@dataclass
class EvaluationSettings(MeasureSettings):
    """One policy, and whatever it is measured against."""

    model: str | None = None
    """The policy: folder of a Hugging Face checkpoint, or a hub id."""
    reference: str | None = None
    """The policy that it was trained from, for kl and for the preferences that log-ratios imply."""
    other: str | None = None
    """A second policy that answers the same prompts, for comparison."""
    llm: LlmSettings = field(default_factory=LlmSettings)
    """A language model that compares both policies' answers."""
    judge: str | None = None
    """A reward model that scores answers and is tested on preferences."""
    kinds: list[str] = setting(list, choices=KINDS)
    """Kinds of figures. Empty measures all that models and data allow."""
    output: str | None = None
    """Folder for evaluation.json, generations.jsonl and comparison.jsonl. Null makes one in the model's run (its folder
    evaluations), and writes nothing for a model of no run."""

    def chosen(self) -> list[str]:
        """The kinds asked for, else all that lack nothing. The KL needs answers of the policy's whole distribution."""
        able = [kind for kind in KINDS if not self.lacking(kind)]
        return list(self.kinds) or [kind for kind in able if kind != "kl" or self.sampling.whole]

    def lacking(self, kind: str) -> list[str]:
        """Return the settings that a kind of figure needs and that are not set."""
        needs = {
            "perplexity": ("model", "demonstrations"),
            "generation": ("model", "prompts"),
            "reward": ("model", "prompts", "judge or gold or rewards"),
            "kl": ("model", "prompts", "reference"),
            "comparison": ("model", "other", "prompts", "judge or gold or rewards or llm"),
            "preference": ("preferences", "judge" if self.model is None else "judge or reference"),
        }
        return [need for need in needs[kind] if not any(self.is_set(name) for name in need.split(" or "))]

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for kind in self.kinds:
            if kind in KINDS and (lacking := self.lacking(kind)):
                yield f"kinds has {kind}, which needs {' and '.join(lacking)}"
        if not self.chosen():
            needed = "prompts, demonstrations or preferences" if self.model else "preferences, or model and prompts"
            needed = needed if self.model or self.judge else "model and prompts, or judge and preferences"
            needed = " and ".join(self.lacking("preference")) if self.is_set("preferences") else needed
            yield f"kinds: nothing to evaluate: set {needed}"
        if "kl" in self.kinds and not self.sampling.whole:
            yield f"sampling: kl {WHOLE}"
        models = {"model": self.model, "reference": self.reference, "other": self.other, "judge": self.judge}
        local = {name: path for name, path in models.items() if path and path.startswith((".", "/", "~"))}
        yield from (f"{name}: there is no folder {path}" for name, path in local.items() if not is_here(path))


@dataclass
class RelabelSettings(ScoringSettings):
    """Pairs of answers, ordered by one measure: a judge, a gold function, or one entry of `rewards`."""

    preferences: Any = None
    """Pairs to label again, in any dialect: one source or a list, as `data.train` of a run."""
    answers: Any = None
    """Instead of `preferences`: answers to make pairs of, several a prompt, as `plaudit generate` writes them."""
    output: str | None = None
    """File of the pairs, in the dialect prompt/chosen/rejected. It ends in .jsonl."""
    judge: str | None = None
    """A reward model that orders the answers."""
    ties: str = setting("drop", choices=("drop", "keep"))
    """Pairs whose scores are equal: drop them, or keep the order that they had."""
    tie: float = setting(0.0, least=0)
    """Largest difference of two scores that counts as equal."""
    pairs: str = setting("extremes", choices=("extremes", "all"))
    """With `answers`: pair each prompt's best answer with its worst (extremes), or every two answers (all)."""
    as_chat: bool | None = None
    """Show the judge plain prompts as chats of one user turn. Null: if it was trained on chats."""
    dialect: str = "auto"
    """Dialect of the source, or "auto" to find it by each row's columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our column name -> the file's, if the file uses other names."""
    split: str = "train"
    """Split of sources that have splits."""
    limit: int | None = setting(None, least=1)
    """Most rows of each source, from its beginning. Null takes all."""
    bad_rows: int = setting(0, least=0)
    """Number of unreadable rows that may be skipped, and reported, in all. 0 refuses the first one."""
    overwrite: bool = False
    """Replace a file of that name."""

    @property
    def sources(self) -> tuple[str, ...]:
        return sources(self.preferences) or sources(self.answers)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        named = [name for name in ("preferences", "answers") if sources(vars(self)[name])]
        if len(named) != 1:
            yield "preferences and answers: name the one that is to be read"
        yield from (f"{name}: there is no {path}" for name in named for path in absent(vars(self)[name]))
        if (self.judge is not None) + (self.gold is not None) + len(self.rewards) != 1:
            yield "judge, gold and rewards: name one measure, which orders the answers"
        if self.output is None or not self.output.endswith(".jsonl"):
            yield f"output={self.output} must be a file that ends in .jsonl"
        elif at_home(self.output).exists() and not self.overwrite:
            yield f"output={self.output} exists already: name another file, or set overwrite=true"
        if named == ["answers"] and self.ties == "keep":
            yield "ties=keep is for preferences: answers have no order to keep"
