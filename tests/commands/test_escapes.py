"""What others wrote, in every text that a command prints: no escape, no control character, no change of direction."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from plaudit import load_settings, run
from plaudit.commands.cli import main
from plaudit.monitor.console import Reporter

pytestmark = pytest.mark.slow

FOUL = "a\x1b[2J\x1b]8;;x\x1b\\b\x1b]52;c;eA==\x07\x9b31m\x9d0;t\x9c\u202ec\u2066\r\x08\x7f\u2028d"
"""Also the name of a file."""
KEPT = "\n\t\u200c\u200d"


def harmless(text: str) -> str:
    bad = {hex(ord(c)) for c in text if c not in KEPT and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert not bad, f"{bad} in {text!r}"
    return text


def told(*words: str) -> str:
    """All that a command prints, as a user reads it."""
    done = CliRunner().invoke(main, list(words), color=True)
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return harmless(done.output)


@pytest.fixture(scope="module")
def made(make_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(load_settings(make_recipe("grpo", tmp_path_factory.mktemp("made")))).folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> list[Path]:
    """Two runs of others, whose names, settings, figures and logs are foul."""
    folder = tmp_path / "runs"
    found = []
    for number in range(2):
        one = folder / f"{FOUL}{number}"
        shutil.copytree(made, one)
        tree = yaml.safe_load((one / "settings.yaml").read_text())
        tree |= {"name": one.name, FOUL: f"{FOUL}{number}"}
        tree["model"]["config"] |= {"note": f"{FOUL}{number}"}
        (one / "settings.yaml").write_text(yaml.safe_dump(tree))
        lines = [json.loads(line) | {f"validation/{FOUL}": 0.5} for line in (one / "metrics.jsonl").open()]
        (one / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found.append(one)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of others: recipes, rows, one that is no YAML."""
    monkeypatch.chdir(tmp_path)
    Path(f"{FOUL}.yaml").write_text(json.dumps({FOUL: FOUL, "method": FOUL}))
    Path("sft.yaml").write_text(
        json.dumps({"method": "sft", "name": FOUL, "optimizer": {FOUL: FOUL}, "model": {"path": FOUL}})
    )
    Path("stages.yaml").write_text(json.dumps({"name": FOUL, "stages": {FOUL: {"method": FOUL}}}))
    Path("torn.yaml").write_bytes(b"a: {" + FOUL.encode())
    rows: list[Any] = [{"prompt": FOUL, "answer": FOUL}, {FOUL: FOUL}, {"prompt": [FOUL], "answer": {FOUL: 1}}]
    Path(f"{FOUL}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


ANY = [
    [FOUL],
    [f"{FOUL}.yaml"],
    ["sft.yaml"],
    ["torn.yaml"],
    ["stages.yaml"],
    [f"{FOUL}={FOUL}"],
    [f"model.path={FOUL}"],
    [f"--{FOUL}"],
    [f"--traceback={FOUL}"],
]
GIVEN: dict[str, list[list[str]]] = {
    "settings": [
        ["sft", FOUL],
        ["sft", "--recipe", "sft.yaml"],
        ["sft", "--recipe", f"{FOUL}.yaml"],
        ["sft", "--recipe", FOUL],
        ["sft", "--plugin", FOUL],
    ],
    "convert": [
        [f"{FOUL}.jsonl", "out.jsonl", "--to", FOUL],
        [f"{FOUL}.jsonl", "out.jsonl", "--to", "prompt/answer"],
        [f"{FOUL}.jsonl", f"{FOUL}.out.jsonl", "--to", "prompt/answer", "--bad-rows", "9"],
        [f"{FOUL}.jsonl", f"out.{FOUL}", "--to", "prompt/answer", "--from", FOUL, "--column", FOUL],
    ],
    "monitor": [
        [".", "--plot", FOUL],
        [".", "--serve", "--port", FOUL],
        [".", "--serve", "--host", FOUL],
        [".", "--output", f"{FOUL}.yaml"],
    ],
    "serve-reward": [
        [FOUL, "--port", FOUL],
        [FOUL, "--host", FOUL],
        [FOUL, "--token-env", FOUL],
        [FOUL, "--device", FOUL],
    ],
    "generate": [
        [FOUL, "--prompt", FOUL],
        [FOUL, f"prompts='{FOUL}.jsonl'"],
        [FOUL, f"data.chat_template_kwargs={FOUL}"],
        [FOUL, "--prompt", "a", f"seed={FOUL}"],
        [FOUL, FOUL],
    ],
    "evaluate": [[f"model={FOUL}", f"prompts={FOUL}.jsonl"], [f"kinds=[{FOUL}]"], [f"model={FOUL}", "--follow"]],
    "relabel": [
        [f"preferences={FOUL}.jsonl", f"judge={FOUL}", f"output={FOUL}"],
        [f"answers={FOUL}.jsonl", f"gold={FOUL}:{FOUL}"],
    ],
    "compare": [[FOUL, FOUL], [".", "out"], [".", f"prompts={FOUL}"]],
    "demo": [["--seed", FOUL], ["--data-only", f"{FOUL}.yaml"]],
    "plan": [["sft.yaml", "--profile", FOUL], ["sft.yaml", "--profile", "torn.yaml"]],
    "layout": [["sft.yaml", "--mesh", FOUL], ["model.path=x", "--to", FOUL]],
    "check": [["sft", "sft.yaml", f"data.train={FOUL}.jsonl"], ["sft", "sft.yaml", "--json"]],
    "train": [["sft.yaml", f"plugins=[{FOUL}]"]],
}


@pytest.mark.parametrize("command", main.commands)
def test_errors_of_every_command(command: str, here: Path) -> None:
    for words in (*(ANY if command != "demo" else ()), *GIVEN.get(command, [])):  # a demo that is refused nothing runs
        told(command, *words)


def test_errors_of_no_command(here: Path) -> None:
    for words in ([FOUL], [f"--{FOUL}"], ["--help", FOUL], [f"-{FOUL}"]):
        told(*words)


def test_runs_of_others_are_compared_drawn_and_read(runs: list[Path], here: Path) -> None:
    assert "Settings that differ" in told("compare", *map(str, runs), "limit=2", "sampling.max_tokens=2")
    told("monitor", str(runs[0].parent))
    told("monitor", str(runs[0].parent), "--output", f"{FOUL}plots")
    told("generate", str(runs[0]), "--prompt", FOUL, "sampling.max_tokens=2")
    told("generate", str(runs[0]), f"prompts='{FOUL}.jsonl'", "sampling.max_tokens=2", f"output='{FOUL}.answers.jsonl'")
    told("evaluate", f"model='{runs[0]}'", f"prompts='{FOUL}.jsonl'")
    for name in ("settings.yaml", "metrics.jsonl", "checkpoints"):
        path = runs[1] / name
        shutil.rmtree(path) if path.is_dir() else path.write_bytes(FOUL.encode())
        for given in (
            ["compare", *map(str, runs)],
            ["monitor", str(runs[1].parent)],
            ["generate", str(runs[1]), "--prompt", "a"],
        ):
            told(*given)


def test_the_title_of_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal; it read "[/]" as markup, and escapes as they were."""
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter()
    reporter.console._force_terminal = reporter.console.is_interactive = True
    reporter.console.width = 400
    with reporter.track(f"answers of {FOUL}\n[/]", 2) as bar:
        bar.advance()
        assert reporter._bar is not None
        reporter._bar.refresh()
    said = capsys.readouterr().out
    assert "answers of a\\u001b[2J" in said
    assert "\\n[/]" in said
    for sign in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e", "\x08"):
        assert sign not in said


def test_a_name_with_a_newline_forges_no_line(runs: list[Path], tmp_path: Path) -> None:
    """Of a folder of others: what a user types is the user's own."""
    renamed = []
    for number, one in enumerate(runs):
        renamed.append(tmp_path / f"run\ndone: forged{number}")
        shutil.copytree(one, renamed[-1])
        shutil.rmtree(renamed[-1] / "checkpoints", ignore_errors=True)
    said = told("compare", *map(str, renamed))
    (renamed[1] / "metrics.jsonl").write_text("nonsense\n{}\n")
    said += told("compare", *map(str, renamed)) + told("monitor", str(tmp_path))
    (renamed[1] / "settings.yaml").write_text("a: {")
    said += told("compare", *map(str, renamed))
    assert "run\\ndone: forged1" in said
    assert not [line for line in said.splitlines() if line.startswith("done:")]
