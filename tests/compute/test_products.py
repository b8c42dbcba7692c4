"""Products beside torch's own, in value and gradient, and which of them are oneDNN's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plaudit.compute import logprobs, products
from plaudit.compute.logprobs import chosen_logprobs
from plaudit.compute.products import (
    by_matrices,
    by_onednn,
    onednn_present,
    product,
    product_by_matrices,
    summed_outer_products,
    widened,
)

pytestmark = pytest.mark.slow


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """To some units in the last place of float32, or of bfloat16."""
    torch.testing.assert_close(
        ours,
        theirs,
        **({"rtol": 2**-7, "atol": 2**-7} if ours.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-5}),
    )


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products go to oneDNN too, so that small tests see it, and on every x86 processor."""
    monkeypatch.setattr(products, "SMALLEST", 1)
    monkeypatch.setattr(products, "_wide_registers", lambda: True)
    monkeypatch.setattr(products, "_intel", lambda: False)


def random(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, above: Tensor) -> None:
    """Value and gradients of `product` and of torch's linear."""
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    ours, theirs = (layer(x, weight, bias) for layer in (product, F.linear))
    assert_close(ours, theirs)
    with torch.no_grad():
        assert_close(product(x, weight, bias), theirs)
    gradients = [torch.autograd.grad(y, leaves, above) for y in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert mine.is_contiguous()
        assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 32, 64), (130, 64, 33), (61, 33, 130), (5, 9, 1), (0, 4, 4)], ids=str)
def test_it_is_torchs_linear_in_value_and_gradient(
    shape: tuple[int, int, int], biased: bool, dtype: torch.dtype
) -> None:
    rows, width, out = shape
    x, weight, bias, above = random((rows, width), (out, width), (out,), (rows, out), dtype=dtype)
    compare(x, weight, bias if biased else None, above)


@pytest.mark.parametrize(
    "shape",
    [(1, 32, 64), (7, 6, 3), (130, 64, 33), (61, 34, 130), (61, 610, 33), (1100, 96, 40), (5, 9, 1), (0, 4, 4)],
    ids=str,
)
def test_bfloat16_by_matrix_registers(
    shape: tuple[int, int, int], played: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sums of exact products, rounded once, and each row as if it were alone."""
    played("matrices")
    monkeypatch.setattr(products, "slow_halves", lambda: False)
    rows, width, out = shape
    x, weight, bias = random((rows, width), (out, width), (out,), dtype=torch.bfloat16)
    assert by_matrices(x, weight, bias)
    with torch.no_grad():
        found = product_by_matrices(x, weight, bias)
        assert torch.equal(found, product(x, weight, bias, alone=True))
        unbiased = product_by_matrices(x, weight)
        assert_close(unbiased, F.linear(x, weight))
        apart, strided = torch.cat([x, x], dim=1)[:, :width], x.T.contiguous().T
        assert torch.equal(product_by_matrices(apart, weight), unbiased)
        assert torch.equal(product_by_matrices(strided, weight), unbiased)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(product_by_matrices(x, weight, bias), found)
    finally:
        torch.set_num_threads(before)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 + 1e-5, atol=1e-5)
    for first, count in ((0, 1), (3, 2), (2, 33), (rows // 2, rows)):
        part = x[first : first + count]
        assert torch.equal(product_by_matrices(part, weight, bias), found[first : first + count])


def test_what_needs_gradients_or_does_not_fit_is_not_multiplied_so(
    played: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    played("matrices")
    monkeypatch.setattr(products, "slow_halves", lambda: False)
    x, weight = random((4, 6), (3, 6), dtype=torch.bfloat16)
    assert product(x, weight.requires_grad_()).grad_fn is not None
    assert by_matrices(x, weight)
    assert not by_matrices(*random((4, 6), (3, 6)))
    for others in (random((4, 8), (3, 6)), random((4, 6), (3, 6), (4,))):
        wrong = [other.bfloat16() for other in others]
        assert not by_matrices(*wrong)
        with pytest.raises(RuntimeError), torch.no_grad():
            product(*wrong, alone=True)
    with pytest.raises(ValueError, match="weight has shape"):  # of another width
        product_by_matrices(x, weight[:, :4])


def test_intels_processors_leave_rows_to_onednn_and_gradients_to_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL orders additions there by the number of rows."""
    if not onednn_present():
        pytest.skip("oneDNN is not built into this torch")
    x, weight = random((4, 6), (3, 6))
    for wide in (True, False):
        for intel in (True, False):
            monkeypatch.setattr(products, "_wide_registers", lambda wide=wide: wide)
            monkeypatch.setattr(products, "_intel", lambda intel=intel: intel)
            assert by_onednn(x, weight, alone=True) == (wide or intel)
            assert by_onednn(x, weight) == (wide and not intel)
    monkeypatch.setattr(products, "_wide_registers", lambda: True)
    monkeypatch.setattr(products, "SMALLEST", 3 * 6 + 1)
    assert by_onednn(x, weight, alone=True)
    assert not by_onednn(x, weight)


def test_bfloat16_is_multiplied_in_float32_where_the_processor_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rounding, of the result: what float32 gives, rounded. A weight's gradient is left in float32."""
    monkeypatch.setattr(products, "slow_halves", lambda: True)
    leaves = [leaf.requires_grad_() for leaf in random((61, 33), (130, 33), (130,), dtype=torch.bfloat16)]
    (above,) = random((61, 130), dtype=torch.bfloat16)
    x, weight, bias = wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = F.linear(x, weight, bias)
    ours = product(*leaves)
    assert widened(*leaves[:2]) and ours.dtype is torch.bfloat16
    gradients = torch.autograd.grad(ours, leaves, above), torch.autograd.grad(expected, wide, above.float())
    for mine, other in zip((ours, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert mine.dtype is torch.bfloat16
        assert_close(mine, other.bfloat16())
    with torch.no_grad():
        assert torch.equal(product(*leaves), ours)
        outer = summed_outer_products(above, leaves[0])
    assert outer.dtype is torch.float32
    assert_close(outer, above.float().T @ x)


def test_factors_may_lie_in_memory_in_any_way() -> None:
    x, weight, bias, above = random((16, 9), (24, 40), (30,), (12, 1))
    # Transposed, every other row and some columns, every other entry, and one column repeated for all (as sums do).
    compare(x.T[:, :12].T, weight[::2, 3:12], bias[6::2], above.expand(12, 12))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = random((4, 3), (2, 3))
    product(x.requires_grad_(), weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None and x.grad is not None
    assert_close(x.grad, weight.sum(0).expand(4, 3))


@pytest.mark.parametrize("sizes", [(6, 40), (40, 6), (17, 17)])
def test_outer_products_are_summed_from_either_side(sizes: tuple[int, int]) -> None:
    first, second = random((23, sizes[0]), (23, sizes[1]))
    found = summed_outer_products(first, second)
    assert found.is_contiguous()
    assert_close(found, first.T @ second)


def test_gradients_in_float64_are_those_of_the_value() -> None:
    leaves = [leaf.requires_grad_() for leaf in random((5, 4), (3, 4), (3,), dtype=torch.float64)]
    assert torch.autograd.gradcheck(product, leaves)


class Looks(Tensor):
    """A tensor of another kind, as those are whose rows lie on several ranks."""


def test_onednn_gets_plain_large_float32_matrices_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not onednn_present():
        pytest.skip("no x86 CPU with oneDNN")
    x, weight = random((4, 64), (32, 64))
    assert by_onednn(x, weight)
    assert by_onednn(x, torch.nn.Parameter(weight))
    assert not by_onednn(x.double(), weight.double())
    assert not by_onednn(x.bfloat16(), weight.bfloat16())
    assert not by_onednn(x.to("meta"), weight.to("meta"))
    assert not by_onednn(x, weight.as_subclass(Looks))
    assert not by_onednn(x[None], weight)
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        assert not by_onednn(x, weight)
    finally:
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(products, "SMALLEST", 32 * 64 + 1)
    assert not by_onednn(x, weight)
    monkeypatch.setattr(products, "SMALLEST", 1)
    monkeypatch.setattr(products, "_wide_registers", lambda: False)
    monkeypatch.setattr(products, "_intel", lambda: False)
    assert not by_onednn(x, weight)


@pytest.mark.parametrize("rows", [3, 64])
def test_log_probs_through_it_are_torchs(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """In one chunk and in several, the last of them a part, whose gradients add up in the head's."""
    monkeypatch.setattr(logprobs, "_chunk_rows", lambda hidden, vocab: rows)
    hidden, weight, bias = (leaf.requires_grad_() for leaf in random((20, 12), (33, 12), (33,)))
    targets = torch.arange(20)
    found = chosen_logprobs(hidden, weight, targets, bias=bias)
    logp = torch.log_softmax(F.linear(hidden, weight, bias), -1)
    expected = logp[torch.arange(20), targets], -(logp.exp() * logp).sum(-1)
    gradients = [torch.autograd.grad(a.sum() + 0.5 * b.sum(), (hidden, weight, bias)) for a, b in (found, expected)]
    for ours, theirs in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert_close(ours, theirs)
