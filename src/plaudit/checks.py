"""What contradicts what in a run's settings: each `_about_...` tells a part's problems, with what to do.

`check` runs before anything is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from typing import Any

from plaudit.data.settings import absent
from plaudit.learn.settings import OptimizerSettings
from plaudit.plugins import known_here_alone
from plaudit.runtime.settings import DASHBOARD
from plaudit.settings import Settings, SettingsError

FIGURES = {"mean", "std", "failed", "greedy"}
"""Of the whole reward, as reward/NAME, where those of its parts stand too."""


def check(settings: Settings) -> None:
    """Raise SettingsError with every contradiction at once."""
    problems = [problem for finder in FINDERS for problem in finder(settings)] + settings.rollout.problems()
    if problems:
        raise SettingsError("the settings contradict themselves:\n" + "\n".join(f"  - {p}" for p in problems))


def _about_model(s: Settings) -> list[str]:
    problems = []
    if s.model.path is None and not s.model.config:
        problems.append("no model: set model.path, or model.config for a fresh one ({model_type: gpt2, ...})")
    if s.model.path is not None and s.model.config:
        problems.append(f"model.path={s.model.path} and model.config are both set: keep one")
    if s.model.path is None and s.model.tokenizer is None:
        problems.append("a fresh model needs model.tokenizer, the folder of one")
    unread = _unread(s.model.config) if s.model.path is None and s.model.config else []
    problems += unread
    lora = s.model.lora
    if lora.rank < 0:
        problems.append(f"model.lora.rank={lora.rank} must be 0 (off) or more")
    if not 0 < lora.alpha < math.inf:
        problems.append(f"model.lora.alpha={lora.alpha} must be above 0")
    if lora.rank > 0 and not unread:
        from plaudit.models.lora import check_lora

        try:
            check_lora(s.model)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if lora.rank > 0 and s.reference.ema:
        problems.append(
            f"reference.ema={s.reference.ema} moves a second model, but with model.lora.rank={lora.rank} the reference "
            "is the model itself with its adapters off: keep one"
        )
    return problems


def _unread(config: dict[str, Any]) -> list[str]:
    """What is wrong with the keys of a fresh model; those of a family that is not ours are left to transformers."""
    from plaudit.models.families import read_config
    from plaudit.models.keys import UnknownKeyError, UnsupportedError

    try:
        read_config(config)
    except ValueError as error:
        theirs = isinstance(error, UnsupportedError) and not isinstance(error, UnknownKeyError)
        return [] if theirs else [f"model.config: {error}"]
    return []


def _about_data(s: Settings) -> list[str]:
    try:
        s.data.check()
    except ValueError as error:
        return [str(error)]
    return [f"data: there is no {name}" for name in (*absent(s.data.train), *absent(s.data.validation))]


def _about_method(s: Settings) -> list[str]:
    objective = s.objective
    problems = []
    if objective.data == "prompts":
        if not s.rewards:
            problems.append(
                f"{s.method} needs a reward: set rewards: [{{kind: judge, path: ...}}] or a function or rule"
            )
        if not 0 < s.rollout.temperature < math.inf:
            problems.append(
                f"rollout.temperature={s.rollout.temperature} must be above 0, and finite: at 0 all answers are alike"
            )
        cut = s.rollout.top_p < 1 or s.rollout.top_k > 0
        if objective.uses_ratio and cut:
            problems.append(
                f"rollout.top_p={s.rollout.top_p} top_k={s.rollout.top_k} cut off part of the distribution that "
                f"{s.method}'s ratios are taken over, which biases them: set top_p=1 top_k=0"
            )
        if objective.uses_ratio and s.rollout.min_tokens and not objective.recompute_old:
            problems.append("rollout.min_tokens changes what is sampled: set algorithm.recompute_old=true with it")
        if s.rollout.min_tokens > s.rollout.max_tokens:
            problems.append(f"rollout.min_tokens={s.rollout.min_tokens} exceeds max_tokens={s.rollout.max_tokens}")
    elif s.rewards:
        problems.append(f"{s.method} learns from data and reads no rewards: remove `rewards`")
    from plaudit.types import Role

    if s.reference.ema and Role.REFERENCE not in objective.asks:
        problems.append(
            f"reference.ema={s.reference.ema} has no effect: {s.method} with these settings asks for no reference"
        )
    for key, path, role in (
        ("reference.path", s.reference.path, Role.REFERENCE),
        ("critic.path", s.critic.path, Role.CRITIC),
    ):
        if path is not None and role not in objective.asks:
            problems.append(f"{key}={path} has no effect: {s.method} with these settings asks for no {role.value}")
    if s.reference.once and (objective.data == "prompts" or Role.REFERENCE not in objective.asks):
        problems.append("reference.once is for offline methods with a reference (dpo)")
    if s.reference.once and s.reference.ema:
        problems.append(
            "reference.once computes the reference's columns before training, reference.ema moves it: keep one"
        )
    return problems + _about_offload(s, referred=Role.REFERENCE in objective.asks)


def _about_best(s: Settings) -> list[str]:
    """What evaluations are compared by, and whether there are any to compare."""
    best, every = s.evaluate.best, s.evaluate
    if best is None:
        patience = every.patience
        return [] if patience is None else [f"evaluate.patience={patience} counts evaluations: set evaluate.best"]
    problems = []
    if s.rollout.replay is not None:
        problems.append(f"evaluate.best={best}: a replay evaluates nothing")
    elif not (s.data.validation or s.data.validation_percent):
        problems.append(f"evaluate.best={best} needs rows: set data.validation or data.validation_percent")
    if every.steps is every.epochs is every.seconds is None:
        problems.append(f"evaluate.best={best} compares evaluations: set evaluate.steps, or epochs or seconds")
    if s.algorithm.data == "prompts":
        if not best.startswith("reward/"):
            problems.append(f"evaluate.best={best}: {s.method} is evaluated by rewards: reward/mean or reward/PART")
    elif type(s.algorithm).__module__.startswith("plaudit."):
        known = ("loss", "accuracy", "margin") if s.algorithm.data == "preferences" else ("loss",)
        if best not in known:
            problems.append(f"evaluate.best={best} is not what {s.method} is evaluated by: {', '.join(known)}")
    return problems


def _about_offload(s: Settings, *, referred: bool) -> list[str]:
    """Where reference.offload would change nothing, whatever the device."""
    if not s.reference.offload:
        return []
    if not referred:
        return [f"reference.offload=true has no effect: {s.method} with these settings asks for no reference"]
    rank = s.model.lora.rank
    if rank > 0 and s.reference.path is None:
        why = "the reference is the policy with its adapters off, and takes no memory of its own"
        return [f"reference.offload=true has no effect with model.lora.rank={rank}: {why}"]
    if s.runtime.cpu_offload:
        return ["reference.offload=true has no effect with runtime.cpu_offload=true, which offloads all models"]
    return []


def _about_rewards(s: Settings) -> list[str]:
    from plaudit.rewards.rules import function_reward

    problems, names = [], []
    for number, reward in enumerate(s.rewards):
        if reward.kind == "judge":
            names.append(reward.name or "judge")
            if not reward.path:
                problems.append(f"rewards.{number}: kind judge needs path, the folder of a reward model")
            if reward.workers and s.runtime.kind == "local" and s.samples:
                problems.append(f"rewards.{number}.workers={reward.workers} need processes: set runtime=ray")
            continue
        if reward.kind == "http":
            names.append(reward.name or "http")
            continue
        try:
            rule = function_reward(reward)
        except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
            problems.append(f"rewards.{number}: {error}")
            continue
        names.append(rule.name)
        importable = reward.kind == "function" and not reward.function.startswith("__main__")
        problems += [] if importable else _about_others(s, f"rewards.{number}: {rule.name}", rule.function)
    for name in sorted({*names} & FIGURES):
        problems.append(f"a reward called {name!r} would take the place of the figure reward/{name}: give it a name")
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"two rewards are called {name!r}: give each a name of its own" for name in twice]
    return problems or _about_best_part(s, names)


def _about_best_part(s: Settings, names: list[str]) -> list[str]:
    """A figure of a reward that there is not. Which parts of its own a reward has shows when it is asked."""
    whole, _, part = (best := s.evaluate.best or "").partition("/")
    own = any(part == name or part.startswith(f"{name}/") for name in names)
    if whole != "reward" or own or part in FIGURES or not s.samples:
        return []
    there = ", ".join(f"reward/{name}" for name in ["mean", *names])
    return [f"evaluate.best={best} is of no reward: there are {there}"]


def _about_numbers(s: Settings) -> list[str]:
    positive = {
        "train.batch_size": s.train.batch_size,
        "train.log_every": s.train.log_every,
        "log.samples_every": s.log.samples_every,
        "evaluate.limit": s.evaluate.limit,
        "rollout.prompts_per_step": s.rollout.prompts_per_step,
        "rollout.max_tokens": s.rollout.max_tokens,
        "rollout.slots": s.rollout.slots,
        "learn.micro_tokens": s.learn.micro_tokens,
        "learn.score_tokens": s.learn.score_tokens,
        "learn.max_skipped": s.learn.max_skipped,
        "optimizer.learning_rate": s.optimizer.learning_rate,
        "critic.optimizer.learning_rate": s.critic.optimizer.learning_rate,
    }
    problems = [f"{key}={value} must be above 0" for key, value in positive.items() if not 0 < value < math.inf]
    counts = {
        "seed": s.seed,
        "save.keep": s.save.keep,
        "log.sample_groups": s.log.sample_groups,
        "rollout.min_tokens": s.rollout.min_tokens,
        "rollout.top_k": s.rollout.top_k,
        "rollout.max_failed": s.rollout.max_failed,
        "rollout.max_redraw": s.rollout.max_redraw,
    }
    problems += [f"{key}={value} must be 0 or more" for key, value in counts.items() if not 0 <= value < math.inf]
    if s.seed >= 1 << 64:
        problems.append(f"seed={s.seed} must be below 2^64: torch's generators take 64 bits")
    often = {
        f"{name}.{unit}": getattr(every, unit)
        for name, every in (("save", s.save), ("evaluate", s.evaluate))
        for unit in ("steps", "epochs", "seconds")
    }
    whole = {"train.steps": s.train.steps, "threads": s.threads, "evaluate.patience": s.evaluate.patience}
    for key, value in {**whole, **often}.items():
        if value is not None and not value > 0:
            problems.append(f"{key}={value} must be above 0, or null")
    if s.train.steps is None and not 0 < s.train.epochs < math.inf:
        problems.append(f"train.epochs={s.train.epochs} must be above 0")
    if s.rollout.max_lag < 0:
        problems.append(f"rollout.max_lag={s.rollout.max_lag} must be 0 (synchronous) or more")
    if not 0 <= s.rollout.top_p <= 1 or s.rollout.top_p == 0:
        problems.append(f"rollout.top_p={s.rollout.top_p} must be in (0, 1]")
    for name, optimizer in (("optimizer", s.optimizer), ("critic.optimizer", s.critic.optimizer)):
        problems += [f"{name}.{problem}" for problem in _about_optimizer(optimizer)]
    if not 0 <= s.reference.ema <= 1:
        problems.append(f"reference.ema={s.reference.ema} must be between 0 and 1")
    if s.device not in ("auto", "cpu") and not s.device.startswith("cuda"):
        problems.append(f"device={s.device} is not one of auto, cpu, cuda")
    return problems


def _about_optimizer(s: OptimizerSettings) -> list[str]:
    problems = []
    if s.schedule not in ("constant", "linear", "cosine"):
        problems.append(f"schedule={s.schedule} is not one of constant, linear, cosine")
    if not 0 <= s.warmup < 1:
        problems.append(f"warmup={s.warmup} is a share of the run: 0 <= warmup < 1")
    betas = list(s.betas)
    if len(betas) != 2:
        problems.append(f"betas={betas} must be two numbers")
    elif not all(0 <= beta < 1 for beta in betas):
        problems.append(f"betas={betas} must both be in [0, 1)")
    if not 0 < s.eps < math.inf:
        problems.append(f"eps={s.eps} must be above 0: a weight without a gradient would be divided by it")
    for key in ("weight_decay", "min_ratio", "max_gradient_norm"):
        if not 0 <= getattr(s, key) < math.inf:
            problems.append(f"{key}={getattr(s, key)} must be 0 or more")
    return problems


def _about_others(s: Settings, what: str, thing: object) -> list[str]:
    """Ray's processes run the plugins, and not the script or notebook that starts the run."""
    if s.runtime.kind == "local" or not known_here_alone(thing, s.plugins):
        return []
    return [
        f"{what} is known to this process alone, not to those of runtime=ray: put it into a file that `plugins` names"
    ]


def _about_runtime(s: Settings) -> list[str]:
    problems = s.runtime.problems(replays=s.rollout.replay is not None)
    problems += _about_others(s, f"method={s.method}", type(s.algorithm))
    problems += s.runtime.about_backend(device=s.device, samples=s.samples, shared=s.rollout.share_devices)
    if s.runtime.cpu_offload and s.device == "cpu":
        problems.append("runtime.cpu_offload=true has no effect with device=cpu: set it to false, or device=cuda")
    if s.runtime.kind == "ray" and not _installed("ray"):
        problems.append("runtime=ray needs Ray, which is not installed: pip install 'plaudit[ray]'")
    lacking = [name for name in DASHBOARD if s.runtime.dashboard and not _installed(name)]
    if lacking:
        problems.append(f"runtime.dashboard=true needs {', '.join(lacking)}, not installed: pip install 'ray[default]'")
    if s.rollout.workers < 1:
        problems.append(f"rollout.workers={s.rollout.workers} must be 1 or more")
    if s.rollout.workers_max and s.rollout.workers_max < s.rollout.workers:
        problems.append(
            f"rollout.workers_max={s.rollout.workers_max} is below rollout.workers={s.rollout.workers}: raise it, or "
            "set 0 for no more than those"
        )
    if s.rollout.replay is not None and s.algorithm.data != "prompts":
        problems.append(f"rollout.replay={s.rollout.replay}: {s.method} learns from data and samples nothing")
    if s.rollout.share_devices and s.runtime.resources_per_rollout_worker:
        problems.append(
            f"runtime.resources_per_rollout_worker={s.runtime.resources_per_rollout_worker} has no effect with "
            "rollout.share_devices=true: rollout workers share what training ranks reserve"
        )
    if s.rollout.engine == "vllm" and s.samples and s.runtime.address is None and not _installed("vllm"):
        problems.append(
            "rollout.engine=vllm needs vLLM, which is not installed: pip install 'plaudit[vllm]' for NVIDIA GPUs, "
            "make vllm for a CPU (docs/vllm.md)"
        )
    if s.runtime.kind == "local" and s.rollout.workers_max and s.samples:
        problems.append(f"rollout.workers_max={s.rollout.workers_max} needs runtime=ray")
    if s.runtime.kind == "local" and s.rollout.workers > 1 and s.samples:
        problems.append(f"rollout.workers={s.rollout.workers} needs processes of their own: set runtime=ray")
    return problems


def _installed(library: str) -> bool:
    """Found, not imported, but for the packages that it lies in."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(library) is not None
    return False


FINDERS = (_about_model, _about_data, _about_method, _about_best, _about_rewards, _about_numbers, _about_runtime)
