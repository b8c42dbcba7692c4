"""Settings of rewards and of their shaping. What they do is in `rules.py`, `weighted.py`, `judge.py`, `remote.py` and
`shaping.py`.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

UNFINISHED = ("score", "penalty", "mask")
KINDS = {
    "judge": ("path", "workers", "resources", "offload"),
    "function": ("function", "options", "deadline", "thread"),
    "http": ("options", "urls", "token_env", "timeout", "retries", "batch", "concurrency"),
}
"""Kinds of reward that are no rules, and what each reads beside the name and the weight."""
OF_RULES = ("options", "deadline", "thread")
"""What rules read."""


@dataclass
class RewardSettings:
    """One reward of a run. A run has a list of them; their weighted sum is the raw score."""

    kind: str = "judge"
    """"judge" (a reward model), "function" (your Python function), "http" (servers of the protocol in docs/rewards.md)
    or the name of a rule, such as "gsm8k"."""
    name: str = ""
    """What its part is called in metrics and samples; empty: the rule's or function's own name, "judge" or "http"."""
    weight: float = 1.0
    """Factor in the sum. With a weight of 0 it is computed and shown, and counts for nothing."""
    path: str = ""
    """Checkpoint of the judge; empty in a pipeline: the judge trained there."""
    workers: int = 0
    """judge: processes that hold it, with runtime=ray; 0 keeps it in the run's own process."""
    resources: dict[str, float] = field(default_factory=dict)
    """judge: what each of its processes reserves, such as {GPU: 1}; empty takes an equal share of the CPUs."""
    offload: bool = False
    """judge, on GPUs: it waits in host memory, and takes the device's only while it scores."""
    function: str = ""
    """The function, for kind "function": "file.py:name" or "package.module:name"."""
    options: dict[str, Any] = field(default_factory=dict)
    """function, rules: keyword arguments passed at every call; http: sent with every request."""
    deadline: float = 60.0
    """function, rules: seconds that one call may take."""
    thread: bool = False
    """function, rules: call a sync function in a thread, for functions that wait (a network, a subprocess). It must be
    thread-safe."""
    urls: list[str] = field(default_factory=list)
    """http: the servers, such as [http://127.0.0.1:8008]; the least busy one is asked, and who fails rests."""
    token_env: str = ""
    """http: name of the environment variable that holds the servers' token; empty: none is sent."""
    timeout: float = 30.0
    """http: seconds that one request may take."""
    retries: int = 8
    """http: how often a failed request is sent again, with growing pauses: about a minute before it is given up."""
    batch: int = 32
    """http: most completions in one request."""
    concurrency: int = 8
    """http: most requests under way at once, over all servers."""

    def __post_init__(self) -> None:
        who = f"of reward {self.name or self.kind!r}"
        if not math.isfinite(self.weight):
            raise ValueError(f"weight={self.weight} {who} must be a finite number.")
        for name in ("deadline", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} {who} must be above 0 seconds, and finite.")
        for name, least in (("workers", 0), ("retries", 0), ("batch", 1), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} {who} must be {least} or more.")
        self._check_kind()
        for url in self.urls:
            _check_url(url)

    def _check_kind(self) -> None:
        if self.kind == "function" and not self.function:
            raise ValueError("A reward of kind 'function' needs function='file.py:name' or 'package.module:name'.")
        if self.kind == "http" and not self.urls:
            raise ValueError("A reward of kind 'http' needs urls=[http://host:port, ...], the servers to ask.")
        for one in fields(self):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if (value := getattr(self, one.name)) != default:
                self._check_read(one.name, value)

    def _check_read(self, name: str, value: Any) -> None:
        readers = [f"kind {kind!r}" for kind, read in KINDS.items() if name in read]
        if readers and name not in KINDS.get(self.kind, OF_RULES):
            readers += ["rules"] * (name in OF_RULES)
            raise ValueError(f"{name}={value!r} is read for {', '.join(readers)} only, not for {self.kind!r}.")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    if not named or any(character.isspace() for character in url):
        raise ValueError(f"urls: {url!r} is not the address of a server. Write http://host:port or https://host.")
    if parts.username or parts.password:
        raise ValueError(
            f"urls: the address of {parts.hostname} holds a password, which logs would show: use token_env."
        )
    if parts.query or parts.fragment:
        raise ValueError(f"urls: {url!r} must end before '?' and '#': /score and /health are added to it.")


@dataclass
class ShapingSettings:
    """From the raw score to the reward: min(max((score + shift) * scale, -clip), clip)."""

    scale: float = 1.0
    """Factor, after the shift."""
    shift: float = 0.0
    """Added first. Minus the judge's mean makes rewards centred."""
    clip: float | None = None
    """Largest size of the reward, on both sides; null: no limit."""
    unfinished: str = "score"
    """Answers cut off by length: "score" as they are, "penalty" (a fixed reward) or "mask" (out of the loss and of the
    group's baseline)."""
    unfinished_penalty: float = -1.0
    """The reward of an unfinished answer with unfinished="penalty", as it stands: not shifted, scaled or clipped."""

    def __post_init__(self) -> None:
        if self.unfinished not in UNFINISHED:
            raise ValueError(f"unfinished={self.unfinished!r} is not one of {', '.join(UNFINISHED)}.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0. For no limit set clip=null.")
        for name in ("scale", "shift", "unfinished_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number.")
