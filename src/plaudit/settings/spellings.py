"""Other systems' words for our settings (`spellings.yaml`), so that a key of theirs is answered with ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml


def meant(theirs: str) -> str:
    """Say our key for a key or flag of TRL, OpenRLHF or verl; "" if it is none of theirs."""
    path = theirs.lstrip("-").replace("-", "_").lower()
    if path == "deepspeed":
        return ": its configuration is given as --deepspeed FILE"
    words = spellings()
    ours = words.get(path) or words.get(path.rpartition(".")[2])
    return f": here it is {ours}" if ours else ""


@cache
def spellings() -> dict[str, str]:
    """Our key, or several in a sentence, by the word of another system."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {str(theirs): str(ours) for theirs, ours in yaml.safe_load(text).items()}
