"""Export a run's page as one HTML file, with what it shows now, to send or to keep.

    the page's files, answers of the server -> one file that sends no request; its policy allows only its own scripts

Left out: searching in the file, which has only the list of answers that the page had loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from markupsafe import Markup

from plaudit.monitor.templates import rendered
from plaudit.page.run_page import WEB

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = tuple(
    f"{name}.js" for name in "uPlot.iife.min base curves heat tokens answers pairs lanes settings table main".split()
)
"""Files of the page, in the order in which it loads them."""
ANSWERS = ("step", "kind", "finish", "words", "field", "least", "most", "sort", "order")


def exported(ask: Callable[[str, Mapping[str, str]], Any], state: Mapping[str, str]) -> str:
    """Return the file's text. `state`: the page's state, as in its URL. `ask`: answers API requests as the server."""
    found: dict[str, Any] = {}

    def keep(what: str, **parameters: str) -> Any:
        parameters = {name: value for name, value in parameters.items() if value != ""}
        found[_key(what, parameters)] = answer = ask(what, parameters)
        return answer

    run, state = state["run"], dict(state)
    names = list(dict.fromkeys([run, *filter(None, map(unquote, state.get("with", "").split(",")))]))
    listed, rows_of_runs = keep("runs"), keep("table")
    found[_key("runs", {})] = {"folder": "", "runs": [one for one in listed["runs"] if one["name"] in names]}
    rows_of_runs["rows"] = [one for one in rows_of_runs["rows"] if one["name"] in names]
    for name in names:
        for what in ("metrics", "health", "settings", "events", "steps", "rewards"):
            keep(what, run=name)
    rows: list[tuple[str, Any]] = []
    steps = found[_key("steps", {"run": run})]["step"]
    if steps:
        if state.get("every") or state.get("step") is None:
            state["step"] = str(steps[-1])
        question = {name: state.get(name, "") for name in ANSWERS if not (state.get("every") and name == "step")}
        if not (question["field"] and (question["least"] or question["most"])):
            question |= {"field": "", "least": "", "most": ""}
        rows += [(run, row) for row in keep("answers", run=run, count="50", **question)["rows"]]
        near = keep("answers", run=run, step=str(steps[-1]), count="200")["rows"]
        prompt = state.get("prompt") or (near[0]["prompt_id"] if near else "")
        state["prompt"] = prompt
        for name in names:
            pairs = keep("answers", run=name, prompt=prompt, sort="step", count="60") if prompt else {"rows": []}
            rows += [(name, row) for row in pairs["rows"]]
    for name, row in rows:
        keep("answer", run=name, at=str(row["at"]))
    return _joined({"answers": found, "state": state})


def shell() -> str:
    """Return the page's HTML as the server sends it, without data of a run."""
    return rendered(WEB / "index.html.jinja", policy="", carried=None, styles=STYLES, scripts=SCRIPTS)


def _key(what: str, parameters: Mapping[str, str]) -> str:
    """Return the key under which base.js looks up the server's answer to a request."""
    return json.dumps([what, *sorted(parameters.items())], ensure_ascii=False, separators=(",", ":"))


def _joined(carried: Mapping[str, Any]) -> str:
    styles, scripts = ([(WEB / name).read_text(encoding="utf-8") for name in names] for names in (STYLES, SCRIPTS))
    policy = f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:"
    inside = {"styles": map(Markup, styles), "scripts": map(Markup, scripts)}
    return rendered(WEB / "index.html.jinja", policy=Markup(policy), carried=carried, **inside)


def _hashes(texts: Sequence[str]) -> str:
    """Return the SHA-256 sources that a content security policy needs to allow these scripts or styles."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
