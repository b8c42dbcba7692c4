"""GRPO with a calculator, by Plaudit and by TRL: tokens a second, memory, and the reward of the same start.

    SmolLM2, played calls in Qwen 2.5's chat template -> SFT by Plaudit -> GRPO with the tool, both sides in turn

TRL reads the calls of few templates, and knows them by their text: so both sides have that of TRL's own file.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from contest import Result, contest
from harness import KEPT, ROOT, asked, keep, show
from lines import SELF, TRL
from measure import Setting, entry
from task import PRETRAINED, Task

sys.path.insert(0, str(ROOT / "scripts"))
import episodes

TEMPLATE = "trl/chat_templates/qwen2_5.jinja"
COUNT, SAMPLES, TOKENS = 32, 8, 48
"""Answers of a step, answers a question, and most tokens of a turn, of which a chat has two."""


def started(folder: Path) -> Path:
    """Write questions and played calls, and teach SmolLM2 the calls. Return the folder with `policy` in it."""
    from plaudit import run

    template = next((ROOT / ".venv-trl").glob(f"lib/*/site-packages/{TEMPLATE}"), None)
    if template is None:
        raise SystemExit(".venv-trl is not there: `make bench-peers ARGS=trl` makes it")
    folder.mkdir(parents=True)
    episodes.make_sums(folder, random.Random(0))
    own = episodes.recipe("calculator", "sft", 0)
    own["data"] |= {"chat_template": str(template), "train": str(folder / "played.jsonl")}
    own["model"] = {**own["model"], "path": str(folder / "model.gguf")}
    made = run({**own, "output": str(folder / "runs"), "threads": 2}).model
    (folder / "policy").symlink_to(Path(made).resolve())
    return folder


def task_of(folder: Path, threads: int, repeats: int) -> Task:
    """The same for both sides, but for the folder that each writes into."""
    rewards: list[dict[str, Any]] = [{"kind": "function", "function": episodes.RIGHT}]
    sizes = {"steps": 1, "repeats": repeats, "rows": COUNT, "samples": SAMPLES, "max_new_tokens": TOKENS}
    paths = {"weights": str(folder), "data": str(folder / "asked.jsonl"), "output": ""}
    common = {"method": "grpo", "model": PRETRAINED, "precision": "fp32", "threads": threads, "lora": 16}
    return Task(**common, **paths, **sizes, learning_rate=1e-6, kl=0.0, rewards=rewards, tool=episodes.TOOL)


def main() -> None:
    given = asked(__doc__, threads=2, repeats=2, json=KEPT)
    from task import read_rows

    from plaudit.data.write import write_rows

    folder = started(ROOT / "runs" / f"tools-{time.strftime('%Y%m%d-%H%M%S')}")
    rows = read_rows(folder / "prompts.jsonl")
    write_rows(folder / "asked.jsonl", [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    task = task_of(folder, given.threads, given.repeats)
    setting = Setting(folder, folder, given.threads, given.repeats, False, "kept", "default", True)
    entries = []
    for side in (SELF, TRL):
        place = folder / side
        (place / "output").mkdir(parents=True)
        entries.append(entry(side, replace(task, output=str(place / "output")), setting, place))
    results = contest(entries, steps=[1, 1], repeats=given.repeats)
    keep(folder / "result.json", [one if isinstance(one, str) else one.json() for one in results])
    show([line(side, one) for side, one in zip((SELF, TRL), results, strict=True)], kept=given.json)


def line(side: str, found: Result | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"side": side, "tok/s": "-", "s a step": "-", "tokens a step": "-", "right": "-", "MiB": found}
    seconds = found.tokens_per_step / found.rate
    return {
        "side": side,
        "tok/s": f"{found.rate:.0f}",
        "s a step": f"{seconds:.1f}",
        "tokens a step": f"{found.tokens_per_step:.0f}",
        "right": f"{found.figures['reward']:.0%}",
        "MiB": f"{found.peak_mib:,.0f}",
    }


if __name__ == "__main__":
    main()
