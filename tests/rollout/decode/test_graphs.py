"""Decoding by recorded steps: the answers of plain ones. On the CPU a tape stands in for a CUDA graph."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import Letters, prompts, transformers_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from plaudit.models.decoder import Decoder
from plaudit.models.load import load_model
from plaudit.models.lora import add_lora
from plaudit.models.settings import LoraSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.decode.cache import Cache, ProductCache
from plaudit.rollout.decode.graphs import CudaGraphs, Step, rounded_length, rounded_rows
from plaudit.rollout.decode.pages import make_cache
from plaudit.rollout.engine import generate_all
from plaudit.rollout.native import NativeEngine
from plaudit.types import Completion, Sampling

pytestmark = pytest.mark.slow

aten: Any = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal}
"""What would make the host wait for a device."""
PLAN = [Sampling(temperature=0.0, max_tokens=11), *(Sampling(seed=s, max_tokens=5 + 7 * s) for s in range(3))]
QUESTIONS = prompts(6, 2, 11, 3, 30)


class Tape(TorchDispatchMode):
    """The operations of a step, to be done again on the same memory: nothing of the Python around them comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.played = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        brings = func.overloadpacket is aten.lift_fresh and args[0].dim() > 0  # more than a number, to the device
        assert not brings and func.overloadpacket not in WAITS, f"a step calls {func}"
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        self.played += 1
        made: dict[int, torch.Tensor] = {}
        for func, args, kwargs, before in self.operations:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: made.get(id(x), x), (args, kwargs))
            now = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                made[id(old)] = new


class Tapes:
    """Makes recorders, and keeps all of their tapes."""

    def __init__(self) -> None:
        self.made = 0
        self.tapes: list[Tape] = []

    def __call__(self, device: torch.device) -> Callable[[Step], Step]:
        assert device == torch.device("cpu")
        self.made += 1
        return self.record

    def record(self, step: Step) -> Step:
        step()  # the first time a model makes its rotary frequencies
        tape = Tape()
        with tape:
            step()
        self.tapes.append(tape)
        return tape.play

    @property
    def played(self) -> int:
        return sum(tape.played for tape in self.tapes)


@pytest.fixture
def product_cache(without_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of GPUs, also here."""
    monkeypatch.setattr("plaudit.rollout.decode.table.make_cache", ProductCache)


@pytest.fixture
def engine_of(letters: Letters, product_cache: None) -> Callable[..., NativeEngine]:
    def make(model: Decoder, slots: int, recorder: Any = None) -> NativeEngine:
        return NativeEngine(model, letters, slots=slots, recorder=recorder)

    return make


Make = Callable[..., NativeEngine]


def close(found: list[list[Completion]], expected: list[list[Completion]], atol: float = 1e-5) -> None:
    for mine, other in zip(chain(*found), chain(*expected), strict=True):
        assert mine.tokens == other.tokens
        assert mine.versions == other.versions
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(other.logprobs), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("kind", "lora"), [("gpt2", False), ("llama", True), ("qwen3", False), ("mistral", False), ("mistral", True)]
)
def test_answers_are_those_of_plain_steps(pairs: Any, engine_of: Make, kind: str, lora: bool) -> None:
    model = copy.deepcopy(pairs(kind)[0])
    if lora:
        add_lora(model, LoraSettings(rank=2))
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    for slots in (3, 64):  # rows are refilled and moved, or all run at once
        tapes = Tapes()
        engine, plain = engine_of(model, slots, tapes), engine_of(model, slots)
        close(generate_all(engine, QUESTIONS, PLAN), generate_all(plain, QUESTIONS, PLAN))
        assert engine.counts == plain.counts
        assert tapes.played == engine.counts.steps - 1  # the first one has prompts alone
        assert len(tapes.tapes) < tapes.played / 3


def test_a_recorded_step_follows_weights_that_change_in_place(pairs: Any, engine_of: Make) -> None:
    """Also while answers are under way, as an optimizer and `load` do it."""
    learner, tapes = copy.deepcopy(pairs("llama")[0]), Tapes()
    engine, plain = (engine_of(copy.deepcopy(learner), 4, recorder) for recorder in (tapes, None))
    before = generate_all(engine, QUESTIONS, PLAN)
    close(before, generate_all(plain, QUESTIONS, PLAN))
    recorded = len(tapes.tapes)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter *= 1.2

    async def answers(engine: NativeEngine) -> list[Completion]:
        running = asyncio.create_task(engine.generate(QUESTIONS[0], PLAN))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.load(dict(learner.hf_tensors()), 1)
        return await running

    found, expected = (asyncio.run(answers(one)) for one in (engine, plain))
    close([found], [expected])
    assert {version for one in found for version in one.versions} == {0, 1}
    assert generate_all(engine, QUESTIONS, PLAN) != before
    assert len(tapes.tapes) == recorded


def test_what_lies_elsewhere_is_recorded_anew(pairs: Any, engine_of: Make) -> None:
    model, tapes = copy.deepcopy(pairs("gpt2")[0]), Tapes()
    engine = engine_of(model, 4, tapes)

    def answers(length: int = 20) -> None:
        plan = [Sampling(seed=1, max_tokens=length)]
        close(generate_all(engine, QUESTIONS, plan), generate_all(engine_of(model, 4), QUESTIONS, plan))

    answers()
    answers()
    assert tapes.made == 1
    engine.sleep()
    assert engine.forward.recorded is None
    engine.wake()
    answers()
    assert tapes.made == 2
    with torch.no_grad():
        model.embedding.weight.data = model.embedding.weight * 1.1
    answers()
    assert tapes.made == 3
    answers(length=60)  # in a larger cache
    assert tapes.made == 4
    assert engine.forward.recorder is not None


def refuses(step: Step) -> Step:
    raise RuntimeError("operation not permitted when stream is capturing")


def records_nothing(step: Step) -> Step:
    """As torch does, with a mere warning, where a step's operations go to another stream than the one it records."""
    step()
    return lambda: None


@pytest.mark.parametrize(
    ("record", "why"),
    [(refuses, "not permitted when stream is capturing"), (records_nothing, "differ by 100.0% .* a plain step")],
)
def test_an_engine_that_cannot_record_says_so_once_and_goes_on(
    pairs: Any, engine_of: Make, caplog: pytest.LogCaptureFixture, record: Any, why: str
) -> None:
    model, _ = pairs("llama")
    engine = engine_of(model, 3, lambda device: record)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            close(generate_all(engine, QUESTIONS, PLAN), generate_all(engine_of(model, 3), QUESTIONS, PLAN))
    [said] = caplog.messages
    assert "goes on without CUDA graphs, as by PLAUDIT_CUDA_GRAPHS=off" in said
    assert re.search(why, said)


class Streams:
    """Stands in for what `CudaGraphs` uses of torch.cuda: notes who waits for whom, and on which stream steps run. A
    graph's replay runs its step again, as the memory's new contents have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuse: bool = False):
        self.notes: list[str] = []
        self.refuse = refuse
        self.current: Any = self.stream_of("the caller's")
        names = ("device", "stream", "graph", "set_stream", "CUDAGraph")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream_of(f"its own on {device}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)

    def stream_of(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.notes.append(f"{name} waits for {other.name}"))

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.notes.append(f"on {device}")
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    class CUDAGraph:
        def __init__(self) -> None:
            self.steps: list[Step] = []

        def replay(self) -> None:
            for step in self.steps:
                step()

    @contextmanager
    def graph(self, graph: CUDAGraph, *, pool: str, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("a pool", "thread_local")
        self.current = stream  # torch leaves it so where recording fails
        if self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing")
        graph.steps.append(self.step)
        yield
        self.current = self.before

    step: Step
    before: Any


def test_a_cuda_graph_is_recorded_on_a_stream_of_its_own_after_a_plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Streams(monkeypatch)
    cuda.before = cuda.current
    graphs = CudaGraphs(torch.device("cuda:1"))
    cuda.step = lambda: cuda.notes.append(f"a step on {cuda.current.name}")
    replay = graphs(cuda.step)
    own = "its own on cuda:1"
    assert cuda.notes == [
        "on cuda:1",
        f"{own} waits for the caller's",
        f"a step on {own}",  # what libraries set up at their first call is no part of the graph
        f"the caller's waits for {own}",
        f"a step on {own}",
    ]
    assert cuda.current is cuda.before
    replay()
    assert cuda.notes[5:] == ["a step on the caller's"]


def test_a_cuda_graph_that_cannot_be_recorded_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Streams(monkeypatch, refuse=True)
    cuda.before = cuda.current
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs(torch.device("cuda"))(lambda: None)
    assert cuda.current is cuda.before


@pytest.fixture(scope="module")
def behind_a_window(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model whose tokens see the 6 newest ones, in 2 layers."""
    folder: Path = tmp_path_factory.mktemp("window")
    transformers_model("mistral", max_position_embeddings=256).save_pretrained(folder)
    model = load_model(str(folder))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(("cache", "recorded"), [(make_cache, False), (ProductCache, False), (ProductCache, True)])
def test_an_idle_row_sees_itself(
    behind_a_window: Decoder,
    letters: Letters,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    cache: Callable[..., Cache],
    recorded: bool,
) -> None:
    """Four rows: three short sequences and one from 140 to 143, whose row then idles at position 142, while the others
    are at 5 and the step reads 32 or 16 keys, or 128 recorded ones: none of 137 to 142. What it writes at 142 must be
    numbers: the next sequence there goes from 120 to 135, and reads 160 or 144 keys from 129 on. Many more follow."""
    if cache is ProductCache:
        request.getfixturevalue("without_kernels")
    monkeypatch.setattr("plaudit.rollout.decode.table.make_cache", cache)
    chance = random.Random(3)
    sizes = [(2, 40), (2, 40), (2, 40), (140, 3), (120, 15)]
    sizes += [(chance.choice((2, 9, 150)), chance.choice((1, 4, 20, 80))) for _ in range(10)]
    questions = prompts(*(size for size, _ in sizes))
    plans = [[Sampling(seed=seed, max_tokens=answer)] for seed, (_, answer) in enumerate(sizes)]

    async def answers(engine: NativeEngine) -> list[list[Completion]]:
        return await asyncio.gather(*map(engine.generate, questions, plans))

    tapes = Tapes()
    engine = NativeEngine(behind_a_window, letters, slots=4, recorder=tapes if recorded else None)
    alone = NativeEngine(behind_a_window, letters, slots=1)
    close(asyncio.run(answers(engine)), asyncio.run(answers(alone)))
    assert (tapes.played > 0) == recorded
    assert engine.table is not None
    assert all(table.isfinite().all() for table in engine.table.cache.keys + engine.table.cache.values)


def test_shapes_are_few() -> None:
    """At most twice as many rows and a quarter more keys than needed, and never more than there are."""
    assert [rounded_rows(n, 256) for n in (1, 2, 3, 33, 64, 65, 129, 250)] == [1, 2, 4, 64, 64, 128, 192, 256]
    assert [rounded_rows(n, 50) for n in (30, 33)] == [32, 50]
    assert [rounded_length(n, 4096) for n in (1, 128, 129, 200, 1000, 1025)] == [128, 128, 160, 224, 1024, 1280]
    assert rounded_length(1025, 1100) == 1100
    assert len({rounded_length(n, 4096) for n in range(1, 4097)}) == 21
    assert all(n <= rounded_length(n, 4096) <= max(1.25 * n, 128) for n in range(1, 4097))


def test_the_cpu_records_nothing(pairs: Any, letters: Letters) -> None:
    engine = build_engine(pairs("llama")[0], letters, slots=4)
    assert isinstance(engine, NativeEngine)
    assert engine.forward.recorder is None


def both_ways(model: Any, letters: Letters, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines with and without CUDA graphs."""
    engines = [build_engine(model, letters, slots=7)]
    monkeypatch.setenv("PLAUDIT_CUDA_GRAPHS", "off")
    return [*engines, build_engine(model, letters, slots=7)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA graphs are recorded on one")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "mistral"])
def test_cuda_graphs_answer_like_plain_steps(
    pairs: Any,
    letters: Letters,
    kind: str,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 the tokens of plain steps. In lower precision other shapes round otherwise and answers part; what was
    drawn then has the log-prob that a pass over the whole answer gives it."""
    model = copy.deepcopy(pairs(kind)[0]).to("cuda", dtype)
    engines = both_ways(model, letters, monkeypatch)
    found, expected = (generate_all(engine, QUESTIONS, PLAN) for engine in engines)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert isinstance(engines[0], NativeEngine)
    assert engines[0].forward.recorder is CudaGraphs
    assert engines[0].forward.recorded is not None
    if dtype is torch.float32:
        close(found, expected, atol=1e-4)
        return
    with torch.no_grad():
        for question, group in zip(QUESTIONS, found, strict=True):
            for one in group:
                tokens = torch.tensor([*question, *one.tokens], device="cuda")
                logp = model.head(model(tokens, model.packed([len(tokens)]))).float().log_softmax(-1)
                again = logp[len(question) - 1 : -1].gather(1, tokens[len(question) :, None])[:, 0].cpu()
                torch.testing.assert_close(torch.tensor(one.logprobs), again, atol=0.15, rtol=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU: torch's current one is the first")
def test_cuda_graphs_of_another_gpu(
    pairs: Any, letters: Letters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(pairs("llama")[0]).to("cuda:1")
    engines = both_ways(model, letters, monkeypatch)
    found, expected = (generate_all(engine, QUESTIONS, PLAN) for engine in engines)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert torch.cuda.current_device() == 0
    close(found, expected, atol=1e-4)
