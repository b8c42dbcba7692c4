"""A part of `gpu.py`: what ways there are to attend over rows of several lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from floor import Peak
from gpu_extent import Extent, Figure, model, seconds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries (n, heads, size), keys and values (n, KV heads, size) of rows that lie end to end -> (n, heads, size)."""


def lengths_of(extent: Extent) -> list[int]:
    """Rows of all lengths up to the longest, as many tokens as a micro-batch has."""
    drawn = torch.Generator().manual_seed(0)
    found: list[int] = []
    while sum(found) < min(extent.micro):
        found.append(int(torch.randint(extent.length // 8, extent.length + 1, (), generator=drawn)))
    return found


def padded(lengths: list[int]) -> Attend:
    """SDPA, causal, on rows filled up to the longest."""
    places = torch.nn.utils.rnn.pad_sequence
    most = max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grids = (places(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*grids, is_causal=True, enable_gqa=True).transpose(1, 2)
        real = torch.arange(most, device=q.device)[None] < torch.tensor(lengths, device=q.device)[:, None]
        return out[real]

    return attend


def ragged(lengths: list[int]) -> Attend:
    """torch's attention over rows that lie end to end (torch.nn.attention.varlen), without padding."""
    from torch.nn.attention.varlen import varlen_attn

    named = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in named else {"is_causal": True}  # torch 2.10

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=q.device)
        group = q.shape[1] // k.shape[1]  # it knows no groups of queries
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths), **causal)
        return out if isinstance(out, Tensor) else out[0]

    return attend


def masked(lengths: list[int], *, device: str) -> Attend:
    """FlexAttention with a mask of rows; compiled on a GPU, where it is one kernel."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (row[query] == row[key])

    mask = create_block_mask(allowed, None, None, len(row), len(row), device=device)
    flex = torch.compile(flex_attention) if device == "cuda" else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = flex(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1)

    return attend


def ours(extent: Extent, lengths: list[int]) -> Attend:
    """What a pass of the decoder does on this device."""
    context = model(extent).packed(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = context.attend(0, q, k, v)
        return out.view(q.shape)

    return attend


def attention(extent: Extent, best: Peak) -> Iterator[Figure]:
    """Forwards, and forwards and backwards, of one layer's attention over rows of several lengths."""
    lengths = lengths_of(extent)
    config = extent.config
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    source = torch.Generator().manual_seed(0)
    shapes = ((sum(lengths), count, size) for count in (heads, groups, groups))
    inputs = [torch.randn(*shape, generator=source).to(extent.device, extent.torch_dtype) for shape in shapes]
    ways: dict[str, Callable[[], Attend]] = {
        "SDPA, padded": lambda: padded(lengths),
        "this decoder": lambda: ours(extent, lengths),
        "varlen": lambda: ragged(lengths),
        "FlexAttention": lambda: masked(lengths, device=extent.device),
    }
    right = padded(lengths)(*inputs).float()
    for name, make in ways.items():
        what = f"attention of {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {name}"
        for act in (forwards, both_ways):
            try:
                yield timed(f"{what}, {act.__name__.replace('_', ' ')}", act, make(), inputs, right, extent)
            except Exception as error:  # noqa: BLE001 - one that is not there for a device is no fault
                why = str(error).splitlines()[0] if str(error) else ""
                yield {"what": what, "note": f"not here, {act.__name__}: {type(error).__name__}: {why:.80}"}


def forwards(attend: Attend, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return attend(*inputs)


def both_ways(attend: Attend, inputs: list[Tensor]) -> Tensor:
    out = attend(*(x.detach().requires_grad_() for x in inputs))
    out.float().square().sum().backward()
    return out.detach()


def timed(
    what: str,
    act: Callable[[Attend, list[Tensor]], Tensor],
    attend: Attend,
    inputs: list[Tensor],
    right: Tensor,
    extent: Extent,
) -> Figure:
    gap = float((act(attend, inputs).float() - right).abs().max())
    taken = min(seconds(lambda: act(attend, inputs), extent.device) for _ in range(extent.steps + 2))
    return {"what": what, "value": 1e3 * taken, "unit": "ms", "note": f"off by {gap:.1e}"}
