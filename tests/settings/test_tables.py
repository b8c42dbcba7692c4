"""What `plaudit settings` and docs/settings.md say of the settings, and that each says what it is."""

from __future__ import annotations

import keys
import pytest
import yaml
from tables import PAGE, page

from plaudit.algorithms import ALGORITHMS
from plaudit.rewards.settings import RewardSettings
from plaudit.settings.recipes import defaults
from plaudit.settings.tree import Settings, annotated, resolved
from plaudit.support.fields import complaints, leaves


def test_settings_are_few() -> None:
    """What nobody should touch is a constant with its reason."""
    assert len([*leaves(defaults("ppo"))]) <= 160


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make settings"
    assert keys.PAGE.read_text(encoding="utf-8") == keys.page(), "run: make settings"


@pytest.mark.parametrize("method", ALGORITHMS)
def test_what_is_printed_is_the_tree_with_its_prose(method: str) -> None:
    printed = annotated(leaves(defaults(method)), {})
    assert {"algorithm": {}} | yaml.safe_load(printed) == yaml.safe_load(resolved(defaults(method)))
    assert "  # Longest answer. At least 1 (tokens).\n  max_tokens: 64" in printed


@pytest.mark.parametrize("tree", [Settings, RewardSettings, *ALGORITHMS.values()])
def test_every_setting_has_prose_and_its_default_is_allowed(tree: type) -> None:
    assert [leaf.key for leaf in leaves(tree) if not leaf.prose] == []
    assert complaints(tree()) == []
