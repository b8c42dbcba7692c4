"""What is recorded of each answer: with numbers by hand, and that a run is the same with and without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hooks import group, moment

from plaudit import load_settings, run
from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.learn.watched import Watched, WatchedRows
from plaudit.loop.progress import Delivery
from plaudit.loop.samples import Pieces, recording, row_columns, sample_records
from plaudit.monitor.samples import stretches
from plaudit.types import Row

ROW = Row(tokens=(1, 2, 3, 4), trainable=(False, False, True, True), group=0)


def decode(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


PIECES = Pieces(decode)


def seen(row: Row, logprobs: list[float], entropy: list[float]) -> WatchedRows:
    batch = Batch.of([row])
    return WatchedRows(batch.tokens, batch.lengths, batch.group, torch.tensor(logprobs), torch.tensor(entropy))


def test_a_sample_by_hand() -> None:
    batch = replace(Batch.of([ROW]), advantages=torch.tensor([9.0, 9.0, 0.25, 0.75]))
    first_pass = seen(ROW, [0.0, 0.0, -1.25, -2.0], [0.0, 0.0, 0.5, 0.25])
    later = seen(ROW, [0.0, 0.0, -9.0, -9.0], [0.0, 0.0, 9.0, 9.0])
    first, nothing = sample_records(group(0), row_columns(batch, [first_pass, later]), PIECES)
    assert first == (
        {"group": 0, "sample": 0, "greedy": False, "prompt_id": "p", "prompt": "how"}
        | {"completion": "well", "finish": "eos", "tokens": 2, "reward": 1.5, "score": 3.0, "parts": {"rule": 2.0}}
        | {"reason": None, "advantage": 0.5, "versions": [7, 8]}
        | {"ids": (3, 4), "pieces": ["<3>", "<4>"], "logprobs": [-1.0, -2.0], "learner": [-1.25, -2.0]}
        | {"entropies": [0.5, 0.25], "advantages": [0.25, 0.75], "drawn": [[8, 1], [7, 1]]}
    )
    assert (nothing["reward"], nothing["reason"], nothing["advantage"]) == (None, "too short", None)
    assert (nothing["versions"], nothing["tokens"], nothing["ids"]) == ([], 0, ())
    (other, _) = sample_records(group(1), row_columns(batch), PIECES)
    assert other["advantage"] is None  # another group's


def test_a_prompts_reference_is_beside_each_of_its_answers() -> None:
    asked = group(0)
    referring = replace(asked, prompt=replace(asked.prompt, answer="\\boxed{4}"))
    of = [list(sample_records(one, {}, PIECES)) for one in (referring, asked)]
    assert [record["answer"] for record in of[0]] == ["\\boxed{4}"] * 2
    assert [{name: value for name, value in record.items() if name != "answer"} for record in of[0]] == of[1]
    assert not any("answer" in record for record in of[1])


def test_the_learners_logprobs_are_those_before_the_first_update_where_it_has_them() -> None:
    batch = Batch.of([ROW]).with_columns(proximal=torch.tensor([0.0, 0.0, -0.5, -0.75]))
    (record, _) = sample_records(group(0), row_columns(batch, [seen(ROW, [0.0] * 4, [0.0, 0.0, 1.0, 2.0])]), PIECES)
    assert (record["learner"], record["entropies"]) == ([-0.5, -0.75], [1.0, 2.0])


def test_equal_answers_keep_the_advantages_of_their_own_rewards() -> None:
    """Both showed the last one's, and so did a failed or greedy answer of the same tokens."""
    drawn, _ = group(0).responses
    answers = (replace(drawn, greedy=True), drawn, replace(drawn, reward=None), replace(drawn, reward=-1.5))
    answers += (replace(drawn, trainable=(False, False)), replace(drawn, reward=None, continues=True))
    columns = torch.tensor([9, 9, 0.5, 0.5, 9, 9, -0.5, -0.5, 9, 9, 2.0, 2.0])
    batch = replace(Batch.of([ROW, ROW, ROW]), advantages=columns)
    records = sample_records(replace(group(0), responses=answers), row_columns(batch), PIECES)
    assert [record["advantage"] for record in records] == [None, 0.5, None, -0.5, None, 2.0]


def test_every_group_of_a_step_is_recorded_with_its_kind(tmp_path: Path) -> None:
    async def nothing_seen(groups: Sequence[int]) -> list[WatchedRows]:
        return []

    path = tmp_path / "samples.jsonl"
    with recording(path, decode, nothing_seen, budget=10**6, steps=3, after=0) as hook:
        hook.validated([group(0)])
        delivery = Delivery(batch=None, epoch=1, groups=(group(0), group(2)), dropped=(group(1),))
        asyncio.run(hook(replace(moment(1, batch=None), delivery=delivery)))
        asyncio.run(hook(moment(2, batch=None)))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(record["step"], record["kind"], record["group"]) for record in records if record["sample"] == 0]
    assert found == [(1, "validation", 0), (1, "train", 0), (1, "train", 2), (1, "dropped", 1)] + [
        (2, "train", index) for index in range(3)
    ]
    assert [(one.step, one.answers, one.groups, one.of) for one in stretches(path)] == [(1, 8, 4, 4), (2, 6, 3, 3)]


def test_a_step_above_its_share_asks_only_for_groups_that_fit(tmp_path: Path) -> None:
    """A group is taken to have 2 * (450 + 3) + 2 * 45 bytes. The first step has 5 % of the budget, 10,000 bytes: room
    for ten. The last one has all the rest."""
    rows = [replace(ROW, group=index) for index in range(400)]
    batch = Batch.of(rows).with_columns(advantages=torch.arange(1600.0))
    delivery = Delivery(batch=None, epoch=1, groups=tuple(map(group, range(400))))
    watched, asked = Watched(), list[Sequence[int]]()

    async def seen(groups: Sequence[int]) -> list[WatchedRows]:
        asked.append(groups)
        return watched.taken(groups)

    path = tmp_path / "samples.jsonl"
    with recording(path, decode, seen, budget=200_000, steps=10, after=0) as record:
        for step in (1, 10):
            watched.watching(lambda output, batch: (torch.zeros(()), {}))(output(batch), sampled(batch))
            asyncio.run(record(replace(moment(step, batch=batch), delivery=delivery)))
            assert watched.taken([0]) == [], "what was not asked for is forgotten"
    assert asked[0] == list(range(10)) and len(asked[1]) > 100
    first, last = stretches(path)
    assert (first.groups, first.of, last.groups, last.of) == (10, 400, len(asked[1]), 400)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    fourth = next(one for one in records if (one["step"], one["group"], one["sample"]) == (10, 4, 0))
    assert (fourth["advantage"], fourth["learner"], fourth["entropies"]) == (18.5, [18.0, 19.0], [18.0, 19.0])


def test_a_group_above_the_share_is_recorded_of_a_validation_and_of_the_first_step(tmp_path: Path) -> None:
    async def nothing_seen(groups: Sequence[int]) -> list[WatchedRows]:
        return []

    with recording(tmp_path / "samples.jsonl", decode, nothing_seen, budget=10_000, steps=100, after=0) as record:
        for step in (1, 2):
            record.validated([group(0), group(1)])
            asyncio.run(record(moment(step, batch=None)))
    kinds = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    found = [(one["step"], one["kind"], one["group"]) for one in kinds if one["sample"] == 0]
    assert found == [(1, "validation", 0), (1, "train", 0), (2, "validation", 0)]


def output(batch: Batch) -> Output:
    numbers = torch.arange(float(len(batch.tokens)))
    return Output(logprobs=numbers.requires_grad_(), entropy=numbers)


def sampled(batch: Batch) -> Batch:
    return batch.with_columns(version=torch.zeros(len(batch.tokens), dtype=torch.int64))


def test_tokens_that_share_a_letter_are_read_together() -> None:
    """The euro sign is three bytes, here tokens 1 to 3; 0 and 4 are letters of their own, and 9 is half of one."""
    letters = {0: b"a", 1: b"\xe2", 2: b"\x82", 3: b"\xac", 4: b"z", 9: b"\xe2"}
    pieces = Pieces(lambda tokens: b"".join(letters[token] for token in tokens).decode(errors="replace"))
    assert pieces((0, 1, 2, 3, 4, 0)) == ["a", "\u20ac", "", "", "z", "a"]
    assert pieces((4, 9, 0)) == ["z", "\ufffd", "a"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_run_has_the_same_weights_with_and_without_records(method: str, make_recipe: Any, tmp_path: Path) -> None:
    more = {"data": {"validation": "20%"}, "algorithm": {"epochs": 2, "minibatches": 1}}
    with_them, without = (
        run(load_settings(make_recipe(method, tmp_path / str(size), log={"samples_megabytes": size}, **more)))
        for size in (200, 0)
    )
    files = [(done.model / "model.safetensors").read_bytes() for done in (with_them, without)]
    assert files[0] == files[1]
    assert without.samples == []
    trained = [sample for sample in with_them.samples if sample["kind"] == "train"]
    assert {sample["step"] for sample in trained} == {1, 2, 3, 4}
    assert {sample["kind"] for sample in with_them.samples} == {"train", "validation"}
    for sample in trained:
        assert "".join(sample["pieces"]).startswith(sample["completion"])
        assert len(sample["learner"]) == len(sample["entropies"]) == len(sample["ids"]) == sample["tokens"]
    first = [sample for sample in trained if sample["step"] == 1]
    gaps = [abs(a - b) for sample in first for a, b in zip(sample["logprobs"], sample["learner"], strict=True)]
    assert max(gaps) < 1e-4  # both are of the first weights
