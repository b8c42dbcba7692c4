"""Why a process ended, from what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from plaudit.runtime.died import READ, last_lines, reason

CRASH = """:job_id:01000000
:actor_name:Host
the kernel says 700
*** SIGSEGV received at time=1764377341 on cpu 1 ***
PC: @     0x7f7c0a3d1a6d  (unknown)  __strlen_avx2
    @     0x7f7c0a28b520  1  (unknown)
[2026-11-29 00:49:01,531 E 2675 2702] logging.cc:474: *** SIGSEGV received at time=1764377341 on cpu 1 ***
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/reward.py", line 9 in score
  File "/home/me/other.py", line 1 in run

Extension modules: msgpack._cmsgpack (total: 1)
""".splitlines()
"""As Ray 2.60 and Python 3.11 write it."""


@pytest.mark.parametrize(
    ("lines", "message", "found"),
    [
        (
            CRASH,
            "",
            "in string_at (__init__.py:519), called by score (reward.py:9); its stderr ends: the kernel says 700",
        ),
        (["Fatal Python error: Aborted"], "", "ended by SIGABRT"),
        ([], "Worker exits with an exit code 4.", "ended with exit code 4"),
        (["a", "", "b ", "c", "d"], "", "or os._exit; its stderr ends: b | c | d"),
        ([":job_id:01", "x" * 500], "", "its stderr ends: " + "x" * 200),
        ([":job_id:01"], "", "or os._exit"),
    ],
)
def test_a_reason_has_signal_place_and_last_lines(lines: list[str], message: str, found: str) -> None:
    assert reason(lines, message).endswith(found)


def test_the_end_of_a_large_file_is_read_and_no_file_is_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_bytes(b"\xff" * READ * 2 + b"\nthe end\n")
    assert last_lines(str(path))[-1] == "the end"
    assert last_lines(str(tmp_path / "none")) == last_lines("") == []
