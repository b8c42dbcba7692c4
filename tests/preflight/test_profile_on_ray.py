"""What `plaudit profile` measures of Ray: a call, a publish, and the memory that Ray adds to a process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from plaudit.commands.cli import main
from plaudit.preflight import measure
from plaudit.preflight.profile import read_profile

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")]


def test_a_profile_on_ray(
    make_recipe: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.05)
    recipe = make_recipe("ppo", tmp_path, runtime={"kind": "ray"})
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(recipe))
    result = CliRunner().invoke(main, ["profile", str(tmp_path / "ppo.yaml")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = read_profile(tmp_path / "run.profile.json")
    assert 0 < found.call < 1
    store = found.links["store"]
    assert store != measure.USUAL["store"]
    assert store.bandwidth > 1e5
    assert "ray" in found.memory
