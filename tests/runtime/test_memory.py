"""Freed memory is kept where the C library is glibc, and the person's own settings of it are left alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plaudit.runtime.memory import VARIABLES, host_memory, keep_freed_memory

pytestmark = pytest.mark.slow

FAULTS = """
import resource

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(1 << 26)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
{between}
print(kept, faults())
"""
KEEP = "from plaudit.runtime.memory import keep_freed_memory; kept = keep_freed_memory()"
RUN = "import sys; from plaudit import load_settings, run; kept = run(load_settings(sys.argv[1])) is not None"

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own behaviour")


def faults_of_a_second_block(
    first: str = KEEP, *arguments: str, between: str = "", **environment: str
) -> tuple[str, int]:
    """What a process called `kept`, and how many pages of 64 MiB, taken a second time, the kernel had to give again."""
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", first + FAULTS.format(between=between), *arguments]
    done = subprocess.run(command, env=inherited | paths | environment, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept, int(count)


@on_glibc
def test_a_block_freed_and_taken_again_costs_no_page_fault() -> None:
    kept, faults = faults_of_a_second_block()
    assert kept == "True"
    assert faults < 100
    kept, faults = faults_of_a_second_block(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert faults > 10_000  # 64 MiB in pages of 4 KiB are 16,384


@on_glibc
@pytest.mark.parametrize(("plenty", "least", "most"), [(0.0, 0, 100), (1.0, 10_000, 20_000)])
def test_who_shares_a_device_gives_back_pages_only_where_memory_is_scarce(plenty: float, least: int, most: int) -> None:
    rest = f"from plaudit.runtime import memory; memory.PLENTY = {plenty}; memory.make_room()"
    kept, faults = faults_of_a_second_block(between=rest)
    assert kept == "True"
    assert least <= faults < most


def test_free_memory_is_a_part_of_all() -> None:
    free, whole = host_memory()
    assert 0 < free <= whole


@on_glibc
def test_a_run_from_python_keeps_freed_memory_as_the_command_does(make_recipe: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"  # which YAML reads
    recipe.write_text(json.dumps(make_recipe("sft", tmp_path, train={"steps": 1}, overwrite=True)))
    assert faults_of_a_second_block(RUN, str(recipe))[1] < 100
    assert faults_of_a_second_block(RUN, str(recipe), MALLOC_TRIM_THRESHOLD_="131072")[1] > 10_000


@pytest.mark.parametrize("name", VARIABLES)
def test_the_environments_word_is_the_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
