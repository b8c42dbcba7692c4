"""What the tests of whole runs share: tiny data, a tiny model, and recipes that finish in a fraction of a second."""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from long import LONG
from tiny import GPT2

from plaudit.tasks.demo import DemoFiles, DemoSize, make_demo

Recipe = Callable[..., dict[str, Any]]

hypothesis.settings.register_profile("short", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=500, deadline=None)  # of the part `examples` of test-long
hypothesis.settings.load_profile("short")  # the same examples every time: nothing fails by chance

os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # tests that start clusters of their own, as runs do
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 without it: Ray's workers would wait for the other tests

REWARDS = Path(__file__).with_name("tiny.py")
SHARED = Path(__file__).parents[2] / "shared" / "data"
CASES: Counter[str] = Counter()
"""Collected so far, by function."""
PROMPTS = ("ppo", "grpo", "rloo", "remax", "reinforce", "distill", "online-dpo", "best-of-k")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Clusters have deadlines, so processes of other tests give way to the one that starts with the clusters."""
    seeded()
    if "PYTEST_XDIST_WORKER" in os.environ and not item.get_closest_marker("clusters"):
        os.nice(max(0, 5 - os.nice(0)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """What fixtures draw, or drew for an earlier test, changes nothing."""
    seeded()


def seeded() -> None:
    """The same numbers for a test in whatever order tests run."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The address of a bucket; skips where s3fs or moto is not installed."""
    from buckets import served

    with served() as address:
        yield address


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of vLLM are skipped without it. Where processes share the tests, as in `make test`, a file's tests stay
    together, and clusters come first."""
    for item in items:
        if needs_ray(item.path):
            item.add_marker(pytest.mark.clusters)
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: `make test-vllm` installs it"))
    if not config.getoption("loadgroup", False):  # as pytest-xdist tells its workers, which collect
        return

    def group(item: pytest.Item) -> str:
        return "clusters" if needs_ray(item.path) else str(item.path)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: group(item) != "clusters")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make test` leaves out, as tests/long.py says: the same in every order that tests run in."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    function = f"{file}::{item.name.split('[')[0]}"
    stays = LONG.get(function, LONG.get(file))
    if stays is not None and (stays == 0 or CASES[function] % stays):
        item.add_marker(pytest.mark.long)
    CASES[function] += 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where groups are scattered, clusters of both processes are in each other's way, and tests fail by chance."""
    if session.config.getoption("loadgroup", False) and session.items and "@" not in session.items[0].nodeid:
        raise RuntimeError(f"pytest-xdist scatters groups of tests with pytest {pytest.__version__}: take an older one")


@functools.cache
def needs_ray(file: Path) -> bool:
    """Whether its tests start clusters: one after the other, beside all other tests. They are skipped without Ray."""
    return 'find_spec("ray")' in file.read_text()


@pytest.fixture
def kernels() -> None:
    """For tests of the kernels, and of bits that do not depend on what is computed beside, which only they give."""
    from plaudit.compute.library import library

    if library() is None:
        pytest.skip("there are no kernels without a C++ compiler: install g++")


PLAYED = {"pairs": ("pairs_of_halves", "-DPLAUDIT_PAIRS"), "matrices": ("matrices_of_halves", "-DPLAUDIT_MATRICES")}
"""What processors may have for bfloat16: how the kernels tell of it, and how they are compiled to play it."""


@pytest.fixture(scope="session")
def played_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the kernels of each are kept. The processes that share the tests share them: one of them compiles."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return {name: shared / f"played_{name}" for name in PLAYED}


@pytest.fixture
def played(
    kernels: None, played_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Called with "pairs" or "matrices": from then on the kernels are as on such a processor, the same code but for
    these instructions."""
    from plaudit.compute import calls, library

    caches = (library.library, library.number, calls._kernel, calls._call)

    def play(name: str) -> None:
        told, flag = PLAYED[name]
        monkeypatch.setenv("PLAUDIT_CACHE", str(played_folders[name]))
        monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O1", flag))  # soon compiled
        monkeypatch.setattr(library, "PATIENCE", 1200.0)  # also beside many busy processes
        for cached in caches:
            cached.cache_clear()
        assert library.number(told) == 1

    yield play
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a compiler: torch's own operations take the place of the kernels."""
    from plaudit.compute.library import library

    monkeypatch.setenv("PLAUDIT_KERNELS", "off")
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def either_way(request: pytest.FixtureRequest) -> None:
    """With the kernels, and without."""
    request.getfixturevalue("kernels" if request.param else "without_kernels")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    """The demo task with a few rows of each kind."""
    size = DemoSize(sft=24, sft_validation=4, pairs=16, pairs_validation=4, prompts=24, prompts_test=4, vocabulary=400)
    return make_demo(tmp_path_factory.mktemp("demo"), size=size)


@pytest.fixture(scope="session")
def make_recipe(demo: DemoFiles, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """recipe(method, folder, **sections): a complete recipe on the demo task; sections are merged in."""
    from plaudit.runs.pipeline import merged

    @functools.cache
    def teacher() -> str:
        """A larger random model, and sure of itself, so that it differs from the tiny policies of tests."""
        from plaudit.models.load import fresh_model, load_tokenizer, save_model

        sizes = {"n_embd": 48, "n_layer": 4, "n_head": 4, "initializer_range": 0.2}
        model = fresh_model({**GPT2, **sizes}, vocab_size=450, seed=5)
        folder = tmp_path_factory.mktemp("teacher") / "model"
        save_model(model, folder, tokenizer=load_tokenizer(str(demo.tokenizer)))
        return str(folder)

    data = {"sft": demo.sft} | dict.fromkeys(("reward", "dpo", "kto", "orpo", "simpo"), demo.preferences)

    def make(method: str, output: Path, **more: Any) -> dict[str, Any]:
        recipe: dict[str, Any] = {
            "method": method,
            "name": "run",
            "output": str(output),
            "threads": 1,
            "model": {"config": dict(GPT2), "tokenizer": str(demo.tokenizer)},
            "data": {"train": str(data.get(method, demo.prompts)), "max_tokens": 64, "max_prompt_tokens": 40},
            "optimizer": {"learning_rate": 0.003},
            "train": {"steps": 4, "batch_size": 4},
            "log": {"quiet": True},
        }
        if method in PROMPTS:
            recipe["rollout"] = {"prompts_per_step": 3, "max_tokens": 10, "slots": 8}
            recipe["rewards"] = [{"kind": "function", "function": f"{REWARDS}:varied"}]
        if method == "distill":
            recipe["reference"] = {"path": teacher()}
        return merged(recipe, more)

    return make


@pytest.fixture(scope="session")
def judge(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judge that was trained for two steps."""
    from plaudit import load_settings, run

    folder = tmp_path_factory.mktemp("judge")
    return run(load_settings(make_recipe("reward", folder, train={"steps": 2}))).model


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a subprocess that is to import this source tree, on one thread."""
    import plaudit

    source = str(Path(plaudit.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def no_interface_is_left() -> Iterator[None]:
    """Joining a group in this process says where gloo is to listen. Processes that later tests start elsewhere, on an
    island of tests/runs/test_partition_runs.py for one, have other interfaces."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    yield
    if before is None:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = before


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny tensors only lose by several threads, and runs that are compared bit for bit need the same number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def table(demo: DemoFiles) -> Any:
    """A tiny model around which episodes are played, a `playing.Table`."""
    from playing import Table

    return Table(str(demo.tokenizer))


@pytest.fixture
def tiny() -> Callable[..., dict[str, Any]]:
    """`tiny("llama", mlp_bias=True)`: the family's keys, with what the test changes."""

    def keys(model_type: str, **changes: Any) -> dict[str, Any]:
        if model_type == "gpt2":
            sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
            sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
        if model_type == "qwen3":
            sizes["head_dim"] = 16
        ids = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
        # A large spread of weights, so that a wrong position, bias or norm shows in the logits.
        return {"model_type": model_type, **sizes, **ids, "initializer_range": 0.2, **changes}

    return keys


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], str]:
    """Write rows (or text, or bytes) to a file of that name and give its path as a source."""

    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def shared_file() -> Callable[[str], Path]:
    """A real data file beside the checkout; the test is skipped where it is absent."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.is_file():
            pytest.skip(f"the real data file {path} is not on this machine")
        return path

    return find


@pytest.fixture
def imdb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of made-up film reviews, whose words tell their label."""
    folder, rng = tmp_path_factory.mktemp("imdb"), random.Random(0)
    words = {"pos": "great lovely warm clever bright".split(), "neg": "dull awful cold stupid grey".split()}
    for name, labels in (("train", ("pos", "neg")), ("test", ("pos", "neg")), ("unlabelled", (None,))):
        with gzip.open(folder / f"imdb-{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            for number in range(60):
                label = labels[number % len(labels)]
                own = words[label] if label else [*words["pos"], *words["neg"]]
                sentences = [
                    f"The {rng.choice(own)} film was {rng.choice(own)} and {rng.choice(own)}." for _ in range(6)
                ]
                file.write(json.dumps({"id": f"{name}/{number}", "text": " ".join(sentences), "label": label}) + "\n")
    return folder
