"""The shape of the package: its files and imports, and a table of what it has grown to beside what it may have.

    python tests/shape.py

Lines are counted as a reader meets them, with comments and blank ones. An arrow goes from a room, a top-level file, the
scripts or the benchmarks to what they import; a floor is the longest way down.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT = REPOSITORY / "src" / "plaudit"

OPTIONAL = (
    "adapters",
    "importers",
    "interchange",
    "page",
    "preflight",
    "relabel",
    "servers",
    "trackers",
    "training_api",
)
"""Rooms that can be removed: no other imports one, but for its command."""

CORE = ("types", "batch", "partition", "algorithms", "maths", "loop", "learn", "rollout/rollouter.py")
"""What a day's reading is to hold."""

ROOMS = {
    "__main__": (10, "`python -m plaudit`"),
    "__init__": (80, "the names that `import plaudit` gives"),
    "types": (
        575,
        "rows, prompts and answers, as every room speaks of them; distant numbers (235), checks (40), episodes (105)",
    ),
    "batch": (250, "rows as tensors; the line between plain values and arithmetic"),
    "partition": (80, "which units of a batch go together, as plain integers"),
    "support": (
        1365,
        "paths, plugins, visible text, late imports; requests (125); errors (60); addresses (105); gym (115)",
    ),
    "maths": (510, "one function for each formula"),
    "compute": (
        1985,
        "our kernels' Python side, torch's form, compiled on GPUs (125); addresses; axes (250), boxes (45), a KL (30)",
    ),
    "runtime": (
        2985,
        "the queue of requests, all that knows Ray, sockets; places (275), servers (60), ends (150), memory (30)",
    ),
    "monitor": (
        2010,
        "records, health, plots, lines of the console; notebooks (65), others' folders (140), table (120), turns (9)",
    ),
    "algorithms": (1400, "a file for each method, two for what they share; rows of episodes (85); teachers (115)"),
    "data": (
        4665,
        "every form of rows people keep, in pieces (85), refusals with what helps (25); a chat as shown (300), gym",
    ),
    "rewards": (
        3310,
        "rules, functions, judges, HTTP, sandbox, protocol; mathematics (300); batches (190), rubrics (265), turns",
    ),
    "models": (
        3740,
        "Hugging Face folders to modules and back, tried first (90), files of a bound (45); boxes (70), other ids (15)",
    ),
    "weights": (
        935,
        "new weights to every process with a copy, from all who have a part (170), or what changed of them (170)",
    ),
    "tasks": (540, "the demo's language, rows and gold reward; sums told in words (65)"),
    "rollout": (
        3650,
        "two engines, one our own decoder, and the way from prompts to rows; processes (385), caches of turns (185)",
    ),
    "learn": (
        2455,
        "passes, shards, parts of matrices, runs of tokens (215), optimizer; ZeRO (120), teachers (65), stages (55)",
    ),
    "loop": (
        2860,
        "a loop for every method; half recovery; groups, copies (220), late writes, lost, masked (90), episodes (60)",
    ),
    "evaluate": (1820, "figures of models that are no figures of a run"),
    "environments": (
        2470,
        "episodes: environments, turns, renderers (215); OpenAI's protocol (480), agents (510), processes (310)",
    ),
    "settings": (1100, "the tree, recipes, files, what sections ask of each other, places (45), a teacher (25)"),
    "executors": (
        2970,
        "who does the work, here and on Ray; generation (60), publishing, groups (490), rewards, copies of ranks (215)",
    ),
    "importers": (1410, "files of TRL, alignment-handbook, DeepSpeed, async_rlhf and llm-on-ray as recipes (optional)"),
    "interchange": (
        970,
        "GGUF files as models; `plaudit export`: a model in 16 bits or as a GGUF file, its card (optional)",
    ),
    "adapters": (185, "environments of other packages: textarena, reasoning-gym, OpenEnv (optional)"),
    "trackers": (245, "TensorBoard, W&B, MLflow, Trackio, Prometheus by Ray (optional)"),
    "page": (915, "a run's page and the page of all runs, besides its scripts (optional)"),
    "servers": (
        1025,
        "parameter servers: workers' islands, what they push, the servers' steps, copies (25) (optional)",
    ),
    "training_api": (
        1510,
        "`plaudit serve-training`: Tinker's API over the learner and the engine; ranks on Ray (145) (optional)",
    ),
    "runs": (1905, "a run from settings to folder, pipelines, records; objects of a caller (290) and rows (155)"),
    "relabel": (
        260,
        "`plaudit relabel`: labels preferences, or makes them of answers, by a judge or function (optional)",
    ),
    "preflight": (
        3300,
        "check (615), layout (150), profile (630), costs (725), placements and search (645), trials (50) (optional)",
    ),
    "commands": (
        2470,
        "the command line; export (60), pretrained (70), beside a run (80), connections, `init`, `serve` (130 each)",
    ),
}
"""Lines that a room may have, and what they are for. Raise one only with what it bought."""

AIMS = {
    "data": 4200,
    "models": 3500,
    "rollout": 3200,
    "preflight": 2700,
    "rewards": 2700,
    "loop": 2500,
    "runtime": 2500,
    "executors": 2300,
    "learn": 2150,
    "commands": 2000,
    "compute": 1800,
    "monitor": 1800,
    "runs": 1700,
    "evaluate": 1600,
    "importers": 1200,
}
"""Lines that these rooms are to have by AIMED_BY, by fewer branches and kinds of the same thing."""
AIMED_BY = "2027-02-28"


@dataclass(frozen=True)
class Import:
    """One imported name, absolute: "torch.nn", "plaudit.batch.Batch"."""

    name: str
    line: int
    at_load: bool
    """Runs when the file is imported: it stands in no function and is not for type checkers only."""


@dataclass(frozen=True)
class Source:
    """One file of the tree; `path` is relative to the package."""

    root: Path
    path: str

    @cached_property
    def text(self) -> str:
        return (self.root / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def unit(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, at_load=True))

    def _imports(self, node: ast.AST, *, at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._base(child)
                yield from (Import(f"{base}.{alias.name}", child.lineno, at_load) for alias in child.names)
            else:
                yield from self._imports(child, at_load=at_load and not _runs_later(child))

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = ["plaudit", *self.path.split("/")[:-1]]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _runs_later(node: ast.AST) -> bool:
    for_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return for_checkers or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def sources(root: Path) -> dict[str, Source]:
    """A tree's files by path. A file is parsed once while it stays as it is, for many rules ask for it."""
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    return {s.path: s for file in files for s in [_source(root, file, file.stat().st_mtime_ns)]}


@cache
def _source(root: Path, file: Path, changed: int) -> Source:
    return Source(root, file.relative_to(root).as_posix())


def unit_of(name: str) -> str:
    """The room or top-level file that an import of ours names; "__init__" for `from plaudit import run`."""
    part = name.split(".")[1] if "." in name else "__init__"
    return part if part in ROOMS else "__init__"


def edges(root: Path) -> dict[str, set[str]]:
    """file -> the files of ours that it imports anywhere."""
    known = sources(root)
    found: dict[str, set[str]] = {}
    for path, source in known.items():
        targets = set()
        for imported in source.imports:
            parts = imported.name.split(".")
            if parts[0] != "plaudit":
                continue
            places = ["/".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            names = [name for place in places for name in (f"{place}.py", f"{place}/__init__.py")]
            targets |= set(next(([name] for name in names if name in known), []))
        found[path] = targets - {path}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle, one such list; [] where there is none."""
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if found := walk(target, [*way, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def arrows(repository: Path) -> dict[str, set[str]]:
    """unit -> the units that it imports; scripts and benchmarks are one each."""
    found: dict[str, set[str]] = {}
    for unit, folder in (("", "src/plaudit"), ("scripts", "scripts"), ("benchmarks", "benchmarks")):
        for source in sources(repository / folder).values():
            mine = unit or source.unit
            names = [imported.name for imported in source.imports if imported.name.split(".")[0] == "plaudit"]
            found.setdefault(mine, set()).update({unit_of(name) for name in names} - {mine})
    return found


def core_arrows(graph: dict[str, set[str]]) -> int:
    return sum(len(targets) for unit, targets in graph.items() if unit not in OPTIONAL)


def floors(graph: dict[str, set[str]]) -> int:
    @cache
    def depth(node: str) -> int:
        return 1 + max((depth(target) for target in graph.get(node, ())), default=0)

    return max(map(depth, graph))


def lines_of(root: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for source in sources(root).values():
        found[source.unit] += source.text.count("\n")
    return found


def calls(root: Path, name: str) -> int:
    nodes = (node for source in sources(root).values() for node in ast.walk(source.tree))
    return sum(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes)


def texts(root: Path, text: str) -> int:
    nodes = (node for source in sources(root).values() for node in ast.walk(source.tree))
    return sum(isinstance(n, ast.Constant) and isinstance(n.value, str) and f"{text} " in n.value for n in nodes)


def _named_calls(node: ast.AST) -> list[tuple[str, int]]:
    """The name of each call below a node, and the number of its arguments."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [(ast.unparse(n.func).rpartition(".")[2], len(n.args) + len(n.keywords)) for n in found]


def recursive(root: Path, makes: str) -> int:
    """Functions that call themselves and `makes`."""
    nodes = [node for source in sources(root).values() for node in ast.walk(source.tree)]
    functions = {n.name: {name for name, _ in _named_calls(n)} for n in nodes if isinstance(n, ast.FunctionDef)}
    return sum({name, makes} <= called for name, called in functions.items())


def renames(root: Path) -> int:
    """Calls of `Path.replace`, by which a file takes the place of another."""
    found = (call for source in sources(root).values() for call in _named_calls(source.tree))
    return sum(call == ("replace", 1) for call in found)


def main() -> None:
    import yaml

    from plaudit.settings.recipes import defaults
    from plaudit.settings.tree import resolved

    def leaves(tree: object) -> int:
        return sum(map(leaves, tree.values())) if isinstance(tree, dict) and tree else 1

    graph, lines = arrows(REPOSITORY), lines_of(ROOT)
    every = sources(ROOT)
    core = sum(s.text.count("\n") for p, s in every.items() if s.unit in CORE or p in CORE)
    rows = (
        ("whole source, lines", sum(lines.values()), 24_478, 38_000),
        ("core, lines", core, 3_532, 6_500),
        ("top-level files", len([path for path in every if "/" not in path]), 20, 6),
        ("floors of the import graph", floors(graph), 19, 12),
        ("arrows of the import graph, optional rooms aside", core_arrows(graph), 215, 140),
        ("leaves of `plaudit settings ppo`", leaves(yaml.safe_load(resolved(defaults("ppo")))), 174, 130),
        ("places that say 'did you mean'", texts(ROOT, "did you mean"), 8, 1),
        ("ways to list settings", recursive(ROOT, "Leaf"), 2, 1),
        ("ways to write a file whole", renames(ROOT), 3, 1),
        ("calls of hasattr", calls(ROOT, "hasattr"), 18, 0),
        ("calls of getattr", calls(ROOT, "getattr"), 90, 25),
    )
    print(f"{'':34}{'before':>8}{'now':>8}{'to reach':>10}")
    for name, now, before, target in rows:
        print(f"{name:34}{before:8,}{now:8,}{target:10,}")
    for room, (budget, why) in ROOMS.items():
        aim = f"{AIMS[room]:,} by {AIMED_BY}" if room in AIMS else ""
        print(f"  {room:32}{lines[room]:8,}   at most  {budget:6,}  {aim:20}  {why}")


if __name__ == "__main__":
    main()
