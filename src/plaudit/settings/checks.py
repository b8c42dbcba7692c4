"""Contradictions in a run's settings: each `_about_...` yields the problems of a part, with what to do.

`check` runs before anything is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plaudit.data.settings import DataSettings, absent, unfed
from plaudit.models.settings import ModelSettings
from plaudit.runtime.settings import GENERATE, NO_RAY, ROLLOUT_TENSOR, SERVER, TRAIN
from plaudit.settings.tree import Settings
from plaudit.support import fields
from plaudit.support.paths import is_here
from plaudit.support.plugins import known_here_alone

FIGURES = {"mean", "std", "failed", "not_applicable", "greedy"}
"""Figures of the whole reward, reward/NAME; a part of a reward may not take these names."""


def check(settings: Settings) -> None:
    """Raise SettingsError with all invalid values and contradictions."""
    fields.refuse(wrong(settings))


def wrong(settings: Settings) -> list[str]:
    """Return all invalid values and contradictions."""
    return fields.wrong(settings, *FINDERS)


def _about_model(s: Settings) -> Iterator[str]:
    if s.model.path is None and not s.model.config:
        yield "no model: set model.path, or model.config for a fresh one ({model_type: gpt2, ...})"
    if s.model.path is not None and s.model.config:
        yield f"model.path={s.model.path} and model.config are both set: keep one"
    if s.model.path is None and s.model.tokenizer is None:
        yield "a fresh model needs model.tokenizer, the folder of a tokenizer"
    unread = _unread(s.model.config) if s.model.path is None and s.model.config else []
    yield from unread
    yield from _about_lora("model.lora", s.model, unread=bool(unread))
    lora = replace(s.model.lora, rank=s.critic.lora_rank)
    critic = ModelSettings(path=s.critic.path or s.model.path, config=s.model.config, lora=lora)
    yield from _about_lora("critic.lora_rank", critic, unread=bool(unread))
    if s.model.lora.rank > 0 and s.reference.ema:
        yield (
            f"reference.ema={s.reference.ema} moves a second model, but with model.lora.rank={s.model.lora.rank} the "
            "reference is the model itself with its adapters off: keep one"
        )


def _about_lora(setting: str, model: ModelSettings, *, unread: bool) -> Iterator[str]:
    """Yield problems of the adapters that a setting asks for. `unread`: the model's keys could not be read."""
    if model.lora.rank > 0 and not unread:
        from plaudit.models.lora import check_lora

        try:
            check_lora(model)
        except (ValueError, OSError) as error:
            yield f"{setting}: {error}"


def _unread(config: dict[str, Any]) -> list[str]:
    """Return problems of a fresh model's keys; transformers checks those of families that are not ours."""
    from plaudit.models.families import read_config
    from plaudit.models.keys import UnknownKeyError, UnsupportedError

    try:
        read_config(config)
    except ValueError as error:
        theirs = isinstance(error, UnsupportedError) and not isinstance(error, UnknownKeyError)
        return [] if theirs else [f"model.config: {error}"]
    return []


def _about_data(s: Settings) -> Iterator[str]:
    yield from unfed(s.data)
    yield from (f"data: there is no {name}" for name in (*absent(s.data.train), *absent(s.data.validation)))


def _about_method(s: Settings) -> Iterator[str]:
    from plaudit.types import Role

    objective = s.objective
    if objective.online:
        if not s.rewards and objective.uses_rewards:
            yield f"{s.method} needs a reward: set rewards: [{{kind: judge, path: ...}}] or a function or rule"
        if s.rollout.temperature == 0:
            yield "rollout.temperature=0.0 must be above 0: at 0 all answers are alike"
        cut = s.rollout.top_p < 1 or s.rollout.top_k > 0
        if objective.uses_ratio and cut:
            yield (
                f"rollout.top_p={s.rollout.top_p} top_k={s.rollout.top_k} cut off part of the distribution that "
                f"{s.method}'s ratios are taken over, which biases them: set top_p=1 top_k=0"
            )
        if objective.uses_ratio and s.rollout.min_tokens and not objective.recompute_old:
            yield "rollout.min_tokens changes what is sampled: set algorithm.recompute_old=true with it"
        if any(one.pairwise for one in s.rewards) and len(s.algorithm.plan(s.rollout.draw())) < 2:
            yield f"rewards: pairwise compares the answers to a prompt, and {s.method} draws one: set pairwise=false"
        if any(one.kind == "environment" for one in s.rewards) and not s.environment.function:
            yield "rewards: kind environment is what a class gives, and there is none: set environment.function"
        if s.environment.on:
            if s.data.as_chat is False:
                yield "data.as_chat=false: the episodes of an environment are chats. Set data.as_chat=true"
            if reads := {one.kind for one in s.rewards} & {"judge", "http", "llm"}:
                yield f"rewards: kind {min(reads)} reads no episodes: set kind environment, function or a rule"
    elif s.environment.on:
        yield f"environment: {s.method} learns from data and plays no episodes: remove it"
    elif s.rewards:
        yield f"{s.method} learns from data and reads no rewards: remove `rewards`"
    if s.shaping.unfinished == "bootstrap" and objective.online and Role.CRITIC not in objective.asks:
        yield (
            f"shaping.unfinished=bootstrap takes the critic's value for the rest of an answer, and {s.method} has no "
            "critic: set score, penalty or mask"
        )
    if s.shaping.unfinished == "mask_loss" and objective.online and not objective.has_baseline:
        yield (
            f"shaping.unfinished=mask_loss is for baselines: {s.method} with these settings compares no answer with "
            "others to its prompt. Set mask"
        )
    unasked = f"has no effect: {s.method} with these settings asks for no"
    if s.reference.ema and Role.REFERENCE not in objective.asks:
        yield f"reference.ema={s.reference.ema} {unasked} reference"
    for path, role in ((s.reference.path, Role.REFERENCE), (s.critic.path, Role.CRITIC)):
        if path is not None and role not in objective.asks:
            yield f"{role.value}.path={path} {unasked} {role.value}"
    if objective.has_teacher and s.reference.path is None:
        yield f"{s.method} needs a teacher: set reference.path, to the folder or run of a model of the same tokenizer"
    if objective.reads_divergence:
        yield from _about_teacher(s)
    if objective.teachers and s.reference.ema:
        yield f"reference.ema={s.reference.ema} moves one reference: leave algorithm.teachers empty"
    with contextlib.suppress(ValueError):  # data.train is wrong itself: its own check says so
        for source in objective.teachers.keys() - {*s.data.fed}:
            yield f"algorithm.teachers has a teacher of {source!r}, which is no source of data.train={list(s.data.fed)}"
    if s.data.stream and s.train.steps is None:
        yield f"data.stream={s.data.stream} has no end: set train.steps"
    yield from _about_offload(s, referred=Role.REFERENCE in objective.asks)


def _about_teacher(s: Settings) -> Iterator[str]:
    """Yield settings by which the teacher, or the policy, is not whole in the policy's processes."""
    runtime = s.runtime
    cannot = {
        f"runtime.mesh={runtime.mesh}": runtime.width * runtime.pipeline > 1,
        f"runtime.strategy={runtime.strategy}": runtime.sharded,
        "runtime.placement.reference": not runtime.trains("reference"),
        f"runtime.offload={list(runtime.offload)}": runtime.offloaded or "reference" in runtime.offload,
    }
    prefix, why = (
        "algorithm.whole_vocabulary=true cannot be used with",
        "both models must be whole on each training rank",
    )
    yield from (f"{prefix} {what}: {why}. Leave one out" for what, wrong in cannot.items() if wrong)


def _about_best(s: Settings) -> Iterator[str]:
    """Yield problems of the figure that compares evaluations, and of a run without evaluations."""
    best, patience = s.evaluate.best, s.evaluate.patience
    if best is None:
        if patience is not None:
            yield f"evaluate.patience={patience} counts evaluations: set evaluate.best"
        return
    if s.rollout.replay is not None:
        yield f"evaluate.best={best}: a replay evaluates nothing"
    elif not s.data.validation:
        yield f"evaluate.best={best} needs rows: set data.validation, to a source or to 5%"
    if s.evaluate.every is None:
        yield f"evaluate.best={best} compares evaluations: set evaluate.every"
    if s.algorithm.online:
        if not s.rewards:
            yield f"evaluate.best={best}: evaluations of answers need rewards, and there are none"
        if not best.startswith("reward/"):
            yield f"evaluate.best={best}: {s.method} is evaluated by rewards: reward/mean or reward/PART"
    elif type(s.algorithm).__module__.startswith("plaudit."):
        known = s.algorithm.evaluated
        if best not in known:
            yield f"evaluate.best={best} is not what {s.method} is evaluated by: {', '.join(known)}"


def _about_offload(s: Settings, *, referred: bool) -> Iterator[str]:
    """Yield a problem if runtime.offload lists `reference` without effect on any device."""
    if "reference" not in s.runtime.offload:
        return
    prefix, rank = "runtime.offload: reference has no effect", s.model.lora.rank
    if not referred:
        yield f"{prefix}: {s.method} with these settings asks for no reference"
    elif rank > 0 and s.reference.path is None:
        why = "the reference is the policy with its adapters off, and takes no memory of its own"
        yield f"{prefix} with model.lora.rank={rank}: {why}"
    elif s.runtime.offloaded:
        yield f"{prefix} beside weights, which offloads all models"


def _about_rewards(s: Settings) -> list[str]:
    from plaudit.rewards.rubric import LlmReward
    from plaudit.rewards.rules import FunctionReward, function_reward

    problems, names, functions = list[str](), [], []
    apart = {"environment": s.environment.workers, **{f"rewards.{n}": one.workers for n, one in enumerate(s.rewards)}}
    if s.runtime.kind == "local" and s.samples:
        problems += [f"{key}.workers={count} need processes: set runtime=ray" for key, count in apart.items() if count]
    for number, reward in enumerate(s.rewards):
        if reward.kind == "judge":
            names.append(reward.name or "judge")
            if not reward.path:
                problems.append(f"rewards.{number}: kind judge needs path, the folder of a reward model")
            continue
        if reward.kind == "http":
            names.append(reward.name or "http")
            continue
        if reward.kind == "function" and not reward.function:
            problems.append(f'rewards.{number}: kind function needs function, "file.py:name" or "package.module:name"')
            continue
        try:
            rule = function_reward(reward)
        except (ValueError, TypeError, AttributeError, ImportError, OSError, RuntimeError) as error:
            problems.append(f"rewards.{number}: {error}")
            continue
        names += [rule.name, *(rule.parts if isinstance(rule, LlmReward) else ())]
        if not isinstance(rule, FunctionReward):
            continue
        functions.append(rule.name)
        importable = reward.kind == "function" and not reward.function.startswith("__main__")
        problems += () if importable else _about_others(s, f"rewards.{number}: {rule.name}", rule.function)
    for name in sorted({*names} & FIGURES):
        problems.append(f"a reward called {name!r} would take the place of the figure reward/{name}: give it a name")
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"two rewards are called {name!r}: give them different names" for name in twice]
    return problems or list(_about_parts(s, names, functions))


def _about_parts(s: Settings, names: list[str], functions: list[str]) -> Iterator[str]:
    """Yield settings that name a part that no reward has. A function's own parts are known only once it is called."""

    def absent(part: str) -> bool:
        return s.samples and part not in names and not part.startswith(tuple(f"{name}/" for name in functions))

    whole, _, part = (best := s.evaluate.best or "").partition("/")
    if whole == "reward" and part not in FIGURES and absent(part):
        there = ", ".join(f"reward/{name}" for name in ["mean", *names])
        yield f"evaluate.best={best} is of no reward: there are {there}"
    own = {leaf.key: leaf.value for leaf in fields.leaves(s.algorithm)}
    part = str(own.get("dynamic_sampling_part") or "")
    if part and absent(part):
        yield (
            f"algorithm.dynamic_sampling_part={part} is of no reward: there are {', '.join(names)}, and a function's "
            "own parts as NAME/PART"
        )


def _about_others(s: Settings, what: str, thing: object) -> Iterator[str]:
    """Yield a problem if `thing` is defined in a script or notebook: Ray's processes load only plugins."""
    if s.runtime.kind != "local" and known_here_alone(thing, s.plugins):
        where = "is known to this process alone, not to those of runtime=ray"
        yield f"{what} {where}: put it into a file that `plugins` names"


def _about_runtime(s: Settings) -> Iterator[str]:
    yield from (f"runtime.{problem}" for problem in s.runtime.unread(replays=s.rollout.replay is not None))
    yield from _about_others(s, f"method={s.method}", type(s.algorithm))
    yield from s.runtime.about_backend(device=s.device, samples=s.samples, shared=s.runtime.shares)
    if s.runtime.offloaded and s.device == "cpu":
        yield "runtime.offload: weights has no effect with device=cpu: leave it out, or take device=cuda"
    if s.runtime.kind == "ray" and not _installed("ray"):
        yield NO_RAY
    if s.runtime.strategy == SERVER and s.reference.ema:
        yield f"reference.ema={s.reference.ema}: workers that come later have no moving reference: set 0"
    if s.runtime.strategy == SERVER and s.runtime.placement:
        yield "runtime.placement: workers of runtime.strategy=server do all that is trained: leave it out"
    if s.rollout.replay is not None and not s.algorithm.online:
        yield f"rollout.replay={s.rollout.replay}: {s.method} learns from data and samples nothing"
    if s.rollout.engine == "vllm" and s.samples and s.runtime.address is None and not _installed("vllm"):
        yield (
            "rollout.engine=vllm needs vLLM, which is not installed: pip install -e '.[vllm]' in Plaudit's folder for "
            "NVIDIA GPUs, make vllm for a CPU (docs/vllm.md)"
        )
    if s.runtime.kind == "local" and s.rollout.workers not in (0, 1) and s.samples:
        yield f"rollout.workers={s.rollout.workers} needs separate processes: set runtime=ray"


def _about_mesh(s: Settings) -> Iterator[str]:
    """Yield problems of models that do not fit their mesh, if their configurations are local; ranks find the rest."""
    own = s.runtime.apart
    wide = [one for one in (s.runtime, *own.values()) if one.width * one.pipeline > 1]
    judges = [(n, one) for n, one in enumerate(s.rewards) if one.tensor > 1 and one.path]
    if not (wide or s.runtime.rollout_width > 1 or judges) or list(s.runtime.contradictions()):
        return
    from plaudit.models.described import check_cut, folder_config
    from plaudit.models.folders import local_folder
    from plaudit.models.mesh import Mesh, check_mesh, check_tensor

    native = s.rollout.engine == "native" and s.algorithm.online  # vLLM has its own rules
    of_rollout = f"runtime.mesh={s.runtime.mesh} for rollout workers"
    rollout = (of_rollout, s.model.path, Mesh(tensor=s.runtime.rollout_width if native else 1))
    if s.runtime.rollout_width > 1 and not s.algorithm.online:
        yield (
            f"runtime.mesh.{ROLLOUT_TENSOR}={s.runtime.rollout_width} has no effect: {s.method} learns from data and "
            "samples nothing. Leave it out"
        )
    asked = [("the model", s.model.path, s.runtime)]
    for call, path in (("critic", s.critic.path), ("reference", s.reference.path)):
        ranks = own.get(s.runtime.host(call), s.runtime)
        if path is not None or ranks is not s.runtime:
            asked.append((f"the {call}", path or s.model.path, ranks))
    cut = [(f"runtime.mesh={one.mesh} for {key}", path, Mesh(**one.axes)) for key, path, one in asked]
    cut += [(f"rewards.{n}.tensor={one.tensor}", one.path, Mesh(tensor=one.tensor)) for n, one in judges]
    for key, path, mesh in (*cut, rollout):
        here = path is None or (is_here(path) and (local_folder(path) / "config.json").exists())
        if mesh.context * mesh.tensor * mesh.pipeline > 1 and here:
            check = check_tensor if key == rollout[0] else check_mesh
            try:
                check_cut(s.model.config if path is None else folder_config(local_folder(path)), mesh, check)
            except (ValueError, OSError) as error:
                yield f"{key}: {error}"


def _about_placement(s: Settings) -> Iterator[str]:
    """Yield problems of settings that runtime.placement cannot be used with."""
    calls = s.runtime.calls
    asks = {role.value for role in s.objective.asks} | ({GENERATE} if s.algorithm.online else set())
    for call in sorted(calls.keys() - asks):
        yield f"runtime.placement.{call} has no effect: {s.method} with these settings has no {call}"
    where = calls.get(GENERATE)
    if where is None or list(s.rollout.contradictions()):
        return
    key, rollout = f"runtime.placement.{GENERATE}={{{where}}}", s.rollout
    least, most = rollout.workers_range
    tensor = s.runtime.rollout_width
    cannot = {
        f"rollout.max_lag={rollout.max_lag}: who learns does not sample meanwhile": rollout.max_lag > 0,
        f"rollout.workers={[least, most]}: none join where training ranks are": least < most,
        f"runtime.mesh.{ROLLOUT_TENSOR}={tensor}: each process there has a whole model": tensor > 1,
        "runtime.resources_per_rollout_worker: training ranks have reserved all": bool(
            s.runtime.resources_per_rollout_worker
        ),
    }
    if where.inside:
        cannot |= {
            f"rollout.engine={rollout.engine}: it has processes of its own. Take {{shares: {TRAIN}}}": (
                rollout.engine != "native"
            ),
            f"rollout.workers={least}: each training rank is one": least != 1,
        }
    yield from (f"{key} cannot be used with {what}. Leave one out" for what, wrong in cannot.items() if wrong)


def _installed(library: str) -> bool:
    """True if the library is installed; it is not imported."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(library) is not None
    return False


FINDERS = (
    _about_model,
    _about_data,
    _about_method,
    _about_best,
    _about_rewards,
    _about_runtime,
    _about_placement,
    _about_mesh,
)


def left_over(recipe: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return a warning if an override names the train rows, but validation rows are the recipe's; else []."""
    keys = {text.partition("=")[0] for text in overrides}
    data = recipe.get("data")
    if "data.train" not in keys or "data.validation" in keys or not isinstance(data, Mapping) or not data.get("train"):
        return []
    apart = data.get("validation")
    if not (isinstance(apart, str | list) and DataSettings(validation=apart).apart):
        return []
    return [f"data.train is given, and data.validation={apart} is still the recipe's: set data.validation=10% or FILE"]
