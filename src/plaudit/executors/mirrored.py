"""A rank's state as arrays, and the process on another node that keeps copies of it. Who sends what is `mirrors.py`.

Mirrored.state -> {role: arrays, what else changes} -> Holder.hold;  Holder.give -> Mirrored.receive, put_back
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.types import Role

if TYPE_CHECKING:  # holders import this file, and need no torch
    from plaudit.learn.scorer import Scorer
    from plaudit.settings.tree import Settings

Key = tuple[int, int]
"""(a worker group's index, its first rank that has this state): ranks with equal state share a key."""
State = Mapping[str, tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]
"""A rank's state by role: (arrays by name, other values that steps change)."""


class Holder:
    """Keeps states of ranks on other nodes: of the newest step that all holders have, and of the one being sent."""

    def __init__(self) -> None:
        self._held: dict[Key, dict[int, State]] = {}

    def hold(self, key: Key, step: int, whole: int, state: State) -> None:
        """Copy and keep a state; drop this key's earlier states except that of step `whole`, which all holders have."""
        mine = self._held.setdefault(key, {})
        for old in [old for old in mine if old != whole]:
            del mine[old]  # before the new one is copied
        mine[step] = {role: ({n: a.copy() for n, a in arrays.items()}, more) for role, (arrays, more) in state.items()}

    def give(self, key: Key, step: int) -> tuple[State, None]:
        return self._held[key][step], None


class Mirrored:
    """The methods of a rank by which `Mirrors` reads and restores its state."""

    settings: Settings
    members: dict[Role, Scorer]
    _received: State

    def _moving(self) -> dict[Role, Scorer]:
        still = () if self.settings.reference.ema else (Role.REFERENCE,)
        return {role: member for role, member in self.members.items() if role not in still}

    def state(self) -> tuple[State, None]:
        """Return all tensors and values that steps change, uncopied if on the CPU: send them before the next step."""
        from plaudit.learn.moving import moving

        held = {role: moving(member) for role, member in self._moving().items()}
        return {
            role: ({n: t.cpu().numpy() for n, t in tensors.items()}, more) for role, (tensors, more) in held.items()
        }, None

    def receive(self, state: State) -> None:
        """Keep a received state; `put_back` loads it into the models."""
        self._received = state

    def put_back(self) -> None:
        import torch

        from plaudit.learn.moving import moved

        for role, member in self._moving().items():
            arrays, more = self._received[role]
            moved(member, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, more)
        self._received = {}
