"""Tinker's API over HTTP, as a Starlette application.

    bytes -> known Host, no web page, the api key -> JSON or protobuf -> a method of Service -> JSON or protobuf

Left out, and answered with 404: lists of runs and checkpoints, links to weights, billing, custom losses on the server.
What else a request asks is refused by name. `docs/training-api.md` has the table.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from plaudit.support.requests import HEADERS, body_of, guarded, json_of
from plaudit.training_api.asked import read
from plaudit.training_api.service import Service
from plaudit.training_api.sessions import ApiError

PROTOBUF = "application/x-protobuf"
CONFIG = {"parallel_fwdbwd_chunks": False, "sample_max_concurrent_requests": 128}
"""Settings of clients: their requests come in order, and not more at a time than the server has connections for."""
log = logging.getLogger(__name__)


def application(service: Service, *, names: Iterable[str], token: str | None = None) -> ASGIApp:
    """Return the application. `names` are this server's host names; clients must send `token` as their api key."""
    posts: dict[str, Callable[[Any], Any]] = {
        "client/config": lambda body: CONFIG,
        "client/dynamic_config": lambda body: {},
        "telemetry": lambda body: {"status": "accepted"},
        "create_session": lambda body: {"session_id": service.sessions.open()},
        "session_heartbeat": service.heartbeat,
        "create_model": service.create,
        "get_info": service.info,
        "optim_step": service.step,
        "save_weights": service.save,
        "save_weights_for_sampler": service.save_for_sampler,
        "load_weights": service.load,
        "weights_info": service.weights_info,
        "create_sampling_session": service.create_sampler,
        "asample": service.sample,
    }
    routes = [("POST", path, partial(_answer, call, json_of)) for path, call in posts.items()]
    routes += [
        ("POST", "forward_backward", partial(_answer, service.compute, partial(body_of, kind=PROTOBUF))),
        ("POST", "retrieve_future", partial(_answer, partial(_retrieved, service), json_of)),
        ("POST", "sessions/{key}/finish", partial(_answer, service.finish, _key)),
        ("GET", "samplers/{key}", partial(_answer, service.sampler, _key)),
        ("GET", "get_server_capabilities", partial(_answer, lambda key: service.capabilities(), _key)),
        ("GET", "healthz", partial(_answer, lambda key: {"status": "ok"}, _key)),
    ]
    found = [Route(f"/api/v1/{path}", call, methods=[method]) for method, path, call in routes]
    return guarded(found, names, said=_said, token=token)


async def _key(request: Request) -> Any:
    return request.path_params.get("key")


async def _retrieved(service: Service, body: Any) -> Response:
    """Answer with a request's result, or with what its work raised: HTTP's own errors only for what is gone."""
    try:
        result = await service.sessions.retrieve(read("retrieve_future", body).request_id)
    except ValueError as error:
        status = error.status if isinstance(error, ApiError) else 400
        if status in (404, 410):
            raise
        return _reply({"error": str(error), "category": "server" if status == 503 else "user"})
    except Exception as error:
        log.exception("a request of the training API failed")
        return _reply({"error": f"{type(error).__name__}: {error!s:.300}", "category": "server"})
    if isinstance(result, bytes):
        return Response(result, media_type=PROTOBUF, headers=HEADERS)
    return _reply({"type": "try_again", "queue_state": "active"}, 408) if result is None else _reply(result)


async def _answer(call: Callable[[Any], Any], read_from: Callable[[Request], Any], request: Request) -> Response:
    """Answer a request with what a call returns of what is read; what is refused, with the reason."""
    try:
        found = call(await read_from(request))
        return await found if isinstance(found, Awaitable) else _reply(found)
    except RecursionError:
        raise HTTPException(400, "the request is nested too deeply") from None
    except ValueError as error:
        raise HTTPException(error.status if isinstance(error, ApiError) else 400, str(error)) from None


def _reply(value: Any, status: int = 200) -> Response:
    return JSONResponse(value, status, headers=HEADERS)


def _said(status: int, reason: str) -> Response:
    return _reply({"error": reason.encode("utf-8", "replace").decode(), "category": "user"}, status)
