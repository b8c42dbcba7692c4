"""Messages are asked for what they must name, in the order of their parts, and not for their sentences."""

from __future__ import annotations

import re


def says(message: object, parts: str) -> bool:
    """Whether a line has all parts: "train.stepps .. steps" is in "no setting train.stepps; did you mean steps?"."""
    wanted = re.compile(".*".join(map(re.escape, parts.split(" .. "))))
    return any(wanted.search(line) for line in str(message).splitlines())
