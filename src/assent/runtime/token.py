"""What must be in the environment before ray is imported: it reads its own settings then, once."""

from __future__ import annotations

import os
import secrets
import sys

from assent.runtime.settings import RuntimeSettings

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray prints its own view of a lost worker, on several lines; the run says in one what was lost and what follows."""


def prepare(settings: RuntimeSettings) -> None:
    """Nobody else on this machine or network may use a cluster that we start: it asks for a token of its own, unless
    the user decided on it (RAY_AUTH_MODE) or ray is in use in this process already."""
    if "ray" in sys.modules:
        return
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if settings.address is not None:
        return
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
