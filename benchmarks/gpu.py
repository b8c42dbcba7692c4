"""One GPU: what it does at best, and how much of that training, decoding and GRPO of a 1B model reach.

    options -> peak -> each of PARTS -> table, JSON, docs/gpu.md

`--tiny` does everything with a model of a few thousand weights, on the CPU in seconds, to see that it works. A part
that fails is named in the table, and the others go on. Needs neither Ray nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from floor import Peak
from gpu_attention import attention
from gpu_decoding import agreement, decoding
from gpu_extent import Extent, Figure
from gpu_grpo import grpo, trl_grpo
from gpu_learning import compiled, offload, peak, profile, the_device, training
from report import ROOT, number, put
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by benchmarks/gpu.py -->", "<!-- end of figures -->"
PARTS: dict[str, tuple[str, Callable[[Extent, Peak], Iterable[Figure]]]] = {
    "device": ("the device", the_device),
    "train": ("training", training),
    "compile": ("torch.compile", compiled),
    "attention": ("attention", attention),
    "decode": ("decoding", decoding),
    "kl": ("agreement", agreement),
    "offload": ("a model that waits", offload),
    "grpo": ("GRPO", grpo),
    "trl": ("GRPO by TRL", trl_grpo),
    "profile": ("where the time goes", profile),
}
"""Title and measurement of each."""
ASIDE = ("profile",)
"""Only where asked for."""

LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""The shape of Llama 3.2 1B: 1.24 billion weights."""
FULL = Extent(
    device="cuda",
    dtype="bfloat16",
    config=LLAMA_1B,
    products=(4096, 8192, 16384),
    mib=(1024, 4096),
    rows=32,
    length=2048,
    micro=(8192, 16384, 32768, 65536),
    steps=3,
    slots=(64, 256),
    samples=16,
    prompt=128,
    answer=256,
    prompts=16,
    sampled=256,
    updates=3,
)
TINY = Extent(
    device="cpu",
    dtype="float32",
    config=LLAMA_1B
    | {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    products=(64, 128),
    mib=(1, 2),
    rows=4,
    length=32,
    micro=(64, 128),
    steps=1,
    slots=(4, 8),
    samples=4,
    prompt=8,
    answer=12,
    prompts=2,
    sampled=12,
    updates=2,
)


def main() -> None:
    options = read_options()
    extent = TINY if options.tiny else FULL
    if extent.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU was found: --tiny does the same in small on the CPU")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    result = measured(options.parts, extent, options.json, console)
    console.print(table_of(result))
    console.print(result["note"], markup=False)
    console.print(f"every figure: {options.json}", markup=False)
    if options.publish:
        put(BEGIN, markdown(result), END, page=PAGE)
        console.print(f"written: {PAGE}", markup=False)
    if any("failed" in figure for figure in result["figures"]):
        sys.exit(1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts",
        default=",".join(part for part in PARTS if part not in ASIDE),
        help=f"some of {', '.join(PARTS)}, separated by commas",
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to see that all parts work")
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    kept = "where figures go; parts of an earlier call in the same file stay, unless they are measured again"
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "gpu.json", help=kept)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if options.tiny and options.publish:
        parser.error("--publish is for figures of a GPU, and --tiny has none")
    return options


def measured(parts: list[str], extent: Extent, path: Path, console: Console) -> dict[str, Any]:
    """All parts, one after the other; each figure is written as soon as it is found."""
    began = time.perf_counter()
    earlier = json.loads(path.read_text())["figures"] if path.exists() else []
    figures = [figure for figure in earlier if figure["part"] not in parts]
    best = peak(extent)
    result: dict[str, Any] = {"note": note(extent, 0.0), "figures": figures}
    for name in parts:
        console.print(f"[{time.perf_counter() - began:5.0f} s] {PARTS[name][0]}", markup=False)
        for figure in attempted(name, extent, best):
            figures.append({"part": name, **figure})
            figures.sort(key=lambda figure: list(PARTS).index(figure["part"]))
            result["note"] = note(extent, time.perf_counter() - began)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def attempted(name: str, extent: Extent, best: Peak) -> Iterator[Figure]:
    """A part's figures as they are found, and what kept it from having more."""
    title, measure = PARTS[name]
    try:
        yield from measure(extent, best)
    except Exception as error:  # noqa: BLE001 - the others are still worth knowing
        traceback.print_exc()
        why = str(error).splitlines()[0] if str(error) else ""
        yield {"what": title, "failed": f"{type(error).__name__}: {why}"}


def note(extent: Extent, seconds: float) -> str:
    where = torch.cuda.get_device_name() if extent.device == "cuda" else f"{platform.machine()}, no GPU"
    size = extent.size.parameters / 1e9
    return (
        f"{time.strftime('%Y-%m-%d')}, {where}; torch {version('torch')}, transformers {version('transformers')}; "
        f"{extent.dtype}, random weights, {size:.2f} billion of them in matrix products; {seconds:.0f} s in all."
    )


def cells(result: dict[str, Any]) -> list[dict[str, str]]:
    """The table's rows."""
    rows = []
    for figure in result["figures"]:
        share, mib = figure.get("share"), figure.get("mib")
        rows.append(
            {
                "what": figure["what"],
                "found": "-" if "value" not in figure else f"{number(figure['value'])} {figure['unit']}",
                "share": "" if share is None else f"{share:.0%} of the {figure['of']}",
                "MiB": "" if mib is None else f"{mib:,.0f}",
                "remark": figure.get("failed") or figure.get("note") or "",
            }
        )
    return rows


def table_of(result: dict[str, Any]) -> Table:
    table = Table(title="one GPU", title_justify="left", padding=(0, 1, 0, 0))
    for title in ("what", "found", "share", "MiB", "remark"):
        table.add_column(title, justify="right" if title in ("found", "MiB") else "left")
    for row in cells(result):
        table.add_row(*map(escape, row.values()))
    return table


def markdown(result: dict[str, Any]) -> str:
    lines = ["| what | found | share | MiB at most | remark |", "|---|---:|---|---:|---|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in cells(result)]
    return "\n".join([*lines, "", result["note"], ""])


if __name__ == "__main__":
    main()
