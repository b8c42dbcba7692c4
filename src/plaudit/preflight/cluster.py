"""Estimate placements in which every call has devices and a mesh of its own. Such placements cannot run yet.

    Costs, devices -> a `Call` of the search with all blocks and meshes -> Problem

What can run today is `placement.py`: there reference and critic are on the training ranks or apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from plaudit.models.config import DecoderConfig
from plaudit.models.mesh import Mesh, faults
from plaudit.preflight.cost import Costs
from plaudit.preflight.placement import WIDTHS, Placement
from plaudit.preflight.search import Call, Option, Problem, blocks, undominated

NODE = 8
"""Devices of a node; tensor parallelism stays within a node."""
Sized = Callable[[int, int], float]
"""Function (data, tensor) -> seconds or bytes on a mesh of data * tensor devices."""


def problem_of(costs: Costs, devices: int, capacity: float) -> Problem:
    """Return a step's calls for the search, each after the calls whose results it needs, with all options that fit."""
    work, models = costs.work, {str(one.role): one for one in costs.models}
    calls: list[Call] = []
    add = partial(_add, costs, calls, devices, capacity)
    if work.sampled:
        generate = lambda data, tensor: costs.generate(Placement(ray=True, workers=data), tensor)  # noqa: E731
        add("generate", costs.policy, generate, peak=lambda data, tensor: costs.cache(Placement(workers=data)) / tensor)
    first = tuple(call.name for call in calls)
    for name in [*(f"judge {number}" for number in costs.judges), *(f"{role} scores" for role in work.scored)]:
        role = name.removesuffix(" scores")
        add(name, costs.config_of(role), partial(costs.passes, f"{role}/score"), after=first)
    for role in work.trained:
        model = models[role]
        held = sum(model.held(model.layout.mesh.place(0)).values())
        before = "generate" if role == "policy" and work.sampled else f"{role} scores"
        add(
            f"{role} trains",
            model.layout.config,
            partial(costs.training, role),
            held=partial(_sharded, held),
            peak=costs.activations,
            after=tuple(call.name for call in calls if not call.name.endswith(" trains")),
            source=before if any(call.name == before for call in calls) else None,
        )
    return Problem(tuple(calls), devices, capacity=capacity)


def _add(
    costs: Costs,
    calls: list[Call],
    devices: int,
    capacity: float,
    name: str,
    config: DecoderConfig,
    seconds: Sized,
    *,
    held: Sized | None = None,
    peak: Sized = lambda data, tensor: 0.0,
    after: tuple[str, ...] = (),
    source: str | None = None,
) -> None:
    """Append a call with its options to `calls`. `held`: bytes on each device; by default those of the weights."""
    weights = float(costs.width * config.parameters)
    holds: Sized = held or (lambda data, tensor: weights / tensor)

    @cache
    def sized(data: int, tensor: int) -> tuple[float, float, float]:
        return seconds(data, tensor), holds(data, tensor), peak(data, tensor)

    cuts = [tensor for tensor in WIDTHS if tensor <= NODE and not faults(config, Mesh(tensor=tensor))]
    placed = (
        Option(start, count, *sized(count // tensor, tensor), tensor)
        for start, count in blocks(devices)
        for tensor in cuts
        if tensor <= count
    )
    options = [one for one in placed if one.held + one.peak <= capacity]
    link, moves, slack = costs.link("network", devices), None, 0.0
    if source is not None:
        moves, slack = (source, partial(_moved, link.latency, weights / link.bandwidth)), weights / link.bandwidth
    calls.append(Call(name, undominated(options, 2 * (slack + link.latency) if moves else 0.0), after, moves))


def _sharded(size: float, data: int, tensor: int) -> float:
    return size / data / tensor


def _moved(latency: float, seconds: float, one: Option, other: Option) -> float:
    """Return the seconds to move weights from option `one` to `other`, each device fetching its part; 0 if equal."""
    same = (one.first, one.count, one.mesh) == (other.first, other.count, other.mesh)
    return 0.0 if same else latency + seconds / (other.mesh or 1)
