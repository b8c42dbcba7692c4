"""Settings of rewards and of their shaping."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

from plaudit.support.fields import Section, check, nearest, setting

Options = TypeVar("Options")

UNFINISHED = ("score", "penalty", "bootstrap", "mask", "mask_loss")
PENALTY = -1.0
"""Reward of an unfinished answer under "penalty"."""
KINDS = {
    "judge": ("path", "workers", "tensor", "resources", "offload"),
    "function": ("function", "options", "deadline", "thread", "workers", "resources"),
    "code": ("options", "workers", "resources"),
    "math": ("options", "workers", "resources"),
    "environment": (),
    "http": ("options", "urls", "token_env", "timeout", "retries", "batch", "concurrency"),
    "llm": ("llm", "rubric", "pairwise"),
}
"""Kinds of reward that are not rules, and the settings that each reads beside name and weight."""
OF_RULES = ("options", "deadline", "thread", "workers", "resources")
"""Settings that rules read."""


@dataclass
class LlmSettings(Section):
    """A language model that judges answers, behind an endpoint that speaks OpenAI's chat completions."""

    url: str = ""
    """Base address, such as http://127.0.0.1:8000/v1; /chat/completions is added. Empty: no such judge."""
    model: str = ""
    """The model's name, as the endpoint knows it."""
    token_env: str = ""
    """Name of the environment variable with the token. Empty sends none."""
    criterion: str = "how helpful, correct and clear an answer is"
    """What makes the better of two answers, in words. A rubric takes its place."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as {max_tokens: 512}. They override temperature=0."""
    timeout: float = setting(120.0, above=0, unit="seconds")
    """Longest time of one request."""
    retries: int = setting(6, least=0)
    """How often a failed request is sent again, with growing pauses."""
    concurrency: int = setting(8, least=1)
    """Most open requests at once."""
    cache: str | None = None
    """Folder where replies are cached, so that no question is sent twice. By default in the cache folder
    (PLAUDIT_CACHE, or ~/.cache/plaudit)."""

    def contradictions(self) -> Iterator[str]:
        if self.url and (why := wrong_url(self.url)):
            yield f"url: {why}"
        if bool(self.url) != bool(self.model):
            yield f"url={self.url!r} and model={self.model!r}: give both, the endpoint and its model's name"


@dataclass
class CriterionSettings(Section):
    """One criterion of a rubric."""

    name: str = ""
    """Name of the criterion's part of the reward: at most 40 letters, digits, _ and -."""
    text: str = ""
    """What the criterion asks of an answer, in words. {column} stands for that column of the row, as {answer} does."""
    weight: float = setting(1.0, above=0)
    """The criterion's factor in the mean over the rubric."""

    def contradictions(self) -> Iterator[str]:
        if not re.fullmatch(r"[\w-]{1,40}", self.name, re.ASCII) or self.name == "consistent":
            yield f"name={self.name!r} must be 1 to 40 letters, digits, _ or -, and not the part consistent"
        if not self.text.strip():
            yield "text='' says nothing: write what the criterion asks of an answer"


@dataclass
class RewardSettings(Section):
    """One reward of a run. A run has a list of them; their weighted sum is the raw score."""

    kind: str = "judge"
    """"judge" (a reward model), "function" (your Python function), "http" (servers of the protocol in docs/rewards.md),
    "llm" (a language model that reads the answers), "code" (unit tests of code, in a sandbox), "math" (equal to the
    reference, by math-verify), "environment" (what the environment says of an episode) or the name of a rule, such as
    "gsm8k"."""
    name: str = ""
    """Name of the reward in metrics and samples. Empty: the rule's or function's own name, or the kind."""
    weight: float = 1.0
    """Factor in the sum. A reward of weight 0 is only computed and shown."""
    path: str = ""
    """Checkpoint of the judge. In a pipeline, empty means the judge that is trained there."""
    workers: int = setting(0, least=0)
    """judge, function, rules, code, math: number of its workers, with runtime=ray. 0: in the run's own process."""
    tensor: int = setting(1, least=1)
    """judge: processes per worker. Several split each matrix, for a judge that does not fit on one device."""
    resources: dict[str, float] = setting(dict, least=0)
    """Ray resources that each of the reward's processes reserves, such as {GPU: 1}; it may then be on any node. Empty:
    a judge's processes take an equal share of the CPUs; others reserve nothing and run on the driver's node."""
    offload: bool = False
    """judge, on GPUs: keep its weights in host memory, and copy them to the GPU only while it scores."""
    function: str = ""
    """function: where it is, "file.py:name" or "package.module:name"."""
    options: dict[str, Any] = field(default_factory=dict)
    """function, rules: keyword arguments passed at every call; http: sent with every request."""
    deadline: float = setting(60.0, above=0, unit="seconds")
    """function, rules: longest time of one call."""
    thread: bool = False
    """function, rules: call a sync function in a thread, for functions that wait for a network or a subprocess. It must
    be thread-safe."""
    urls: list[str] = field(default_factory=list)
    """http: the servers, such as [http://127.0.0.1:8008]. The least busy one is asked; one that fails rests."""
    token_env: str = ""
    """http: name of the environment variable with the servers' token. Empty sends none."""
    timeout: float = setting(30.0, above=0, unit="seconds")
    """http: longest time of one request."""
    retries: int = setting(8, least=0)
    """http: how often a failed request is sent again, with growing pauses. The default takes about a minute."""
    batch: int = setting(32, least=1)
    """http: most completions in one request."""
    concurrency: int = setting(8, least=1)
    """http: most open requests at once, over all servers."""
    llm: LlmSettings = field(default_factory=LlmSettings)
    """llm: the language model."""
    rubric: list[CriterionSettings] = field(default_factory=list)
    """llm: criteria, such as [{name: correct, text: "the answer is {answer}", weight: 2}]. Each has a part of its own;
    the reward is their mean by weight, from 0 to 1."""
    pairwise: bool = False
    """llm: compare the answers to a prompt with one another, each pair in both orders, instead of grading each. The
    reward is the share won."""

    @property
    def reserving(self) -> int:
        """Number of the reward's processes for which resources are reserved."""
        return self.workers * self.tensor if self.kind == "judge" or self.resources else 0

    @property
    def asked(self) -> list[str]:
        """Addresses of servers that are asked before a run whether they answer."""
        models = [f"{self.llm.url.rstrip('/')}/models"] * bool(self.llm.url)
        return [f"{url.rstrip('/')}/health" for url in self.urls] + models

    def contradictions(self) -> Iterator[str]:
        if self.tensor > 1 and not self.workers:
            yield f"tensor={self.tensor} counts processes of a worker, and workers=0: set workers=1"
        if self.kind == "http" and not self.urls:
            yield "urls=[] names no server: kind http needs [http://host:port, ...]"
        yield from (f"urls: {why}" for url in self.urls if (why := wrong_url(url)))
        if self.kind == "llm":
            yield from self._about_llm()
        for key, default in vars(RewardSettings()).items():
            readers = [f"kind {kind!r}" for kind, read in KINDS.items() if key in read]
            readers += ["rules"] * (key in OF_RULES)
            if (value := vars(self)[key]) != default and readers and key not in KINDS.get(self.kind, OF_RULES):
                yield f"{key}={value!r:.80} is read for {', '.join(readers)} only, not for {self.kind!r}"

    def _about_llm(self) -> Iterator[str]:
        if not self.llm.url:
            yield "llm.url='' names no endpoint: kind llm needs llm: {url: http://host:port/v1, model: NAME}"
        if not self.rubric and not self.pairwise:
            yield "rubric=[] has no criterion to grade by: kind llm needs [{name: correct, text: ...}, ...]"
        if self.rubric and self.llm.criterion != LlmSettings.criterion:
            yield f"llm.criterion={self.llm.criterion!r} has no effect beside a rubric: make it one of its criteria"
        names = [one.name for one in self.rubric]
        yield from (f"rubric: two criteria are called {one!r}" for one in sorted({*names}) if names.count(one) > 1)


def by_name(name: str) -> dict[str, Any]:
    """Return the settings of a reward that is given by its name: a rule's, or a function's "file.py:name"."""
    return {"kind": "function", "function": name} if ":" in name else {"kind": name}


def options_of(kind: type[Options], name: str, values: Mapping[str, Any]) -> Options:
    """Return the `options` of a reward as its dataclass. Raises ValueError for unknown keys and wrong values."""
    written: Any = kind
    known = [one.name for one in fields(written)]
    refuse_options(name, values, known)
    options = kind(**values)
    check(options, prefix="options.")
    return options


def refuse_options(name: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for an option that a reward does not take."""
    if unknown := [key for key in names if key not in known]:
        near = nearest(unknown[0], known)
        raise ValueError(f"options of reward {name!r} have {unknown[0]!r}, which it does not take{near}")


def wrong_url(url: str) -> str:
    """Return why requests cannot be sent to an address; "" if they can."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    if not named or any(character.isspace() for character in url):
        return f"{url!r} is not the address of a server: write http://host:port or https://host"
    if parts.username or parts.password:
        return f"the address of {parts.hostname} holds a password, which logs would show: use token_env"
    if parts.query or parts.fragment:
        return f"{url!r} must end before '?' and '#': /score and /health are added to it"
    return ""


@dataclass
class ShapingSettings:
    """From the raw score to the reward: min(max((score + shift) * scale, -clip), clip)."""

    scale: float = 1.0
    """Factor, after the shift."""
    shift: float = 0.0
    """Added first. Minus the judge's mean centres rewards."""
    renormalise: bool = False
    """If a reward does not apply to an answer (its function returned None), scale the others' weights up to the same
    total. Otherwise that reward adds nothing, and the others keep their weights."""
    clip: float | None = setting(None, above=0)
    """Largest size of the reward, on both sides. Null sets no limit."""
    unfinished: str | int | float = setting("score", choices=UNFINISHED, numbers=True)
    """Reward of an answer that was cut off by length: "score" (its own), "penalty" (-1), a number, "bootstrap" (none;
    the critic's value after the cut stands for the rest), "mask" or "mask_loss" (no token of it is trained). A penalty
    or number is not shifted, scaled or clipped. "mask" acts as if the answer had not been drawn; with "mask_loss", as
    in TRL, it still counts in its group's baseline and in the number of answers over which losses are averaged."""

    @property
    def penalty(self) -> float | None:
        """The fixed reward of an unfinished answer; None if `unfinished` names no fixed one."""
        if isinstance(self.unfinished, str):
            return PENALTY if self.unfinished == "penalty" else None
        return float(self.unfinished)
