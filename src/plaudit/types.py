"""The values that flow left of the learner: plain Python, no torch, so that rollout and reward workers stay light.

    Prompt -> (engine) Completion -> Response -> (reward) Group -> (algorithm) Row -> Batch

Tensors begin in `batch.py`. Anything that only one stage needs lives with that stage, not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Stats = dict[str, float]
"""Named figures of a step. Everything adds up across micro-batches and ranks (a mean is a sum of pre-divided
terms), except names that end in `max` or `min`, which take the extreme. `merge_stats` is that rule."""


class Role(StrEnum):
    """What a model is there for. `judge` is the learned reward model, `critic` the value model."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    JUDGE = "judge"


class Finish(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    """The model emitted an end token, which is the completion's last token."""
    STOP = "stop"
    """A stop string appeared; the text is cut in front of it, the tokens are kept as sampled."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached: the answer is unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, tokenised and ready to be answered.

    `id` is stable across runs ("file.jsonl:17"); `text` is what `tokens` say; `answer` is whatever a rule reward
    compares with; `messages` holds the chat that was rendered, if there was one, whole even where the beginning of a
    long prompt was cut off; `extra` holds the remaining columns of the data row.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    answer: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is drawn. `temperature=0` is greedy. `top_k=0` and `top_p=1` keep the whole distribution.

    Log-probs are always those of the distribution sampled from: of logits / temperature, renormalised over the kept
    tokens where top-k, top-p or the ban on ending before `min_tokens` cut some off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int = 0
    """Seed of this completion alone: what is sampled does not depend on what else the engine is doing."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns: sampled tokens (the end token included), their log-probs and policy versions."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward, or the reason why there is none. `value=None` masks the response; it is never read as 0."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A scored completion.

    Example of two turns, where a tool answers in between (T = trained):
        tokens     I  ask  <call>  | 4  2 | so  42  <eos>
        trainable  T  T    T       | -  - | T   T   T
    """

    completion: Completion
    trainable: tuple[bool, ...]
    score: Score
    reward: float | None
    """`score.value` after scale, shift, clip and the penalty for unfinished answers; None where it failed."""
    greedy: bool = False
    """Not sampled: a baseline, as ReMax's, which figures of samples leave out."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.tokens

    @property
    def finished(self) -> bool:
        return self.completion.finish is not Finish.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All responses to one prompt, in the order of the algorithm's plan. `index` counts prompts from the run's
    start."""

    index: int
    prompt: Prompt
    responses: tuple[Response, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence for the learner: prompt and answer together.

    Every per-token field has one entry a token and obeys the column rule: entry t speaks of emitting token t given
    the tokens before it. The first token is never trained (nothing precedes it).
    """

    tokens: tuple[int, ...]
    trainable: tuple[bool, ...]
    group: int = 0
    """Rows of one prompt share it."""
    logprobs: tuple[float, ...] | None = None
    """Behaviour log-probs: the sampler's; 0 on tokens that were not sampled."""
    versions: tuple[int, ...] | None = None
    """Policy version that sampled each token; -1 on tokens that were not sampled."""
    reference: tuple[float, ...] | None = None
    """Reference log-probs, where they were computed once before training."""
    reward: float = 0.0
    baseline: float = 0.0
    weight: float = 1.0
    """Relative weight of the row (1 / pairs of its prompt for a reward model)."""
    margin: float = 0.0
    """By how much this chosen row should beat the rejected one next to it."""
    truncated: bool = False
    """The answer was cut off by length: its value bootstraps, it carries no end token."""


def merge_stats(parts: Iterable[Stats]) -> Stats:
    """Merge the figures of micro-batches or ranks: sums, but the extreme for names ending in `max` or `min`."""
    merged: Stats = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith("max"):
                merged[name] = max(merged[name], value)
            elif name.endswith("min"):
                merged[name] = min(merged[name], value)
            else:
                merged[name] += value
    return merged


def plain(figures: Mapping[str, Any], whose: str) -> Stats:
    """The figures as floats, of whatever kind of number each one is. Raises TypeError for one that is none,
    with its name and `whose` it is."""
    if not isinstance(figures, Mapping):
        raise TypeError(f"{whose} must be a dict of named numbers, not {figures!r:.80}")
    return {name: _plain(value, name, whose) for name, value in figures.items()}


def _plain(value: Any, name: str, whose: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text is no number")
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's, of several numbers
        raise TypeError(f"{whose}: {name!r} is no number but {value!r:.80}") from error
