"""Text that others wrote, as a terminal, a log or an error may show it: control characters as JSON writes them.

    visible("\\x1b[2Jdone\\r") -> "\\u001b[2Jdone\\r", both as backslashes and letters

An escape sequence would move the cursor, set the clipboard or the title, or hide lines; a bidi override would show
letters in another order than they stand. Left out: look-alike letters, which are text.
"""

from __future__ import annotations

import json
import unicodedata
from decimal import Decimal

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control characters, formats, lone surrogates and separators of lines and paragraphs."""
JOINERS = "\u200c\u200d"
"""Formats that only join or part two letters. Persian, Hindi and emoji are written with them."""
LARGE = 1e12
"""Numbers from here on are shown by their first digits: a float may have 309 before its point."""


def visible(text: str, *, line: bool = False) -> str:
    """Return the text with control characters, which a terminal obeys, as JSON's escapes. Line feeds and tabs stay;
    with `line` they are escaped too. JSON keeps its meaning. Text that is escaped already does not change."""
    if text.isprintable():
        return text
    allowed = JOINERS if line else JOINERS + "\n\t"
    for letter in set(text):
        if not letter.isprintable() and letter not in allowed:
            text = text.replace(letter, _escaped(letter))
    return text


def _escaped(letter: str) -> str:
    if letter == "\x7f":  # DEL: JSON does not escape it
        return "\\u007f"
    return json.dumps(letter)[1:-1] if unicodedata.category(letter) in HIDDEN else letter


def rounded(value: float, form: str) -> str:
    """Return a number by a format such as ".3f", or by four digits and an exponent if it is large."""
    try:
        number = float(value)
    except OverflowError:  # an integer
        return f"{Decimal(value):.4g}"
    return f"{number:.4g}" if abs(number) >= LARGE else f"{number:{form}}"
