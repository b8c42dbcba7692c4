"""Rules of settings, and nested values by their dotted keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from plaudit.support.fields import DEVICE, Rule, complaints, flat, nearest, one_of, setting


@dataclass
class Where:
    device: str = setting("auto", **DEVICE)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_choice_or_a_text_of_the_form_is_taken(device: str) -> None:
    assert complaints(Where(device)) == []


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "xcuda:1", "cuda:1x", "cuda:NUMBER"])
def test_any_other_text_is_refused_with_what_is_allowed(device: str) -> None:
    (told,) = complaints(Where(device))
    assert told.startswith(f"device={device} must be one of auto, cpu, cuda, cuda:NUMBER")


def test_without_a_form_an_empty_text_is_no_choice() -> None:
    assert not Rule(choices=("a", "b")).takes("")


@pytest.mark.parametrize(
    ("plain", "found"),
    [
        ({"a": {"b": 1, "c": {}}, "d": [2, {"e": 3}]}, {"a.b": 1, "a.c": {}, "d.0": 2, "d.1.e": 3}),
        ({"a": [], "b": None}, {"a": [], "b": None}),
        (7, {"": 7}),
    ],
)
def test_flat_gives_each_value_its_dotted_key(plain: Any, found: dict[str, Any]) -> None:
    assert flat(plain) == found


def test_flat_begins_at_a_given_key() -> None:
    assert flat({"b": {"c": 1}}, "a") == {"a.b.c": 1}


def test_the_nearest_name_is_asked_for_in_one_form() -> None:
    assert nearest("lenth", ["length", "width"]) == one_of(["length"]) == "; did you mean length?"
    assert one_of(["a", "b"]) == "; did you mean a or b?"
