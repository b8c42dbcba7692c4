"""The script of a process, started by `mathematics.py`, that compares mathematical answers by math-verify.

    arguments: seconds, bytes     lines of standard input: [reference, answer] as JSON -> "ready", then 0 or 1

A comparison that takes more CPU time ends the process. math-verify's own limits are signals, which Python handles only
between two steps, and a power of large numbers is one step. The script imports nothing of Plaudit, to start quickly.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

KINDS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
"""What math-verify extracts from a text: boxed content first, then other LaTeX and plain expressions."""


def limit(what: str, most: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        number = getattr(resource, what)
        resource.setrlimit(number, (most, resource.getrlimit(number)[1]))


def equal(reference: str, answer: str) -> bool:
    """True if both are mathematically equal, read as the same kind of thing (set, equation); False if unparsable."""
    expected = parse(reference, KINDS, parsing_timeout=None)
    return bool(expected) and verify(expected, parse(answer, KINDS, parsing_timeout=None), timeout_seconds=None)


def main() -> None:
    seconds, memory = map(int, sys.argv[1:])
    logging.disable()
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # only verdicts are written there
    limit("RLIMIT_AS", memory)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        limit("RLIMIT_CPU", int(time.process_time()) + seconds + 1)
        print(int(equal(*json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
