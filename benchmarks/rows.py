"""How much memory a data set takes: rows are stored, and drawn in shuffled batches as training draws them.

    python benchmarks/rows.py --rows 10000000             rows of random tokens
    python benchmarks/rows.py --rows 1000000 --texts      rows of random words, read and tokenised as a run does
    python benchmarks/rows.py --rows 1000000 --train      those words, and a whole run of SFT: a tiny model, checkpoints

Figures are of this process: its own memory (RssAnon of /proc/self/status, the highest of samples every 50 ms), without
the pages of the mapped file, which the system takes back when it needs room.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import asked, resident

TOKENS = 200
"""Of a row: half of them asked, half trained."""


class Peak:
    """The most MiB that were this process's own since it began."""

    def __init__(self) -> None:
        self.most = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, resident("RssAnon"))
            time.sleep(0.05)


def texts(count: int) -> Iterator[dict[str, str]]:
    """Rows of words of one token each, for a tokenizer of words."""
    words = [f"w{number}" for number in range(1000)]
    chance = random.Random(0)
    for _ in range(count):
        drawn = chance.choices(words, k=TOKENS - 1)
        yield {"prompt": " ".join(drawn[:100]) + " ", "completion": " ".join(drawn[100:])}


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(1000)} | {"<eos>": 1000}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


def random_rows(count: int) -> Any:
    import numpy as np

    from plaudit.data.store import RowItems, Writer
    from plaudit.types import Row

    writer = Writer(RowItems())
    drawn = np.random.default_rng(0)
    trainable = (False,) * (TOKENS // 2) + (True,) * (TOKENS // 2)
    for first in range(0, count, 1024):
        tokens = drawn.integers(0, 50_000, (min(1024, count - first), TOKENS)).tolist()
        writer.add((Row(tokens=tuple(ids), trainable=trainable, group=first + i),) for i, ids in enumerate(tokens))
    return writer.items()


def source_of(folder: Path, count: int) -> str:
    """What `data.train` names so that it gives so many rows of words."""
    written = folder / "source.py"
    written.write_text(f"from rows import texts\n\ndef rows():\n    return texts({count})\n")
    return f"{written}:rows"


def trained(folder: Path, count: int, steps: int) -> None:
    from plaudit import load_settings, run

    word_tokenizer().save_pretrained(folder / "tokenizer")
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = {
        "method": "sft",
        "output": str(folder / "run"),
        "model": {"config": config | {"intermediate_size": 64}, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": source_of(folder, count), "validation": "0.01%", "max_tokens": 256, "max_prompt_tokens": 128},
        "train": {"steps": steps, "batch_size": 64},
        "save": {"every": max(steps // 2, 1)},
    }
    run(load_settings(recipe))


def main(arguments: Sequence[str] | None = None) -> None:
    given = asked(__doc__, arguments, rows=1_000_000, steps=200, texts=False, train=False)

    import torch  # noqa: F401  (a run has it loaded)

    from plaudit.data.cursor import Cursor
    from plaudit.data.load import load_demonstrations
    from plaudit.data.settings import DataSettings
    from plaudit.loop.offline import OfflineSource

    peak, began = Peak(), time.perf_counter()
    print(f"before: {resident('RssAnon'):,.0f} MiB")
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        if given.train:
            trained(folder, given.rows, given.steps)
            seconds = time.perf_counter() - began
            print(f"trained on {given.rows:,} rows in {seconds:,.0f} s: peak {peak.most:,.0f} MiB")
            return
        if given.texts:
            settings = DataSettings(train=source_of(folder, given.rows), validation="1%")
            data = load_demonstrations(settings, word_tokenizer(), 0)
            items, cursor = data.items, data.cursor(0)
        else:
            items = random_rows(given.rows)
            cursor = Cursor(len(items))
        print(f"stored {len(items):,} rows in {time.perf_counter() - began:,.0f} s: peak {peak.most:,.0f} MiB")
        source = OfflineSource(items, cursor, batch_size=64, unit=1)
        began = time.perf_counter()
        for _ in range(given.steps):
            asyncio.run(source.next())
        each = (time.perf_counter() - began) / given.steps
        print(f"drew {given.steps} batches of 64, {each * 1e3:.2f} ms each: peak {peak.most:,.0f} MiB")


if __name__ == "__main__":
    main()
