"""What is shown of an answer: with or without special tokens, up to a stop string."""

import pytest

from plaudit.rollout.text import text_before_stop, text_of
from plaudit.types import Sampling

PIECES = ["<a>", "<b>", "x", "yz", "é"]
"""Tokens 0 to 4, of which the first two are special; 5 and 6 are the halves of é."""


class Pieces:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        said = b""
        for token in token_ids:
            if token > 4:
                said += "é".encode()[token - 5 : token - 4]
            elif token > 1 or not skip_special_tokens:
                said += PIECES[token].encode()
        return said.decode(errors="replace")


@pytest.mark.parametrize(
    ("tokens", "stop", "plain", "whole"),
    [
        ([2, 1, 3, 0], "<a>", "xyz", "x<b>yz"),
        ([2, 1, 3, 0], "z<a>", "xy", "x<b>y"),
        ([2, 3, 0, 2], "a>x", "xyz<", "xyz<"),
        ([0, 2, 3], "yz", "x", "<a>x"),
        ([1, 5, 6, 3], "z", "éy", "<b>éy"),
        ([0, 2], "x", "", "<a>"),
        ([2, 3], "<a>", None, None),
    ],
)
def test_a_stop_string_may_hold_special_tokens_which_the_text_shows_or_not(
    tokens: list[int], stop: str, plain: str | None, whole: str | None
) -> None:
    for special, said in ((False, plain), (True, whole)):
        sampling = Sampling(stop=(stop,), special_tokens=special)
        assert text_before_stop(Pieces(), tokens, sampling) == said


def test_text_shows_special_tokens_where_asked_to() -> None:
    assert text_of(Pieces(), [0, 2, 1, 3], Sampling()) == "xyz"
    assert text_of(Pieces(), [0, 2, 1, 3], Sampling(special_tokens=True)) == "<a>x<b>yz"
