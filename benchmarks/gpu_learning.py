"""Parts of `gpu.py`: the device's best, training, what a waiting reference costs, and where the time goes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator

import torch
from anatomy import grouped
from floor import Peak, training_flops
from gpu_extent import Extent, Figure, best_rate, memory, model, parameter_bytes, rated, seconds


def peak(extent: Extent) -> Peak:
    """The best matrix product and the best pass over memory."""
    device, dtype, products, passes = extent.device, extent.torch_dtype, [0.0], [0.0]
    for side in extent.products:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        products.append(best_rate(2.0 * side**3, lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device))
        del a, b, out
    for mib in extent.mib:
        source = torch.zeros(mib << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = best_rate(2.0 * (mib << 20), lambda s=source, t=target: t.copy_(s), device)
        whole = source.view(torch.float32)
        read = best_rate(float(mib << 20), lambda w=whole: w.amax(), device)
        passes += [copy, read]
        del source, target, whole
    return Peak(max(products), max(passes))


def the_device(extent: Extent, best: Peak) -> list[Figure]:
    return [
        {"what": f"best matrix product, {extent.precision}", "value": best.flops / 1e12, "unit": "TFLOP/s"},
        {"what": "best pass over memory (a copy counts twice)", "value": best.bandwidth / 1e9, "unit": "GB/s"},
    ]


def training(extent: Extent, best: Peak) -> Iterator[Figure]:
    """SFT steps of full rows by the learner, as a run makes them, with micro-batches of several sizes; then DPO steps
    of half as many pairs, the pass of the reference included."""
    for method, sizes in (("sft", extent.micro), ("dpo", extent.micro[1:2])):
        for tokens in sizes:
            yield of_size(extent, best, method, tokens)


def of_size(extent: Extent, best: Peak, method: str, tokens: int) -> Figure:
    rows = f"{extent.rows} rows" if method == "sft" else f"{extent.rows // 2} pairs"
    what = f"{method.upper()}, {rows} of {extent.length} tokens, learn.micro_tokens={tokens}"
    try:
        with memory(extent.device, model(extent)) as held:
            taken, finite = training_step(extent, method, tokens)
    except torch.OutOfMemoryError:
        model(extent).zero_grad()
        return {"what": what, "note": "takes more memory than there is"}
    rate = extent.rows * extent.length / taken
    flops = training_flops(extent.size, method, attention_length=extent.length)
    note = "" if finite else "a loss is not finite"
    return rated(what, rate, rate * flops / best.flops, "matrix peak", held) | {"note": note}


def training_step(extent: Extent, method: str, micro_tokens: int) -> tuple[float, bool]:
    """Seconds of the fastest step, and whether all losses were finite."""
    step, losses = learning(extent, micro_tokens, method)
    for _ in range(2):
        step()
    taken = min(seconds(step, extent.device) for _ in range(extent.steps))
    return taken, all(map(math.isfinite, losses))


def learning(extent: Extent, micro_tokens: int, method: str = "sft") -> tuple[Callable[[], None], list[float]]:
    """What takes a step, and the losses so far. DPO asks the policy itself as its reference, which costs the same."""
    from plaudit.algorithms import DPO, SFT
    from plaudit.batch import Batch
    from plaudit.learn.learner import Learner
    from plaudit.learn.scorer import Scorer
    from plaudit.learn.settings import LearnSettings, OptimizerSettings
    from plaudit.types import Role, Row

    source = torch.Generator().manual_seed(0)
    table = torch.randint(extent.config["vocab_size"], (extent.rows, extent.length), generator=source).tolist()
    trained = (False, *(True,) * (extent.length - 1))
    algorithm = DPO() if method == "dpo" else SFT()
    batch = algorithm.weigh(Batch.of([Row(tokens=tuple(row), trainable=trained) for row in table]))
    losses: list[float] = []
    settings = LearnSettings(precision=extent.dtype, micro_tokens=micro_tokens)
    learner = Learner(
        model(extent),
        Role.POLICY,
        algorithm.losses()[Role.POLICY],
        optimizer=OptimizerSettings(learning_rate=1e-6, schedule="constant"),
        settings=settings,
        total_steps=100,
    )
    reference = Scorer(model(extent), Role.REFERENCE, token_budget=learner.passes.score)

    def step() -> None:
        whole = reference.annotate(batch) if algorithm.asks else batch
        losses.append(learner.step(whole, len(losses))["loss/policy"])

    return step, losses


def compiled(extent: Extent, best: Peak) -> list[Figure]:
    """A training step and a call of the engine without torch.compile. The other parts have it."""
    from gpu_decoding import natively

    tokens, slots, gpu = extent.micro[1], max(extent.slots), extent.device == "cuda"
    os.environ["PLAUDIT_TORCH_COMPILE"] = "off"
    try:
        taken, _ = training_step(extent, "sft", tokens)
        answered, _ = natively(extent, slots, graphs=gpu)
    finally:
        del os.environ["PLAUDIT_TORCH_COMPILE"]
    what = "with PLAUDIT_TORCH_COMPILE=off:"
    trained, drawn = extent.rows * extent.length / taken, slots * extent.answer / answered
    sft = f"{what} SFT, learn.micro_tokens={tokens}"
    decoding = f"{what} {slots} sequences, native" + ", CUDA graphs" * gpu
    return [{"what": sft, "value": trained, "unit": "tok/s"}, {"what": decoding, "value": drawn, "unit": "tok/s"}]


def offload(extent: Extent, best: Peak) -> list[Figure]:
    """What runtime.offload=[reference] costs each time that the reference is asked: its way to the device."""
    from plaudit.learn.sharding import Waiting

    one = copy.deepcopy(model(extent))
    size = parameter_bytes(one)
    place = Waiting(one, device=torch.device(extent.device))

    def come() -> None:
        with place.present():
            pass

    come()
    taken = min(seconds(come, extent.device) for _ in range(3))
    what = f"a waiting model of {size / 1e9:.2f} GB comes to the device"
    return [{"what": what, "value": taken, "unit": "s", "note": f"{size / taken / 1e9:.1f} GB/s"}]


def profile(extent: Extent, best: Peak) -> list[Figure]:
    """Operators' time on the device by kind, of a training step and of some steps of decoding (graphs hide theirs)."""
    from gpu_decoding import asked, engine

    from plaudit.rollout.engine import generate_all

    step, _ = learning(extent, min(extent.micro))
    slots = max(extent.slots)
    one, (prompts, plan) = engine(extent, slots, graphs=False), asked(extent, slots)
    acts: dict[str, Callable[[], object]] = {
        f"a step of training, learn.micro_tokens={min(extent.micro)}": step,
        f"a call of {slots} sequences": lambda: generate_all(one, prompts, plan),
    }
    return [figure for name, act in acts.items() for figure in traced(name, act, extent)]


def traced(name: str, act: Callable[[], object], extent: Extent) -> list[Figure]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    act()
    gpu = extent.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profiler(activities=activities) as found:
        total = seconds(act, extent.device)
    operators = {
        one.key: (one.self_device_time_total if gpu else one.self_cpu_time_total) / 1e6
        for one in found.key_averages()
        if one.device_type == DeviceType.CPU  # kernels are told again by themselves
    }
    return [
        {"what": f"{name}: {kind}", "value": taken, "unit": "s", "share": taken / total, "of": "traced time"}
        for kind, taken in grouped(operators, total).items()
    ]
