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
from pathlib import Path
from typing import Any

import torch
from floor import Peak
from gpu_attention import attention
from gpu_decoding import agreement, decoding
from gpu_extent import Extent, Figure
from gpu_grpo import grpo, trl_grpo
from gpu_learning import compiled, offload, peak, profile, the_device, training
from harness import ROOT, keep, table, versions
from report import number, put

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
SMALL = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
TINY = Extent(
    device="cpu",
    dtype="float32",
    config=LLAMA_1B | SMALL,
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
    result = measured(options.parts, extent, options.json)
    print(markdown(result))
    print(f"every figure: {options.json}", flush=True)
    if options.publish:
        put(BEGIN, markdown(result), END, page=PAGE)
        print(f"written: {PAGE}", flush=True)
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


def measured(parts: list[str], extent: Extent, path: Path) -> dict[str, Any]:
    """All parts, one after the other; each figure is written as soon as it is found."""
    began = time.perf_counter()
    earlier = json.loads(path.read_text())["figures"] if path.exists() else []
    figures = [figure for figure in earlier if figure["part"] not in parts]
    best = peak(extent)
    result: dict[str, Any] = {"note": note(extent, 0.0), "figures": figures}
    for name in parts:
        print(f"[{time.perf_counter() - began:5.0f} s] {PARTS[name][0]}", flush=True)
        for figure in attempted(name, extent, best):
            figures.append({"part": name, **figure})
            figures.sort(key=lambda figure: list(PARTS).index(figure["part"]))
            result["note"] = note(extent, time.perf_counter() - began)
            keep(path, result)
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
        f"{time.strftime('%Y-%m-%d')}, {where}; {', '.join(' '.join(pair) for pair in versions().items())}; "
        f"{extent.dtype}, random weights, {size:.2f} billion of them in matrix products; {seconds:.0f} s in all."
    )


def cells(result: dict[str, Any]) -> list[dict[str, str]]:
    """The table's rows."""
    return [
        {
            "what": figure["what"],
            "found": f"{number(figure['value'])} {figure['unit']}" if "value" in figure else "-",
            "share": f"{figure['share']:.0%} of the {figure['of']}" if figure.get("share") is not None else "",
            "MiB": f"{figure['mib']:,.0f}" if figure.get("mib") is not None else "",
            "remark": figure.get("failed") or figure.get("note") or "",
        }
        for figure in result["figures"]
    ]


def markdown(result: dict[str, Any]) -> str:
    titles = ("what", "found", "share", "MiB at most", "remark")
    told = table(titles, (row.values() for row in cells(result)), left=("share", "remark"))
    return "\n".join([told, "", result["note"], ""])


if __name__ == "__main__":
    main()
