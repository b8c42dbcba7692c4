"""Models that wait in host memory: on the device while they are asked and no longer, with the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import GPT2

from plaudit import load_settings, run
from plaudit.batch import Batch
from plaudit.evaluate.judge import Judge
from plaudit.learn.learner import Learner
from plaudit.learn.scorer import Scorer
from plaudit.learn.sharding import Waiting, Whole
from plaudit.models.base import LanguageModel
from plaudit.models.load import fresh_model
from plaudit.types import Role

Recipe = Callable[..., dict[str, Any]]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: nothing can wait apart from it")
    return str(request.param)


@pytest.fixture
def offloads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a device with memory of its own: what waits is copied there as well."""
    for module in ("plaudit.executors.trainer", "plaudit.evaluate.judge"):
        monkeypatch.setattr(f"{module}.apart", lambda device: True)


def tiny(device: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    return fresh_model(GPT2, seed=seed, vocab_size=50, dtype=dtype, device=device)  # head and embedding are one


def places(model: LanguageModel) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_parameters_are_copied_for_the_time_of_asking(device: str) -> None:
    model, same = (tiny(device) for _ in range(2))
    place = Waiting(model, device=torch.device(device))
    waiting = places(model)
    assert place.device.type == device
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert device == "cpu" or all(parameter.is_pinned() for parameter in model.parameters())
    for _ in range(2):
        with place.present():
            assert {parameter.device.type for parameter in model.parameters()} == {device}
            assert not set(places(model)) & set(waiting)
            assert model.head.weight is model.embedding.weight  # type: ignore[union-attr]
            for mine, other in zip(model.parameters(), same.parameters(), strict=True):
                assert torch.equal(mine, other)
        assert places(model) == waiting
    with pytest.raises(KeyError), place.present():
        raise KeyError
    assert places(model) == waiting


@pytest.mark.parametrize("budget", [8, 1000])
def test_what_it_says_is_the_same_to_the_bit(device: str, batch: Batch, budget: int) -> None:
    whole, waiting = (tiny(device) for _ in range(2))
    place = Waiting(waiting, device=torch.device(device))
    scorers = [
        Scorer(model, Role.REFERENCE, token_budget=budget, placement=placed)
        for model, placed in ((whole, Whole(whole)), (waiting, place))
    ]
    first, second = (scorer.annotate(batch).reference for scorer in scorers)
    assert first is not None
    assert second is not None
    assert first.device.type == "cpu"
    assert torch.equal(first, second)


def test_a_moving_one_moves_where_it_waits(device: str) -> None:
    """In float32, towards a policy in bfloat16, as on the device."""
    whole, waiting = (tiny(device, dtype=torch.float32) for _ in range(2))
    place = Waiting(waiting, device=torch.device(device))
    before = places(waiting)
    for model, placed in ((whole, Whole(whole)), (waiting, place)):
        Scorer(model, Role.REFERENCE, leader=tiny(device, seed=1), placement=placed).follow(0.25)
    assert places(waiting) == before
    for mine, other in zip(waiting.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other.cpu())


def test_a_judge_comes_to_score(device: str, offloads: None, judge: Path) -> None:
    plain, waiting = (Judge.load(str(judge), device=device, offload=offload) for offload in (False, True))
    assert isinstance(waiting.placement, Waiting)
    assert plain.placement is None
    asked = [(3, 4, 5), (9, 8), (2,) * 30]
    assert waiting.of_sequences(asked) == plain.of_sequences(asked)


TURNS = {"placement": {"generate": {"shares": "train"}}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"kl_in_loss": 0.1}, "reference": {"ema": 0.1}, "runtime": TURNS},
    "dpo": {"data": {"limit": 8}, "reference": {}, "runtime": {}},  # read twice: the columns are computed once
}
EVENTS = {"grpo": "(comes goes learns ){4}", "dpo": "(comes goes )+(learns ){4}"}


@pytest.mark.slow
@pytest.mark.parametrize("method", CASES)
def test_a_run_is_the_same(
    method: str, device: str, offloads: None, make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and figures. The reference is there to be asked, once a step or before them all, and gone while the
    policy learns."""
    events: list[str] = []
    present, learn = Waiting.present, Learner.prepare

    @contextmanager
    def watched(place: Waiting) -> Iterator[None]:
        events.append("comes ")
        with present(place):
            yield
        events.append("goes ")

    def prepare(learner: Learner, *given: Any) -> Any:
        events.append("learns ")
        return learn(learner, *given)

    monkeypatch.setattr(Waiting, "present", watched)
    monkeypatch.setattr(Learner, "prepare", prepare)
    runs = []
    for offload in (False, True):
        events.clear()
        more = CASES[method] | {"device": device}
        waiting = ["reference", *["optimizer"] * (device == "cpu")]  # the optimizer's arithmetic is the CPU's then
        more["runtime"] = CASES[method]["runtime"] | {"offload": waiting if offload else []}
        runs.append(run(load_settings(make_recipe(method, tmp_path / str(offload), **more))))
        assert re.fullmatch(EVENTS[method] if offload else "(learns ){4}", "".join(events))
    stays, waits = runs
    [first], [second] = (list(done.model.glob("*.safetensors")) for done in runs)
    assert first.read_bytes() == second.read_bytes()
    clocks = re.compile("time|second")
    for mine, theirs in zip(stays.metrics, waits.metrics, strict=True):
        assert {k: v for k, v in mine.items() if not clocks.search(k)} == {
            k: v for k, v in theirs.items() if not clocks.search(k)
        }
