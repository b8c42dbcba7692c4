"""Read files of settings as mappings: YAML, JSON and Python literals. No code in them is run."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plaudit.data.settings import FILE
from plaudit.settings.tree import SettingsError
from plaudit.support.bounded import UnreadableError, yaml_text
from plaudit.support.fields import close
from plaudit.support.paths import at_home


def read(path: str | Path) -> dict[str, Any]:
    """Read a file of settings: YAML, JSON, or a `.conf` with a Python dict literal or JSON."""
    place = at_home(path)
    parsers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".conf": _python}
    parse = parsers.get(place.suffix)
    return read_yaml(path) if parse is None else _mapping(path, lambda: parse(place.read_text(encoding="utf-8")))


def _python(text: str) -> Any:
    """Read a Python literal, or else JSON."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError) as error:
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(f"it is neither a Python dict nor JSON: {error}") from error


def _recipe_within(folder: Path) -> str:
    """Return a hint at the settings.yaml of a run's folder, for an error; "" if the folder has none."""
    return f": its run's settings are {folder / 'settings.yaml'}" if (folder / "settings.yaml").is_file() else ""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping and resolve interpolations. Raises SettingsError, with the line of an error in the YAML."""
    from omegaconf import OmegaConf

    return _mapping(path, lambda: OmegaConf.to_container(OmegaConf.load(path), resolve=True))


def read_saved(path: Path) -> dict[str, Any]:
    """Read the settings that a run saved, which others may have written: bounded, and nothing in them is resolved.
    Raises SettingsError."""
    from omegaconf import OmegaConf

    return _mapping(path, lambda: OmegaConf.to_container(OmegaConf.create(yaml_text(path))))


def _mapping(path: str | Path, read: Callable[[], Any]) -> dict[str, Any]:
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    try:
        if FILE.search(str(path)) and not str(path).endswith(".json") and at_home(path).is_file():
            raise UnreadableError(f"{path} has rows and is no recipe: `plaudit init METHOD {path}` writes one")
        content = read()
    except FileNotFoundError as error:
        near = close(str(path), (str(Path(path).with_name(one.name)) for one in at_home(path).parent.glob("*.y*ml")))
        raise SettingsError(f"there is no recipe {path}{near or '; `plaudit init METHOD` writes one'}") from error
    except IsADirectoryError as error:
        raise SettingsError(f"{path} is a folder, not a recipe{_recipe_within(at_home(path))}") from error
    except UnreadableError as error:  # it names the file
        raise SettingsError(str(error)) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError, OSError) as error:
        raise SettingsError(f"{path} cannot be read as settings: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a {type(content).__name__}, but a recipe is a mapping of keys")
    return {str(key): value for key, value in content.items()}
