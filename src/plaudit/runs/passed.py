"""Objects that a script or notebook passes to a run: a transformers model, a tokenizer, rows, functions.

    model, tokenizer, rows -> OUTPUT/.passed/KIND-DIGEST -> settings that name these files
    functions              -> rules of this process     -> settings that name them with a digest of their source

A run reads only files, so that other processes and a resume find the same content. Equal content has the same name; a
resume with other content is refused. Left out: training the object itself. The run's checkpoints have the trained
model.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from plaudit.models.load import load_tokenizer
from plaudit.rewards.rules import RULES
from plaudit.rewards.settings import RewardSettings, by_name
from plaudit.runs.records import CHECKPOINTS, SETTINGS
from plaudit.runs.rows import splits_of, stored_rows
from plaudit.settings.recipes import load_settings, load_tree, read_saved, read_yaml
from plaudit.settings.tree import Settings, SettingsError, to_plain
from plaudit.support.fields import nearest
from plaudit.support.paths import at_home
from plaudit.support.plugins import name_of

FOLDER = ".passed"
"""Name of the folder under `output` with passed objects' files. They are needed as long as a run may be resumed."""
PREFIX = "passed:"
UNKNOWN = "unknown"
"""Digest of a function whose source or values cannot be compared."""
NOT_COMPARED = ("transformers_version", "_name_or_path")
"""Keys of config.json that are left out of a model's digest, since they do not describe it."""
SHARED = ("transformers", "tokenizers", "plaudit")
"""Packages whose model classes other processes can import too."""
Recipe = Settings | Mapping[str, Any] | str | Path
OneReward = Callable[..., Any] | RewardSettings | Mapping[str, Any] | str
PassedReward = OneReward | tuple[OneReward, float]


@dataclass(frozen=True)
class PassedObjects:
    """Objects that a caller passes besides the settings; None and () leave the settings as they are."""

    model: Any = None
    tokenizer: Any = None
    data: Any = None
    validation: Any = None
    rewards: Sequence[PassedReward] = ()

    @contextmanager
    def placed(self, recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> Iterator[Settings]:
        """Yield the settings with files and names in place of the objects. While active, functions are registered as
        rules. Raises SettingsError if an object cannot be stored, or a resume would continue with other objects."""
        tree = recipe if isinstance(recipe, Settings | Mapping) else read_yaml(recipe)
        output, on_ray = _of(tree, "output") or Settings.output, _kind(_of(tree, "runtime")) == "ray"
        folder = at_home(str(output)) / FOLDER
        rules, rewards = _rules(self.rewards)
        sections = self._sections(folder, say, on_ray=on_ray, named=_of(_of(tree, "model"), "tokenizer"))
        RULES.update(rules)
        try:
            settings = _with(tree, sections, rewards)
            _refuse_others(settings)
            yield settings
        finally:
            for name in rules:
                RULES.pop(name, None)

    def _sections(
        self, folder: Path, say: Callable[[str], None], *, on_ray: bool, named: str | None
    ) -> dict[str, dict[str, str]]:
        """Store the objects; return the settings that name them, by section. `named`: the recipe's model.tokenizer."""
        model: dict[str, str] = {}
        data = splits_of(self.data, self.validation)
        if self.model is not None:
            is_path = isinstance(self.model, str | Path)
            model["path"] = str(self.model) if is_path else _stored_model(self.model, folder, on_ray)
        if isinstance(self.tokenizer, str | Path):
            model["tokenizer"] = str(self.tokenizer)
        elif self.tokenizer is not None:
            model["tokenizer"] = _stored_tokenizer(self.tokenizer, folder, on_ray)
        elif model and not isinstance(self.model, str | Path) and named is None:
            model["tokenizer"] = _origin(self.model)
        stored = {name: stored_rows(rows, name, folder, say) for name, rows in data.items()}
        return {name: section for name, section in (("model", model), ("data", stored)) if section}


def is_quiet(recipe: Recipe) -> bool:
    """True if a recipe in memory has log.quiet=true; False for a path, whose file is not read here."""
    return _of(_of(recipe, "log"), "quiet") is True


def _of(recipe: Any, key: str) -> Any:
    return recipe.get(key) if isinstance(recipe, Mapping) else getattr(recipe, key, None)


def _kind(runtime: Any) -> Any:
    return runtime if isinstance(runtime, str) else _of(runtime, "kind")


def _with(settings: Settings | Mapping[str, Any], sections: dict[str, Any], rewards: list[RewardSettings]) -> Settings:
    """Return the settings with these values in their sections and these rewards added. A mapping is also checked."""
    if isinstance(settings, Settings):
        parts = {name: replace(getattr(settings, name), **section) for name, section in sections.items()}
        return replace(settings, **parts, rewards=[*settings.rewards, *rewards])
    recipe = {**settings, **{name: {**(settings.get(name) or {}), **section} for name, section in sections.items()}}
    if rewards:
        recipe["rewards"] = [*(settings.get("rewards") or []), *map(to_plain, rewards)]
    return load_settings(recipe)


def _stored_model(model: Any, folder: Path, on_ray: bool) -> str:
    """Save a transformers model; return its folder."""
    if not {"save_pretrained", "config"} <= set(dir(model)):
        raise SettingsError(f"model is a {type(model).__name__}: give a transformers model, or the folder of one")
    if "peft_config" in dir(model):
        raise SettingsError("model has adapters of peft: merge them (model.merge_and_unload()), and set model.lora")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise SettingsError("model has parameters on the meta device, without values: load it whole")
    _check_travels(model, "model", on_ray)
    return _stored(folder, "model", model.save_pretrained)


def _stored_tokenizer(tokenizer: Any, folder: Path, on_ray: bool) -> str:
    """Save a tokenizer, and check that it loads with the same vocabulary; return its folder."""
    if not {"save_pretrained", "get_vocab"} <= set(dir(tokenizer)):
        raise SettingsError(f"tokenizer is a {type(tokenizer).__name__}: give one of transformers, or its folder")
    _check_travels(tokenizer, "tokenizer", on_ray)
    path = _stored(folder, "tokenizer", tokenizer.save_pretrained)
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise SettingsError(
            f"tokenizer has another vocabulary after saving and loading ({path}): give its folder instead"
        )
    return path


def _origin(model: Any) -> str:
    """Return the folder or hub id that a model was loaded from, which has its tokenizer."""
    origin = str(getattr(model, "name_or_path", "") or "")
    if not origin:
        raise SettingsError("model was not loaded from a folder or hub id that has a tokenizer: give tokenizer=")
    return origin


def _check_travels(thing: Any, name: str, on_ray: bool) -> None:
    if on_ray and type(thing).__module__.partition(".")[0] not in SHARED:
        raise SettingsError(
            f"{name} is a {type(thing).__qualname__} of {type(thing).__module__}, which processes on Ray cannot load: "
            "use one of transformers' own classes, or set runtime=local"
        )


def _stored(folder: Path, kind: str, save: Callable[[Path], Any]) -> str:
    """Call `save` with a new folder, rename that to KIND-DIGEST by its content, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as temporary:
        made = Path(temporary) / kind
        save(made)
        target = folder / f"{kind}-{_digest(made)}"
        if not target.exists():
            made.rename(target)
    return str(target)


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(folder).as_posix()}\n".encode())
            if path.name == "config.json":
                keys = json.loads(path.read_text(encoding="utf-8"))
                compared = {key: value for key, value in keys.items() if key not in NOT_COMPARED}
                found.update(json.dumps(compared, sort_keys=True).encode())
            else:
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def _rules(rewards: Sequence[PassedReward]) -> tuple[dict[str, Callable[..., Any]], list[RewardSettings]]:
    """Return the functions by their `kind` in the settings (passed:NAME:DIGEST), and the settings of all rewards."""
    if isinstance(rewards, str | Mapping | RewardSettings) or not isinstance(rewards, Iterable):
        raise SettingsError(f"rewards={_named(rewards)}: give a list: rewards=[{_named(rewards)}]")
    rules: dict[str, Callable[..., Any]] = {}
    found: list[RewardSettings] = []
    for entry in rewards:
        weighted = isinstance(entry, tuple) and len(entry) == 2
        reward, weight = cast(tuple[Any, Any], entry) if weighted else (entry, None)
        if weighted and (isinstance(weight, bool) or not isinstance(weight, int | float)):
            raise SettingsError(f"rewards has the weight {weight!r} for {_named(reward)}: give a number")
        settings = _reward(reward, rules)
        found.append(settings if weight is None else replace(settings, weight=float(weight)))
    return rules, found


def _named(reward: Any) -> str:
    return name_of(reward) if callable(reward) else f"{reward!r:.80}"


def _reward(reward: Any, rules: dict[str, Callable[..., Any]]) -> RewardSettings:
    """Return the settings of one reward. A function becomes one of the `rules`, under a kind of its own."""
    if isinstance(reward, RewardSettings):
        return reward
    if isinstance(reward, str):
        return RewardSettings(**by_name(reward))
    if isinstance(reward, Mapping):
        known = [one.name for one in fields(RewardSettings)]
        if unknown := [str(key) for key in reward if key not in known]:
            raise SettingsError(f"rewards has the key {unknown[0]!r}{nearest(unknown[0], known)}")
        return load_tree(RewardSettings, reward)
    if "state_dict" in dir(reward):
        raise SettingsError(
            f"rewards has the model {name_of(reward)}: save it, and give {{'kind': 'judge', 'path': FOLDER}}"
        )
    if not callable(reward):
        raise SettingsError(
            f"rewards has {reward!r:.80}: give functions, rules by name ('gsm8k'), dicts as in settings, or pairs of "
            "one of these and its weight"
        )
    plain = reward.func if isinstance(reward, functools.partial) else reward
    name = name_of(plain).strip("<>")
    kind = f"{PREFIX}{name}:{_source_digest(reward)}"
    if kind in rules:
        raise SettingsError(f"rewards has {name!r} twice: give each function a different name")
    rules[kind] = reward
    return RewardSettings(kind=kind, name=name)


def _source_digest(function: Any) -> str:
    """Hash a function's source, defaults and closed-over values; UNKNOWN if they cannot be read as text or JSON."""
    values: list[Any] = []
    if isinstance(function, functools.partial):
        values, function = [function.args, sorted(function.keywords.items())], function.func
    if not inspect.isfunction(function):
        return UNKNOWN
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
        text = json.dumps([inspect.getsource(function), values, function.__defaults__, function.__kwdefaults__])
    except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):  # no source, or values that are no JSON
        return UNKNOWN
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _refuse_others(settings: Settings) -> None:
    """Raise SettingsError if a resume would continue with other rows or functions. `records.refuse_another` refuses
    other models."""
    if settings.resume is None or settings.name is None:
        return
    folder = at_home(settings.output) / settings.name
    if not (folder / SETTINGS).is_file() or not (folder / CHECKPOINTS / "state").is_dir():
        return
    try:
        there = read_saved(folder / SETTINGS)
        before = {"data": there["data"]["train"], "validation": there["data"]["validation"]}
        here = {"data": settings.data.train, "validation": settings.data.validation}
        kinds = _kinds(there["rewards"]), _kinds(settings.rewards)
    except (SettingsError, KeyError, TypeError):  # an incomplete file has no information
        return
    problems = [
        f"{name} has other rows than those that the run has read ({before[name]} there, {here[name]} here)"
        for name in before
        if before[name] != here[name] and any(FOLDER in str(one) for one in (before[name], here[name]))
    ]
    problems += [f"the reward {kind.split(':')[1]} differs" for kind in kinds[1] if kind not in kinds[0]]
    problems += [f"the reward {kind.split(':')[1]} is missing" for kind in kinds[0] if kind not in kinds[1]]
    problems += [
        f"the reward {kind.split(':')[1]} is not a plain function, so it cannot be compared with the earlier one"
        for kind in kinds[1]
        if kind.endswith(f":{UNKNOWN}")
    ]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(
            f"resume={settings.resume} would not continue {folder} exactly:\n{listed}\nGive the same objects, or files "
            "('file.py:function'), or set another name for a new run"
        )


def _kinds(rewards: Any) -> list[str]:
    kinds = [str(_of(reward, "kind")) for reward in rewards]
    return [kind for kind in kinds if kind.startswith(PREFIX)]
