"""Other systems' words for our settings (`spellings.yaml`), so that a key of theirs is answered with ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from plaudit.settings.tree import Settings
from plaudit.support.fields import leaves


def meant(theirs: str) -> str:
    """Return a hint that names our key for a key or flag of TRL, OpenRLHF or verl; "" if it is unknown."""
    path = theirs.lstrip("-").replace("-", "_").lower()
    if path == "deepspeed":
        return ": its configuration is given as --deepspeed FILE"
    words = spellings()
    ours = words.get(path) or words.get(path.rpartition(".")[2])
    return f": here it is {ours}" if ours else ""


def meant_in(root: type, theirs: str) -> str:
    """Return a hint at the key of `root` that `theirs` means (another system's key, or a misplaced one); "" if none."""
    ours = meant(theirs)
    if root is Settings:
        return ours
    key = (ours.removeprefix(": here it is ") or theirs).replace("rollout.", "sampling.")
    keys = [leaf.key for leaf in leaves(root)]
    last = key.rpartition(".")[2]
    here = [one for one in (key, f"sampling.{last}") if one in keys][:1]
    here = here or [one for one in keys if one.rpartition(".")[2] == last]
    return f": here it is {here[0]}" if len(here) == 1 else ""


@cache
def spellings() -> dict[str, str]:
    """Return {another system's key: our key, or text that names several}."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {str(theirs): str(ours) for theirs, ours in yaml.safe_load(text).items()}
