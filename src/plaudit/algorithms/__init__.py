"""The methods by name. A new one is a file beside these and a line here, or `register_algorithm` from outside."""

from __future__ import annotations

from plaudit.algorithms.base import Algorithm, Objective, Output, row_of
from plaudit.algorithms.best_of_k import BestOfK
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.online_dpo import OnlineDPO
from plaudit.algorithms.policy_gradient import PolicyGradient
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.reward_model import RewardModel
from plaudit.algorithms.rloo import RLOO
from plaudit.algorithms.sft import SFT
from plaudit.plugins import registered_again

ALGORITHMS: dict[str, type[Objective]] = {
    "sft": SFT,
    "reward": RewardModel,
    "dpo": DPO,
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce": Reinforce,
    "online-dpo": OnlineDPO,
    "best-of-k": BestOfK,
}


def register_algorithm(name: str, algorithm: type[Objective]) -> type[Objective]:
    """Make a method known under `name`, for `method: name` in a recipe. Of the class that has the name already, as when
    a notebook's cell is run again, the newer form counts. Raises ValueError if it is another one's, and for a class
    whose fields would not be settings."""
    own = vars(algorithm).get("__annotations__", {})
    lost = [field for field, kind in own.items() if "ClassVar" not in str(kind)]
    if lost and "__dataclass_fields__" not in vars(algorithm):
        raise ValueError(
            f"{algorithm.__name__} has the field {lost[0]}, which is no setting, and has no effect, unless "
            "@dataclass(frozen=True) stands above the class"
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
