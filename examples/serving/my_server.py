"""A reward server of your own, with nothing but the standard library: it counts words.

Start it, then a run that asks it:

    python examples/serving/my_server.py 8009
    plaudit grpo configs/grpo.yaml "rewards=[{kind: http, urls: ['http://127.0.0.1:8009']}]"
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(item: dict[str, Any]) -> tuple[float | None, str | None]:
    words = item["completion"].split()
    return (len(set(words)) / len(words), None) if words else (None, "an empty answer")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        scores, reasons = zip(*map(score, request["items"]), strict=True)
        self.reply({"scores": scores, "reasons": reasons})

    def reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print(f"serving on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
