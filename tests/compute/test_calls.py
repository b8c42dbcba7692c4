"""A wrong call is refused before anything is read or written; memory and threads that are not there kill no process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plaudit.compute.attention import Sequences, attention
from plaudit.compute.calls import run
from plaudit.compute.declarations import KERNELS, symbols
from plaudit.compute.fused import activate, rms_norm, rotate, swiglu
from plaudit.compute.library import library
from plaudit.models.config import DecoderConfig
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.rollout.decode.pages import PageCache
from plaudit.rollout.decode.steps import Steps

pytestmark = pytest.mark.usefixtures("kernels")


def states(tokens: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    return [torch.randn(tokens, count, dim) for count in (heads, kv_heads, kv_heads)]


def attended(
    parts: list[Tensor], lengths: list[int], index: list[int] | None = None, window: int | None = None
) -> Tensor:
    return attention(*parts, Sequences(lengths, None if index is None else torch.tensor(index)), window)


def model(**more: Any) -> Decoder:
    keys = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    found = fresh_model({**keys, "num_attention_heads": 2, **more})
    assert isinstance(found, Decoder)
    return found


def cache(slots: int = 2, length: int = 8) -> PageCache:
    config: DecoderConfig = replace(model().config, heads=2, kv_heads=1, head_dim=4)
    return PageCache(config, slots, length, dtype=torch.float32)


def written(slots: list[int], positions: list[int]) -> None:
    found = cache()
    _, key, value = states(len(positions), 2, 1, 4)
    places = (torch.tensor(slots), torch.tensor(positions), torch.tensor(0))[:2]
    found.write(0, places, key, value)


def decoded(position: int, *, kv_heads: int = 1) -> None:
    found = cache()
    found.past(torch.tensor([0, position]), 0).attend(0, *states(2, 2, kv_heads, 4))


def stepped(position: int, **more: Any) -> None:
    made = model(**more)
    kept = PageCache(model().config, 2, 8, dtype=torch.float32)
    Steps(made).logits(kept, torch.tensor([1, 2]), torch.tensor([0, position]))


LONG = 64  # positions; the caches here have one page, of 32 at most
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "sequences beyond the tokens": (lambda: attended(states(5, 2, 2, 4), [3, 4]), "5 tokens; the sequences have 7"),
    "tokens of no sequence": (lambda: attended(states(5, 2, 2, 4), [3]), "5 tokens; the sequences have 3"),
    "a length of 0": (lambda: attended(states(5, 2, 2, 4), [5, 0]), "every length is at least 1"),
    "an index of another length": (lambda: attended(states(3, 2, 2, 4), [3], [0, 1, 2, 1]), "an index of 4 tokens"),
    "a token that no row reads": (
        lambda: attended(states(3, 2, 2, 4), [2], [0, 2]),
        "each computed token must be read",
    ),
    "one token after two": (lambda: attended(states(3, 2, 2, 4), [3, 2], [0, 1, 2, 0, 2]), "after the same tokens"),
    "keys of fewer tokens": (
        lambda: attended([x[: 5 - i] for i, x in enumerate(states(5, 2, 2, 4))], [5]),
        r"key has shape \(4, 2, 4\); it must be \(tokens, kv_heads, dim\), \(5, 2, 4\) here",
    ),
    "3 heads on 2 of keys": (
        lambda: attended(states(5, 3, 2, 4), [5]),
        "heads % kv_heads == 0 must hold, .*'heads': 3",
    ),
    "no window": (lambda: attended(states(5, 2, 2, 4), [5], window=0), "window >= 1 must hold"),
    "one of another kind": (
        lambda: attended([x.bfloat16() if i else x for i, x in enumerate(states(5, 2, 2, 4))], [5]),
        "one kind",
    ),
    "a position beyond the cache": (
        lambda: written([0], [LONG]),
        f"positions are {LONG} to {LONG};",
    ),
    "a position before it": (lambda: written([0, 1], [3, -1]), "positions are -1 to 3;"),
    "a slot beyond the cache": (lambda: written([2], [0]), r"slots are 2 to 2; .* 2$"),
    "fewer slots than positions": (lambda: written([1], [0, 1]), r"positions has shape \(2,\)"),
    "a new token beyond the cache": (lambda: decoded(LONG), f"positions are 0 to {LONG}"),
    "new tokens of other heads": (lambda: decoded(0, kv_heads=2), "it must be"),
    "a step beyond the cache": (lambda: stepped(LONG), f"positions are 0 to {LONG}"),
    "a step of another model": (lambda: stepped(0, num_hidden_layers=2), r"tables has shape \(1, 2\)"),
    "halves of an odd width": (
        lambda: swiglu(torch.zeros(2, 7)),
        r"x has shape \(2, 7\); .*\(rows, 2\*width\)",
    ),
    "a cosine for too few": (
        lambda: rotate(torch.zeros(3, 2, 8), torch.zeros(2, 1, 4), torch.zeros(3, 1, 4)),
        r"cos has shape \(2, 1, 4\)",
    ),
    "a weight of another width": (lambda: rms_norm(torch.zeros(2, 7), torch.zeros(8), 1e-5), "weight has shape"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_refused(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.zeros(4), None, None], "y is None"),
        ([torch.zeros(4), torch.zeros(4, dtype=torch.float64), None], "y is a Tensor of torch.float64"),
        ([torch.zeros(4), torch.zeros(4, device="meta"), None], "plain CPU tensor"),
        ([torch.zeros(4), torch.zeros(8)[::2], None], "contiguous"),
        ([torch.zeros(4), torch.zeros(5), None], r"y has shape \(5,\)"),
    ],
)
def test_the_entry_layer_itself(tensors: list[Tensor | None], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run("activate", *tensors, activation=1)


def test_memory_that_was_taken_away_is_not_written_to() -> None:
    """As that of parameters in shards."""
    gone = torch.zeros(4)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        run("activate", torch.zeros(4), gone, None, activation=1)


def test_every_kernel_is_declared() -> None:
    found = library()
    assert found is not None
    assert all(hasattr(found, name) for name in symbols())
    source = (sys.modules["plaudit.compute.library"].SOURCE).read_text()
    assert set(KERNELS) - {"weighted_sum"} == {
        line[7:].split(",")[0] for line in source.splitlines() if line.startswith("KERNEL(")
    }


def test_strided_angles_are_right_numbers() -> None:
    x, angles = torch.randn(5, 2, 8), torch.randn(5, 3, 4)
    cos, sin = angles[:, :1], angles[:, 1:2]
    assert torch.equal(rotate(x, cos, sin), rotate(x, cos.contiguous(), sin.contiguous()))
    assert torch.equal(activate(x.flatten(1), "gelu"), activate(x, "gelu").flatten(1))  # of any shape


def alone(code: str, environment: dict[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
    ready = (
        "import os, resource, torch\nfrom plaudit.compute.attention import Sequences, attention\n"
        "from plaudit.compute.calls import run\ntorch.set_num_threads(2)\n"
    )
    return subprocess.run([sys.executable, "-c", ready + code], env=environment, capture_output=True, text=True, **more)


@pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is bounded, and looked at, as on Linux")
@pytest.mark.slow
def test_no_memory_is_an_error_and_much_of_it_is_given_back(environment: dict[str, str]) -> None:
    code = """
n = 60_000
x, out, rows = torch.randn(n, 1, 64), torch.empty(n, 64), Sequences([n], None).rows
call = lambda: run("attend", *rows, x, x, x, out, None, window=24)
pages = lambda: int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
attention(x[:64], x[:64], x[:64], Sequences([64], None), None)  # threads are there
before = pages()
resource.setrlimit(resource.RLIMIT_AS, (before + (8 << 20), -1))
try:
    call()
    print("no error")
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
call()
print(pages() - before)
"""
    found = alone(code, environment, timeout=120)
    said, grown = found.stdout.splitlines()
    assert said.startswith("attend: no memory"), found.stderr
    assert int(grown) < 16 << 20  # of 60,000 x 3 x 64 numbers, 46 MB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on Unix")
@pytest.mark.slow
def test_a_forked_process_goes_on_by_itself(environment: dict[str, str]) -> None:
    """It waited for its parent's threads."""
    code = """
x = torch.randn(40, 2, 16)
call = lambda: attention(x, x, x, Sequences([30, 10], None), None)
expected = call()
child = os.fork()
if not child:
    os._exit(0 if torch.equal(call(), expected) else 3)
print(os.waitpid(child, 0)[1])
"""
    assert alone(code, environment, timeout=120).stdout == "0\n"
