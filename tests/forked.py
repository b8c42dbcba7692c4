"""Jobs that several processes of a test do together: a script forks them, which share one import of torch.

    at_work -> python SCRIPT JOBS.json WORLD -> fork -> `work` in each process, whose log lies beside JOBS.json

Left out: what a job is, which the script says.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from plaudit.runtime.network import free_address

PATIENCE = 900.0
"""Seconds for the jobs of a file: some forty on two idle cores, far more beside three other test processes."""
GRACE = 20.0
"""Seconds for the others after one failed; by then they have said why they cannot go on."""


def at_work(
    script: str, jobs: Sequence[Mapping[str, Any]], world: int, folder: Path, environment: Mapping[str, str]
) -> None:
    """Let `script` do the jobs in so many processes. Fails with what they said if one failed or they took too long."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    command = [sys.executable, script, str(folder / "jobs.json"), str(world)]
    path = {"PYTHONPATH": f"{environment['PYTHONPATH']}:{Path(__file__).parent}"}
    process = subprocess.Popen(command, env={**environment, **path}, start_new_session=True)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("process*.log")))
    assert process.returncode == 0, f"exit status {process.returncode}; None: cut off after {PATIENCE:.0f} s\n{said}"


def fork(work: Callable[[list[Any], int, int, str], None]) -> None:
    """The script's own process: `work(jobs, number, world, address)` in each of the others."""
    file, world, address = Path(sys.argv[1]), int(sys.argv[2]), free_address()

    def begin(number: int) -> None:
        log = file.with_name(f"process{number}.log").open("w", buffering=1)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        faulthandler.dump_traceback_later(PATIENCE - GRACE, file=log)
        torch.set_num_threads(1)
        work(json.loads(file.read_text()), number, world, address)
        sys.stdout.flush()
        os._exit(0)  # a thread of gloo that asks for the interpreter while it ends would abort the process

    context = multiprocessing.get_context("fork")
    running = [context.Process(target=begin, args=(number,)) for number in range(world)]
    for process in running:
        process.start()
    left, failed = {process.sentinel: process for process in running}, False
    while left and (ended := wait(list(left), GRACE if failed else None)):
        for sentinel in ended:
            process = left.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            failed |= process.exitcode != 0
    os._exit(failed)  # without waiting for those left, which `at_work` ends
