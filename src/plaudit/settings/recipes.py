"""From a recipe (YAML) and `key.sub=value` overrides in Hydra's grammar to checked settings.

    defaults <- recipe <- overrides -> Settings        unknown keys are refused with the nearest name

A recipe holds only what differs from the defaults in the dataclasses. YAML, types and the override grammar are
OmegaConf's and Hydra's; Hydra's launcher, groups and working folders are left out.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.rewards.settings import by_name
from plaudit.settings.checks import check
from plaudit.settings.files import read
from plaudit.settings.files import read_saved as read_saved
from plaudit.settings.files import read_yaml as read_yaml
from plaudit.settings.imported import Imported
from plaudit.settings.spellings import meant_in
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.fields import flat, leaves, mistyped, nearest, one_of, refuse, shortened
from plaudit.support.paths import at_home
from plaudit.support.plugins import registered_again
from plaudit.support.rooms import optional

Tree = typing.TypeVar("Tree")
NO_VALUE = (IndexError, ValueError, TypeError, OverflowError)
"""Errors that OmegaConf raises besides its own: for positions in lists, and numbers too large for a float."""

WHOLE = ("data.train", "data.split")
"""Settings whose mapping an override replaces as a whole: its sources are not added to the recipe's."""


def load_settings(
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    method: str | None = None,
    deepspeed: str | Path | Mapping[str, Any] | None = None,
) -> Settings:
    """Load and check settings from a recipe file (or mapping) and overrides.

    The file may be of another system (docs/switching.md). `method` is the command's; a recipe that names another is
    refused. `deepspeed` is a configuration that goes over the recipe. Raises SettingsError, naming every key.
    """
    settings = read_settings(recipe, overrides, method=method, deepspeed=deepspeed)
    check(settings)
    return settings


def read_settings(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    *,
    method: str | None = None,
    deepspeed: str | Path | Mapping[str, Any] | None = None,
) -> Settings:
    """Like `load_settings`, without checking that files exist and that settings agree."""
    settings, problems = drafted(recipe, overrides, method=method, deepspeed=deepspeed)
    refuse(problems, plain=True)
    return settings


def drafted(
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    method: str | None = None,
    deepspeed: str | Path | Mapping[str, Any] | None = None,
) -> tuple[Settings, list[str]]:
    """Return (settings as far as they can be read, unchecked; problems: unknown keys and wrong types).

    Raises SettingsError for a file, a method or a plugin that cannot be read at all.
    """
    problems, parsed = list[str](), list[Override]()
    for text in overrides:
        with _collected(problems):
            parsed.append(parse_override(text))
    asked = next((str(o.value) for o in reversed(parsed) if o.key == "method"), None)
    tree = at_length(as_ours(recipe, method or asked, deepspeed).recipe)
    named = asked or tree.get("method")
    if method is not None and named not in (None, method):
        raise SettingsError(f"the recipe says method: {named}, the command says {method}. Use `plaudit {named}`")
    if not (method := str(method or named or "")):
        raise SettingsError("no method is given: add one, such as method: sft (`plaudit --help` lists them)")
    _load_plugins(tree, parsed)
    algorithm = _algorithm_class(method)

    template = dataclasses.replace(Settings(), method=method)
    config = _structured(template, algorithm)
    unknown = list(unknown_keys(tree, Settings, algorithm=algorithm))
    problems += [problem for _, problem in unknown]
    for key, value in tree.items():
        problems += _merged(config, str(key), value, skip={path for path, _ in unknown})
    for override in parsed:
        with _collected(problems):
            override.apply(config, algorithm)
    settings = completed(dataclasses.replace(_to_object(config), method=method))
    return settings, problems + [override for override in mistyped(settings) if override not in problems]


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        problems.append(str(error))


def as_ours(
    recipe: str | Path | Mapping[str, Any] | None,
    method: str | None,
    deepspeed: str | Path | Mapping[str, Any] | None = None,
) -> Imported:
    """Return our recipe, or convert another system's file to one and set that file's environment variables here."""
    tree = {} if recipe is None else _texts(recipe) if isinstance(recipe, Mapping) else read(recipe)
    importers = optional("importers", asked_by="a DeepSpeed configuration" if deepspeed else "")
    found: Imported = importers.opened(tree, method, deepspeed) if importers else Imported(recipe=dict(tree))
    os.environ.update(found.environment)
    return found


def _texts(value: Any) -> Any:
    """Return a recipe given in Python with every Path as a str."""
    if isinstance(value, Mapping):
        return {key: _texts(entry) for key, entry in value.items()}
    value = str(value) if isinstance(value, Path) else value
    return type(value)(map(_texts, value)) if type(value) in (list, tuple) else value


def completed(settings: Settings) -> Settings:
    """Load plugins; return the settings with `algorithm` as the method's dataclass, its defaults filled in."""
    _load_plugins({"plugins": settings.plugins}, ())
    algorithm = _algorithm_class(settings.method)
    if settings.algorithm is None:
        settings = dataclasses.replace(settings, algorithm=algorithm())
    if not isinstance(settings.algorithm, algorithm):
        if registered_again(algorithm, type(settings.algorithm)):
            raise SettingsError(
                f"method={settings.method}: these settings hold another version of the class {algorithm.__name__} "
                "than the registered one: register it, and make the settings again"
            )
        raise SettingsError(
            f"method={settings.method} takes a {algorithm.__name__} as its algorithm, not {settings.algorithm!r}"
        )
    return dataclasses.replace(settings, output=str(at_home(settings.output)))


@dataclass(frozen=True)
class Override:
    """One `key=value`, `+key=value` or `~key` of the command line."""

    text: str
    key: str
    value: Any
    deletes: bool

    def apply(self, config: Any, algorithm: type) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        check_keys(nested(self.key, self.value), Settings, algorithm=algorithm)
        try:
            if self.deletes:
                OmegaConf.update(config, self.key, None)
            else:
                merge = self.key not in WHOLE
                OmegaConf.update(config, self.key, self.value, merge=merge, force_add=False)
        except (OmegaConfBaseException, *NO_VALUE) as error:
            raise SettingsError(f"{shortened(self.text)}: {_first_line(error)}") from error


def parse_override(text: str) -> Override:
    """Read an override in Hydra's grammar (null for None, [a,b], {a: 1}) and expand its short form (`at_length`)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
        if parsed.is_sweep_override():
            raise SettingsError(f"{text}: a sweep over several values is not a setting of one run; start one run each")
        value = None if parsed.is_delete() else _plain(parsed.value())
        if not parsed.key_or_group:
            raise HydraException("it has no key")
    except (HydraException, ValueError) as error:  # ValueError: more digits than Python converts
        raise SettingsError(f"{shortened(text)!r} is not of the form key.sub=value: {_first_line(error)}") from error
    key = parsed.key_or_group
    return Override(text=text, key=key, value=_at_length(key, value), deletes=parsed.is_delete())


def _plain(value: Any) -> Any:
    """Replace Hydra's quoted strings by str, also in lists and dicts."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    return value.text if type(value).__name__ == "QuotedString" else value


def at_length(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with its short forms written out."""
    return {key: _at_length(key, value) for key, value in tree.items()}


def _at_length(key: str, value: Any) -> Any:
    """`runtime: ray` is short for `runtime: {kind: ray}`, and `rewards: [gsm8k]` for `rewards: [{kind: gsm8k}]`."""
    part, _, last = key.rpartition(".")
    if last == "rewards" and isinstance(value, list) and not part.endswith("options"):
        return [by_name(one) if isinstance(one, str) else one for one in value]
    return {"kind": value} if last == "runtime" and isinstance(value, str) else value


def defaults(method: str) -> Settings:
    """Return the default settings of a method."""
    return _to_object(_structured(dataclasses.replace(Settings(), method=method), _algorithm_class(method)))


def load_tree(
    template: type[Tree], values: Mapping[str, Any], overrides: Sequence[str] = (), *, free: Sequence[str] = ()
) -> Tree:
    """Fill any dataclass of settings from a mapping and overrides; `free` names fields whose content is not checked."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_keys({key: value for key, value in values.items() if key not in free}, template)
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        check_keys(nested(override.key, override.value), template)
    config: Any = OmegaConf.structured(template)
    text = ""
    try:
        for text in values:
            config = OmegaConf.merge(config, {text: _at_length(text, values[text])})
        for override in parsed:
            text = shortened(override.text)
            config = OmegaConf.merge(config, nested(override.key, override.value))
        tree = OmegaConf.to_object(config)
        refuse(mistyped(tree))
        return typing.cast(Tree, tree)
    except (OmegaConfBaseException, *NO_VALUE) as error:
        where = _where(error, text) if text in values else text  # an override names its whole key already
        raise SettingsError(f"{where}: {_first_line(error)}") from error


def recipe_of(words: Iterable[str | None]) -> tuple[str | None, list[str]]:
    """Return the recipe, or None if the first word is an override (`plaudit sft data.train=...`), and the overrides."""
    rest = [word for word in words if word is not None]
    none = not rest or ("=" in rest[0] and not os.path.exists(rest[0]))  # noqa: PTH110 - it may be of any length
    return (None if none else rest.pop(0)), rest


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return nested mappings for a dotted key: `a.b`, value -> {a: {b: value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return typing.cast(dict[str, Any], value)


def check_known(name: str, known: Iterable[str], *, what: str) -> None:
    """Raise SettingsError unless `name` is known, naming the nearest one that is."""
    known = list(known)
    if name not in known:
        raise SettingsError(f"there is no {what} {name!r}{nearest(name, known)}")


def _load_plugins(tree: Mapping[str, Any], overrides: Sequence[Override]) -> None:
    from plaudit.support.plugins import PluginError, load_plugins

    plugins = next((o.value for o in reversed(overrides) if o.key == "plugins"), tree.get("plugins")) or []
    if not isinstance(plugins, list) or not all(isinstance(plugin, str) for plugin in plugins):
        raise SettingsError(f"plugins={plugins!r} must be a list of Python files")
    try:
        load_plugins(plugins)
    except PluginError as error:
        raise SettingsError(f"plugins: {error}") from error


def _algorithm_class(method: str) -> type:
    from plaudit.algorithms import ALGORITHMS

    check_known(method, ALGORITHMS, what="method")
    return ALGORITHMS[method]


def _structured(template: Settings, algorithm: type) -> Any:
    from omegaconf import OmegaConf

    config = OmegaConf.structured(template)
    node = OmegaConf.structured(algorithm)
    OmegaConf.set_readonly(node, False)  # frozen dataclasses come read-only
    config.algorithm = node
    OmegaConf.set_readonly(config.algorithm, False)
    return config


def _merged(config: Any, key: str, value: Any, *, skip: Collection[str]) -> list[str]:
    """Merge a value into `config`; return the problems. If a section fails as a whole, merge setting by setting."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if key in skip:
        return []
    section = dataclasses.is_dataclass(OmegaConf.get_type(OmegaConf.select(config, key)))
    if value is None and section and "." not in key:
        return []  # a section left empty
    try:
        OmegaConf.update(config, key, value, merge=True)
    except (OmegaConfBaseException, *NO_VALUE) as error:
        if section and isinstance(value, Mapping):
            parts = [_merged(config, f"{key}.{name}", part, skip=skip) for name, part in value.items()]
            if found := [problem for part in parts for problem in part]:
                return found
        if any(one.startswith(f"{key}.") for one in skip):
            return []  # the error was an unknown key, which is reported elsewhere
        return [f"{_where(error, key.partition('.')[0])}: {_first_line(error)}"]
    return []


def _to_object(config: Any) -> Settings:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        settings = OmegaConf.to_object(config)
    except (OmegaConfBaseException, *NO_VALUE) as error:
        raise SettingsError(_first_line(error)) from error
    assert isinstance(settings, Settings)
    return dataclasses.replace(settings, algorithm=_with_tuples(settings.algorithm))


def _with_tuples(method: Any) -> Any:
    """Return the method with tuples where its defaults are tuples; OmegaConf turns them into lists."""
    if not dataclasses.is_dataclass(method) or isinstance(method, type):
        return method  # it is refused later
    pairs = {one.name: vars(method)[one.name] for one in dataclasses.fields(method) if isinstance(one.default, tuple)}
    return dataclasses.replace(method, **{name: tuple(pair) for name, pair in pairs.items() if isinstance(pair, list)})


def check_keys(tree: Any, template: type, *, algorithm: type | None = None) -> None:
    """Raise SettingsError for keys of `tree` that the dataclass `template` does not have."""
    refuse([problem for _, problem in unknown_keys(tree, template, algorithm=algorithm)], plain=True)


def unknown_keys(
    tree: Any, template: type, *, algorithm: type | None = None, prefix: str = "", root: type | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each unknown key. The message suggests settings of that name elsewhere and siblings that
    contain it, else our name for another framework's key, else the closest spelling."""
    root = root or template
    if not isinstance(tree, Mapping) or not dataclasses.is_dataclass(template):
        return
    hints = typing.get_type_hints(template)
    known = {f.name: hints[f.name] for f in dataclasses.fields(template)}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in known:
            every = [*leaves(root), *(leaves(algorithm, "algorithm.") if algorithm is not None else ())]
            elsewhere = [leaf.key for leaf in every if leaf.key.rpartition(".")[2] == key]
            here = [f"{prefix}{one}" for one in known if key in one.split("_")]
            few = 0 < len(elsewhere) < 4
            near = one_of(here + elsewhere) if few else nearest(str(key), known, prefix)
            theirs = {one: meaning for one in flat(value, path) if (meaning := meant_in(root, one))}
            answers = {path: near} if few or not theirs else theirs
            yield from ((path, f"there is no setting {one}{answer}") for one, answer in answers.items())
            continue
        inner = algorithm if path == "algorithm" and algorithm is not None else known[key]
        for kind in (inner, *typing.get_args(inner)):  # itself, in a list, or where null is allowed too
            if not dataclasses.is_dataclass(kind):
                continue
            for number, entry in _entries(value):
                inside = f"{path}.{number}"
                yield from unknown_keys(entry, typing.cast(type, kind), algorithm=algorithm, prefix=inside, root=root)


def _entries(value: Any) -> list[tuple[str, Any]]:
    """Return ("INDEX.", entry) for each entry of a list, also if given as a mapping {0: ...}; else [("", value)]."""
    if isinstance(value, list):
        return [(f"{number}.", entry) for number, entry in enumerate(value)]
    if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
        return [(f"{number}.", entry) for number, entry in value.items()]
    return [("", value)]


def _where(error: Exception, key: str) -> str:
    """Return the full key of an error below `key`. For a list's entry, OmegaConf names only the key within it."""
    from omegaconf.errors import OmegaConfBaseException

    full = str((error.full_key if isinstance(error, OmegaConfBaseException) else None) or key)
    return full if full.split(".")[0] == key else f"{key}: {full}"


def _first_line(error: Exception) -> str:
    return shortened(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
