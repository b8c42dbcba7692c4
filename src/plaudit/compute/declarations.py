"""Declare each kernel's arguments: kinds, shapes, strides and bounds. `calls.py` reads the declarations and checks.

    name: (tensors, numbers, *conditions)

A tensor is `name:kind[sizes]`. Kind T is float32 or bfloat16, the same for all; f is float32, i int64, w int32. A size
is a name, which means the same wherever it stands, or an expression of names; `page(n)` and `register(n)` are n filled
up to a cache's page and to a register. A tensor with `*` before its size
may have any shape with that many entries. After a tensor may stand:

    /        rows may have gaps between them; `name_stride` is the row stride. Without /, the tensor is contiguous.
    <limit   every entry is at least 0 and less than `limit`; with <<, no entry is less than the one before it either.
    ?        None may stand in its place.

The numbers are what the kernel gets after the tensors' addresses and before the number of threads: expressions of
sizes, strides and what the caller passes by name. The conditions are on all of these.
"""

from __future__ import annotations

import torch

SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
"""Dtypes that the kernels support, with the ending of the kernels' names."""

_ROWS = "index:i[places]<tokens starts:i[ends]<<places+1 begins:i[ends]<<"  # each kernel adds a limit
_STATES = "query:T[tokens,heads,dim]/ key:T[tokens,kv_heads,dim]/ value:T[tokens,kv_heads,dim]/"
_NEW = "slots:i[n]<slots positions:i[n]<length"
_NEW_KEYS = "key:T[n,kv_heads,dim]/ value:T[n,kv_heads,dim]/"
_CACHE = "keys:T[slots,kv_heads,pages,dim,page(1)] values:T[slots,kv_heads,length,register(dim)]"
_ATTENTION = "heads kv_heads dim query_stride key_stride value_stride"
_GROUPED, _PAGED = ("kv_heads >= 1 and heads % kv_heads == 0", "window >= 1"), "length == pages * page(1)"

KERNELS: dict[str, tuple[str, ...]] = {
    "attend": (
        f"{_ROWS}places+1 {_STATES} out:T[tokens,heads*dim] logs:f[tokens,heads]?",
        f"ends-1 {_ATTENTION} window",
        *_GROUPED,
    ),
    "attend_back": (
        (
            f"{_ROWS}twice_shared//2+1 {_STATES} out:T[tokens,heads*dim] logs:f[tokens,heads] grad:T[tokens,heads*dim] "
            "of_query:T[tokens,heads,dim] of_key:f[tokens,kv_heads,dim] of_value:f[tokens,kv_heads,dim] "
            "rest:f[twice_shared,kv_heads,dim]"
        ),
        f"ends-1 {_ATTENTION} window",
        *_GROUPED,
    ),
    "write": (f"{_NEW} {_NEW_KEYS} {_CACHE}", "n kv_heads dim key_stride value_stride pages register(dim)", _PAGED),
    "decode": (
        f"{_NEW} query:T[n,heads,dim]/ {_NEW_KEYS} {_CACHE} out:T[n,heads*dim]",
        f"n {_ATTENTION} pages register(dim) window",
        *_GROUPED,
        _PAGED,
    ),
    # `layers` has the addresses of each layer's weights and its ranks (decode/steps.py). `tables` has the addresses of
    # keys and values, whose sizes are those of the first layer.
    "step": (
        (
            "layers:i[depth,26] norm:T[width] norm_bias:T[width]? head:T[page(vocabulary)*width] "
            f"head_bias:T[page(vocabulary)]? {_NEW} cos:T[n,1,dim//2]? sin:T[n,1,dim//2]? tables:i[depth,2] {_CACHE} "
            "x:f[n,page(width)] room:f[n,room] logits:f[n,vocabulary]"
        ),
        (
            "n depth width inner vocabulary rank heads kv_heads dim pages register(dim) window layer_norm activation "
            "gated eps"
        ),
        *_GROUPED,
        _PAGED,
        (
            "room == page(width) + page((heads + 2 * kv_heads) * dim) + max(page(inner), page(heads * dim)) "
            "+ 2 * page(rank)"
        ),
        "activation in (0, 1, 2, 3)",
        "not (bfloat16 and pairs_of_halves) or width % 2 == inner % 2 == heads * dim % 2 == 0",
    ),
    "pack": (
        "weight:T[rows,inner] packed:T[(2*page(rows//2)if(gated)else(page(rows)))*inner]",
        "rows inner gated pairs",
        "gated in (0, 1) and (rows % 2 == 0 or not gated)",
        "inner % 2 == 0 or not pairs",
    ),
    "product": (
        "x:T[rows,inner]/ weight:T[columns,inner] bias:T[columns]? out:T[rows,columns]",
        "rows inner columns x_stride",
        "not bfloat16 or pairs_of_halves and inner % 2 == 0",
    ),
    "activate": ("x:T[*count] y:T[*count] slope:T[*count]?", "count activation", "activation in (1, 2, 3)"),
    "swiglu": ("x:T[rows,2*width] y:T[rows,width]", "rows width"),
    "swiglu_back": ("x:T[rows,2*width] grad:T[rows,width] of_x:T[rows,2*width]", "rows width"),
    "rotate": (
        "x:T[tokens,heads,2*half]/ cos:T[tokens,1,half] sin:T[tokens,1,half] y:T[tokens,heads,2*half]",
        "tokens heads half x_stride back",
    ),
    "rms_norm": ("x:T[rows,width] weight:T[width] y:T[rows,width] scales:f[rows]?", "rows width eps"),
    "rms_norm_back": (
        "x:T[rows,width] weight:T[width] scales:f[rows] grad:T[rows,width] of_x:T[rows,width] parts:f[parts,width]",
        "rows width",
        "parts == parts_of_sums",
    ),
    "weighted_sum": (
        "bits:w[rows,columns]/ factors:w[piece] sum:i[]",
        "rows columns bits_stride width first count piece base",
        "first + (rows - 1) * width + columns <= count",
    ),
}


def symbols() -> list[str]:
    """Return the names of all kernels in a library, with an ending for each precision."""
    return [name + ending for name, (tensors, *_) in KERNELS.items() for ending in _endings(tensors)]


def _endings(tensors: str) -> list[str]:
    return [f"_{suffix}" for suffix in SUFFIXES.values()] if ":T[" in tensors else [""]
