"""Starlette app of the page that shows runs: serves the page's files and a JSON API. Read-only.

    /, /page/NAME -> web/          /api/... -> folders.py, answers.py -> JSON

`commands/listening.py` opens the sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from plaudit.monitor.folders import EVALUATED, Followed, columns, joined, runs_in, settings_of, summary
from plaudit.monitor.health import Ledger
from plaudit.monitor.sinks import as_json
from plaudit.monitor.table import Best, table
from plaudit.page.answers import PAGE, Answers, Query
from plaudit.page.door import STRANGER, Door
from plaudit.page.export import SCRIPTS, STYLES, exported, shell
from plaudit.page.run_page import WEB
from plaudit.support.requests import known_hosts
from plaudit.support.visible import visible

EVENTS = 20_000
"""Most events (stretches of time) in one response, the latest ones."""
MOST = 500
"""Most answers in one response."""
REFUSED = (ValueError, OverflowError, TypeError, AttributeError, RecursionError, OSError)
"""Errors of reading a bad request, or files that no run would write."""
Parameters = Mapping[str, str]


class RunsReader:
    """Reads the runs of a folder for requests. It keeps what it has read of a file; later requests read what is new."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._followed: dict[Path, Followed] = {}
        self._best: dict[Path, Best] = {}
        self._answers: dict[Path, Answers] = {}
        self._lock = threading.Lock()

    def run(self, parameters: Parameters) -> Path:
        """Return a run's folder. Raises LookupError for a name that is not in the list of runs."""
        name = parameters.get("run", "")
        try:
            return runs_in(self.folder)[name]
        except KeyError:
            raise LookupError(f"there is no run {name!r:.80}") from None

    def records(self, path: Path) -> list[dict[str, Any]]:
        with self._lock:
            followed = self._followed.setdefault(path, Followed(path))
        return followed.look()  # outside the lock: a slow file does not delay other runs'

    def runs(self, parameters: Parameters) -> Any:
        return {
            "folder": str(self.folder.resolve()),
            "runs": [summary(name, path) for name, path in runs_in(self.folder).items()],
        }

    def metrics(self, parameters: Parameters) -> Any:
        run = self.run(parameters)
        return columns(joined(self.records(run / "metrics.jsonl"), self.records(run / EVALUATED)))

    def health(self, parameters: Parameters) -> Any:
        return list(Ledger(self.records(self.run(parameters) / "health.jsonl")).entries.values())

    def events(self, parameters: Parameters) -> Any:
        return self.records(self.run(parameters) / "events.jsonl")[-EVENTS:]

    def settings(self, parameters: Parameters) -> Any:
        return settings_of(self.run(parameters))

    def table(self, parameters: Parameters) -> Any:
        with self._lock:
            runs = runs_in(self.folder)
            files = (path / name for path in runs.values() for name in ("metrics.jsonl", EVALUATED))
            self._best = {file: self._best.get(file) or Best(file) for file in files}
            best = self._best
        return table(runs, lambda run: [best[run / "metrics.jsonl"], best[run / EVALUATED]])

    def answers_of(self, parameters: Parameters) -> Answers:
        path = self.run(parameters) / "samples.jsonl"
        with self._lock:
            return self._answers.setdefault(path, Answers(path))

    def steps(self, parameters: Parameters) -> Any:
        names = ("step", "answers", "groups", "of")
        found = [asdict(one) for one in self.answers_of(parameters).steps()]
        return {name: [one[name] for one in found] for name in names}

    def rewards(self, parameters: Parameters) -> Any:
        return self.answers_of(parameters).rewards(parameters.get("kind", "train"))

    def answers(self, parameters: Parameters) -> Any:
        return self.answers_of(parameters).find(question(parameters)).json()

    def answer(self, parameters: Parameters) -> Any:
        return self.answers_of(parameters).one(int(parameters.get("at", "-1")))


def question(parameters: Parameters) -> Query:
    """Read a query from a URL's parameters. Raises ValueError if one that must be a number is not."""

    def number(name: str) -> float | None:
        return float(parameters[name]) if parameters.get(name) else None

    field = parameters.get("field")
    return Query(
        step=int(parameters["step"]) if parameters.get("step") else None,
        kind=parameters.get("kind", ""),
        finish=parameters.get("finish", ""),
        prompt_id=parameters.get("prompt") or None,
        words=parameters.get("words", "")[:1000],
        limits=((field, number("least"), number("most")),) if field else (),
        sort=parameters.get("sort", ""),
        descending=parameters.get("order") != "rising",
        offset=max(0, int(parameters.get("offset", "0"))),
        count=min(MOST, max(1, int(parameters.get("count", PAGE)))),
    )


def application(folder: Path, *, names: Iterable[str] = ("localhost",), token: str | None = None) -> ASGIApp:
    """Return the page of a folder of runs as an ASGI application. `names`: host names that requests may use."""
    reader = RunsReader(folder)
    asked = (
        reader.runs,
        reader.metrics,
        reader.health,
        reader.events,
        reader.settings,
        reader.table,
        reader.steps,
        reader.rewards,
        reader.answers,
        reader.answer,
    )
    routes = [Route("/", lambda request: HTMLResponse(shell())), Route("/page/{name}", _file)]
    routes += [Route(f"/api/{ask.__name__}", _endpoint(ask, as_json, "application/json")) for ask in asked]
    answers = {ask.__name__: ask for ask in asked}

    def export(parameters: Parameters) -> str:
        reader.run(parameters)
        return exported(lambda what, parameters: answers[what](parameters), parameters)

    routes.append(Route("/api/export", _endpoint(export, str.encode, "application/octet-stream")))
    inside = Starlette(routes=routes, middleware=[Middleware(Door, token=token)])
    return known_hosts(inside, names, refused=STRANGER)


def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in (*STYLES, *SCRIPTS):
        return PlainTextResponse("there is no such file", 404)
    return FileResponse(WEB / name)


def _endpoint(
    ask: Callable[[Parameters], Any], encode: Callable[[Any], bytes], kind: str
) -> Callable[[Request], Response]:
    """Return an endpoint, which Starlette runs in a thread: `ask`'s encoded result, or status 404 or 400."""

    def answer(request: Request) -> Response:
        try:
            body = encode(ask(request.query_params))
        except LookupError as error:
            return PlainTextResponse(visible(str(error.args[0]), line=True), 404)
        except REFUSED as error:
            return PlainTextResponse(visible(str(error)[:300], line=True), 400)
        return Response(body, media_type=kind)

    return answer
