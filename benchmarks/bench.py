"""Plaudit beside the systems that people use, and beside what the machine can do: one run, one table.

    options -> rows of lines.py -> workload (once) -> for each row: a contest (measure.py) -> table, result.json

Contenders run in environments of their own (`make bench-peers`); docs/benchmarks.md says what each line means and how
tokens are counted. Left out: GPUs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from anatomy import table_of, text_of
from contest import ContenderError
from harness import HERE, ROOT, SOURCE, about, keep, versions
from lines import ASIDE, LINES, SMALL, Row, chosen, rows
from measure import Machine, Setting, measure, profile
from report import PAGE, PROFILE_BEGIN, PROFILE_END, markdown, publish, put
from start import measure_start
from task import MODELS, PRECISIONS, PRETRAINED
from workload import made


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no contender behind
    options = read_options()
    setting = Setting(
        folder=ROOT / "runs" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}",
        workload=ROOT / "runs" / "bench-workload",
        threads=options.threads,
        repeats=options.repeats or (2 if options.quick else 3),
        hurry=options.quick,
        malloc=options.malloc,
        wait=options.wait,
        peers=not options.alone,
    )
    extent = "quick" if options.quick else "full" if options.full else "usual"
    wanted = list(rows(options.lines, options.models, options.precision, extent=extent))
    aside = [name for name in options.lines if name in ASIDE]
    setting.folder.mkdir(parents=True)
    models = {row.model for row in wanted} | ({"tiny"} if "start-step" in aside else set())
    prepare(sorted(models), setting)
    if options.profile:
        profiles = explain(wanted, setting)
        if options.publish:
            put(PROFILE_BEGIN, table_of(profiles), PROFILE_END)
            print(f"written: {PAGE}", flush=True)
        return
    result = run(wanted, aside, setting)
    print(markdown(result))
    if options.publish:
        own = PRETRAINED if options.models == [PRETRAINED] else None  # a table of its own, in place of no other's
        for path in publish(result, own):
            print(f"written: {path}", flush=True)
    for output in setting.folder.glob("**/output"):
        shutil.rmtree(output)
    print(f"every figure: {setting.folder / 'result.json'}", flush=True)
    if any("missing" in record["ours"] for record in result["records"]):
        sys.exit(1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*LINES, *ASIDE]
    parser.add_argument("--lines", help=f"some of {', '.join(names)}, or how they begin (gen); separated by commas")
    parser.add_argument("--models", help="4M, 25M, 25M-50k, 135M-49k")
    parser.add_argument("--precision", help="fp32, bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every contender")
    parser.add_argument("--repeats", type=int, help="measured segments of each side; 3, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few lines and half the steps: about a minute")
    parser.add_argument("--full", action="store_true", help="every line in every model and precision")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--profile", metavar="LINES", help="where the time of these lines goes, in place of the table")
    parser.add_argument("--publish", action="store_true", help="write what was found into docs/")
    parser.add_argument("--malloc", choices=("kept", "default"), default="kept", help="glibc's memory, for all sides")
    waits = "how all sides' OpenMP threads wait: torch's default spins for some ms"
    parser.add_argument("--wait", choices=("default", "passive"), default="default", help=waits)
    options = parser.parse_args()
    for name in ("threads", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: give 1 or more")
    quick = [*(name for name, line in LINES.items() if line.quick), "start-help"]
    given = options.profile or options.lines
    try:
        options.lines = chosen(split(given)) if given else quick if options.quick else names
    except ValueError as error:
        parser.error(str(error))
    for name, known in (("models", set(MODELS) - {"tiny"}), ("precision", set(PRECISIONS))):
        found = split(getattr(options, name) or "")
        if unknown := set(found) - known:
            parser.error(f"--{name} {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}")
        setattr(options, name, found or None)
    if options.profile and options.models is None and options.precision is None:
        options.models, options.precision = [SMALL[0]], [SMALL[1]]
    return options


def split(given: str) -> list[str]:
    return given.replace(",", " ").split()


def prepare(models: list[str], setting: Setting) -> None:
    """Data and weights; those of an earlier run are used again."""
    if made(setting.workload, models):
        return
    print(f"making texts and weights in {setting.workload}, once", flush=True)
    log = setting.folder / "workload.log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, str(HERE / "workload.py"), str(setting.workload), str(setting.threads), *models],
            env={**os.environ, **setting.environment(), **SOURCE},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        sys.exit(f"the workload could not be made; see {log}")


def run(wanted: list[Row], aside: list[str], setting: Setting) -> dict[str, Any]:
    """Every row, one after the other; what is known is written after each."""
    began, before = time.perf_counter(), about()
    machine = Machine(setting)
    result: dict[str, Any] = {"note": "", "peaks": {}, "records": []}
    try:
        machine.ask({row.precision for row in wanted})
        steps = [*((row.key, row) for row in wanted), *((name, None) for name in aside)]
        for name, row in steps:
            print(f"[{time.perf_counter() - began:5.0f} s] {name}", flush=True)
            record = measure_start(name, setting) if row is None else measure(row, setting)
            if row is not None:
                machine.ask([row.precision])
            result["records"].append(record)
            result["peaks"] = {name: vars(peak) for name, peak in machine.best.items()}
            result["note"] = note(setting, result["peaks"], seconds=time.perf_counter() - began, before=before)
            keep(setting.folder / "result.json", result)
    finally:
        machine.close()
    return result


def note(setting: Setting, peaks: dict[str, Any], *, seconds: float, before: str) -> str:
    """The paragraph under the table."""
    best = "; ".join(
        f"best {precision} matrix product {peak['flops'] / 1e9:,.0f} GFLOP/s (laid out for oneDNN "
        f"{peak['packed'] / 1e9:,.0f}), read {peak['bandwidth'] / 1e9:,.0f} GB/s"
        for precision, peak in peaks.items()
    )
    return (
        f"{before}; {best}; {', '.join(' '.join(pair) for pair in versions().items())}; glibc memory {setting.malloc}, "
        f"OpenMP waits {setting.wait.lower()}; medians of {setting.repeats} segments after a warm-up, sides in turn; "
        f"{seconds:.0f} s in all."
    )


def explain(wanted: list[Row], setting: Setting) -> dict[str, Any]:
    """Profiles instead of the table."""
    profiles: dict[str, Any] = {}
    for row in wanted:
        try:
            profiles[row.key] = profile(row, setting)
        except ContenderError as error:
            print(f"{row.key}: {error}", flush=True)
            continue
        print(text_of(row.key, profiles[row.key]), flush=True)
    keep(setting.folder / "profiles.json", profiles)
    return profiles


if __name__ == "__main__":
    main()
