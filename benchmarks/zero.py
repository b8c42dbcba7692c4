"""Stages of ZeRO and offloading beside DeepSpeed's, on the same weights and rows. Prints a table.

    sh benchmarks/setup_peers.sh deepspeed
    python benchmarks/zero.py [--rounds 5] [--speed] [--out FILE] [CASE ...]

A Llama of 25.7 million float32 weights learns on two ranks of one thread each, over gloo. Both systems of a case are
there at once and take turns, a step each, so that whatever else the machine does meets both alike. Theirs is the engine
of DeepSpeed around transformers' model (`zero_deepspeed.py`), ours the learner as a run has it.

tokens/s: median of the turns. held: tensors that a rank has between steps. peak: how far its memory rose in the first
step above what it had without a model. gap: of the gradient, to that of one rank without shards in the same system.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from zero_rank import CONFIG

from plaudit.models.load import fresh_model, save_model
from plaudit.runtime.network import free_address

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "replicate": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2, optimizer offloaded": {"stage": 2, "offload": True},
    "zero3, optimizer offloaded": {"stage": 3, "offload": True},
}
SYSTEMS = {
    "plaudit": (sys.executable, "zero_plaudit.py"),
    "deepspeed": (str(HERE.parent / ".venv-deepspeed/bin/python"), "zero_deepspeed.py"),
}
SAVED, ON = 2, (1, 3)
"""A checkpoint is written after so many steps, and taken up by so many ranks."""


class Contender:
    """The ranks of a system. Each reads commands and answers each with a line of JSON."""

    def __init__(self, system: str, case: dict[str, Any], world: int, folder: Path):
        python, script = SYSTEMS[system]
        host, _, port = free_address(held=False).rpartition(":")
        environment = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        self.log = folder / f"{system}.log"
        self.ranks = [
            subprocess.Popen(
                [python, str(HERE / script), json.dumps(case)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log.open("a"),
                text=True,
            )
            for rank in range(world)
        ]

    def do(self, what: str, *arguments: str) -> list[dict[str, Any]]:
        """What the ranks answer. Raises RuntimeError with what they said where one failed."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([what, *arguments]) + "\n")
            rank.stdin.flush()
        return [self._answer(rank) for rank in self.ranks]

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        for line in rank.stdout:  # libraries print there too
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise RuntimeError(f"a rank ended: {self.log.read_text()[-2000:]}")

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def compared(
    name: str, case: dict[str, Any], rounds: int, folder: Path, ranks: Sequence[int] = ON
) -> list[dict[str, Any]]:
    """A row for each system. `ranks`: numbers of ranks that go on from the checkpoint."""
    contenders = {system: Contender(system, case, 2, folder) for system in SYSTEMS}
    try:
        found = {system: {"case": name, "system": system, **one.do("first")[0]} for system, one in contenders.items()}
        turns: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for number in range(1, rounds + 1):
            for system, one in contenders.items():
                answers = one.do("step")
                if number > 1:
                    turns[system].append(answers[0]["tokens"] / max(answer["seconds"] for answer in answers))
                if number == SAVED:
                    one.do("save", str(folder / f"{system} saved"))
        for system, one in contenders.items():
            found[system] |= {"tokens/s": median(turns[system]), "turns": turns[system]}
            answers = one.do("held")
            found[system] |= {key: max(answer[key] for answer in answers) for key in ("held", "peak")}
            one.do("write", str(folder / f"{system} undisturbed.safetensors"))
    finally:
        for one in contenders.values():
            one.end()
    for system in SYSTEMS:
        found[system]["resumed"] = {world: resumed(system, case, world, rounds, folder) for world in ranks}
    return list(found.values())


def resumed(system: str, case: dict[str, Any], world: int, rounds: int, folder: Path) -> float | str:
    """How far weights are from the undisturbed ones where so many ranks went on; or why they did not."""
    from safetensors.torch import load_file

    one = Contender(system, case, world, folder)
    try:
        told = one.do("load", str(folder / f"{system} saved"))
        if failed := [answer["failed"] for answer in told if "failed" in answer]:
            return str(failed[0])
        for _ in range(SAVED, rounds):
            one.do("step")
        one.do("write", str(folder / f"{system} on {world}.safetensors"))
    finally:
        one.end()
    mine, other = (load_file(folder / f"{system} {how}.safetensors") for how in (f"on {world}", "undisturbed"))
    return max(float((mine[key] - other[key]).abs().max()) for key in other)


def alone(folder: Path) -> None:
    """The model, and the gradient of one rank in each system."""
    save_model(fresh_model(CONFIG), folder / "model")
    for system in SYSTEMS:
        one = Contender(system, CASES["replicate"] | {"start": str(folder)}, 1, folder)
        one.do("first", "write")
        one.end()


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("case", "system", "tokens/s", "times", "held MiB", "peak MiB", "gap", *(f"resume on {n}" for n in ON))
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    theirs = {row["case"]: row["tokens/s"] for row in rows if row["system"] == "deepspeed"}
    for row in rows:
        ratio = f"{row['tokens/s'] / theirs[row['case']]:.2f}" if row["system"] == "plaudit" else ""
        told = [row["resumed"].get(world, "") for world in ON]
        again = [f"{far:.0e}" if isinstance(far, float) else "refused" * bool(far) for far in told]
        cells = (f"{row['tokens/s']:.0f}", ratio, f"{row['held']:.0f}", f"{row['peak']:.0f}", f"{row['gap']:.0e}")
        lines.append("| " + " | ".join((row["case"], row["system"], *cells, *again)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speed", action="store_true", help="go on from no checkpoint")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        alone(Path(kept))
        for name in options.cases or CASES:
            folder = Path(kept) / name
            folder.mkdir()
            rows += compared(name, CASES[name] | {"start": kept}, options.rounds, folder, () if options.speed else ON)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(table(rows[-2:]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
