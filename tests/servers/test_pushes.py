"""Messages between workers and parameter servers: their size, their rounding, and what rounding keeps back."""

from __future__ import annotations

import pytest
import torch

from plaudit.runtime.settings import PUSHES
from plaudit.servers.pushes import BLOCK, Feedback, cuts, decode, encode


@pytest.mark.parametrize(("push", "size"), [("float32", 4000), ("bfloat16", 2000), ("int8", 1000 + 4 * 4)])
def test_a_message_has_so_many_bytes(push: str, size: int) -> None:
    values = torch.linspace(-1.0, 1.0, 1000)
    message = encode(values, push)
    assert message.nbytes == size
    assert decode(message, push).shape == values.shape


def test_int8_rounds_to_a_127th_of_the_largest_in_each_block() -> None:
    values = torch.zeros(BLOCK + 3)
    values[0], values[1], values[2] = 127.0, 1.4, -63.6  # steps of 1
    values[BLOCK:] = torch.tensor([0.0127, -0.00014, 0.00016])  # steps of 0.0001
    found = decode(encode(values, "int8"), "int8")
    assert found[:3].tolist() == [127.0, 1.0, -64.0]
    assert found[BLOCK:].tolist() == pytest.approx([0.0127, -0.0001, 0.0002])
    assert not decode(encode(torch.zeros(5), "int8"), "int8").any()


@pytest.mark.parametrize("push", PUSHES)
@pytest.mark.parametrize("count", [1, 3])
def test_what_rounding_keeps_back_is_pushed_later(push: str, count: int) -> None:
    """After 40 pushes their sum is that of the numbers, but for the rounding of the last one."""
    runs = cuts(600, count)
    feedback, generator = Feedback(600, push), torch.Generator().manual_seed(0)
    there, here = torch.zeros(600), torch.zeros(600)
    for _ in range(40):
        values = torch.randn(600, generator=generator)
        here += values
        there += torch.cat([decode(message, push) for message in feedback.encode(values, runs)])
        feedback.settle(True)
    assert float((there - here).abs().max()) < {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.03}[push]


def test_the_number_of_servers_changes_no_bit() -> None:
    values = torch.randn(1500, generator=torch.Generator().manual_seed(0))
    one, many = ([*Feedback(1500, "int8").encode(values, cuts(1500, count))] for count in (1, 4))
    assert torch.equal(decode(one[0], "int8"), torch.cat([decode(part, "int8") for part in many]))
    assert cuts(1500, 4) == [(0, 512), (512, 1024), (1024, 1500), (1500, 1500)]


def test_pushes_that_were_not_taken_leave_no_trace() -> None:
    feedback = Feedback(3, "int8")
    feedback.encode(torch.tensor([1.0, 0.3001, 0.7]), [(0, 3)])
    feedback.settle(True)
    carried = feedback.carried.clone()
    assert carried.any()
    feedback.encode(torch.tensor([float("nan"), 1.0, 2.0]), [(0, 3)])
    feedback.encode(torch.tensor([5.0, 1.0, 2.0]), [(0, 3)])  # units of a lost worker
    feedback.settle(False)
    assert torch.equal(feedback.carried, carried)
