"""One place for a setting: a dataclass field with its default, bounds and unit; the string below it is its prose.

    batch_size: int = setting(32, least=1)
    "Prompts of one step."

`leaves` walks a tree of such dataclasses. What prints settings, checks them or documents them reads its leaves.
Where two fields contradict each other, their class is a `Section` and says so. Nothing is checked when a tree is made.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any

from plaudit.support.visible import rounded

DEVICE = {"choices": ("auto", "cpu", "cuda"), "form": "cuda:NUMBER"}
"""Rule of a setting that names a device."""
LONG = 300
"""Most characters of a value or an error in a message."""
MANY = 24
"""Most names that an error lists."""
NAMES = {
    int: "a whole number of at most 64 bits",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a dict",
}
NAMES |= {NoneType: "null", list: "a list", tuple: "a list"}


class SettingsError(ValueError):
    """Settings that cannot be read or that contradict each other."""


class Section:
    """A part of the tree whose fields can contradict each other."""

    def contradictions(self) -> Iterable[str]:
        """Return a sentence for each contradiction, which begins with the name of a field of this part."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Values that a setting may have. Bounds hold for each entry of a list or a mapping; None may pass by its type."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    infinite: bool = False
    choices: tuple[Any, ...] = ()
    numbers: bool = False
    """True if a number within the bounds may be given instead of one of `choices`."""
    form: str = ""
    """A form of text that is allowed too, in which NUMBER stands for a whole number: "cuda:NUMBER"."""
    count: int | None = None
    """Exact number of entries of the list; None: any number."""
    unit: str = ""

    def __str__(self) -> str:
        if self.choices and not self.numbers:
            return f"one of {', '.join(map(str, filter(None, (*self.choices, self.form))))}"
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}, or a number {bounds}".strip()
        if self.form:
            return f'{bounds}, or "{self.form}"'
        return (
            f"{self.count} numbers, each " * bool(self.count) + bounds + f" ({self.unit})" * bool(self.unit)
        ).strip()

    def takes(self, value: Any) -> bool:
        if isinstance(value, list | tuple | dict):
            entries = value.values() if isinstance(value, dict) else value
            return self.count in (None, len(value)) and all(map(self.takes, entries))
        if value is None or (self.choices and not (self.numbers and isinstance(value, int | float))):
            return value is None or value in self.choices or self._formed(value)
        if not isinstance(value, int | float):
            return not self.form or self._formed(value)
        within = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        within = within and (self.above is None or value > self.above) and (self.below is None or value < self.below)
        return within and (math.isfinite(value) or (self.infinite and value == math.inf))

    def _formed(self, value: Any) -> bool:
        form = re.escape(self.form).replace("NUMBER", "[0-9]+")
        return bool(form and isinstance(value, str) and re.fullmatch(form, value))


def setting(default: Any, **rule: Any) -> Any:
    """Return a dataclass field with its `Rule`. `list` or `dict` as the default stands for an empty one."""
    metadata = {"rule": Rule(**rule)}
    if default in (list, dict):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One setting of a tree."""

    key: str
    """The setting's dotted name, such as `train.steps`."""
    value: Any
    kind: Any
    rule: Rule
    prose: str

    @property
    def allowed(self) -> str:
        """The rule in words, besides the type; "" if every value of the type is allowed."""
        return f"{self.rule}, or null" if str(self.rule) and NoneType in typing.get_args(self.kind) else str(self.rule)

    @property
    def words(self) -> str:
        """The setting's description and its rule, as sentences."""
        return f"{self.prose} {self.allowed[:1].upper()}{self.allowed[1:]}{'.' * bool(self.allowed)}".strip()

    def complaint(self) -> str | None:
        if not _is(self.value, self.kind):
            return f"{self.key}={shown(self.value)} must be {_named(self.kind)}"
        if self.rule.takes(self.value):
            return None
        near = close(self.value, self.rule.choices) if isinstance(self.value, str) else ""
        finite = isinstance(self.value, float) and not (math.isfinite(self.value) or self.rule.infinite)
        words = " and ".join(filter(None, ["finite" * finite, self.allowed]))
        return f"{self.key}={shown(self.value)} must be {words}{near}"


def leaves(tree: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yield every setting of a tree of dataclasses, also in lists. If `tree` is a class, its defaults are taken."""
    kind: type = tree if isinstance(tree, type) else type(tree)
    hints, proses = _hints(kind), prose(kind)
    for one in fields(tree):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        key, value = f"{prefix}{one.name}", default if tree is kind else getattr(tree, one.name)
        parts = list(_parts(key, value))
        for path, part in parts:
            yield from leaves(part, f"{path}.")
        if not parts:
            rule = one.metadata.get("rule", Rule())
            yield Leaf(key=key, value=value, kind=hints[one.name], rule=rule, prose=proses.get(one.name, ""))


def _parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a field that holds a part of the tree (a dataclass), or of each part in its list."""
    several = enumerate(value) if isinstance(value, list) else ()
    for path, part in [(key, value), *((f"{key}.{number}", entry) for number, entry in several)]:
        if is_dataclass(part):
            yield path, part


def flat(plain: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings and lists by their dotted keys. An empty one is a value."""
    inner = dict(enumerate(plain)) if isinstance(plain, list) else plain
    if not isinstance(inner, Mapping) or not inner:
        return {prefix: plain}
    entries = (flat(entry, f"{prefix}.{key}" if prefix else str(key)) for key, entry in inner.items())
    return {key: value for found in entries for key, value in found.items()}


def complaints(tree: Any, prefix: str = "") -> list[str]:
    """Return everything that is wrong with a tree's values, each with its key, what was given and what is allowed."""
    return [why for leaf in leaves(tree, prefix) if (why := leaf.complaint())] + list(_contradictions(tree, prefix))


def _contradictions(tree: Any, prefix: str) -> Iterator[str]:
    if isinstance(tree, Section):
        yield from (f"{prefix}{why}" for why in tree.contradictions())
    for one in fields(tree):
        for path, part in _parts(f"{prefix}{one.name}", getattr(tree, one.name)):
            yield from _contradictions(part, f"{path}.")


def mistyped(tree: Any, prefix: str = "") -> list[str]:
    """Return complaints about values of a wrong type, whose bounds cannot be checked."""
    return [why for one in leaves(tree, prefix) if not _is(one.value, one.kind) and (why := one.complaint())]


def wrong(tree: Any, *finders: Callable[[Any], Iterable[str]], prefix: str = "") -> list[str]:
    """Return everything that is wrong with a tree, also by `finders`. If there are wrong types, return only those."""
    return mistyped(tree, prefix) or [*complaints(tree, prefix), *(why for find in finders for why in find(tree))]


def check(tree: Any, *finders: Callable[[Any], Iterable[str]], prefix: str = "") -> None:
    """Raise SettingsError with everything that is wrong with a tree, at once."""
    refuse(wrong(tree, *finders, prefix=prefix))


def refuse(problems: list[str], *, plain: bool = False) -> None:
    """Raise SettingsError with all problems, if there are any. With `plain`, a single one has no heading."""
    if plain and len(problems) == 1:
        raise SettingsError(problems[0])
    if problems:
        raise SettingsError("the settings cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems))


def nearest(name: str, known: Iterable[str], within: str = "") -> str:
    """Return the end of an error: "did you mean" the nearest known name, prefixed by `within`; else a list of names."""
    names = sorted(known)
    there = ", ".join(names[:MANY]) or "none"
    return close(name, names, within) or f"; there are {there}{' ...' if len(names) > MANY else ''}"


def close(name: str, known: Iterable[str], within: str = "") -> str:
    """Return "; did you mean ...?" with the nearest known name, prefixed by `within`; "" if none is near."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return one_of(within + one for one in found) if found else ""


def one_of(names: Iterable[str]) -> str:
    return f"; did you mean {' or '.join(names)}?"


@cache
def prose(kind: type) -> dict[str, str]:
    """Return {field of a dataclass or of its bases: the string below the field in the source}."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        try:
            (source,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # a class without a source file
            continue
        for named, below in pairwise(typing.cast(ast.ClassDef, source).body):
            match named, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def shown(value: Any) -> str:
    """Return a value as a recipe would write it, shortened if it is long."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) <= 2**64 else rounded(value, ".0f")
    try:
        return shortened(str(list(value) if isinstance(value, tuple) else value))
    except ValueError:  # an integer in it has more digits than Python prints
        return "..."


def shortened(text: str) -> str:
    """Return the text, cut after its beginning if it is too long for a message."""
    return text if len(text) <= LONG else f"{text[:200]}..."


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _is(value: Any, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return any(_is(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_is(entry, inner[0] if inner else Any) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(entry, inner[1] if inner else Any) for entry in value.values())
    if origin is Any:
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return all(_is(entry, Any) for entry in entries) and not (isinstance(value, int) and abs(value) > 2**64)
    if origin in (int, float) and isinstance(value, int):
        return abs(value) <= 2**64
    return isinstance(value, origin)


def _named(kind: Any) -> str:
    """Return a type in words, for messages."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(_named, inner))
    entries = {list: inner[:1], tuple: inner[:1], dict: inner[1:]}.get(origin, ())
    of = f" of which each is {_named(entries[0])}" if entries and entries[0] is not Any else ""
    return f"{NAMES.get(origin) or (origin.__name__ if isinstance(origin, type) else origin)}{of}"
