"""The GPU benchmark in small, on the CPU: that its parts work together; and its table by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu
import pytest
import torch
from gpu_decoding import decoded
from gpu_extent import Extent, Figure, memory, rated
from gpu_grpo import rows_of_a_pass
from report import put
from task import evenness

from plaudit.models.load import fresh_model

pytestmark = pytest.mark.slow


def test_every_part_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    parts = [part for part in gpu.PARTS if part != "trl"]  # another environment's
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--parts", ",".join(parts), "--json", str(path)])
    gpu.main()
    figures = json.loads(path.read_text())["figures"]
    assert [figure["part"] for figure in figures] == sorted(
        (figure["part"] for figure in figures), key=list(gpu.PARTS).index
    )
    assert {figure["part"] for figure in figures} == set(parts)
    lacking = [figure["note"] for figure in figures if "value" not in figure]
    assert [note.split(":")[0] for note in lacking] == [
        "not here, forwards",
        "not here, both_ways",
        "not here, both_ways",
    ]
    assert not [figure for figure in figures if "failed" in figure or figure.get("value", 0) < 0]
    gaps = [figure["note"] for figure in figures if figure["part"] == "attention" and "value" in figure]
    assert [float(note.removeprefix("off by ")) < 1e-5 for note in gaps] == [True] * 5
    by_part = {figure["part"]: figure for figure in figures}  # the last of each
    assert 0 <= by_part["kl"]["value"] < 1e-9
    grpo, *_, sampler_kl, waiting = [figure for figure in figures if figure["part"] == "grpo"]
    assert 0 <= sampler_kl["value"] < 1e-9
    assert "losses, rewards and gradients finite" in grpo["note"]
    assert waiting["note"] == grpo["note"], "the same rewards"
    assert all(figure["unit"] == "tok/s" and figure["share"] > 0 for figure in figures if figure["part"] == "train")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--parts", "device", "--json", str(path)])
    gpu.main()
    again = json.loads(path.read_text())["figures"]
    assert [figure["what"] for figure in again] == [figure["what"] for figure in figures]
    assert again[2:] == figures[2:], "other parts' figures are kept"


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(extent: Extent, best: object) -> list[Figure]:
        raise ValueError("no such kernel\nfurther lines")

    monkeypatch.setitem(gpu.PARTS, "train", ("training", fails))
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--parts", "train,device", "--json", str(path)])
    with pytest.raises(SystemExit):
        gpu.main()
    rows = gpu.cells(json.loads(path.read_text()))
    assert [row["what"] for row in rows][2] == "training"
    assert (rows[2]["found"], rows[2]["remark"]) == ("-", "ValueError: no such kernel")


def test_shares_by_hand() -> None:
    """Of 2 sequences with 4 tokens of prompt (a group's computed once) and 6 of answer."""
    extent = gpu.Extent(**{**vars(gpu.TINY), "prompt": 4, "answer": 6, "samples": 2})
    size = extent.size
    best = gpu.Peak(flops=1e30, bandwidth=1e9)
    figure = decoded(extent, best, 2, "by hand", 3.0, [])
    assert figure["value"] == 2 * 6 / 3.0
    read = size.parameters * 4 / 2 + (4 + 3) * 2 * 2 * 16 * 4  # weights shared by 2; 2 layers of K and V of 16 numbers
    assert figure["share"] == pytest.approx(4.0 * read / 1e9)
    assert rated("x", 5.0, 0.5, "peak", [7.0]) == {
        "what": "x", "value": 5.0, "unit": "tok/s", "share": 0.5, "of": "peak", "mib": 7.0
    }  # fmt: skip


def test_memory_is_that_of_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of earlier parts stay on the GPU, 3 MiB of them; one of 1 MiB is used by what is measured, or is not."""
    for name, found in {"memory_allocated": 3 << 20, "max_memory_allocated": 8 << 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    used = torch.nn.Linear(512, 512, bias=False)
    with memory("cuda", used) as ours, memory("cuda") as theirs:
        assert not ours
    assert (ours, theirs) == ([6.0], [5.0])


def test_trl_learns_in_passes_that_fit() -> None:
    """Of 256 answers of 384 tokens at most, 16,384 tokens at once; of 8 of 20, 128."""
    assert [rows_of_a_pass(extent) for extent in (gpu.FULL, gpu.TINY)] == [32, 4]


def test_the_model_is_as_large_as_it_is_called() -> None:
    with torch.device("meta"):
        found = fresh_model({**gpu.LLAMA_1B, "num_hidden_layers": 1, "vocab_size": 8}, device="meta")
    layer = sum(p.numel() for p in found.layers.parameters())  # type: ignore[operator, union-attr]
    assert 16 * layer + 128256 * 2048 + 2048 == 1_235_814_400  # as transformers counts Llama 3.2 1B


def test_evenness() -> None:
    assert [evenness(tokens) for tokens in ((), (2, 4), (1, 2, 3, 5))] == [0.0, 1.0, 0.25]


def test_the_table_goes_into_its_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    figures: list[Figure] = [
        {"part": "train", **rated("SFT", 12345.6, 0.456, "matrix peak", [2048.0])},
        {"part": "trl", "what": "GRPO by TRL", "note": "trl is not installed"},
    ]
    put(gpu.BEGIN, gpu.markdown({"figures": figures, "note": "by hand"}), gpu.END, page=page)
    text = page.read_text()
    assert "| SFT | 12,346 tok/s | 46% of the matrix peak | 2,048 |  |" in text
    assert "| GRPO by TRL | - |  |  | trl is not installed |" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert gpu.BEGIN in gpu.PAGE.read_text()
