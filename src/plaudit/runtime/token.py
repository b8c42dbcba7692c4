"""Set the environment before ray is imported, since ray reads its settings only then."""

from __future__ import annotations

import os
import secrets
import sys

from plaudit.runtime.settings import RuntimeSettings

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Variables that stop Ray's own lines about a lost worker; the run reports the loss and its effect in one line."""


def check_cluster(settings: RuntimeSettings) -> None:
    """Raise ValueError if runtime.kind is ray and no cluster answers at runtime.address; null is not checked."""
    if settings.kind == "ray" and settings.address is not None:
        prepare(settings)
        from plaudit.runtime.ray_node import check_address

        check_address(settings.address)


def prepare(settings: RuntimeSettings) -> None:
    """Protect a cluster that we start by its own token, unless the user decided on it (RAY_AUTH_MODE) or this process
    uses ray already."""
    if "ray" in sys.modules:
        return
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if settings.address is not None:
        return
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
