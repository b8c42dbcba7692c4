"""docs/quickstart.md from its first command to its last, as they stand: runs are made short by further overrides."""

from __future__ import annotations

import functools
import json
import re
import select
import shlex
import subprocess
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plaudit import Run
from plaudit.commands import demo as demo_command
from plaudit.commands.cli import main
from plaudit.tasks.demo import DemoSize, make_demo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
SHELL = re.sub("^```python$.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
LINES = re.findall("^    (.+)$", re.sub(r" *\\\n +", " ", SHELL), re.MULTILINE)
ROWS = {found[1]: found[2] for line in LINES if (found := re.fullmatch(r"(my/\S+) +(\{.*\})", line))}
"""The example row of each file of one's own."""
COMMANDS = [line for line in LINES if not line.startswith(tuple(ROWS))]
NOT_HERE = ("make setup", ". .venv/bin/activate", "make demo")
"""What makes the environment, and what takes two minutes (commands/test_cli.py has it shorter)."""

SIZE = DemoSize(sft=40, sft_validation=4, pairs=30, pairs_validation=4, prompts=8, prompts_test=4, vocabulary=300)
SHORT = ["threads=1", "train.steps=2", "train.batch_size=4"]
SHORTER = {
    "sft": [*SHORT, "model.config.n_embd=32", "model.config.n_layer=1"],
    "reward": SHORT,
    "dpo": SHORT,
    "grpo": [*SHORT, "rollout.prompts_per_step=2", "rollout.max_tokens=8"],
    "generate": ["sampling.max_tokens=8"],
    "evaluate": ["limit=4", "sampling.max_tokens=8"],
}


def served(words: list[str], environment: dict[str, str]) -> list[str]:
    """Start the page, ask it for its runs, and end it."""
    command = [sys.executable, "-m", "plaudit.commands.cli", *words, "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 120)[0], "it says nothing"
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[0].rstrip('/')}/api/runs", timeout=60) as answer:
                return [run["name"] for run in json.load(answer)["runs"]]
        finally:
            process.kill()


def test_the_page_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_command, "make_demo", functools.partial(make_demo, size=SIZE))
    said: dict[str, list[str]] = defaultdict(list)
    for line in (line for line in COMMANDS if not line.startswith(NOT_HERE)):
        program, *words = shlex.split(line)
        if program != "plaudit":
            subprocess.run(line, shell=True, check=True)
            if found := re.search(r"> (my/\S+)$", line):  # the reader's own rows are like the page's
                Path(found[1]).write_text(f"{Path(found[1]).read_text()}{ROWS[found[1]]}\n")
        elif "--serve" in words:
            said["--serve"] += served(words, environment)
        else:
            done = CliRunner().invoke(main, [*words, *SHORTER.get(words[0], [])])
            assert done.exit_code == 0, f"{line}\n{done.output}"
            said[words[0]].append(done.output)
    assert [Run(f"runs/{name}").metrics[-1]["step"] for name in ("sft", "reward", "grpo", "dpo")] == [2] * 4
    assert sorted(said["--serve"]) == ["dpo", "grpo", "reward", "sft"]
    assert "41 as prompt/completion" in said["check"][0]
    assert said["generate"][0].count("Two and two? |") == 2
    assert all(figure in said["evaluate"][0] for figure in ("reward/judge", "kl/token"))
    assert list(Path("runs/grpo/evaluations").iterdir())


def test_the_pages_reward_function() -> None:
    (text,) = re.findall("^```python$(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    own: dict[str, Any] = {}
    exec(text, own)
    assert [own["near"](completion, "4") for completion in (" 4", "5", "four")] == [1.0, 0.2, 0.0]
