"""What every contender starts from: texts, tokenizer, and the weights of policy and judge.

    demo grammar -> data/{short,eightfold,long,mixed,pairs,prompts}.jsonl, data/tokenizer
    model keys -> <model>/fresh (random weights), policy (after a short SFT, so that answers end), judge (fresh head)
    SmolLM2 from the package index -> 135M-49k/fresh, and policy, which is the same

Made once by Plaudit's own environment and kept in `runs/bench-workload`.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from task import MODELS, PRETRAINED, VOCABULARY, read_rows

WARM_START = {"tiny": 0, "4M": 80, "25M": 40, "25M-50k": 40, PRETRAINED: 0}
"""SFT steps of 32 rows before the online lines."""
SIZES = {"sft": 3000, "pairs": 1600, "prompts": 1000}
MANY = 160
"""Long and mixed texts."""
ROWS = {"short": SIZES["sft"], "eightfold": SIZES["sft"] // 8, "long": MANY, "mixed": MANY}
"""Demonstrations in each file."""


def main() -> None:
    folder, threads, models = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if not (folder / "data" / "ready").exists():
        make_data(folder / "data")
    for model in models:
        if not (folder / model / "ready").exists():
            make_weights(folder, model, threads)


def made(folder: Path, models: Iterable[str]) -> bool:
    """Whether everything is there."""
    return all((folder / part / "ready").exists() for part in ("data", *models))


def make_weights(folder: Path, model: str, threads: int) -> None:
    from plaudit import load_settings, run
    from plaudit.models.load import fresh_model, load_model, load_tokenizer, save_model

    target = folder / model
    shutil.rmtree(target, ignore_errors=True)
    origin = str(folder / "data" / "tokenizer")
    if model == PRETRAINED:  # fetched by the command's own code, which nothing here imports
        code = "from plaudit.commands import smollm2; print(smollm2.fetched())"
        origin = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    tokenizer = load_tokenizer(origin)
    keys, size = MODELS[model], len(tokenizer)
    fresh = load_model(origin) if model == PRETRAINED else fresh_model(keys, seed=0, vocab_size=size)
    save_model(fresh, target / "fresh", tokenizer=tokenizer)
    if WARM_START[model]:
        settings = {
            "name": "warm-start",
            "output": str(target),
            "threads": threads,
            "model": {"path": str(target / "fresh")},
            "data": {"train": str(folder / "data" / "short.jsonl")},
            "optimizer": {"learning_rate": 1e-3, "warmup": 0.1},
            "train": {"steps": WARM_START[model], "batch_size": 32},
        }
        trained = run(load_settings(settings, method="sft")).checkpoint("policy")
        save_model(load_model(str(trained)), target / "policy", tokenizer=tokenizer)
        shutil.rmtree(target / "warm-start")
    else:
        save_model(fresh, target / "policy", tokenizer=tokenizer)
    judge = load_model(str(target / "policy"), head="scalar", seed=0)
    save_model(judge, target / "judge", tokenizer=tokenizer)
    (target / "ready").touch()


def make_data(folder: Path) -> None:
    from plaudit.data.write import write_rows
    from plaudit.models.load import load_tokenizer
    from plaudit.tasks.demo import DemoSize, make_demo

    shutil.rmtree(folder, ignore_errors=True)
    size = DemoSize(**SIZES, sft_validation=1, pairs_validation=1, prompts_test=1, vocabulary=VOCABULARY)
    demo = make_demo(folder / "demo", seed=0, size=size)
    demo.tokenizer.rename(folder / "tokenizer")
    short = read_rows(demo.sft)
    texts = Texts(short, load_tokenizer(str(folder / "tokenizer")))
    rng = random.Random(0)
    write_rows(folder / "short.jsonl", short)
    write_rows(folder / "eightfold.jsonl", (joined(short[8 * row : 8 * row + 8]) for row in range(ROWS["eightfold"])))
    write_rows(folder / "long.jsonl", (texts.of(rng.randint(512, 1020)) for _ in range(MANY)))
    spread = (round(math.exp(rng.uniform(math.log(16), math.log(1020)))) for _ in range(MANY))
    write_rows(folder / "mixed.jsonl", map(texts.of, spread))
    write_rows(folder / "pairs.jsonl", one_a_prompt(read_rows(demo.preferences)))
    write_rows(folder / "prompts.jsonl", read_rows(demo.prompts))
    (folder / "ready").touch()


def joined(rows: list[dict[str, str]]) -> dict[str, str]:
    """One long demonstration: the first one's prompt, and everything else as its answer."""
    rest = "".join(f" {row['prompt']}{row['completion']}" for row in rows[1:])
    return {"prompt": rows[0]["prompt"], "completion": rows[0]["completion"] + rest}


class Texts:
    """Demonstrations of a wanted length, made of short ones in turn."""

    def __init__(self, rows: list[dict[str, str]], tokenizer: Any):
        self.rows, self.tokenizer, self.next = rows, tokenizer, 0

    def of(self, tokens: int) -> dict[str, str]:
        """A row of about so many tokens, prompt and end token included."""
        parts: list[dict[str, str]] = []
        length = 1
        while length < tokens:
            row = self.rows[self.next % len(self.rows)]
            self.next += 1
            parts.append(row)
            length += len(self.tokenizer(row["prompt"] + row["completion"])["input_ids"])
        whole = joined(parts)
        room = tokens - 1 - len(self.tokenizer(whole["prompt"])["input_ids"])
        kept = self.tokenizer(whole["completion"])["input_ids"][: max(room, 2)]
        return whole | {"completion": self.tokenizer.decode(kept)}


def one_a_prompt(pairs: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The first pair of each prompt: a batch is counted in prompts by one system and in pairs by the other."""
    seen = set()
    for pair in pairs:
        if pair["prompt"] not in seen:
            seen.add(pair["prompt"])
            yield pair


if __name__ == "__main__":
    main()
