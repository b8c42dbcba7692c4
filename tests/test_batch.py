"""The ragged batch: whatever is cut, shuffled or joined, every entry stays with its token."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.algorithms.rows import row_of
from plaudit.batch import ROW_COLUMNS, TOKEN_COLUMNS, Batch
from plaudit.learn import scorer  # noqa: F401 - it says how a batch travels
from plaudit.types import Completion, Finish, Group, Prompt, Response, Row, Score

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def marked(lengths: list[int], unit: int = 1) -> Batch:
    """A batch whose every column entry is its token's (or row's) own number, in the column's own way."""
    size, rows = sum(lengths), len(lengths)
    token = torch.arange(size)
    row = torch.arange(rows)
    columns = {name: token * 100.0 + place for place, name in enumerate(TOKEN_COLUMNS)}
    columns |= {name: row * 100.0 + place for place, name in enumerate(ROW_COLUMNS)}
    columns |= {"tokens": token, "trainable": token % 3 == 1, "version": token * 7, "group": row // unit}
    columns |= {"lengths": torch.tensor(lengths), "continues": row % 2 == 1}
    return Batch(unit=unit, **columns)


def same(a: Batch, b: Batch) -> bool:
    return a.unit == b.unit and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in (*TOKEN_COLUMNS, *ROW_COLUMNS)
    )


def unit_numbers(batch: Batch) -> list[int]:
    return (batch.group.view(-1, batch.unit)[:, 0]).tolist()


def assert_aligned(part: Batch, whole: Batch) -> None:
    """Each row of `part` is the row of `whole` that its reward names, in every column."""
    first = ROW_COLUMNS.index("reward")
    starts = whole.lengths.cumsum(0) - whole.lengths
    assert part.reward is not None and int(part.lengths.sum()) == len(part.tokens)
    at = 0
    for number, mark in enumerate(part.reward.tolist()):
        source = int(mark - first) // 100
        size = int(whole.lengths[source])
        for name in ROW_COLUMNS:
            assert getattr(part, name)[number] == getattr(whole, name)[source], name
        span = slice(int(starts[source]), int(starts[source]) + size)
        for name in TOKEN_COLUMNS:
            assert torch.equal(getattr(part, name)[at : at + size], getattr(whole, name)[span]), name
        at += size
    assert at == len(part.tokens)


def assert_units_whole(part: Batch) -> None:
    groups = part.group.view(-1, part.unit)
    assert bool((groups == groups[:, :1]).all())


ROWS = [
    Row(tokens=(7, 8, 4, 5, 2), trainable=(False, False, True, True, True), group=3, reward=1.5, weight=0.5),
    Row(tokens=(9, 6, 2), trainable=(False, True, True), group=4, baseline=-1.0, margin=0.25, continues=True),
]


def test_rows_lie_end_to_end() -> None:
    batch = Batch.of(ROWS)
    assert batch.tokens.tolist() == [7, 8, 4, 5, 2, 9, 6, 2]
    assert batch.trainable.tolist() == [False, False, True, True, True, False, True, True]
    assert batch.lengths.tolist() == [5, 3]
    assert batch.ends.tolist() == [4, 7]
    assert batch.row.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert len(batch) == 2
    assert batch.group.tolist() == [3, 4]
    expected = {"reward": [1.5, 0.0], "baseline": [0.0, -1.0], "row_weight": [0.5, 1.0], "margin": [0.0, 0.25]}
    for name, column in expected.items():
        assert getattr(batch, name).tolist() == column
    assert batch.continues is not None and batch.continues.tolist() == [False, True]
    for name in ("behaviour", "version", "reference", "proximal", "values", "advantages", "weight"):
        assert getattr(batch, name) is None


def test_columns_of_the_sampler_and_the_reference_are_laid_out_with_the_tokens() -> None:
    row = replace(ROWS[1], logprobs=(0.0, -1.0, -2.0), versions=(-1, 4, 5), reference=(0.0, -3.0, -4.0))
    batch = Batch.of([row, row])
    assert batch.behaviour is not None and batch.behaviour.tolist() == [0.0, -1.0, -2.0] * 2
    assert batch.version is not None and batch.version.tolist() == [-1, 4, 5] * 2
    assert batch.reference is not None and batch.reference.tolist() == [0.0, -3.0, -4.0] * 2


def test_column_rule_of_a_sampled_row() -> None:
    """behaviour[t] and version[t] belong to tokens[t]: each token's log-prob here is minus a tenth of its id."""
    completion = Completion(
        tokens=(40, 50, 60, 2), logprobs=(-4.0, -5.0, -6.0, -0.2), versions=(3, 3, 4, 4), text="", finish=Finish.EOS
    )
    response = Response(completion=completion, trainable=(True, True, False, True), score=Score(value=1.0), reward=0.75)
    prompt = Prompt(id="p", text="", tokens=(10, 20))
    row = row_of(Group(index=5, prompt=prompt, responses=(response,)), response, baseline=0.5)
    batch = Batch.of([row])
    assert batch.behaviour is not None and batch.version is not None
    assert batch.tokens.tolist() == [10, 20, 40, 50, 60, 2]
    assert batch.trainable.tolist() == [False, False, True, True, False, True]
    for token, logprob, version in zip(
        batch.tokens.tolist(), batch.behaviour.tolist(), batch.version.tolist(), strict=True
    ):
        if token in prompt.tokens:
            assert (logprob, version) == (0.0, -1)
        else:
            assert logprob == pytest.approx(-token / 10)
            assert version == (4 if token in (60, 2) else 3)
    assert (row.group, row.reward, row.baseline, row.continues) == (5, 0.75, 0.5, False)
    cut = replace(response, completion=replace(completion, finish=Finish.LENGTH))
    assert not row_of(Group(index=5, prompt=prompt, responses=(cut,)), cut).continues, "its reward ends it"
    cut = replace(cut, reward=None, continues=True)
    row = row_of(Group(index=5, prompt=prompt, responses=(cut,)), cut)
    assert (row.reward, row.continues) == (0.0, True)


def test_units_without_a_trained_token_are_dropped() -> None:
    lone = Row(tokens=(7, 8), trainable=(False, False), reward=3.0)
    batch = Batch.of([lone, ROWS[0], lone, ROWS[1]])
    assert batch.trained().reward.tolist() == [1.5, 0.0]  # type: ignore[union-attr]
    pairs = Batch.of([lone, ROWS[0], lone, lone], unit=2)
    assert pairs.trained().reward.tolist() == [3.0, 1.5]  # type: ignore[union-attr]
    for whole in (Batch.of(ROWS), Batch.of([lone, lone])):
        assert whole.trained() is whole


def test_ratios_are_taken_against_proximal_where_there_is_one() -> None:
    batch = marked([2, 1])
    assert batch.old is batch.proximal
    assert batch.with_columns(proximal=None).old is batch.behaviour
    with pytest.raises(AssertionError, match="behaviour or proximal"):
        batch.with_columns(proximal=None, behaviour=None).old  # noqa: B018


@pytest.mark.parametrize(
    ("rows", "unit", "message"),
    [
        ([], 1, "row"),
        ([ROWS[0]] * 3, 2, "3 rows .* 2"),
        ([ROWS[0], Row(tokens=(), trainable=())], 1, "row 1 .*tokens"),
        ([Row(tokens=(1, 2), trainable=(False,))], 1, "row 0: trainable .*1 .*2"),
        ([replace(ROWS[1], logprobs=(0.0,))], 1, "row 0: logprobs .*1 .*3"),
        ([replace(ROWS[1], versions=(0,) * 4)], 1, "row 0: versions .*4 .*3"),
        ([ROWS[0], replace(ROWS[1], reference=(0.0,))], 1, "row 1: reference .*1 .*3"),
        ([ROWS[0], replace(ROWS[1], logprobs=(0.0,) * 3)], 1, "row 1 has logprobs and row 0"),
        ([replace(ROWS[0], versions=(0,) * 5), ROWS[1]], 1, "row 0 has versions and row 1"),
        ([ROWS[0], ROWS[0], replace(ROWS[0], reference=(0.0,) * 5)], 1, "row 2 has reference and row 0"),
        ([Row(tokens=(1, 2), trainable=(True, True))], 1, "row 0: .*first token.*BOS"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[Row], unit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch.of(rows, unit=unit)


def test_select_by_hand() -> None:
    batch = Batch.of(ROWS).select(torch.tensor([1, 0, 1]))
    assert batch.tokens.tolist() == [9, 6, 2, 7, 8, 4, 5, 2, 9, 6, 2]
    assert batch.lengths.tolist() == [3, 5, 3]


@given(LENGTHS, st.data())
def test_any_selection_keeps_all_columns_aligned(lengths: list[int], data: st.DataObject) -> None:
    whole = marked(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    part = whole.select(torch.tensor(rows, dtype=torch.int64))
    assert len(part) == len(rows)
    assert_aligned(part, whole)
    assert [int(mark) // 100 for mark in part.reward.tolist()] == rows  # type: ignore[union-attr]


def test_a_batch_arrives_in_another_process_as_it_was_and_may_be_changed() -> None:
    whole = marked([3, 1, 2])
    arrived = pickle.loads(pickle.dumps(whole))
    assert arrived.unit == whole.unit
    assert arrived.columns().keys() == whole.columns().keys()
    for name, column in whole.columns().items():
        assert arrived.columns()[name].dtype == column.dtype
        assert arrived.columns()[name].equal(column)
    arrived.tokens.add_(1)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 12))
def test_split_loses_and_doubles_nothing(lengths: list[int], unit: int, parts: int) -> None:
    whole = marked(lengths * unit, unit)
    count = len(lengths)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count + parts))
    if parts > count:
        with pytest.raises(ValueError, match=f"{count} units .*{parts} .*1 to {count}"):
            whole.split(parts, order=order)
        return
    batches = whole.split(parts, order=order)
    sizes = [len(batch) // unit for batch in batches]
    assert len(batches) == parts and max(sizes) - min(sizes) <= 1
    assert [number for batch in batches for number in unit_numbers(batch)] == order.tolist()
    for batch in batches:
        assert_aligned(batch, whole)
        assert_units_whole(batch)
    assert same(whole.split(1)[0], whole)
    in_order = whole.split(parts)
    assert len(in_order) == parts
    assert [number for batch in in_order for number in unit_numbers(batch)] == list(range(count))


def found(shards: list[Batch]) -> list[dict[str, torch.Tensor]]:
    """What ranks add to the sequences of their shards."""
    return [
        {name: column for name, column in shard.columns().items() if name not in shard.sequences().columns()}
        for shard in shards
    ]


@given(LENGTHS, st.integers(1, 3), st.integers(1, 5))
def test_shards_are_disjoint_cover_all_and_join_again(lengths: list[int], unit: int, world: int) -> None:
    whole = marked(lengths * unit, unit)
    every = whole.shards(world)
    shards, left_over = every[: len(lengths)], every[len(lengths) :]
    assert sorted(number for shard in shards for number in unit_numbers(shard)) == list(range(len(lengths)))
    sizes = [len(shard) // unit for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    for shard in shards:
        assert_aligned(shard, whole)
        assert_units_whole(shard)
    for shard in left_over:  # a rank without units of its own gets one that counts for nothing
        assert unit_numbers(shard) == unit_numbers(whole)[:1]
        assert not any(column.any() for column in (shard.weight, shard.token_share, shard.row_weight))
    assert same(whole.sequences().rejoined(found(every)), whole)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(2, 9)), min_size=1, max_size=14), st.integers(1, 5))
def test_shards_of_prompts_with_several_answers_join_again(rows: list[tuple[int, int]], world: int) -> None:
    whole = marked([length for _, length in rows])
    whole = whole.with_columns(group=torch.tensor([group for group, _ in rows]))
    shards = whole.shards(world)
    counted = [shard for shard in shards if shard.weight is not None and bool(shard.weight.any())]
    for shard in counted:
        assert_aligned(shard, whole)
    assert sum(len(shard) for shard in counted) == len(rows)
    assert same(whole.sequences().rejoined(found(shards)), whole)


def test_a_rank_takes_whole_prompts_where_that_spares_it_tokens() -> None:
    """Four answers of 2 tokens to each of four prompts of 6: two ranks compute 2 x (6 + 8) tokens each, and every other
    answer would be 4 x (6 + 4). One long prompt would leave a rank with more than every other answer does."""
    prompts = torch.tensor([[False] * 6 + [True] * 2] * 16).flatten()
    groups = torch.arange(16) // 4
    even = marked([8] * 16).with_columns(group=groups, trainable=prompts)
    assert [shard.group.tolist() for shard in even.shards(2)] == [[0] * 4 + [2] * 4, [1] * 4 + [3] * 4]
    assert [len(shard) for shard in even.shards(4)] == [4, 4, 4, 4]
    assert [len(set(shard.group.tolist())) for shard in even.shards(4)] == [1, 1, 1, 1]
    assert [len(shard) for shard in even.shards(8)] == [2] * 8, "more ranks than prompts"
    lengths = torch.tensor([30 if group == 0 else 2 for group in groups.tolist()])
    answers = torch.cat([torch.tensor([False] + [True] * (int(size) - 1)) for size in lengths])
    uneven = marked(lengths.tolist()).with_columns(group=groups, trainable=answers)
    assert [len(shard) for shard in uneven.shards(2)] == [8, 8]
    assert [shard.group.tolist() for shard in uneven.shards(2)] == [groups[rank::2].tolist() for rank in range(2)]


def test_the_heaviest_prompts_find_a_rank_first() -> None:
    """Prompts of 4, 4 and 8 tokens have 2, 2 and 4 answers of one: 6, 6 and 12 tokens, which makes 12 a rank. Every
    other row would be 5, 5 and 10 tokens for each; in the prompts' order one would get 6 + 12."""
    prompts = [4] * 4 + [8] * 4
    answers = torch.tensor([place == prompt for prompt in prompts for place in range(prompt + 1)])
    rows = marked([prompt + 1 for prompt in prompts])
    rows = rows.with_columns(group=torch.tensor([0, 0, 1, 1, 2, 2, 2, 2]), trainable=answers)
    assert [shard.group.tolist() for shard in rows.shards(2)] == [[2] * 4, [0, 0, 1, 1]]


@given(LENGTHS, st.integers(1, 3), st.integers(1, 30), st.booleans())
def test_micro_batches_fit_the_budget_and_cover_all(lengths: list[int], unit: int, budget: int, together: bool) -> None:
    whole = marked(lengths * unit, unit)
    batches = whole.micro(budget, together=together)
    assert sorted(number for batch in batches for number in unit_numbers(batch)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) > 0
        assert_aligned(batch, whole)
        assert_units_whole(batch)
        assert len(batch.tokens) <= budget or len(batch) == unit


def test_micro_batches_keep_a_prompts_answers_together() -> None:
    whole = marked([9, 3, 8, 2, 7, 4]).with_columns(group=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert [part.lengths.tolist() for part in whole.micro(12, together=True)] == [[9, 2], [8, 4], [7, 3]]
    # Group 0 has the longest row; 8 and 4 are group 2's, and do not fit beside it.
    assert [part.group.tolist() for part in whole.micro(12, together=True)] == [[0, 0], [2, 2], [1, 1]]
    assert [part.lengths.tolist() for part in whole.micro(12)] == [[9], [8], [7, 4], [3, 2]], "by length alone"


def test_runs_of_neighbours_keep_the_order_and_the_budget() -> None:
    batch = marked([5, 3, 6])
    assert [run.lengths.tolist() for run in batch.consecutive(8)] == [[5, 3], [6]]
    assert [run.lengths.tolist() for run in batch.consecutive(9)] == [[5, 3], [6]]
    assert [run.lengths.tolist() for run in batch.consecutive(4)] == [[5], [3], [6]]
    assert batch.consecutive(14) == [batch]


def test_a_prompt_counts_once_where_a_pass_computes_it_once() -> None:
    """Three answers of 2 tokens to each of two prompts of 6 cost 8, 2 and 2 tokens; pairs 10, 4 and 4."""
    trained = torch.tensor([[False] * 6 + [True] * 2] * 6).flatten()
    rows = marked([8] * 6).with_columns(group=torch.tensor([0, 0, 0, 1, 1, 1]), trainable=trained, episode=None)
    for cut in (Batch.consecutive, partial(Batch.micro, together=True)):
        assert [len(part) for part in cut(rows, 12, once=True)] == [3, 3]
        assert [len(part) for part in cut(rows, 11, once=True)] == [2, 1, 2, 1]
        assert [len(part) for part in cut(rows, 24, once=True)] == [6]
        assert [len(part) for part in cut(rows, 12)] == [1] * 6
    groups = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    pairs = marked([8] * 8, 2).with_columns(group=groups, trainable=trained.repeat(2)[:64], episode=None)
    assert [len(part) for part in pairs.consecutive(14, once=True)] == [4, 2, 2]
    assert [len(part) for part in pairs.consecutive(28, once=True)] == [8]
    unanswered = rows.with_columns(trainable=torch.zeros_like(trained))
    assert [len(part) for part in unanswered.consecutive(12, once=True)] == [1] * 6, "what is not trained is no prompt"


def test_an_absent_column_stays_absent() -> None:
    batch = marked([2, 3, 1]).with_columns(values=None, bootstrap=None)
    parts: list[Batch] = [*batch.micro(3), *batch.shards(2), *batch.split(2), batch.units([2, 0])]
    parts.append(batch.sequences().rejoined(found(batch.shards(2))))
    for part in parts:
        assert part.values is None and part.bootstrap is None


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("advantages", torch.ones(2), r"advantages .*\(2,\).* a token.*\(5,\)"),
        ("advantages", torch.ones(5, 1), r"\(5, 1\).*\(5,\)"),
        ("reward", torch.ones(5), r"reward .*\(5,\).* a row.*\(2,\)"),
        ("reward", [0.0, 1.0], "a list"),
        ("advantage", torch.ones(5), "'advantage'.*advantages"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(name: str, column: Any, message: str) -> None:
    """One of (n, 1) beside (n,) would make a loss of n squared terms, and train."""
    with pytest.raises(ValueError, match=message):
        marked([2, 3]).with_columns(**{name: column})


def test_every_column_is_listed_once() -> None:
    """The comment of each column gives its shape: (n,) for tokens, (r,) for rows."""
    shapes = dict(re.findall(r"^    (\w+): Tensor.*# \(([nr]),\)", inspect.getsource(Batch), re.MULTILINE))
    tensors = {name for name, kind in Batch.__annotations__.items() if "Tensor" in str(kind)}
    assert shapes == dict.fromkeys(TOKEN_COLUMNS, "n") | dict.fromkeys(ROW_COLUMNS, "r")
    assert tensors == shapes.keys()
