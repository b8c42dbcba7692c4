"""What changes a digest and what does not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assent.models.digest import PIECE, digest


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(PIECE + 7, generator=generator).to(torch.bfloat16),
        "c": torch.arange(4),
    }


def test_order_and_strides_do_not_count() -> None:
    given = tensors()
    turned = {name: given[name] for name in ("c", "b", "a")} | {"a": given["a"].t().contiguous().t()}
    assert not turned["a"].is_contiguous()
    assert digest(turned) == digest(given)
    assert len(digest(given)) == 32


@settings(max_examples=60)
@given(place=st.integers(0, PIECE + 6), bit=st.integers(0, 15))
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
        case "far exchange":  # equal places of two pieces
            after["b"][0], after["b"][PIECE] = before["b"][PIECE].item(), before["b"][0].item()
    assert digest(after) != digest(before)


def test_an_empty_tensor_and_no_tensor_differ() -> None:
    assert digest({"a": torch.empty(0)}) != digest({})
