"""Processes that hold parts of a model answer as one process does, and repeat themselves to the last bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from group_at_work import PLAN, SLOTS, Answer, Job, answers, at_work, learned, model_of
from tiny_models import VOCAB, Letters, episodes, prompts

from plaudit.compute.digest import digest
from plaudit.models.lora import adapter_names
from plaudit.rollout.native import NativeEngine

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "vocab_size": VOCAB,
}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96, "vocab_size": VOCAB}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 6},
}
CASES = [("gpt2", 2), ("llama", 2), ("qwen3", 2), ("mistral", 2), ("half", 2), ("lora", 2), ("gpt2", 4)]
EXACT = [(kind, world) for kind, world in CASES if kind != "half"]


def job_of(kind: str, world: int, root: Path) -> Job:
    job = {
        "config": CONFIGS.get(kind, CONFIGS["llama"]),
        "dtype": "bfloat16" if kind == "half" else "float32",
        "rank": 3 if kind == "lora" else 0,
        "prompts": prompts(6, 2, 11, 3),
        "out": str(root / f"{kind}-{world}.json"),
    }
    return job | {"answers": answers(NativeEngine(model_of(job), Letters(), slots=SLOTS), job)}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[tuple[str, int], Job]:
    root = tmp_path_factory.mktemp("group")
    made = {(kind, world): job_of(kind, world, root) for kind, world in CASES}
    for size in (2, 4):
        folder = root / str(size)
        folder.mkdir()
        path = f"{environment['PYTHONPATH']}:{Path(__file__).parent}"
        mine = [job for (_, world), job in made.items() if world == size]
        at_work(mine, size, folder, environment | {"PYTHONPATH": path})
    return made


def found(job: Job) -> dict[str, Any]:
    return json.loads(Path(job["out"]).read_text())  # type: ignore[no-any-return]


def tokens(groups: list[list[Answer]]) -> list[list[int]]:
    return [answer["tokens"] for group in groups for answer in group]


def kl(groups: list[list[Answer]], learner: list[float], temperature: float = 1.0) -> float:
    """Of the answers at temperature 1, nats a token."""
    total, count, place = 0.0, 0, 0
    for group in groups:
        for sampling, answer in zip(PLAN[:2], group[:2], strict=True):
            theirs = learner[place : place + len(answer["tokens"])]
            place += len(theirs)
            if sampling.temperature == temperature:
                gaps = [b - a for a, b in zip(answer["logprobs"], theirs, strict=True)]
                total += sum(math.expm1(gap) - gap for gap in gaps)
                count += len(gaps)
    assert place == len(learner) and count > 40
    return total / count


@pytest.mark.parametrize(("kind", "world"), EXACT)
def test_they_draw_the_tokens_of_one_process(kind: str, world: int, jobs: dict[tuple[str, int], Job]) -> None:
    job = jobs[kind, world]
    mine, theirs = job["answers"], found(job)["first"]
    assert tokens(mine) == tokens(theirs)
    for one, other in zip(mine, theirs, strict=True):
        for answer, same in zip(one, other, strict=True):
            assert same["logprobs"] == pytest.approx(answer["logprobs"], abs=1e-5)
    assert len({tuple(answer) for answer in tokens(mine)}) == len(tokens(mine)), "answers that differ prove something"


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_each_holds_a_part_of_model_and_cache(kind: str, world: int, jobs: dict[tuple[str, int], Job]) -> None:
    job = jobs[kind, world]
    answered, model = found(job), model_of(job)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert 1 / world < answered["held"] / whole < 1.25 / world, "norms, few biases and positions are copied"
    assert answered["cached"] == model.config.kv_heads // world


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_they_repeat_themselves_whatever_is_beside(
    kernels: None, kind: str, world: int, jobs: dict[tuple[str, int], Job]
) -> None:
    """To the last bit: asked again, one by one, and after others had given up."""
    answered = found(jobs[kind, world])
    assert answered["first"] == answered["again"]
    assert answered["first"][:2] == answered["alone"]


@pytest.mark.parametrize(("kind", "world"), EXACT)
def test_episodes_go_on_from_the_caches_of_all_of_them(kind: str, world: int, jobs: dict[tuple[str, int], Job]) -> None:
    job = jobs[kind, world]
    answered, alone = found(job), episodes(NativeEngine(model_of(job), Letters(), slots=SLOTS), job["prompts"])
    assert tokens(answered["episodes"]) == [list(turn.tokens) for turns in alone for turn in turns]
    assert answered["episodes"] == answered["played again"]
    assert max(len(turns) for turns in alone) > 2


@pytest.mark.parametrize(("kind", "world"), EXACT)
def test_new_weights_reach_all_of_them_at_the_same_step(
    kind: str, world: int, jobs: dict[tuple[str, int], Job]
) -> None:
    """Within answers under way; a caller that gave up leaves the others in step."""
    job = jobs[kind, world]
    answered = found(job)
    versions = {tuple(sorted(set(one["versions"]))) for group in answered["interrupted"] for one in group}
    assert (0, 1) in versions
    new = NativeEngine(model_of(job, seed=5), Letters(), slots=SLOTS)
    assert tokens(answered["new"]) == tokens(answers(new, job))
    assert tokens(answered["new"]) != tokens(job["answers"])


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_their_parts_have_the_digest_of_the_whole_model_without_adapters(
    kind: str, world: int, jobs: dict[tuple[str, int], Job]
) -> None:
    job = jobs[kind, world]
    model = model_of(job)
    adapters = adapter_names(model)
    base = {name: parameter for name, parameter in model.named_parameters() if name not in adapters}
    assert len(base) < len(list(model.parameters())) or not adapters
    assert found(job)["beneath"] == digest(base)


def test_weights_that_do_not_come_to_a_process_are_refused(jobs: dict[tuple[str, int], Job]) -> None:
    assert found(jobs["llama", 2])["refused"].startswith("process 1 of this worker did not get version 2")
    assert found(jobs["gpt2", 4])["refused"].startswith("process 1 of this worker did not get version 2")
    assert found(jobs["lora", 2])["refused"].startswith("process 1 of this worker did not get version 2")


@pytest.mark.parametrize(("kind", "world"), EXACT)
def test_sampler_and_learner_agree_whatever_holds_them(kind: str, world: int, jobs: dict[tuple[str, int], Job]) -> None:
    """KL below 1e-6 for one process or several that sample, and one or several that learn."""
    job = jobs[kind, world]
    answered = found(job)
    alone = model_of(job)
    for sampler, groups in (("one", job["answers"]), ("group", answered["first"])):
        for learner in (learned(alone, groups, job["prompts"]), answered["scored"][sampler]):
            assert 0 <= kl(groups, learner) < 1e-6
            assert kl(groups, learner, temperature=0.6) > 1e-3, "it is the log-prob that was drawn with"
