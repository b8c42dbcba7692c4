"""`plaudit serve-training`: a base model that others train and sample from, by Tinker's API.

checkpoint -> training_api/opening.py (the service) -> training_api/server.py (the application) -> uvicorn
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click

from plaudit.commands.errors import plain_errors
from plaudit.commands.options import HomePath, TakesOptions, address_options, traceback_option
from plaudit.commands.speaking import say
from plaudit.support.paths import check_writable


@click.command("serve-training", cls=TakesOptions)
@click.argument("model", type=click.Path())
@address_options(8010)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0, show_default=True, help="CPU threads; 0: all cores.")
@click.option("--folder", type=HomePath(path_type=Path, file_okay=False), default="runs/served", help="For saves.")
@click.option("--name", default="", help="Name by which clients ask for the model; default: its folder's.")
@click.option("--models", type=click.IntRange(1), default=4, show_default=True, help="Most models in training at once.")
@click.option("--heartbeat", type=click.FloatRange(30), default=120, help="Seconds until a silent session ends.")
@click.argument("settings", nargs=-1)
@traceback_option
def serve_training(model: str, host: str, port: int, token_env: str, settings: tuple[str, ...], **options: Any) -> None:
    """Let clients of Tinker's API train adapters of a model and sample from them (docs/training-api.md).

    \b
    plaudit serve-training runs/sft
    plaudit serve-training runs/sft runtime=ray runtime.num_training_workers=2
    """
    with plain_errors(options["folder"]):
        import torch

        from plaudit.commands.listening import address_of, bounded_protocol, listen, serve_http
        from plaudit.commands.serve import token_of

        token, names = token_of(host, token_env), ("localhost", socket.gethostname(), host, *options.pop("allow_hosts"))
        check_writable(options["folder"])
        listening = listen(host, port)
        from plaudit.training_api.opening import opened
        from plaudit.training_api.server import application

        torch.set_num_threads(options.pop("threads") or torch.get_num_threads())
        service = opened(model, settings, say=say, **options)
        app: Any = application(service, names=names, token=token)

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            try:
                await service.open()
                say(f"serving {service.name} on {address_of(listening)}, {'with a' if token else 'without a'} key")
                yield
            finally:
                service.group.close()

        serve_http(app, bounded_protocol(), listening, running())
