"""One HTML file of a run: the page with what is seen now, to send or to keep.

    the page's files, answers of the server -> one file, which sends no request and whose policy names its own scripts

Left out: a search within it; it has the list of answers as it was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ANSWERS = ("step", "kind", "finish", "words", "field", "least", "most", "sort", "order")


def exported(web: Path, ask: Callable[[str, Mapping[str, str]], Any], state: Mapping[str, str]) -> str:
    """Return the file. `state` is the page's, as its address has it; `ask` answers as the server does."""
    found: dict[str, Any] = {}

    def keep(what: str, **given: str) -> Any:
        given = {name: value for name, value in given.items() if value != ""}
        found[_key(what, given)] = answer = ask(what, given)
        return answer

    run, state = state["run"], dict(state)
    names = [run, *([state["with"]] if state.get("with") else [])]
    listed = keep("runs")
    found[_key("runs", {})] = {"folder": "", "runs": [one for one in listed["runs"] if one["name"] in names]}
    for name in names:
        for what in ("metrics", "health", "settings", "events", "steps"):
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
    return _joined(web, {"answers": found, "state": state})


def _key(what: str, given: Mapping[str, str]) -> str:
    """The name of an answer, as base.js makes it."""
    return json.dumps([what, *sorted(given.items())], ensure_ascii=False, separators=(",", ":"))


def _joined(web: Path, carried: Mapping[str, Any]) -> str:
    page = (web / "index.html").read_text(encoding="utf-8")
    policy = {"script": list[str](), "style": list[str]()}

    def inside(kind: str, name: str) -> str:
        text = (web / name).read_text(encoding="utf-8")
        policy[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    styles = re.findall(r'<link rel="stylesheet" href="page/([\w.]+)">', page)
    scripts = re.findall(r'<script defer src="page/([\w.]+)"></script>', page)
    head = "".join(inside("style", name) for name in styles)
    # JSON within HTML: no "<" means no tag, whatever a model wrote.
    data = json.dumps(carried, ensure_ascii=True).replace("<", "\\u003c")
    tail = f'<script type="application/json" id="carried">{data}</script>' + "".join(
        inside("script", n) for n in scripts
    )
    allowed = f"default-src 'none'; script-src {' '.join(policy['script'])}; style-src {' '.join(policy['style'])}"
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n|<script defer[^>]*></script>\n|<link rel="icon"[^>]*>\n', "", page)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{allowed}; img-src data:">'
    before, _, after = page.partition("</head>")
    body, _, end = after.partition("</body>")
    return f"{before.replace('<title>', meta + '<title>')}{head}</head>{body}{tail}</body>{end}"
