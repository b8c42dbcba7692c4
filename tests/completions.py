"""A server that speaks chat completions, with replies by a function, for tests of judges that read."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], tuple[int, Any]]


def said(text: str | None) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """The two answers of a question, as it shows them."""
    text = body["messages"][1]["content"]
    first, second = (text.split(f"<answer_{one}>\n")[1].split(f"\n</answer_{one}>")[0] for one in "AB")
    return first, second


def longer(body: dict[str, Any]) -> tuple[int, Any]:
    """A judge that is right: the longer answer wins wherever it stands."""
    first, second = (len(answer) for answer in shown(body))
    return said(f"I see [[C]] at first, but: [[{'A' if first > second else 'B' if second > first else 'C'}]]")


class Endpoint:
    """A server that gives the prepared answers and keeps the requests."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.models = 200
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(endpoint.models)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.asked.append(body | {"path": self.path})
                endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
                status, content = endpoint.reply(body)
                sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                with contextlib.suppress(ConnectionError):  # who asked has not waited
                    self.send_response(status)
                    self.send_header("content-length", str(len(sent)))
                    self.end_headers()
                    self.wfile.write(sent)

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
