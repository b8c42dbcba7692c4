"""`plaudit serve` on a real socket, and `plaudit chat` over lines."""

from __future__ import annotations

import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from tiny import GPT2

from plaudit.commands.cli import main
from plaudit.models.load import fresh_model, load_tokenizer, save_model

pytestmark = pytest.mark.slow

ASKED = {"messages": [{"role": "user", "content": "The acting"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def model(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaking") / "tiny"
    tokenizer = load_tokenizer(str(demo.tokenizer))
    save_model(fresh_model(GPT2, vocab_size=len(tokenizer)), folder, tokenizer=tokenizer)
    return folder


def test_a_policy_is_served_by_the_name_of_its_folder(model: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "plaudit.commands.cli", "serve", str(model), "port=0", "--threads", "1"]
    server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert select.select([server.stdout], [], [], 120)[0], "the server said nothing for two minutes"
        line = server.stdout.readline()
        found = re.fullmatch(r"serving tiny on (http://127\.0\.0\.1:\d+/v1), without a token\n", line)
        assert found, line
        with httpx2.Client(base_url=found[1], timeout=60) as client:
            assert [one["id"] for one in client.get("models").json()["data"]] == ["tiny"]
            reply = client.post("chat/completions", json=ASKED)
            events = client.post("chat/completions", json=ASKED | {"stream": True})
        assert reply.json()["choices"][0]["message"]["content"]
        assert events.text.endswith("data: [DONE]\n\n")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)


def talk(model: Path, lines: list[str]) -> tuple[str, list[str]]:
    """What is answered, and the errors."""
    words = ["chat", str(model), "--temperature", "0", "--max-tokens", "3"]
    done = CliRunner().invoke(main, words, input="".join(f"{line}\n" for line in lines))
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr.splitlines()


def test_a_conversation_is_kept_until_it_is_forgotten(model: Path) -> None:
    question = "The acting was superb . " * 4
    alone, errors = talk(model, [question])
    assert alone.endswith("\n")
    assert errors == []
    assert talk(model, [question, "", "/reset"] * 6) == (alone * 6, [])
    assert talk(model, [question, "/quit", question]) == (alone, [])
    kept, errors = talk(model, [question] * 6)
    assert kept.startswith(alone)
    assert errors, "six questions with their answers are longer than the model reads"
    assert all(re.search(r"error: the messages have \d+ tokens.* 128 ", error) for error in errors)
