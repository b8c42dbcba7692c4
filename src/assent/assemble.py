"""From settings to a run: the only file that names concrete classes and joins them.

settings -> tokenizer, data -> models -> learners, engine, rewards -> source, hooks -> train -> Run
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from assent import records
from assent.algorithms.base import Algorithm, Objective
from assent.batch import Batch
from assent.data.load import Dataset, load_demonstrations, load_preferences, load_prompts
from assent.evaluate.judge import Judge
from assent.learn.learner import Learner
from assent.learn.scorer import BaseScorer, Scorer
from assent.loop.cast import Actor, Cast
from assent.loop.checkpoint import Store, Writer
from assent.loop.hooks import (
    Due,
    Evaluate,
    RecordMetrics,
    RecordSamples,
    SaveCheckpoint,
    Track,
    restore,
    validation_loss,
    validation_rewards,
)
from assent.loop.offline import OfflineSource, with_reference
from assent.loop.online import OnlineSource
from assent.loop.progress import BatchSource, Hook, Moment, Progress
from assent.loop.train import train
from assent.models.base import LanguageModel
from assent.models.config import HeadKind
from assent.models.load import fresh_model, load_model, load_tokenizer, local_folder, save_model
from assent.models.lora import FOLDER, add_lora, lora_of, restore_lora, save_lora
from assent.models.tokenizer import check_vocabulary
from assent.monitor.console import Reporter, Tracker, step_line
from assent.monitor.health import Health
from assent.monitor.sinks import JsonLines
from assent.monitor.trackers import open_trackers
from assent.recipes import completed
from assent.records import Run, find_resume, open_folder
from assent.rewards.base import Reward
from assent.rewards.rules import function_reward
from assent.rewards.settings import RewardSettings
from assent.rewards.weighted import WeightedReward
from assent.rollout.engine import Engine
from assent.rollout.rollouter import Rollouter
from assent.runtime.coroutines import finished
from assent.runtime.local import LocalGang
from assent.settings import Settings, SettingsError, check, resolved
from assent.stopping import Stopped, stop_signals
from assent.types import Role, Sampling, Stats


def run(settings: Settings, *, reporter: Reporter | None = None, hooks: Iterable[Hook] = ()) -> Run:
    """Do a run and return its records; `hooks` see every step, and figures that they return are recorded with it.
    Raises SettingsError before anything starts; Stopped after SIGTERM or Ctrl-C."""
    settings = completed(settings)
    check(settings)
    reporter = reporter or Reporter(quiet=settings.log.quiet)
    folder = open_folder(settings)
    store = Store(folder / records.CHECKPOINTS)
    store.sweep()
    resume, problems = find_resume(settings, store)
    reporter.log_to(folder / records.LOG)
    for problem in problems:
        reporter.say(f"warning: {problem}; an older checkpoint is used")
    (folder / records.SETTINGS).write_text(resolved(settings))
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    torch.manual_seed(settings.seed)
    reporter.say(f"{settings.method}: logs and samples in {folder}, checkpoints in {store.folder}")
    job = Job(settings, folder, store, resume, reporter)
    with stop_signals() as stop:
        finished(job.train(stop, hooks))
    reporter.say(f"done: {job.described_model()}")
    return Run(folder)


@dataclass
class Models:
    """Every model of a run, by what it is for."""

    policy: LanguageModel | None
    trained: dict[Role, LanguageModel]
    reference: LanguageModel | None


class Job:
    """Builds the parts of one run, in the order in which the methods stand, and trains."""

    def __init__(self, settings: Settings, folder: Path, store: Store, resume: str | None, reporter: Reporter):
        self.settings, self.folder, self.store, self.resume, self.reporter = settings, folder, store, resume, reporter
        self.objective: Objective = settings.algorithm
        cuda = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
        self.device = ("cuda" if settings.device == "auto" else settings.device) if cuda else "cpu"
        self.tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
        self.data = self.load_data()
        self.models = self.load_models()
        self.total_steps = self.count_steps()

    # --- data and models

    def load_data(self) -> Dataset[Any]:
        """The data set; its report is printed and saved before anything costly starts."""
        loaders: Mapping[str, Callable[..., Dataset[Any]]] = {
            "demonstrations": load_demonstrations,
            "preferences": load_preferences,
            "prompts": load_prompts,
        }
        data = loaders[self.objective.data](self.settings.data, self.tokenizer, self.settings.seed)
        self.reporter.say(data.report.table())
        (self.folder / records.DATA).write_text(json.dumps(data.report.json(), indent=1))
        return data

    def load_models(self) -> Models:
        """The trained models (from the checkpoint when resuming) and the reference."""
        roles = list(self.objective.losses())
        trained: dict[Role, LanguageModel] = {}
        for role in roles:
            head: HeadKind = "scalar" if role in (Role.JUDGE, Role.CRITIC) else "lm"
            trained[role] = self.trained(role, head=head)
            check_vocabulary(self.tokenizer, trained[role])
        reference = None
        if Role.REFERENCE in self.objective.asks:
            saved = self.store.folder / Role.REFERENCE / (self.resume or "")
            if self.resume is not None and self.settings.reference.ema and saved.is_dir():
                reference = self.load(str(saved))
            elif self.settings.reference.path is not None:
                reference = self.load(self.settings.reference.path)
            elif lora_of(trained[Role.POLICY]) is not None:
                reference = trained[Role.POLICY]  # asked with its adapters off
            else:
                reference = self.initial(Role.POLICY)
            check_vocabulary(self.tokenizer, reference)
            if reference is not trained.get(Role.POLICY):
                reference.requires_grad_(False)
        self.check_lengths(trained)
        return Models(trained.get(Role.POLICY), trained, reference)

    def trained(self, role: Role, *, head: HeadKind) -> LanguageModel:
        """A role's model as training goes on from here. A critic never has adapters: its task is new to the model."""
        saved = None if self.resume is None else self.store.model(role, self.resume)
        lora = self.settings.model.lora
        if lora.rank > 0 and role is not Role.CRITIC:
            adapted = add_lora(self.initial(role, head=head), lora, seed=self.settings.seed)
            return adapted if saved is None else restore_lora(adapted, saved)
        return self.initial(role, head=head) if saved is None else self.load(str(saved), head=head)

    def initial(self, role: Role, *, head: HeadKind = "lm") -> LanguageModel:
        """A role's model as the run starts."""
        settings = self.settings
        path = settings.model.path
        if role is Role.CRITIC:
            judges = [r.path for r in settings.rewards if r.kind == "judge" and r.path]
            path = settings.critic.path or next(iter(judges), None) or path
        if path is not None:
            return self.load(path, head=head)
        size = len(self.tokenizer)
        return fresh_model(
            settings.model.config,
            head=head,
            seed=settings.seed,
            vocab_size=size,
            device=self.device,
        )

    def load(self, path: str, *, head: HeadKind = "lm") -> LanguageModel:
        return load_model(path, head=head, device=self.device, seed=self.settings.seed)

    def check_lengths(self, trained: Mapping[Role, LanguageModel]) -> None:
        """Refuse rows that would not fit a model's context."""
        room = min(model.max_positions for model in trained.values())
        if self.objective.data == "prompts":
            longest = max(len(prompt.tokens) for prompt in [*self.data.items, *self.data.validation])
            needed, what = longest + self.settings.rollout.max_tokens, "the longest prompt and rollout.max_tokens"
        else:
            rows = [row for item in [*self.data.items, *self.data.validation] for row in item]
            needed, what = max(len(row.tokens) for row in rows), "the longest row"
        if needed > room:
            raise SettingsError(
                f"{what} take {needed} tokens together, the model has room for {room}: lower data.max_tokens, "
                "data.max_prompt_tokens or rollout.max_tokens"
            )

    def described_model(self) -> str:
        role = next(iter(self.models.trained))
        return f"{role} in {self.store.model(role)}"

    # --- learners, rollout, rewards

    def cast(self) -> Cast:
        settings, objective = self.settings, self.objective
        temperature = settings.rollout.temperature if objective.data == "prompts" else 1.0
        trained = {}
        for role, loss in objective.losses().items():
            learner = Learner(
                self.models.trained[role],
                role,
                loss,
                optimizer=settings.critic.optimizer if role is Role.CRITIC else settings.optimizer,
                settings=settings.learn,
                total_steps=self.total_steps,
                temperature=temperature,
                halt=objective.halt if role is Role.POLICY else lambda stats: None,
            )
            trained[role] = Actor(LocalGang(learner))
        reference = None
        if self.models.reference is not None:
            budget = settings.learn.score_tokens
            kind = BaseScorer if self.models.reference is self.models.policy else Scorer
            scorer = kind(self.models.reference, Role.REFERENCE, temperature=temperature, token_budget=budget)
            reference = Actor(LocalGang(scorer))
        return Cast(objective, trained, reference, settings.reference.ema)

    def engine(self) -> Engine:
        """The sampler: on the policy's own parameters, or on a copy where samples may lag behind it."""
        from assent.rollout.build import build_engine

        policy = self.models.policy
        assert policy is not None
        lag = self.settings.rollout.max_lag
        return build_engine(policy, self.tokenizer, slots=self.settings.rollout.slots, copy=lag > 0)

    def reward(self, engine: Engine) -> Reward:
        """The run's reward: the weighted sum of the listed ones (of one, itself, as a part under its name)."""
        parts: list[tuple[Reward, float, str]] = []
        for settings in self.settings.rewards:
            if settings.kind == "judge":
                parts.append((self.judge(settings, engine), settings.weight, settings.name or "judge"))
            else:
                reward = function_reward(settings)
                parts.append((reward, settings.weight, reward.name))
        return WeightedReward(parts)

    def judge(self, settings: RewardSettings, engine: Engine) -> Reward:
        judge = Judge.load(settings.path, device=self.device, token_budget=self.settings.learn.score_tokens)
        return judge.reward(self.tokenizer, busy=lambda: engine.busy)

    def sampling(self) -> Sampling:
        rollout = self.settings.rollout
        names = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens")
        return Sampling(**{name: getattr(rollout, name) for name in names}, stop=tuple(rollout.stop))

    def source(self) -> tuple[BatchSource, Engine | None, Rollouter | None]:
        settings, cursor = self.settings, self.data.cursor(self.settings.seed)
        if not isinstance(self.objective, Algorithm):
            batch_size = settings.train.batch_size
            return (
                OfflineSource(self.data.items, cursor, batch_size=batch_size, unit=self.objective.unit),
                None,
                None,
            )
        engine = self.engine()
        plan = self.objective.plan(self.sampling())
        rollouter = Rollouter(engine, self.reward(engine), settings.shaping, plan, seed=settings.seed)
        source = OnlineSource(
            self.data.items,
            cursor,
            rollouter,
            self.objective,
            prompts_per_step=settings.rollout.prompts_per_step,
            max_lag=settings.rollout.max_lag,
            max_redraw=settings.rollout.max_redraw,
            max_failed=settings.rollout.max_failed,
        )
        return source, engine, rollouter

    def count_steps(self) -> int:
        train = self.settings.train
        if train.steps is not None:
            return train.steps
        items = self.data.cursor(self.settings.seed).length
        if self.objective.data == "prompts":
            return max(1, int(train.epochs * items / self.settings.rollout.prompts_per_step))
        return max(1, round(train.epochs * -(-items // train.batch_size)))

    # --- the run

    async def train(self, stop: list[int], further: Iterable[Hook] = ()) -> Progress:
        settings = self.settings
        cast = self.cast()
        source, engine, rollouter = self.source()
        memory: dict[str, float] = {}
        progress = Progress()
        if self.resume is not None:
            progress = await restore(self.store, self.resume, cast, source, memory)
            self.reporter.say(f"resumed {self.resume}: step {progress.step} of {self.total_steps}")
            if engine is not None:
                await self.publish(engine, progress.step)
        if settings.reference.once and isinstance(source, OfflineSource):
            source.items = await with_reference(source.items, cast, unit=self.objective.unit)
        with self.reporter.track(settings.method, self.total_steps, done=progress.step) as tracker:
            hooks = self.hooks(cast, source, rollouter, memory, tracker, progress, further=further)
            try:
                progress = await train(
                    source,
                    cast,
                    partial(self.publish, engine),
                    hooks,
                    until=lambda p: p.step >= self.total_steps,
                    stop=lambda: bool(stop),
                    progress=progress,
                    memory=memory,
                    seed=settings.seed,
                    max_skipped=settings.learn.max_skipped,
                )
            finally:
                await source.close()
                if engine is not None:
                    engine.close()
        if stop and progress.step < self.total_steps:
            raise Stopped(stop[0], progress.step)
        return progress

    async def publish(self, engine: Engine | None, version: int) -> None:
        """Tell the sampler of new weights: nothing moves where it shares them."""
        if engine is None:
            return
        assert self.models.policy is not None
        lag = self.settings.rollout.max_lag
        engine.load(dict(self.models.policy.hf_tensors()) if lag else None, version)

    def hooks(
        self,
        cast: Cast,
        source: BatchSource,
        rollouter: Rollouter | None,
        memory: dict[str, float],
        tracker: Tracker,
        progress: Progress,
        *,
        further: Iterable[Hook],
    ) -> list[Hook]:
        settings = self.settings
        metrics = JsonLines(self.folder / records.METRICS)
        samples = JsonLines(self.folder / records.SAMPLES)
        metrics.truncate_after(progress.step)
        samples.truncate_after(progress.step)
        hooks: list[Hook] = []
        if self.data.validation:
            due = Due(settings.evaluate, at_end=True)
            due.start(progress)
            hooks.append(Evaluate(due, self.validation(cast, rollouter)))
        hooks.extend(further)
        hooks.append(RecordMetrics(metrics))
        if rollouter is not None:
            hooks.append(RecordSamples(samples, every=settings.log.samples_every, groups=settings.log.sample_groups))
        hooks.append(Track(open_trackers(settings.log, self.folder, resumed_after=progress.step or None)))
        hooks.append(partial(self.speak, tracker, Health()))
        due = Due(settings.save, at_end=True)
        due.start(progress)
        writers: dict[str, Writer] = {role: self.writer(model) for role, model in self.models.trained.items()}
        if settings.reference.ema and self.models.reference is not None:
            writers[Role.REFERENCE] = self.writer(self.models.reference)
        hooks.append(SaveCheckpoint(self.store, due, cast, source, memory, writers=writers, keep=settings.save.keep))
        return hooks

    def writer(self, model: LanguageModel) -> Writer:
        """Writes the whole model, adapters merged, and beside it the adapters alone."""

        def write(folder: Path) -> None:
            save_model(model, folder, tokenizer=self.tokenizer)
            if lora_of(model) is not None:
                path = self.settings.model.path
                base = str(local_folder(path).resolve()) if path is not None and Path(path).is_dir() else path
                save_lora(model, folder / FOLDER, base=base)

        return write

    def validation(self, cast: Cast, rollouter: Rollouter | None) -> Callable[[], Awaitable[Stats]]:
        """Figures on the validation items: the loss for offline methods, rewards of fresh answers for online ones."""
        items = self.data.validation[: self.settings.evaluate.limit]
        if rollouter is None:
            batch = Batch.of([row for item in items for row in item], unit=self.objective.unit)
            return partial(validation_loss, cast, batch)
        plan = (self.sampling(),)
        held_out = Rollouter(rollouter.engine, rollouter.reward, rollouter.shaping, plan, seed=rollouter.seed + 1)
        return partial(validation_rewards, held_out, items)

    async def speak(self, tracker: Tracker, health: Health, moment: Moment) -> Stats:
        """The terminal's line of a step, and whatever looks unhealthy."""
        tracker.advance()
        step, every = moment.progress.step, self.settings.train.log_every
        ends, evaluated = moment.last or moment.stopping, any(n.startswith("validation/") for n in moment.stats)
        if step % every == 0 or step == 1 or ends or evaluated:
            self.reporter.say(step_line(moment.stats, tracker))
        for warning in health.check({"step": float(step)} | moment.stats):
            self.reporter.say(f"health: {warning}")
        return {}
