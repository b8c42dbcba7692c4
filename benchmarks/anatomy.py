"""Where the time of a segment goes: operators' own time by kind of work, and the operators that take most of it.

Matrix products, decoding steps (products and attention in one kernel), attention, norms and activations, sampling, the
optimizer; what is left of the segment's time is Python and everything that no operator accounts for. The head and the
drawing of tokens run operators of several kinds; the profile marks where each begins and ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness import table

KINDS: dict[str, tuple[str, ...]] = {
    kind: tuple(parts.split())
    for kind, parts in {
        "matrix products": "aten::mm aten::addmm aten::bmm aten::baddbmm aten::mv linear onednn mkldnn",
        "decoding steps": "plaudit::step",
        "attention": "scaled_dot_product flash_attention plaudit::attend plaudit::decode plaudit::write",
        "optimizer": "adam _foreach_ _fused_ Optimizer.step clip_grad linalg_vector_norm",
        "sampling": "cumsum multinomial exponential_ topk sort searchsorted argmax isin",
        "softmax and log-probs": "softmax logsumexp nll_loss log_sigmoid gather scatter",
        "norms": "layer_norm rms_norm rsqrt aten::mean aten::pow",
        "activations and other arithmetic": "gelu silu swiglu rotate tanh sigmoid aten::mul aten::add aten::sub "
        "aten::div aten::neg aten::exp aten::sum aten::where aten::clamp aten::sqrt aten::max aten::min aten::log",
        "copies and indexing": "copy_ index aten::cat embedding aten::fill_ aten::zero_ contiguous aten::stack "
        "plaudit::pack empty resize clone _to_copy item local_scalar narrow split select slice",
    }.items()
}
"""Kind of work -> parts of operators' names; the first kind that fits takes the operator."""
OTHER = "Python and other"
DRAWING, AGAIN, HEAD = "plaudit: drawing tokens", "plaudit: the head again", "_ChosenLogprobs"
"""Ranges of a profile. `contender_plaudit.py` opens the first two: around the drawing of tokens, and around the head of
a decoding step, computed a second time, which counts only as the share of that step's kernel. The third is training's
head: the function of `compute/logprobs.py`."""


def kind_of(operator: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), OTHER)


def names_of(event: Any) -> list[str]:
    """An operator's name, then those of the operators and ranges around it."""
    return [] if event is None else [event.name, *names_of(event.cpu_parent)]


def part_of(names: Sequence[str]) -> str:
    """The part of a step that an operator belongs to, by its `names_of`."""
    if DRAWING in names:
        return "drawing tokens"
    if any(HEAD in name for name in names):
        return "head and log-probs"
    kind = kind_of(names[0])
    return {"attention": kind, "decoding steps": "decoding, layers", OTHER: OTHER}.get(kind, "rest of the model")


def summed(events: Sequence[Any], total: float) -> dict[str, Any]:
    """A segment of `total` seconds by kinds of work, by parts of a step, and the operators that take most."""
    again = sum(one.cpu_time_total for one in events if one.name == AGAIN) / 1e6
    operators, calls = Counter[str](), Counter[str]()
    parts = Counter({"decoding, layers": -again, "decoding, head": again})
    for one in events:
        if AGAIN not in (names := names_of(one)):
            operators[one.name] += (seconds := one.self_cpu_time_total / 1e6)
            calls[one.name] += 1
            parts[part_of(names)] += seconds
    total -= again
    parts[OTHER] += max(0.0, total - parts.total())
    top = [[name, seconds, calls[name]] for name, seconds in operators.most_common(20)]
    return {"seconds": total, "kinds": grouped(operators, total), "parts": dict(parts), "operators": top}


def grouped(operators: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds by kind, the largest first; `total` is what the segment took in all."""
    found: dict[str, float] = {}
    for name, seconds in operators.items():
        found[kind_of(name)] = found.get(kind_of(name), 0.0) + seconds
    found[OTHER] = found.get(OTHER, 0.0) + max(0.0, total - sum(operators.values()))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


class Tracer:
    """Traces the first segment after the warm-up, where there is one to trace: `steps` of a segment, 0 for none."""

    def __init__(self, steps: int):
        self.steps = steps
        self.result: dict[str, Any] | None = None
        self._profiler: Any = None
        self._began = 0.0

    def begin(self, done: int) -> None:
        """Called when the next step may start, with the number of steps done."""
        if self.steps and done == self.steps:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.__enter__()
            self._began = time.perf_counter()

    def end(self, done: int) -> None:
        """Called when a step has ended, before the gate may block."""
        if self.steps and done == 2 * self.steps:
            total = time.perf_counter() - self._began  # as operators are timed
            self._profiler.__exit__(None, None, None)
            self.result = summed(self._profiler.events(), total)


def text_of(name: str, found: dict[str, Any]) -> str:
    """A profile as a small page of text."""
    total = found["seconds"]
    lines = [f"{name}: {total:.2f} s in one traced segment"]
    lines += [f"  {seconds / total:6.1%}  {seconds:7.3f} s  {kind}" for kind, seconds in found["kinds"].items()]
    lines.append("  the operators that take most:")
    for operator, seconds, calls in found["operators"]:
        lines.append(f"  {seconds / total:6.1%}  {seconds:7.3f} s  {calls:7d} x  {kind_of(operator)}: {operator}")
    return "\n".join(lines)


def table_of(profiles: dict[str, dict[str, Any]]) -> str:
    """Shares of several profiles, a line each, as Markdown."""
    kinds = [*KINDS, OTHER]
    shares = (
        [name, *(f"{found['kinds'].get(kind, 0.0) / found['seconds']:.0%}" for kind in kinds)]
        for name, found in profiles.items()
    )
    return table(["line", *kinds], shares) + "\n"
