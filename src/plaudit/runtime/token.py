"""What must be in the environment before ray is imported: it reads its own settings then, once."""

from __future__ import annotations

import os
import secrets
import sys

from plaudit.runtime.settings import RuntimeSettings

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray prints its own view of a lost worker, on several lines; the run says in one what was lost and what follows."""
GIVEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
"""With either of these the user decided who is let in."""


def prepare(settings: RuntimeSettings) -> None:
    """Nobody else on this machine or network may use a cluster that we start: it asks for a token of its own, unless
    the user decided on it (RAY_AUTH_MODE) or ray is in use in this process already. Raises ValueError where its page
    would be closed to the user too."""
    if "ray" in sys.modules:
        return
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if settings.address is not None:
        return
    if settings.dashboard and not any(name in os.environ for name in GIVEN):
        raise ValueError(
            "runtime.dashboard=true: the page asks for the cluster's token, and one that we draw nobody knows. Give it "
            "one before the run: export RAY_AUTH_TOKEN=$(openssl rand -hex 32)"
        )
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
