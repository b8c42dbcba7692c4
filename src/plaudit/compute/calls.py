"""The only caller of kernels: it first checks their arguments against `declarations.py`.

    tensors, numbers -> kinds, shapes and strides (remembered for the next such call) -> indices in bounds -> the kernel

A wrong call raises ValueError before the kernel runs. Threads' memory is allocated before they start; if
there is none, a call raises MemoryError. In a forked process kernels run on one thread, with the same results: the
parent's threads do not exist there, and GNU's OpenMP would wait for them forever.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from plaudit.compute.declarations import KERNELS, SUFFIXES
from plaudit.compute.library import library, number

KINDS = {"f": (torch.float32,), "i": (torch.int64,), "w": (torch.int32,), "T": tuple(SUFFIXES)}
TENSOR = re.compile(r"(\w+):([Tfiw])\[(\*?)(.*)\](/?)(?:<(<?)([^?]+))?(\?)?")
_forked: list[bool] = []

if sys.platform != "win32":
    os.register_at_fork(after_in_child=functools.partial(_forked.append, True))


def usable(*tensors: Tensor) -> bool:
    """True if the kernels support these tensors: plain CPU tensors, all of one supported precision, last dimension
    contiguous. Tensor subclasses (sharded or fake ones) are left to torch."""
    dtype = tensors[0].dtype
    return all(
        type(x) in (Tensor, nn.Parameter)
        and x.dtype is dtype
        and x.device.type == "cpu"
        and (x.stride(-1) == 1 or x.shape[-1] == 1)
        for x in tensors
    ) and available(dtype)


def available(dtype: torch.dtype) -> bool:
    """True if there are kernels for this dtype."""
    return dtype in SUFFIXES and library() is not None


def side_by_side(x: Tensor) -> Tensor:
    """Return x (rows, heads, dim), copied if a row's heads are not adjacent."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()


def run(name: str, *tensors: Tensor | None, **numbers: float) -> None:
    """Run a kernel; a profile shows it as `plaudit::name`. Raises ValueError if arguments are not as declared,
    MemoryError if there is no memory."""
    forms = tuple([None if x is None else (type(x), x.dtype, x.is_cpu, x.shape, x.stride()) for x in tensors])
    call = _call(name, forms, tuple(numbers.items()))
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    if 0 in addresses:
        for x, address in zip(tensors, addresses, strict=True):
            if x is not None and x.numel() and not address:
                raise ValueError(f"{name}: a tensor of shape {tuple(x.shape)} has no memory")
    for place, limit, rising in call.bounds:
        entries = tensors[place]
        assert entries is not None
        if not call.within(addresses[place], entries.numel(), limit, rising):
            raise ValueError(call.out_of_bounds(place, entries, limit, rising))
    threads = 1 if _forked else torch.get_num_threads()
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"plaudit::{name}"):
            done = call.function(*addresses, *call.numbers, threads)
    else:
        done = call.function(*addresses, *call.numbers, threads)
    if not done:
        raise MemoryError(f"{name}: no memory for what {threads} threads compute with, beside the tensors")


class _Form(NamedTuple):
    """The properties of a tensor (dtype, shape, strides) by which a call is checked and its check is cached."""

    kind: type
    dtype: torch.dtype
    on_cpu: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor argument as `declarations.py` declares it."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    flat: bool
    sizes: tuple[str, ...]
    apart: bool
    limit: str | None
    rising: bool
    optional: bool

    def shape(self, form: _Form) -> tuple[int, ...]:
        return (math.prod(form.shape),) if self.flat else tuple(form.shape)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a kernel that was checked for tensors of certain forms and certain numbers; it can be repeated."""

    name: str
    function: Callable[..., int]
    within: Callable[..., int]
    numbers: tuple[float, ...]
    bounds: tuple[tuple[int, int, bool], ...]  # (tensor's index, entries' limit, must they not fall)

    def out_of_bounds(self, place: int, entries: Tensor, limit: int, rising: bool) -> str:
        rise = ", and none less than the one before it" if rising else ""
        return (
            f"{self.name}: entries of {_declared(self.name)[place].name} are {int(entries.min())} to "
            f"{int(entries.max())}; they must be at least 0 and less than {limit}{rise}"
        )


@functools.cache
def _declared(name: str) -> tuple[_Tensor, ...]:
    def read(text: str) -> _Tensor:
        found = TENSOR.fullmatch(text)
        assert found is not None, text
        label, kind, flat, sizes, apart, rising, limit, optional = found.groups()
        shape = tuple(sizes.split(",")) if sizes else ()
        return _Tensor(label, KINDS[kind], bool(flat), shape, bool(apart), limit, bool(rising), bool(optional))

    return tuple(map(read, KERNELS[name][0].split()))


@functools.lru_cache(maxsize=4096)
def _call(name: str, forms: tuple[Any, ...], known_sizes: tuple[tuple[str, float], ...]) -> _Call:
    """Return the call for tensors of these forms. Raises ValueError if they are not as declared."""
    _, numbers, *conditions = KERNELS[name]
    arguments = [(x, form and _Form(*form)) for x, form in zip(_declared(name), forms, strict=True)]
    present = [(x, _right_kind(name, x, form)) for x, form in arguments if form or not x.optional]
    sizes: dict[str, Any] = _constants() | dict(known_sizes)
    for x, form in present:
        if x.apart:
            sizes[f"{x.name}_stride"] = form.strides[0]
        for size, length in zip(x.sizes, x.shape(form), strict=True):
            sizes.setdefault(size, length)  # an expression too: no name that is looked up equals one
    dtypes = {form.dtype for x, form in present if x.dtypes == KINDS["T"]}
    if len(dtypes) > 1:
        raise ValueError(f"{name}: tensors are {' and '.join(sorted(map(str, dtypes)))}; they must be of one kind")
    sizes["bfloat16"] = torch.bfloat16 in dtypes
    for x, form in present:
        _check_shape(name, x, form, sizes)
    for condition in conditions:
        if not eval(condition, {}, sizes):
            named = {key: value for key, value in sizes.items() if re.search(rf"\b{re.escape(key)}\b(?!\()", condition)}
            raise ValueError(f"{name}: {condition} must hold, and does not with {named}")
    passed = tuple(eval(each, {}, sizes) for each in numbers.split())
    kinds = [ctypes.c_int64] * len(forms) + [ctypes.c_double if type(n) is float else ctypes.c_int64 for n in passed]
    return _Call(
        name=name,
        function=_kernel("_".join((name, *(SUFFIXES[dtype] for dtype in dtypes))), *kinds, ctypes.c_int64),
        within=_kernel("within", *[ctypes.c_int64] * 4),
        numbers=passed,
        bounds=tuple(
            (place, int(eval(x.limit, {}, sizes)), x.rising)
            for place, (x, form) in enumerate(arguments)
            if x.limit and form
        ),
    )


def _right_kind(name: str, x: _Tensor, form: _Form | None) -> _Form:
    if form is None:
        raise ValueError(f"{name}: {x.name} is None; it must be a tensor")
    if form.kind not in (Tensor, nn.Parameter) or not form.on_cpu or form.dtype not in x.dtypes:
        allowed = " or ".join(map(str, x.dtypes))
        raise ValueError(
            f"{name}: {x.name} is a {form.kind.__name__} of {form.dtype}{'' if form.on_cpu else ' on another device'}; "
            f"it must be a plain CPU tensor of {allowed}"
        )
    if len(x.shape(form)) != len(x.sizes):
        raise ValueError(f"{name}: {x.name} has shape {tuple(form.shape)}; it must be ({', '.join(x.sizes)})")
    return form


def _check_shape(name: str, x: _Tensor, form: _Form, sizes: Mapping[str, Any]) -> None:
    expected = tuple(eval(size, {}, sizes) for size in x.sizes)
    if x.shape(form) != expected:
        declared = f"({', '.join(x.sizes)})"
        raise ValueError(f"{name}: {x.name} has shape {tuple(form.shape)}; it must be {declared}, {expected} here")
    if 0 not in form.shape and not _contiguous(form.shape[x.apart :], form.strides[x.apart :]):
        rows = "each row" if x.apart else "it"
        raise ValueError(
            f"{name}: {x.name} has shape {tuple(form.shape)} and strides {form.strides}; {rows} must be contiguous"
        )


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _constants() -> dict[str, Any]:
    """Return the functions and numbers that every declaration may use, by name."""

    def filled(to: str) -> Callable[[int], int]:
        return lambda count: -(-count // number(to)) * number(to)

    return {
        "page": filled("page_positions"),
        "register": filled("register_numbers"),
        "parts_of_sums": number("parts_of_sums"),
        "pairs_of_halves": number("pairs_of_halves"),
    }


@functools.cache
def _kernel(symbol: str, *arguments: Any) -> Callable[..., int]:
    found = library()
    assert found is not None, "a kernel was asked for without asking whether there are any"
    function = found[symbol]  # not by an attribute: all calls would share its argtypes
    function.restype, function.argtypes = ctypes.c_int64, arguments
    return function
