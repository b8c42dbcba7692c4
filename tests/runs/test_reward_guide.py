"""The guide to a reward model on an elastic cluster (docs/llama3_reward.md), command by command and in small. Of its
real nodes one is lost while the judge trains, and another one joins."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD

from plaudit import load_settings, run
from plaudit.commands.cli import main
from plaudit.loop.progress import Moment
from plaudit.types import Stats

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "llama3_reward.md").read_text(encoding="utf-8")
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_log_monitor": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that has no room for ranks, and two nodes that have room for one each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"num_cpus": 0})
    yield cluster
    cluster.shutdown()


def command(start: str, number: int = 0) -> list[str]:
    """The words of the guide's command that begins so, comments left out."""
    found = [line.strip() for line in GUIDE.splitlines() if line.startswith(f"    {start}")]
    return shlex.split(found[number], comments=True)


def test_the_guide_step_by_step(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained = importlib.import_module("pretrained")
    start = pretrained.made(pretrained.config_of("llama-3-8b", tiny=True), tmp_path / "start")
    rows = tmp_path / "hh.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in pretrained.HH))
    small = f"train.batch_size=4 data.train={rows} data.validation={rows} evaluate.every=null device=cpu log.quiet=true"
    here = [*small.split(), f"output={tmp_path / 'runs'}", "runtime.resources_per_worker={CPU: 1}"]
    here += ["threads=1", "save.every=1", f"runtime.address={cluster.address}"]

    def settings(words: list[str], *more: str) -> Any:
        return load_settings(ROOT / words[2], [*words[3:], *here, *more], method=words[1])

    # 2. on one rank: what the second stage needs is a policy
    cluster.add_node(**NODE)
    one = "runtime.num_training_workers=1"
    run(settings(command("plaudit sft"), one, f"model.path={start}", "train.steps=1"))

    # 3 and 4. two ranks; the node of one is lost, and the next one that joins takes it in
    nodes = [cluster.add_node(**NODE)]

    async def lose(moment: Moment) -> Stats:
        if moment.progress.step == 2 and len(nodes) == 1:
            cluster.remove_node(nodes[0], allow_graceful=False)
            nodes.append(cluster.add_node(**NODE))
        return {}

    trained, resumed = command("plaudit reward"), command("plaudit reward", 1)
    assert "resume=latest" in resumed
    policy = f"model.path={tmp_path / 'runs/llama-3-8b-sft'}"
    first = run(settings(trained, "runtime.num_training_workers=2", policy, "train.steps=4"), hooks=[lose])
    log = (first.folder / "log.txt").read_text()
    assert "lost training rank" in log
    assert [metrics["step"] for metrics in first.metrics] == [1, 2, 3, 4]

    # 4. goes on with another number of ranks
    again = run(settings(resumed, one, policy, "train.steps=6"))
    assert [metrics["step"] for metrics in again.metrics] == [1, 2, 3, 4, 5, 6]

    # 5. scored by us, and by transformers alone
    judge = command("plaudit evaluate")
    judge[2:] = [
        word.replace("runs/", f"{tmp_path}/runs/").replace("Anthropic/hh-rlhf", str(rows)) for word in judge[2:]
    ]
    told = CliRunner().invoke(main, [*judge[1:], "device=cpu", f"output={tmp_path / 'evaluation'}"])
    assert told.exit_code == 0, told.output
    assert "accuracy" in told.output
    words = command("python examples/score_with_reward_model.py")
    words[2] = str(again.checkpoint("judge"))
    monkeypatch.setattr(sys, "argv", words[1:])
    importlib.import_module("score_with_reward_model").main()


def test_every_command_of_the_guide_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own size: settings alone, no model and no data."""
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^    plaudit (?:sft|reward|ppo) .*$", GUIDE, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line, comments=True)
        assert load_settings(ROOT / words[2], words[3:], method=words[1]).runtime.address == "auto"
