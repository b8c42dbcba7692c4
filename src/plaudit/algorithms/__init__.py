"""Map method names to classes. To add a method: a file here, a line below and in methods.yaml; or a plugin's class."""

from __future__ import annotations

from plaudit.algorithms.base import Algorithm, Objective, Output
from plaudit.algorithms.best_of_k import BestOfK
from plaudit.algorithms.distill import Distill
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.kto import KTO
from plaudit.algorithms.online_dpo import OnlineDPO
from plaudit.algorithms.orpo import ORPO
from plaudit.algorithms.policy_gradient import PolicyGradient
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.reward_model import RewardModel
from plaudit.algorithms.rloo import RLOO
from plaudit.algorithms.rows import row_of
from plaudit.algorithms.sft import SFT
from plaudit.algorithms.simpo import SimPO
from plaudit.support.plugins import registered_again

ALGORITHMS: dict[str, type[Objective]] = {
    "sft": SFT,
    "reward": RewardModel,
    "dpo": DPO,
    "kto": KTO,
    "orpo": ORPO,
    "simpo": SimPO,
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce": Reinforce,
    "distill": Distill,
    "online-dpo": OnlineDPO,
    "best-of-k": BestOfK,
}


def register_algorithm(name: str, algorithm: type[Objective]) -> type[Objective]:
    """Register a method for `method: name` in a recipe, and return its class. A class that is defined again, such as
    in a notebook's cell, replaces its older version. Raises ValueError if another class has the name, or if fields of
    the class would not become settings."""
    own = vars(algorithm).get("__annotations__", {})
    lost = [field for field, kind in own.items() if "ClassVar" not in str(kind)]
    if lost and "__dataclass_fields__" not in vars(algorithm):
        raise ValueError(
            f"{algorithm.__name__} has the field {lost[0]}, which has no effect because the class is not a dataclass: "
            "put @dataclass(frozen=True) above it"
        )
    if not registered_again(algorithm, ALGORITHMS.get(name, algorithm)):
        raise ValueError(f"the method name {name!r} is taken by {ALGORITHMS[name].__name__}: choose another")
    ALGORITHMS[name] = algorithm
    return algorithm


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Objective",
    "Output",
    "PolicyGradient",
    "register_algorithm",
    "row_of",
]
