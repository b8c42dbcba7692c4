"""The package keeps its shape: one import direction, optional libraries in few named files, readable sizes.

Every rule is a function from a source tree to a list of complaints. It runs on the package, where the list must be
empty, and on a small tree that breaks it, where the list must not be.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest
from long import LONG as LEFT
from shape import (
    AIMS,
    OPTIONAL,
    REPOSITORY,
    ROOMS,
    ROOT,
    Import,
    Source,
    arrows,
    circle,
    core_arrows,
    edges,
    floors,
    lines_of,
    sources,
    unit_of,
)

# A unit may import units of earlier lines and itself, never one beside it. Units are subpackages and top-level files.
LAYERS = (
    {"support"},
    {"types", "partition"},
    {"compute", "batch", "maths", "runtime", "monitor"},
    {"algorithms", "data", "rewards", "models"},
    {"weights", "tasks"},
    {"rollout", "learn"},
    {"environments"},
    {"loop", "evaluate"},
    {"settings"},
    {"executors", "importers", "interchange"},
    {"adapters", "trackers", "page", "servers", "training_api"},
    {"runs", "relabel"},
    {"preflight"},
    {"commands"},
    {"__main__"},
    {"__init__"},
)
ONLY_TYPES = {"runtime", "monitor"}

# Optional libraries and the only files that may import each.
PLACES: dict[str, set[str]] = {
    "ray": {
        "runtime/ray.py",
        "runtime/ray_worker.py",
        "runtime/ray_node.py",
        "runtime/ray_private.py",
        "trackers/ray.py",
    },
    "httpx2": {"rewards/remote.py"},
    "uvicorn": {"commands/listening.py", "environments/agents.py"},
    "starlette": {
        "environments/server.py",
        "page/app.py",
        "page/door.py",
        "rewards/server.py",
        "support/requests.py",
        "training_api/server.py",
    },
    "vllm": {"rollout/vllm_library.py"},
    "math_verify": {"rewards/comparing.py"},
    "reasoning_gym": {"support/gym.py"},
    "textarena": {"adapters/textarena.py"},
    "openenv": {"adapters/openenv.py"},
    "httpx": {"adapters/openenv.py"},
    "gguf": {"interchange/gguf.py"},
    "google": {"training_api/wire.py"},
    "tensorboard": {"trackers/tensorboard.py"},
    "torch.utils.tensorboard": {"trackers/tensorboard.py"},
    "wandb": {"trackers/wandb.py"},
    "IPython": {"monitor/notebook.py"},
    "mlflow": {"trackers/mlflow.py"},
    "trackio": {"trackers/trackio.py"},
    "deepspeed": set(),
    "pickle": {"runtime/plain.py"},
    "marshal": set(),
    "shelve": set(),
}

# What loads none of the heavy libraries when it is imported, not even through another file.
LIGHT = ("__init__", "types", "support", "settings", "commands/cli.py", "tasks", "data", "rewards", "monitor")
HEAVY = {"torch", "transformers", "datasets", "matplotlib", "sklearn"}
HEAVY_ALL_THE_SAME = {"rewards/judge.py": "it runs the judge, a model"}

READING_PATHS = (
    (
        1700,
        "types/__init__.py",
        "batch.py",
        "algorithms/base.py",
        "algorithms/policy_gradient.py",
        "algorithms/grpo.py",
        "runtime/worker_group.py",
        "learn/scorer.py",
        "learn/learner.py",
        "loop/models.py",
        "loop/train.py",
        "rollout/rollouter.py",
        "loop/online.py",
    ),
    (600, "runtime/worker_group.py", "runtime/local.py", "runtime/ray_worker.py", "runtime/ray_worker_group.py"),
    (600, "weights/packed.py", "weights/transport.py", "executors/publisher.py", "rollout/worker.py"),
)
"""The files that the README gives a newcomer to read, in their order, after the most lines that they may have together:
the whole; from a call to a learner's method in an actor of Ray; from a learner's weights to the sampler's."""

FILE_LINES = 400
FUNCTION_LINES = 60
ALGORITHM_CODE_LINES = 80
ALGORITHM_BASES = {"algorithms/base.py", "algorithms/policy_gradient.py"}
OVERSIZED: dict[str, str] = {}  # "models/x.py" or "models/x.py:function" -> why it cannot be split


def ours(imported: Import) -> bool:
    return imported.name.split(".")[0] == "plaudit"


def direction(root: Path) -> list[str]:
    known = sources(root)
    layer = {unit: index for index, units in enumerate(LAYERS) for unit in units}
    complaints = [f"{s.path}: {s.unit} stands in no layer of LAYERS" for s in known.values() if s.unit not in layer]
    for source in known.values():
        for imported in filter(ours, source.imports):
            target = unit_of(imported.name)
            where = f"{source.path}:{imported.line}: {source.unit} imports {imported.name}"
            if target == source.unit or source.unit not in layer or target not in layer:
                continue
            if source.unit in ONLY_TYPES and target not in ("types", "support"):
                complaints.append(f"{where}, it may import nothing of ours but types and support")
            elif layer[target] == layer[source.unit]:
                complaints.append(f"{where}, which stands beside it")
            elif layer[target] > layer[source.unit]:
                complaints.append(f"{where}, which stands above it")
    return complaints


def plain_settings(root: Path) -> list[str]:
    """Settings of a room, and `support/plugins.py`, import the standard library, types, support and other settings."""
    complaints = []
    for path, source in sources(root).items():
        if not (path == "support/plugins.py" or path.endswith("/settings.py")):
            continue
        for imported in source.imports:
            parts = imported.name.split(".")
            is_ours = parts[0] == "plaudit" and (parts[1] in ("types", "support") or parts[2:3] == ["settings"])
            if not (is_ours or parts[0] in sys.stdlib_module_names):
                complaints.append(
                    f"{path}:{imported.line}: imports {imported.name}, not settings, types, support or a standard"
                )
    return complaints


def one_place(root: Path) -> list[str]:
    return [
        f"{path}:{imported.line}: imports {library}, which only {' and '.join(sorted(places)) or 'no file'} may"
        for path, source in sources(root).items()
        for imported in source.imports
        for library, places in PLACES.items()
        if path not in places and (imported.name == library or imported.name.startswith(library + "."))
    ]


def light(root: Path) -> list[str]:
    known = sources(root)
    return [
        f"importing {' -> '.join(chain)} loads {chain[-1]}; import it in the function that needs it"
        for path, source in known.items()
        if (source.unit in LIGHT or path in LIGHT) and path not in HEAVY_ALL_THE_SAME
        if (chain := _heavy_chain(path, known))
    ]


def _heavy_chain(start: str, known: dict[str, Source]) -> list[str]:
    """The shortest way from a file over imports that run at load time to a heavy library."""
    ways, seen = [[start]], {start}
    for way in ways:
        for imported in known[way[-1]].imports:
            if not imported.at_load:
                continue
            if imported.name.split(".")[0] in HEAVY:
                return [*way, imported.name.split(".")[0]]
            for path in _files(imported.name, known) - seen:
                seen.add(path)
                ways.append([*way, path])
    return []


def _files(name: str, known: dict[str, Source]) -> set[str]:
    """The files that run when a module of ours is imported: its own and those of the packages around it."""
    parts = name.split(".")
    if parts[0] != "plaudit":
        return set()
    places = ["/".join(parts[1:end]) for end in range(1, len(parts) + 1)]
    candidates = {f"{place}/__init__.py".lstrip("/") for place in places} | {f"{place}.py" for place in places}
    return candidates & known.keys()


def sizes(root: Path) -> list[str]:
    complaints = {}
    for path, source in sources(root).items():
        lines = source.text.count("\n")
        if lines > FILE_LINES:
            complaints[path] = f"{path} has {lines} lines, at most {FILE_LINES}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    place = f"{path}:{node.name}"
                    complaints[place] = f"{place} has {lines} lines, at most {FUNCTION_LINES}"
    return [text for place, text in complaints.items() if place not in OVERSIZED]


def small_algorithms(root: Path) -> list[str]:
    complaints = []
    for path, source in sources(root).items():
        if source.unit == "algorithms" and path not in ALGORITHM_BASES:
            lines = len(_code_lines(source))
            if lines > ALGORITHM_CODE_LINES:
                complaints.append(f"{path} has {lines} lines of code, at most {ALGORITHM_CODE_LINES}")
    return complaints


def _code_lines(source: Source) -> set[int]:
    """Lines that hold code: no blank lines, comments, or strings that stand alone, which are prose."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    lines = {n for t in tokens if t.type not in skipped for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def rooms(root: Path) -> list[str]:
    return [
        f"{room} has {lines} lines, at most {ROOMS[room][0]} (tests/shape.py)"
        for room, lines in lines_of(root).items()
        if room in ROOMS and lines > ROOMS[room][0]
    ]


def reading_path(root: Path) -> list[str]:
    """Paths are short, no file needs a later one, and each header shows with arrows what comes in and goes out."""
    every, needs, complaints = sources(root), edges(root), list[str]()
    for most, *files in READING_PATHS:
        path = [every[name] for name in files if name in every]
        lines = sum(source.text.count("\n") for source in path)
        for number, source in enumerate(path):
            if not re.search(r"\n.+ -> ", ast.get_docstring(source.tree) or ""):
                complaints.append(f"{source.path} has no line with an arrow (->) in its header")
            later = needs[source.path].intersection(one.path for one in path[number + 1 :])
            complaints += [f"{source.path} needs {one}, which the reading path has later" for one in sorted(later)]
        if lines > most:
            complaints.append(f"the reading path from {files[0]} has {lines} lines, at most {most}")
    return complaints


def circles(root: Path) -> list[str]:
    found = circle(edges(root))
    return [f"a circle of imports: {' -> '.join([*found, found[0]])}"] if found else []


COMMANDS_OF = {
    "commands/ahead.py": {"preflight"},
    "commands/cli.py": {"relabel"},
    "commands/files.py": {"interchange"},
    "commands/listening.py": {"page"},
    "commands/training.py": {"training_api"},
}


def optional_rooms(root: Path) -> list[str]:
    """An optional room is imported by its command alone, when it is called; others ask `support/rooms.py`."""
    return [
        f"{path}:{imported.line}: imports {imported.name}, which may be removed: ask `optional` for it"
        for path, source in sources(root).items()
        for imported in filter(ours, source.imports)
        if (room := unit_of(imported.name)) in OPTIONAL and room != source.unit
        if imported.at_load or room not in COMMANDS_OF.get(path, ())
    ]


def one_executor(root: Path) -> list[str]:
    """Only the executors' own room names a kind of executor; `Executor` answers what others would test for."""
    return [
        f"{path}:{imported.line}: imports {imported.name}, give its answer to `Executor` in executors/base.py"
        for path, source in sources(root).items()
        for imported in source.imports
        if source.unit not in ("executors", "servers") and imported.name.endswith(("LocalExecutor", "RayExecutor"))
    ] + [
        f"{path}:{node.lineno}: asks whether something is `apart`, give its answer to `Executor` in executors/base.py"
        for path, source in sources(root).items()
        if source.unit in ("loop", "runs", "commands")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "apart" and ast.unparse(node.value).endswith("executor")
    ]


RULES: dict[str, Callable[[Path], list[str]]] = {
    rule.__name__: rule
    for rule in (
        *(
            direction,
            plain_settings,
            one_place,
            light,
            sizes,
            small_algorithms,
            rooms,
            reading_path,
            circles,
            one_executor,
            optional_rooms,
        ),
    )
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule: str) -> None:
    complaints = RULES[rule](ROOT)
    assert not complaints, "\n".join(["", *complaints])


def test_aims_are_below_what_rooms_may_have() -> None:
    assert [room for room, lines in AIMS.items() if lines >= ROOMS[room][0]] == []


def test_exceptions_name_files_that_exist() -> None:
    known = sources(ROOT)
    named = [
        *HEAVY_ALL_THE_SAME,
        *ALGORITHM_BASES,
        *itertools.chain(*(files for _, *files in READING_PATHS)),
        *(place.split(":")[0] for place in OVERSIZED),
    ]
    assert [path for path in named if path not in known] == []


def test_the_house_stays_low() -> None:
    """What DESIGN asks of the import graph: a newcomer can hold it in mind."""
    graph = arrows(REPOSITORY)
    assert floors(graph) <= 12
    assert core_arrows(graph) <= 154  # 11 of them are those of environments
    assert len([path for path in sources(ROOT) if "/" not in path]) <= 6


PATTERN = re.compile(r"""\bmatch=[rf]*(["'])(.*?)\1""")
SENTENCE = re.compile("(?:[A-Za-z']+ ){4}[A-Za-z']+")
PATCHES = re.compile(r"\b(?:syspath_prepend|sys\.path\.(?:insert|append))\(")


def texts_of_tests() -> dict[str, str]:
    return {str(file): file.read_text(encoding="utf-8") for file in (REPOSITORY / "tests").rglob("*.py")}


def test_tests_look_for_what_a_message_must_name_and_not_for_its_sentence() -> None:
    given = [(name, found[2]) for name, text in texts_of_tests().items() for found in PATTERN.finditer(text)]
    assert len(given) > 350
    assert [(name, text) for name, text in given if SENTENCE.search(text)] == []


def test_no_test_patches_where_modules_are_found() -> None:
    """A folder of pyproject's `pythonpath`, or a process with PYTHONPATH, does it as users do."""
    assert [name for name, text in texts_of_tests().items() if PATCHES.search(text)] == []


HEADER = '"""What it is for.\n\n    what comes in -> what goes out\n"""\n'
LONG = "\n".join(f"    x{n} = {n}" for n in range(FUNCTION_LINES))
OFFENCES = {
    "upwards": ("direction", {"maths/kl.py": "from plaudit.batch import Batch"}, "which stands beside it"),
    "beside": (
        "direction",
        {"learn/learner.py": "from plaudit.rollout.engine import Engine"},
        "which stands beside it",
    ),
    "above": ("direction", {"models/load.py": "import plaudit.learn.learner"}, "which stands above it"),
    "in a function": (
        "direction",
        {"data/x.py": "def f():\n    from plaudit.runs import assemble"},
        "which stands above it",
    ),
    "relative": ("direction", {"data/x.py": "from ..loop import train"}, "data imports plaudit.loop.train"),
    "facade": ("direction", {"loop/x.py": "from plaudit import run"}, "which stands above it"),
    "monitor": ("direction", {"monitor/x.py": "from plaudit.batch import Batch"}, "nothing of ours but types"),
    "no layer": ("direction", {"novel/x.py": ""}, "novel stands in no layer"),
    "settings": ("plain_settings", {"data/settings.py": "import omegaconf"}, "data/settings.py:1: imports omegaconf"),
    "plugins": (
        "plain_settings",
        {"support/plugins.py": "from plaudit.batch import Batch"},
        "imports plaudit.batch.Batch",
    ),
    "ray": ("one_place", {"loop/x.py": "def f():\n    import ray.util"}, "loop/x.py:2: imports ray"),
    "board": (
        "one_place",
        {"loop/x.py": "from torch.utils.tensorboard import SummaryWriter"},
        "torch.utils.tensorboard",
    ),
    "pickle": ("one_place", {"loop/x.py": "import pickle"}, "only runtime/plain.py may"),
    "heavy": ("light", {"data/x.py": "from torch import Tensor"}, "data/x.py -> torch"),
    "through another": (
        "light",
        {"data/x.py": "try:\n    from plaudit.batch import Batch\nfinally:\n    pass", "batch.py": "import torch.nn"},
        "data/x.py -> batch.py -> torch",
    ),
    "through a package": (
        "light",
        {
            "commands/cli.py": "import plaudit.models.settings",
            "models/settings.py": "",
            "models/__init__.py": "import transformers",
        },
        "commands/cli.py -> models/__init__.py -> transformers",
    ),
    "long file": ("sizes", {"loop/x.py": "x = 1\n" * 401}, "loop/x.py has 401 lines"),
    "long function": ("sizes", {"loop/x.py": f"class A:\n  async def f():\n{LONG}"}, "loop/x.py:f has 61 lines"),
    "large room": ("rooms", {"partition.py": "x = 1\n" * 81}, "partition has 81 lines, at most 80"),
    "long path": (
        "reading_path",
        dict.fromkeys(READING_PATHS[0][1:], HEADER + "x = 1\n" * 147),
        f"has {(147 + HEADER.count(chr(10))) * len(READING_PATHS[0][1:])} lines",
    ),
    "no arrows": ("reading_path", {"loop/train.py": '"""A loop: a -> b."""\n'}, "loop/train.py has no line with"),
    "later on the path": (
        "reading_path",
        {"loop/train.py": f"{HEADER}from plaudit.loop import online", "loop/online.py": HEADER},
        "loop/train.py needs loop/online.py",
    ),
    "circle": (
        "circles",
        {
            "loop/x.py": "from plaudit.loop import y",
            "loop/y.py": "def f():\n    from plaudit.loop.x import a",
        },
        "loop/x.py -> loop/y.py -> loop/x.py",
    ),
    "kind of executor": (
        "one_executor",
        {"runs/x.py": "from plaudit.executors.ray import RayExecutor"},
        "imports plaudit.executors.ray.RayExecutor",
    ),
    "optional": (
        "optional_rooms",
        {"runs/x.py": "from plaudit.page import app"},
        "runs/x.py:1: imports plaudit.page.app",
    ),
    "apart": ("one_executor", {"runs/x.py": "def f(executor):\n    return executor.apart"}, "runs/x.py:2: asks"),
    "long algorithm": ("small_algorithms", {"algorithms/x.py": '"""A."""\n' + "x = 1\n" * 81}, "81 lines of code"),
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_each_rule_finds_its_offence(tmp_path: Path, offence: str) -> None:
    rule, files, complaint = OFFENCES[offence]
    _write(tmp_path, files)
    found = RULES[rule](tmp_path)
    assert len(found) == 1, found
    assert complaint in found[0]


def test_what_is_allowed_passes_every_rule(tmp_path: Path) -> None:
    prose = '"""' + "Much prose.\n" * 100 + '"""\n'
    _write(
        tmp_path,
        {
            "types.py": HEADER + "import enum",
            "batch.py": HEADER + "import torch\nfrom plaudit.types import Row",
            "data/x.py": "from plaudit.types import Row\ndef f():\n    import torch",
            "evaluate/settings.py": "import math\nfrom plaudit.data.settings import DataSettings",
            "data/y.py": "import typing\nif typing.TYPE_CHECKING:\n    from plaudit.batch import Batch",
            "rewards/judge.py": "import torch",
            "rollout/vllm_library.py": "import vllm\nfrom plaudit.models import load",
            "trackers/wandb.py": "import wandb\nfrom . import sinks",
            "algorithms/x.py": prose + "# Comment\n\n" * 20 + "x = 1\n" * 80,
            "loop/x.py": "x = 1\n" * 400,
            "loop/y.py": "def f():\n" + "\n".join(LONG.splitlines()[1:]),
        },
    )
    assert {name: found for name, rule in RULES.items() if (found := rule(tmp_path))} == {}


def _write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def test_what_is_left_to_test_long_exists() -> None:
    tests = Path(__file__).parent
    named = {name: name.partition("::") for name in LEFT}
    absent = [name for name, (file, _, _) in named.items() if not (tests / file).exists()]
    assert not absent
    assert not [
        name
        for name, (file, _, function) in named.items()
        if function and f"\ndef {function}(" not in (tests / file).read_text()
    ]
