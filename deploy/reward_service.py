"""A judge as an application of Ray Serve, which speaks the reward protocol as `plaudit serve-reward` does.

    REWARD_MODEL=runs/reward REWARD_TOKEN=... serve run deploy.reward_service:app

Needs `pip install "ray[serve]"`. REWARD_MODEL is a judge's folder, REWARD_TOKEN what requests must carry, and
REWARD_HOSTS the names by which they call this service, with commas between them. Each replica loads the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import serve


def built() -> Any:
    """Load the judge and return its ASGI application, in a replica. Raises ValueError without a token."""
    from plaudit.commands.serve import JudgeService, token_of
    from plaudit.evaluate.judge import Judge
    from plaudit.models.device import device_of
    from plaudit.rewards.server import application

    path = os.environ["REWARD_MODEL"]
    service = JudgeService(Judge.load(path, device=device_of("auto")))
    about = {"model": Path(path).name, "vocabulary": service.vocabulary}
    names = ["localhost", *filter(None, os.environ.get("REWARD_HOSTS", "").split(","))]
    return application(service, about=about, names=names, token=token_of("0.0.0.0", "REWARD_TOKEN"))


app = serve.deployment(serve.ingress(built)()).options(name="judge").bind()
