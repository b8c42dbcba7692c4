"""Settings of an environment, in which the policy answers several turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from plaudit.support.fields import Section, setting


@dataclass
class EnvironmentSettings(Section):
    """The environment of a run's episodes. Without `function` and `tools` there is none: an answer is one turn."""

    kind: str = setting("class", choices=("class", "agent"))
    """What `function` names: a class that answers the policy, or an agent that asks it (docs/agents.md)."""
    function: str = ""
    """A class, "file.py:Name" or "package.module:Name". Each episode has its own instance; public methods are tools. Of
    an agent, a function."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that each instance is made with."""
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call in every episode, "file.py:name", beside the methods of the class."""
    renderer: str = ""
    """What writes chats and reads answers in the chat template's place, "renderers:create_renderer" or
    "file.py:function": called with the tokenizer, it returns an object with that package's methods."""
    max_turns: int = setting(8, least=1)
    """Most answers of the policy in an episode. One that reaches it is unfinished."""
    max_tokens: int = setting(2048, least=1, unit="tokens")
    """Most tokens of an episode after its prompt, with those of the environment. A turn has rollout.max_tokens."""
    timeout: float = setting(60.0, above=0, unit="seconds")
    """Most time of one call of the environment. A call that takes longer fails its episode."""

    workers: int = setting(0, least=0)
    """Number of processes in which environments or agents run, with runtime=ray. 0: in the run's own process."""
    resources: dict[str, float] = setting(dict, least=0)
    """Ray resources that each of these processes reserves, such as {CPU: 1}; it may then be on any node. Empty: they
    reserve nothing and run on the driver's node."""

    @property
    def on(self) -> bool:
        return bool(self.function or self.tools)

    @property
    def reserving(self) -> int:
        """Number of the environment's processes for which resources are reserved."""
        return self.workers if self.resources else 0

    def contradictions(self) -> Iterator[str]:
        if self.kind == "agent" and (self.tools or self.options or not self.function):
            yield "kind agent: set function, and neither tools nor options, which are an agent's own affair"
        elif self.options and not self.function:
            yield "options are for an environment's class, and there is none: set function"
        if self.resources and not self.workers:
            yield f"resources={self.resources} are for processes of the environment, and workers=0: set workers=1"
        if (self.renderer or self.workers) and not self.on:
            what = "renderer is" if self.renderer else "workers are"
            yield f"{what} for episodes, and there are none: set function or tools"
