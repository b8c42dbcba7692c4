"""Set the environment before ray is imported, since ray reads its settings only then."""

from __future__ import annotations

import os
import secrets
import sys

from plaudit.runtime.settings import RuntimeSettings

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray reports a lost worker on several lines; the run reports it and its effect in one."""
GIVEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
"""With either variable, the user has decided who may connect."""


def prepare(settings: RuntimeSettings) -> None:
    """Protect a cluster that we start by its own token, unless the user decided on it (RAY_AUTH_MODE) or this process
    uses ray already. Raises ValueError if the user could then not open its page."""
    if "ray" in sys.modules:
        return
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if settings.address is not None:
        return
    if settings.dashboard and not any(name in os.environ for name in GIVEN):
        raise ValueError(
            "runtime.dashboard=true: the page asks for the cluster's token, which is random and secret by default. Set "
            "your own before the run: export RAY_AUTH_TOKEN=$(openssl rand -hex 32)"
        )
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
