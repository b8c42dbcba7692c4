"""The settings of a run: one typed tree.

Each part of the tree stands beside what it sets (`data/settings.py`, `learn/settings.py`, ...); this file joins them.
`recipes.py` fills the tree from files and the command line, `checks.py` tells what contradicts what in it.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plaudit.data.settings import DataSettings
from plaudit.environments.settings import EnvironmentSettings
from plaudit.learn.settings import CriticSettings, LearnSettings, OptimizerSettings, ReferenceSettings
from plaudit.loop.settings import EvaluateSettings, SaveSettings, TrainSettings
from plaudit.models.settings import LoraSettings, ModelSettings
from plaudit.monitor.settings import LogSettings
from plaudit.rewards.settings import RewardSettings, ShapingSettings
from plaudit.rollout.settings import RolloutSettings
from plaudit.runtime.settings import RuntimeSettings
from plaudit.support.fields import DEVICE, Leaf, leaves, setting, shown
from plaudit.support.fields import SettingsError as SettingsError

if TYPE_CHECKING:
    from plaudit.algorithms.base import Objective
    from plaudit.types import Role


@dataclass
class Settings:
    """All settings of a run."""

    method: str = "sft"
    """A method that `plaudit --help` lists, or one that a plugin registers."""
    name: str | None = None
    """The run's folder under `output`; null names it after the method and the time."""
    output: str = "runs"
    """Folder that holds the run folders."""
    seed: int = setting(0, least=0, below=2**64)
    """Seed of initial weights, data order and samples."""
    resume: str | None = None
    """Checkpoint to continue from: its name, or latest, which starts from the beginning if there is none yet."""
    overwrite: bool = False
    """Replace a run folder of the same name."""
    device: str = setting("auto", **DEVICE)
    """Where models are computed: cpu, cuda, or auto, which takes a GPU if torch finds one."""
    threads: int | None = setting(None, least=1)
    """CPU threads of each process. Null takes all cores (under Ray, those that the process reserves); a resumed run
    keeps its number. If other programs keep cores busy, fewer threads are faster."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register your own algorithms, rewards, dialects or model families."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    algorithm: Any = None
    """The method's own hyperparameters: the fields of its dataclass in `plaudit.algorithms`."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    learn: LearnSettings = field(default_factory=LearnSettings)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    rewards: list[RewardSettings] = field(default_factory=list)
    """Judges, servers, functions and rules; their weighted sum is the score of an answer."""
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    log: LogSettings = field(default_factory=LogSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)

    @property
    def objective(self) -> Objective:
        """The method, adapted to samples that may be old or come from another engine."""
        served = self.runtime.served
        off_policy = self.rollout.max_lag > 0 or self.rollout.engine != "native"
        off_policy = off_policy or (served is not None and served.local_steps > 1)  # samples of older weights
        objective: Objective = self.algorithm.adapted(off_policy=off_policy)
        return objective

    def adapters(self, role: Role) -> LoraSettings:
        """The adapters that a trained role gets."""
        lora = self.model.lora
        return dataclasses.replace(lora, rank=self.critic.lora_rank) if role == "critic" else lora

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer, or of an episode after its prompt."""
        return self.environment.max_tokens if self.environment.on else self.rollout.max_tokens

    @property
    def asked_tokens(self) -> int:
        """Most tokens that an engine is asked with: a prompt's, and those of an episode before its last answer."""
        return self.data.max_prompt_tokens + max(0, self.answer_tokens - self.rollout.max_tokens)

    @property
    def samples(self) -> bool:
        """True if the run draws and scores answers: the method is online, and nothing is replayed."""
        return bool(self.algorithm.online and self.rollout.replay is None)

    @property
    def reserving(self) -> list[dict[str, float]]:
        """The resources of each process of a reward or environment that reserves any; {}: an equal share."""
        each = [(one.resources, one.reserving) for one in self.rewards]
        each += [(self.environment.resources, self.environment.reserving)]
        return [one for one, count in each for _ in range(count * self.samples)]


def resolved(settings: Settings) -> str:
    """Return all settings as YAML that loads back as a recipe; it is saved with the run."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.create(to_plain(settings))))


def to_plain(settings: Any) -> Any:
    """Return dataclasses and tuples as plain dicts and lists, at every level."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: to_plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        return {key: to_plain(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [to_plain(value) for value in settings]
    return settings


def unused(s: Settings) -> list[str]:
    """Return changed settings of rollout, shaping, critic and train.batch_size that the method ignores: key=value."""
    from plaudit.types import Role

    online = s.algorithm.online
    idle = ["train.batch_size"] if online else ["rollout.", "shaping."]
    idle += [] if s.rewards or not online else ["shaping."]
    idle += [] if Role.CRITIC in s.objective.asks else ["critic."]
    default = {leaf.key: leaf.value for leaf in leaves(Settings())}
    changed = [leaf for leaf in leaves(s) if leaf.key.startswith(tuple(idle)) and leaf.value != default[leaf.key]]
    return [f"{leaf.key}={shown(leaf.value)}" for leaf in changed]


def annotated(found: Iterable[Leaf], default: Mapping[str, Any]) -> str:
    """Return settings as YAML that loads back as a recipe, its comments within 80 columns. One above each setting says
    what it does and which values are allowed; one beside it gives the default if the value differs."""
    import yaml

    lines, before = [], [""]
    for leaf in found:
        *sections, name = leaf.key.split(".")
        news = [depth for depth in range(len(sections)) if sections[: depth + 1] != before[: depth + 1]]
        lines += [f"{'  ' * depth}{'-' if sections[depth].isdigit() else f'{sections[depth]}:'}" for depth in news]
        before, indent = sections, "  " * len(sections)
        lines += textwrap.wrap(leaf.words, 80, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        value = yaml.safe_dump(to_plain(leaf.value), default_flow_style=True, width=math.inf)
        usual = default.get(leaf.key, leaf.value)
        differs = "" if to_plain(usual) == to_plain(leaf.value) else f"  # by default {shown(usual)}"
        lines.append(f"{indent}{name}: {value.removesuffix('...' + chr(10)).strip()}{differs}")
    return "\n".join(lines)
