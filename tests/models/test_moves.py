"""Sends between layouts: every box arrives once, and those who hold the same give equal parts of it."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_layout import HEADS, MESHES, configs, covered, fitted, index, small

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.families import read_config
from plaudit.models.layout import Box, Layout
from plaudit.models.mesh import Mesh
from plaudit.models.moves import Moves, parts

PAIRS = (configs(), st.sampled_from(HEADS), MESHES, MESHES)
LLAMA_405B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}


def both(config: DecoderConfig, head: HeadKind, one: Mesh, other: Mesh) -> tuple[Layout, Layout]:
    before, after = (Layout(config, head, fitted(config, mesh)) for mesh in (one, other))
    return before, after


def numbers(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


@given(*PAIRS, st.booleans())
def test_each_number_arrives_once_from_a_rank_that_has_it(
    config: DecoderConfig, head: HeadKind, one: Mesh, other: Mesh, apart: bool
) -> None:
    """And what a rank has already stays with it, unless the two layouts are of other processes."""
    before, after = both(config, head, one, other)
    has = {rank: covered(before, before.slices(rank)) for rank in range(before.mesh.world)}
    got = {rank: covered(after, ()) for rank in range(after.mesh.world)}
    for move in Moves(before, after, apart=apart):
        assert has[move.source][move.name][index(move.box)].all()
        got[move.target][move.name][index(move.box)] += 1
        if not apart and move.target in has and has[move.target][move.name][index(move.box)].all():
            assert move.source == move.target
    for rank, counts in got.items():
        wanted = covered(after, after.slices(rank))
        assert all((counts[name] == wanted[name]).all() for name in counts)


@given(*PAIRS, st.booleans())
def test_what_a_rank_gives_are_its_sends_in_the_order_of_the_tensors(
    config: DecoderConfig, head: HeadKind, one: Mesh, other: Mesh, apart: bool
) -> None:
    moves = Moves(*both(config, head, one, other), apart=apart)
    given = [move for rank in range(moves.one.mesh.world) for move in moves.sent_by(rank)]
    assert Counter(given) == Counter(moves)
    order = list(moves.one.stored)
    first = [order.index(move.name) for move in moves.sent_by(0)]
    assert first == sorted(first)


@given(configs(), st.sampled_from(HEADS), MESHES)
def test_holders_of_a_box_give_equal_parts_of_it(config: DecoderConfig, head: HeadKind, mesh: Mesh) -> None:
    """To one that takes everything: no rank gives more than its part of each of its boxes, and a line of it."""
    layout = Layout(config, head, mesh := fitted(config, mesh))
    sent: Counter[int] = Counter()
    for move in Moves(layout, Layout(config, head), apart=True):
        sent[move.source] += numbers(move.box)
    assert sum(sent.values()) == sum(math.prod(shape) for shape in layout.stored.values())
    copies: Counter[tuple[str, Box]] = Counter()
    for rank in range(mesh.world):
        copies.update((one.name, one.box) for one in layout.slices(rank))
    for rank in range(mesh.world):
        share, lines = 0.0, 0.0
        for one in layout.slices(rank):
            share += numbers(one.box) / copies[one.name, one.box]
            lines += numbers(one.box) / max(stop - start for start, stop in one.box)
        assert sent[rank] <= share + lines
        assert sent[rank] >= share - lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(data=1024),
        Mesh(data=128, tensor=8),
        Mesh(replicas=16, data=8, tensor=8),
        Mesh(replicas=128, data=8),
        Mesh(replicas=64, tensor=8, pipeline=2),
    ],
    ids=str,
)
def test_nobody_gives_more_than_a_fifth_above_its_share_of_405_billion(mesh: Mesh) -> None:
    """And the plan takes less than 5 seconds of one core."""
    config = read_config(LLAMA_405B)
    layout, whole = Layout(config, "lm", mesh), Layout(config)
    began = time.process_time()
    moves = Moves(layout, whole, apart=True)
    sent: Counter[int] = Counter()
    for names, sends in moves.alike:
        for box, source, _ in sends:
            sent[source] += len(names) * numbers(box)
    assert time.process_time() - began < 5.0
    total = sum(map(math.prod, layout.stored.values()))
    assert sum(sent.values()) == total
    assert len(sent) == mesh.world
    assert max(sent.values()) <= 1.2 * total / mesh.world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Mesh(data=1024), Mesh(data=128, tensor=8)),
        (Mesh(replicas=64, tensor=8, pipeline=2), Mesh(data=1024)),
        (Mesh(replicas=16, data=8, tensor=8), Mesh(replicas=128, tensor=8)),
    ],
    ids=str,
)
def test_405_billion_are_laid_out_anew(one: Mesh, other: Mesh) -> None:
    """Among 1,024 ranks, each of which gets what it lacks."""
    config = read_config(LLAMA_405B)
    before, after = Layout(config, "lm", one), Layout(config, "lm", other)
    moves = Moves(before, after).alike
    wanted = sum(numbers(piece.box) for piece in after.slices(1023))
    assert wanted == sum(len(names) * numbers(box) for names, sends in moves for box, _, to in sends if to == 1023)


def test_copies_share_the_sends() -> None:
    """Four replicas give four others their copies: each sends once, where one alone would send four times."""
    moves = Moves(Layout(small(), "lm", Mesh(replicas=4)), Layout(small(), "lm", Mesh(replicas=8)))
    sent: Counter[int] = Counter()
    for move in moves:
        if move.source != move.target:
            sent[move.source] += numbers(move.box)
    assert len(sent) == 4
    assert len(set(sent.values())) == 1


def test_parts_by_hand() -> None:
    """Along the longest side; of equal ones, the rows."""
    assert parts(((0, 2), (4, 10)), 3) == [((0, 2), (4, 6)), ((0, 2), (6, 8)), ((0, 2), (8, 10))]
    assert parts(((1, 4), (0, 3)), 2) == [((1, 2), (0, 3)), ((2, 4), (0, 3))]
    assert [numbers(part) for part in parts(((0, 2),), 4)] == [0, 1, 0, 1]


def test_layouts_of_different_models_do_not_move() -> None:
    with pytest.raises(ValueError, match="different models"):
        Moves(Layout(small()), Layout(small(width=6)))
