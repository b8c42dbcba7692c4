"""Files of settings as mappings: YAML, JSON, and what Python writes. Nothing in them is run."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from plaudit.settings.tree import SettingsError
from plaudit.support.paths import at_home


def read(path: str | Path) -> dict[str, Any]:
    """A file of settings: YAML, JSON, or a `.conf` that holds a dict as Python writes it, with comments and None."""
    place = at_home(path)
    if place.suffix not in (".conf", ".json") or not place.exists():
        return read_yaml(path)
    try:
        text = place.read_text(encoding="utf-8")
        content = json.loads(text) if place.suffix == ".json" else _python(text)
    except (ValueError, OSError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read as settings: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a {type(content).__name__}, but settings are a mapping of keys")
    return {str(key): value for key, value in content.items()}


def _python(text: str) -> Any:
    """A literal, else JSON. Nothing is run."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError) as error:
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(f"it is no dict of Python and no JSON: {error}") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping with interpolations resolved. Raises SettingsError, with the line where the YAML breaks."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError as error:
        raise SettingsError(f"there is no recipe {path}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"{path} cannot be read as settings: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a {type(content).__name__}, but a recipe is a mapping of keys")
    return {str(key): value for key, value in content.items()}
