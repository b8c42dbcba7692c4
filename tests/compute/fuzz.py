"""Every kernel with random arguments against float64, under the address and undefined-behaviour sanitizers.

    make fuzz-kernels      compile with sanitizers, twice; make rounds for a while; plant errors, which must be reported

A round calls kernels as the package does, with random sizes, strides, kinds and threads. Before each call one of its
arguments is spoilt: such a call must be refused, or be none that a sanitizer reports. One compilation is for this very
processor, the other for one with fewer instructions that plays one with matrix registers.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plaudit.compute import attention, calls, digest, fused, library, products
from plaudit.compute.context import Packed
from plaudit.learn import prefixes
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.lora import _targets, add_lora
from plaudit.models.lowrank import adapted_layers
from plaudit.models.settings import LoraSettings
from plaudit.rollout.decode import pages, steps
from plaudit.rollout.decode.cache import Prefill

SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILATIONS = {"native": library.NATIVE, "fewer": (*library.FEWER[library.X86[0]], "-DPLAUDIT_MATRICES")}
CALLERS: tuple[ModuleType, ...] = (attention, fused, pages, steps, products, digest)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: tuple[dict[str, Any], ...] = (
    {"model_type": "gpt2", "activation_function": "gelu", "n_embd": 40, "n_layer": 1, "n_head": 2, "n_positions": 64},
    {"model_type": "gpt2", "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64},
    {**SIZES, "model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 2},
    {**SIZES, "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 50},
)
Results = list[tuple[Tensor, Tensor]]
"""What kernels gave, and what is right."""


class Fuzz:
    """Draws arguments."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.dtype = self.random.choice((torch.float32, torch.bfloat16))

    def size(self, most: int) -> int:
        """Small ones more often, and whole registers."""
        return self.random.choice((1, self.random.randint(1, most), self.random.randint(1, 1 + most // 8), 16, 32))

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def states(self, tokens: int, *heads: int, dim: int) -> list[Tensor]:
        """Of each number of heads: side by side in one tensor, as a projection leaves them, or each by itself."""
        if self.random.random() < 0.5:
            return [self.numbers(tokens, count, dim) for count in heads]
        whole = self.numbers(tokens, sum(heads) * dim).split([count * dim for count in heads], dim=-1)
        return [part.view(tokens, -1, dim) for part in whole]

    def heads(self) -> tuple[int, int, int]:
        kv_heads = self.random.choice((1, 1, 2, 3))
        return kv_heads * self.random.choice((1, 1, 2, 4)), kv_heads, self.size(72)


def both(ours: Callable[..., Tensor], right: Callable[..., Tensor], *inputs: Tensor) -> Results:
    """Values and gradients of both, the latter in float64."""
    found, wide = [x.detach() for x in inputs], [x.detach().double() for x in inputs]
    for x in (*found, *wide):
        x.requires_grad_()
    out, other = ours(*found), right(*wide)
    above = torch.randn(out.shape).to(out.dtype)
    gradients, others = torch.autograd.grad(out, found, above), torch.autograd.grad(other, wide, above.double())
    return [(out, other), *zip(gradients, others, strict=True)]


def fuzz_activate(fuzz: Fuzz) -> Results:
    name = fuzz.random.choice(("gelu_tanh", "silu", "gelu"))
    return both(partial(fused.activate, name=name), fused.PLAIN[name], fuzz.numbers(fuzz.size(60), fuzz.size(300)))


def fuzz_swiglu(fuzz: Fuzz) -> Results:  # by torch where it is float64
    return both(fused.swiglu, fused.swiglu, fuzz.numbers(fuzz.size(60), 2 * fuzz.size(200)))


def fuzz_rms_norm(fuzz: Fuzz) -> Results:
    width = fuzz.size(200)
    norm = partial(fused.rms_norm, eps=1e-5)  # by torch where it is float64
    return both(norm, norm, fuzz.numbers(fuzz.size(200), width), fuzz.numbers(width))


def fuzz_rotate(fuzz: Fuzz) -> Results:
    tokens, half = fuzz.size(200), fuzz.size(40)
    apart = fuzz.numbers(tokens, 2, half)[:, :1] if fuzz.random.random() < 0.3 else fuzz.numbers(tokens, 1, half)
    tables = [apart.cos(), apart.sin()]
    (x,) = fuzz.states(tokens, fuzz.size(8), dim=2 * half)
    return both(lambda x: fused.rotate(x, *tables), lambda x: fused.rotate(x, *(t.double() for t in tables)), x)


def fuzz_attention(fuzz: Fuzz) -> Results:
    heads, kv_heads, dim = fuzz.heads()
    if fuzz.random.random() < 0.2:  # one so long that all threads share it
        rows = [list(range(fuzz.random.randint(200, 500)))]
    else:
        rows = [[fuzz.random.randint(0, 1) for _ in range(fuzz.size(90))] for _ in range(fuzz.random.randint(1, 6))]
    index = prefixes.shared(rows)[1] if fuzz.random.random() < 0.5 else None
    packed = Packed([len(row) for row in rows], window=fuzz.random.choice((None, fuzz.size(60))), index=index)
    parts = fuzz.states(len(packed.positions), heads, kv_heads, kv_heads, dim=dim)
    return both(lambda *x: packed.attend(0, *x), lambda *x: packed.padded.attend(*x), *parts)


def fuzz_cache(fuzz: Fuzz) -> Results:
    """Prompts are written, and next tokens look at them."""
    heads, kv_heads, dim = fuzz.heads()
    window, slots, more = (
        fuzz.random.choice((None, fuzz.size(40))),
        fuzz.random.randint(1, 4),
        fuzz.random.randint(1, 40),
    )
    config = replace(model(fuzz, MODELS[0]).config, heads=heads, kv_heads=kv_heads, head_dim=dim, window=window)
    lengths = [fuzz.size(60) for _ in range(slots)]
    cache = pages.PageCache(config, slots, max(lengths) + more, dtype=fuzz.dtype)
    states = [fuzz.states(length + more, heads, kv_heads, kv_heads, dim=dim) for length in lengths]
    for slot, (length, (_, key, value)) in enumerate(zip(lengths, states, strict=True)):
        cache.write(0, cache.places(torch.full((length,), slot), torch.arange(length)), key[:length], value[:length])
    found = []
    for step in range(more):
        positions = torch.tensor(lengths) + step
        tokens = [[part[at] for part in state] for state, at in zip(states, positions.tolist(), strict=True)]
        found.append(cache.past(positions, 0).attend(0, *map(torch.stack, zip(*tokens, strict=True))))
    whole = [Packed([length + more], window=window) for length in lengths]
    right = [p.padded.attend(*(x.double() for x in state)) for p, state in zip(whole, states, strict=True)]
    return [(torch.stack(found, dim=1)[slot], right[slot][length:]) for slot, length in enumerate(lengths)]


def model(fuzz: Fuzz, kind: dict[str, Any]) -> Decoder:
    keys = {**kind, "vocab_size": 40 + fuzz.size(9), "initializer_range": 0.1}
    found = fresh_model(keys, seed=1)
    assert isinstance(found, Decoder)
    return found.to(fuzz.dtype)


def with_adapters(fuzz: Fuzz, model: Decoder) -> None:
    """Adapters that change something, of all projections or of a few."""
    names = sorted({name.rsplit(".", 1)[-1] for name in _targets(model)})
    chosen = fuzz.random.sample(names, fuzz.random.randint(1, len(names)))
    add_lora(model, LoraSettings(rank=fuzz.random.randint(1, 20), alpha=3.0, targets=chosen))
    for _, layer in adapted_layers(model):
        for half in layer.lora_b.values():
            half.normal_(std=0.1)


@torch.no_grad()
def fuzz_step(fuzz: Fuzz) -> Results:
    ours, slots, more = model(fuzz, fuzz.random.choice(MODELS)), fuzz.random.randint(1, 40), fuzz.random.randint(1, 9)
    if fuzz.random.random() < 0.5:
        with_adapters(fuzz, ours)
    lengths = [fuzz.random.randint(1, 30) for _ in range(slots)]
    rows = [torch.randint(0, 40, (length + more,)) for length in lengths]
    cache = pages.PageCache(ours.config, slots, 64, dtype=fuzz.dtype)
    prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    ours(torch.cat(prompts), Prefill(cache, range(slots), lengths))
    kernel, found = steps.Steps(ours), []
    for step in range(more):
        positions = torch.tensor(lengths) + step
        found.append(
            kernel.logits(cache, torch.stack([row[at] for row, at in zip(rows, positions, strict=True)]), positions)
        )
    ours.double()
    whole = ours.head(ours(torch.cat(rows), Packed([len(row) for row in rows], window=ours.config.window)))
    right = whole.split([len(row) for row in rows])
    return [(out[slot], right[slot][lengths[slot] + step]) for step, out in enumerate(found) for slot in range(slots)]


def fuzz_product(fuzz: Fuzz) -> Results:
    x, weight = fuzz.numbers(fuzz.size(80), fuzz.size(90)), fuzz.numbers(fuzz.size(90), 1)
    weight = fuzz.numbers(len(weight), x.shape[1])
    bias = fuzz.numbers(len(weight)) if fuzz.random.random() < 0.5 else None
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if fuzz.dtype == torch.float32:
        out = x.new_empty(right.shape)
        products.run("product", x, weight, bias, out)
        return [(out, right)]
    if not library.number("pairs_of_halves"):
        return []
    return [(products.product_by_matrices(x, weight, bias), right)]


def fuzz_digest(fuzz: Fuzz) -> Results:
    x = fuzz.numbers(fuzz.size(300), fuzz.size(600))
    row, column = fuzz.random.randrange(len(x)), fuzz.random.randrange(x.shape[1])
    alone = torch.zeros_like(x)
    alone[row:, column:] = x[row:, column:]
    found = digest.box_sum(x[row:, column:], x.shape, (row, column))
    assert int(found) == int(digest.box_sum(alone, x.shape, (0, 0)))
    return []


FUZZES = [value for name, value in list(globals().items()) if name.startswith("fuzz_")]


def spoilt(fuzz: Fuzz, name: str, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The arguments of a call, copied, with one that another call would have."""
    copies = [None if x is None else x.clone() for x in tensors]
    place = fuzz.random.choice([i for i, x in enumerate(copies) if x is not None])
    x = copies[place]
    assert x is not None
    kinds: list[Callable[[], Tensor | None]] = [lambda: x.double(), lambda: torch.cat((x[None], x[None]))]
    if x.ndim and x.numel():
        kinds += [
            lambda: x[:-1],
            lambda: torch.cat((x, x[:1])),
            lambda: x[..., :-1],
            lambda: x.repeat_interleave(2, -1)[..., ::2],
        ]
    if x.dtype == torch.int64 and x.numel() and name != "step" and name != "weighted_sum":  # those have addresses
        wrong = fuzz.random.choice((-1, 1 << 40, 1 + int(x.max()), -(1 << 63)))
        kinds += [lambda: x.flatten().index_fill(0, torch.randint(0, x.numel(), (1,)), wrong).view(x.shape)] * 3
    if name != "step":
        kinds.append(lambda: None)
    copies[place] = fuzz.random.choice(kinds)()
    return copies


def spoiling(fuzz: Fuzz, count: dict[str, int]) -> Callable[..., None]:
    """`calls.run` that first tries a spoilt call."""

    def run(name: str, *tensors: Tensor | None, **numbers: float) -> None:
        other = spoilt(fuzz, name, tensors)
        try:
            calls.run(name, *other, **numbers)
        except ValueError:
            count["refused"] += 1
        count["calls"] += 1
        calls.run(name, *tensors, **numbers)

    return run


def check(found: Tensor, right: Tensor, what: str) -> None:
    near = 1e-4 if found.dtype == torch.float32 and "bfloat16" not in what else 2**-5
    off, most = (found.double() - right).abs().max().item(), 1 + right.abs().max().item()
    assert found.shape == right.shape, (what, found.shape, right.shape)
    assert off <= near * most, f"{what}: {off} beside numbers of {most}"


def rounds(seconds: float, first: int) -> None:
    until, seed, count = time.monotonic() + seconds, first, {"calls": 0, "refused": 0}
    while time.monotonic() < until:
        fuzz = Fuzz(seed)
        torch.manual_seed(seed)
        torch.set_num_threads(fuzz.random.randint(1, 3))
        for module in CALLERS:
            module.run = spoiling(fuzz, count)  # type: ignore[attr-defined]
        for one in FUZZES:
            for number, (found, right) in enumerate(one(fuzz)):
                check(found, right, f"{one.__name__}, seed {seed}, result {number}, {fuzz.dtype}")
        seed += 1
    print(f"{seed - first} rounds, {count['calls']} calls, {count['refused']} spoilt ones refused", flush=True)


def planted(kind: str) -> None:
    """What a sanitizer must report, or all this shows nothing."""
    x = torch.zeros(24)
    address = ctypes.c_int64
    if kind == "AddressSanitizer":
        calls._kernel("activate_float", *[address] * 6)(x.data_ptr(), x.data_ptr(), 0, 32, 1, 1)
    else:
        calls._kernel("within", *[address] * 4)(x.data_ptr() + 1, 2, 5, 1)


def sanitized(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """This script again, with the sanitizers' libraries."""
    found = [
        library._asked(library._compilers()[0][0], f"-print-file-name=lib{x}.so").strip() for x in ("asan", "ubsan")
    ]
    environment = os.environ | {
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of rounds, with each compilation")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--compilation", choices=COMPILATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--planted", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compilation:
        library.PATIENCE = 600.0
        library.FLAGS, library.NATIVE, library.FEWER = (*library.FLAGS, *SANITIZED), COMPILATIONS[given.compilation], {}
        assert library.library() is not None, "there are no kernels with sanitizers: is g++ there?"
        planted(given.planted) if given.planted else rounds(given.seconds, given.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLAUDIT_CACHE"] = folder
        arguments = ["--seconds", str(given.seconds), "--seed", str(given.seed)]
        running = {name: sanitized([*arguments, "--compilation", name]) for name in COMPILATIONS}
        for name, process in running.items():
            said, _ = process.communicate()
            assert process.returncode == 0, said
            print(f"{name}, from seed {given.seed}: {said}", end="")
        for kind in ("AddressSanitizer", "runtime error"):
            process = sanitized(["--compilation", "native", "--planted", kind])
            said, _ = process.communicate()
            assert process.returncode and kind in said, f"a planted error was not reported: {said}"
            print(f"a planted error was reported: {kind}")


if __name__ == "__main__":
    main()
