"""A device apart that every machine has: tensors that say they are on `meta` and hold their values on the CPU.

Whatever asks them together with tensors of the CPU is refused, as a GPU would refuse it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten: Any = torch.ops.aten
HERE, AWAY = torch.device("cpu"), torch.device("meta")
COPIES = {aten.copy_, aten._to_copy}
"""What may see both devices. Indices may lie on the CPU as well."""
INDEXED = {aten.index, aten.index_put_, aten.index_put}
READ = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal}
"""What needs a value to go on."""
waits: list[str] = []
"""Where the host would have waited for the device: values read there, and copies between the two."""


class Away(Tensor):
    """A tensor of the device apart."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Away:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=AWAY,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        waits.append("tolist")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.inner!r})"


class Built(TorchFunctionMode):
    """`torch.tensor` makes its tensor out of sight of the other mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or HERE) == AWAY:
            waits.append("tensor")
            return Away(func(*args, **kwargs | {"device": HERE}))
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within, `device="meta"` makes tensors of the device apart."""
    with Built(), Elsewhere():
        yield


class Elsewhere(TorchDispatchMode):
    """Every operation without such a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    packet = func.overloadpacket
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if packet in INDEXED:
        tensors = [x for x in tree_leaves((args[:1], args[2:])) if isinstance(x, Tensor)]
    away = any(isinstance(x, Away) for x in tensors)
    mixed = away and any(x.dim() > 0 and not isinstance(x, Away) for x in tensors)
    if mixed and packet not in COPIES:
        raise AssertionError(f"{func} got tensors of two devices")
    to = kwargs.get("device")
    crosses = packet is aten._to_copy and to is not None and away != (torch.device(to) == AWAY)
    if crosses or mixed or (away and packet in READ):
        waits.append(str(packet))
    if to is not None:
        away = torch.device(to) == AWAY
        kwargs = kwargs | {"device": HERE}
    plain = tree_map_only(Away, lambda x: x.inner, (args, kwargs))
    out = func(*plain[0], **plain[1])
    if func._schema.is_mutable:
        given = {id(mine): theirs for mine, theirs in zip(tree_leaves(plain), tree_leaves((args, kwargs)), strict=True)}
        return tree_map(lambda x: given.get(id(x), x), out)
    if not away:
        return out
    return tree_map_only(Tensor, Away, out)


def moved(module: nn.Module) -> nn.Module:
    """The module with its parameters on the device apart, those that are shared still shared."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                key = id(parameter)
                if key not in made:
                    made[key] = nn.Parameter(Away(parameter.detach().clone()), requires_grad=parameter.requires_grad)
                owner._parameters[name] = made[key]
    return module


@contextmanager
def unseen() -> Iterator[None]:
    """Within, `device="meta"` is torch's own again, which has no values."""
    with _disable_current_modes():
        yield
