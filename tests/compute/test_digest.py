"""What changes a digest and what does not."""

import itertools
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.compute.digest import BASE, PIECE, _factors, box_sum, digest, digest_of


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(2 * PIECE + 14, generator=generator).to(torch.bfloat16),
        "c": torch.arange(4),
    }


def test_order_and_strides_do_not_count() -> None:
    given = tensors()
    turned = {name: given[name] for name in ("c", "b", "a")} | {"a": given["a"].t().contiguous().t()}
    assert not turned["a"].is_contiguous()
    assert digest(turned) == digest(given)
    assert len(digest(given)) == 32


@given(place=st.integers(0, 2 * PIECE + 13), bit=st.integers(0, 15))
def test_any_flipped_bit_counts(place: int, bit: int) -> None:
    before, after = tensors(), tensors()
    after["b"].view(torch.int16)[place] ^= torch.tensor(-(2**15) if bit == 15 else 2**bit, dtype=torch.int16)
    assert digest(after) != digest(before)


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "exchange", "missing", "sign of zero", "far exchange"])
def test_what_else_counts(change: str) -> None:
    before, after = tensors(), tensors()
    before["a"][0, 0] = after["a"][0, 0] = 0.0
    match change:
        case "name":
            after["d"] = after.pop("a")
        case "dtype":
            after["c"] = after["c"].view(torch.float64)
        case "shape":
            after["a"] = after["a"].reshape(5, 3)
        case "exchange":
            after["a"][1, :2] = before["a"][1, :2].flip(0)
        case "missing":
            del after["c"]
        case "sign of zero":
            after["a"][0, 0] = -0.0
        case "far exchange":  # equal places of two pieces, whose numbers are two of these
            first, other = slice(2), slice(2 * PIECE, 2 * PIECE + 2)
            after["b"][first], after["b"][other] = before["b"][other], before["b"][first]
    assert digest(after) != digest(before)


def test_an_empty_tensor_and_no_tensor_differ() -> None:
    assert digest({"a": torch.empty(0)}) != digest({})


def by_hand(tensor: torch.Tensor) -> int:
    """Python's own whole numbers, from the bytes in memory."""
    raw = bytes(tensor.flatten().view(torch.uint8).tolist())
    size = {0: 4, 2: 2}.get(len(raw) % 4, 1)
    numbers = [int.from_bytes(raw[i : i + size], "little", signed=size > 1) for i in range(0, len(raw), size)]
    factors, total = _factors(torch.device("cpu")).tolist(), 0
    for start in range(0, len(numbers), PIECE):
        total = total * BASE + sum(map(operator.mul, numbers[start : start + PIECE], factors))
    return total % 2**64


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(2 * PIECE + 7),
        torch.randn(4 * PIECE + 2).bfloat16(),
        torch.randn(PIECE + 1).bfloat16(),
        torch.randn(8).bfloat16()[1:7],
        torch.arange(-3, 4),
        torch.tensor([True, False, True]),
        torch.tensor(2.5),
        torch.full((PIECE,), -1, dtype=torch.int32),
        torch.empty(0),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
@pytest.mark.usefixtures("either_way")
def test_the_sum_with_kernels_and_without(tensor: torch.Tensor) -> None:
    assert int(box_sum(tensor, tensor.shape, [0] * tensor.dim())) % 2**64 == by_hand(tensor)


@st.composite
def cut(draw: Any) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
    """A tensor of one or two dimensions, transposed in memory or not, and the edges of boxes that cover it."""
    shape = draw(st.sampled_from([(1,), (6,), (7,), (2 * PIECE + 8,), (3, 4), (5, 7), (9, 2), (300, 333), (8, PIECE)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = (torch.randn(shape[::-1], generator=seed) * 100).to(dtype)
    values = values.t() if draw(st.booleans()) else values.reshape(shape)
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return values, [list(itertools.pairwise(some)) for some in edges]


@given(cut())
def test_sums_of_boxes_make_up_the_sum_of_the_whole(case: tuple[torch.Tensor, list[list[tuple[int, int]]]]) -> None:
    """Even where a number is cut in two, as a pair of bfloat16 in a row of odd length."""
    tensor, sides = case
    total = 0
    for box in itertools.product(*sides):
        values = tensor[tuple(slice(*one) for one in box)]
        total += int(box_sum(values, tensor.shape, [start for start, _ in box]))
    assert total % 2**64 == int(box_sum(tensor, tensor.shape, [0] * tensor.dim())) % 2**64


@pytest.mark.usefixtures("either_way")
def test_a_box_by_hand_with_kernels_and_without() -> None:
    """The sum is linear: a box counts as the whole tensor with zeros around it."""
    for dtype, columns in ((torch.float32, 7), (torch.bfloat16, 8), (torch.bfloat16, 7), (torch.uint8, 7)):
        whole = torch.randn(PIECE // 6, columns).mul(50).to(dtype)
        masked = torch.zeros_like(whole)
        masked[5:-3, 2:6] = whole[5:-3, 2:6]
        assert int(box_sum(whole[5:-3, 2:6], whole.shape, (5, 2))) % 2**64 == by_hand(masked)


def test_the_digest_of_boxes_is_that_of_the_tensors() -> None:
    given = tensors()
    upper, lower = (box_sum(part, (3, 5), (row, 0)) for part, row in ((given["a"][:1], 0), (given["a"][1:], 1)))
    total = upper + lower  # modulo 2^64
    others = {name: int(box_sum(given[name], given[name].shape, [0])) for name in ("b", "c")}
    sums = {name: (one.dtype, one.shape, others.get(name, int(total))) for name, one in given.items()}
    assert digest_of(sums) == digest(given)


@pytest.mark.usefixtures("either_way")
def test_where_numbers_lie_does_not_count() -> None:
    """A view may begin in the middle of four bytes."""
    row = torch.randn(9, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert digest({"a": row[1:]}) == digest({"a": row[1:].clone()})
    assert digest({"a": row[::2][:1]}) == digest({"a": row[:1].clone()})
    assert digest({"a": row[::2][:0]}) == digest({"a": torch.empty(0, dtype=torch.bfloat16)})
    with torch.device("meta"):
        assert digest({"a": row}) == digest({"a": row})


def test_no_two_numbers_of_a_piece_have_one_factor() -> None:
    factors = _factors(torch.device("cpu"))
    assert len(factors.unique()) == len(factors) == PIECE
    assert (factors % 2 == 1).all()
    assert (factors > 0).all()
