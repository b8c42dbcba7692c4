"""moto's S3 server in a process of its own: what s3fs speaks with, as with a store elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import pytest
from listening import free_port


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of an empty bucket. Until the end, s3fs finds the server, also in processes started then."""
    for package in ("s3fs", "moto"):
        pytest.importorskip(package, reason=f"{package} is not installed: make test-trackers runs this")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            for name, value in (
                ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
                ("AWS_ACCESS_KEY_ID", "test"),
                ("AWS_SECRET_ACCESS_KEY", "test"),
                ("AWS_DEFAULT_REGION", "us-east-1"),
            ):
                patch.setenv(name, value)
            answered(f"http://127.0.0.1:{port}/moto-api/", server)
            import s3fs

            name = f"box-{uuid.uuid4().hex[:12]}"
            s3fs.S3FileSystem().mkdir(name)
            yield f"s3://{name}"
        finally:
            server.kill()


def answered(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + 120
    while True:
        try:
            with urlopen(url, timeout=10):
                return
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < end, "no answer"
            time.sleep(0.1)
