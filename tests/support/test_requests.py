"""Requests to our HTTP servers. Who may send them is tested with each server."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from plaudit.environments.agents import _listening
from plaudit.support.requests import body_of, guarded

HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize("late", ["the request", "the answer"])
def test_a_request_that_the_servers_end_cuts_off_is_answered_and_logs_nothing(
    late: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop of a run's agents ends whenever it does: uvicorn logged a traceback of the cancelled request."""

    async def serve() -> socket.socket:
        begun = asyncio.Event()

        async def answer(request: Request) -> Response:
            begun.set()
            await (body_of(request) if late == "the request" else asyncio.sleep(60))
            return PlainTextResponse("done")

        app = guarded([Route("/", answer, methods=["POST"])], (), said=lambda code, why: PlainTextResponse(why, code))
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(_listening(app, listening))
        client = socket.create_connection(listening.getsockname())
        client.sendall(HEAD + b"{")
        await begun.wait()
        assert not serving.done()
        return client

    with asyncio.run(serve()) as client:
        client.settimeout(10)
        answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 503") and answer.endswith(b"the server has stopped"), answer
    assert not caplog.records
