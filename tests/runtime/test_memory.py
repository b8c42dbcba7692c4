"""Freed memory is kept where the C library is glibc, and the person's own settings of it are left alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from assent.runtime.memory import VARIABLES, keep_freed_memory

FAULTS = """
import resource
from assent.runtime.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(1 << 26)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
faults()
print(kept, faults())
"""


def faults_of_a_second_block(**environment: str) -> tuple[str, int]:
    """Whether memory was kept, and how many pages of 64 MiB, taken a second time, the kernel had to give again."""
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=inherited | paths | environment, capture_output=True, text=True, check=True
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own behaviour")
def test_a_block_freed_and_taken_again_costs_no_page_fault() -> None:
    kept, faults = faults_of_a_second_block()
    assert kept == "True"
    assert faults < 100
    kept, faults = faults_of_a_second_block(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert faults > 10_000  # 64 MiB in pages of 4 KiB are 16,384


@pytest.mark.parametrize("name", VARIABLES)
def test_the_environments_word_is_the_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
