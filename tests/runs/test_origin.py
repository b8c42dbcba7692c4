"""Relative paths in a run's settings: which settings they are in, and from where they are read."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from plaudit.runs.origin import settings_of_run


def test_only_paths_that_are_there_are_made_whole(tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    for folder in (home / "data", home / "judge", run):
        folder.mkdir(parents=True)
    for name in ("a.jsonl", "mine.py", "chat.jinja"):
        (home / name).write_text("")
    given = {
        "method": "grpo",
        "name": "a.jsonl",
        "output": "runs",
        "plugins": ["mine.py", "other.py"],
        "data": {
            "train": {"a.jsonl": 2, "owner/name": 1, "data:main": 1},
            "split": {"a.jsonl": "mine.py"},
            "validation": "5%",
            "chat_template": "chat.jinja",
        },
        "rewards": [{"kind": "function", "function": "mine.py:score"}, {"kind": "judge", "path": "judge"}],
        "rollout": {"stop": ["a.jsonl"]},
    }
    (run / "settings.yaml").write_text(yaml.safe_dump(given))
    assert settings_of_run(run) == given, "it says nowhere where it was started"
    (run / "data.json").write_text(json.dumps({"started_in": str(home)}))
    found = settings_of_run(run)
    assert found["data"] == {
        "train": {f"{home}/a.jsonl": 2, "owner/name": 1, f"{home}/data:main": 1},
        "split": {f"{home}/a.jsonl": "mine.py"},
        "validation": "5%",
        "chat_template": f"{home}/chat.jinja",
    }
    assert found["plugins"] == [f"{home}/mine.py", "other.py"]
    assert [one.get("function") or one["path"] for one in found["rewards"]] == [
        f"{home}/mine.py:score",
        f"{home}/judge",
    ]
    assert {key: found[key] for key in ("name", "output", "rollout")} == {
        key: given[key] for key in ("name", "output", "rollout")
    }
