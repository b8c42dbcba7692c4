"""Estimate a step of a placed run: seconds by call and in all, and bytes by process. Formulas only, no torch.

    Work, Profile, Placement -> seconds by call -> the step -> Estimate

`docs/plan.md` has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plaudit.models.config import DecoderConfig
from plaudit.models.layout import Layout
from plaudit.models.mesh import Mesh
from plaudit.preflight import stages
from plaudit.preflight.held import Model, judges_of, models_of
from plaudit.preflight.needs import by_token
from plaudit.preflight.placement import Placement
from plaudit.preflight.profile import Link, Profile
from plaudit.preflight.work import Amounts, Shape, Work, amounts, decoding, work_of
from plaudit.settings.tree import Settings

AHEAD = 4
"""Number of steps whose generation is simulated back to back; their mean stands for a long run."""
BUFFERS = 2
"""Copies of the published weights that a process holds during publishing: packed ones, and those that arrived."""


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes of a step by one placement."""

    placement: Placement
    calls: Mapping[str, float]
    """Seconds that each call of a step takes on its devices, by name of the call."""
    step: float
    idle: float
    """Share of the devices' time without work."""
    memory: Mapping[str, Mapping[str, float]]
    """{kind of process: {part, such as weights: bytes}}."""

    @property
    def largest(self) -> float:
        """Bytes of the process that takes most memory."""
        return max(sum(parts.values()) for parts in self.memory.values())

    @property
    def total(self) -> float:
        """Bytes of all processes."""
        counts = self.placement.counts
        return sum(sum(parts.values()) * counts.get(name, 1) for name, parts in self.memory.items())


@dataclass(frozen=True)
class Costs:
    """The cost model: estimates placements of one recipe, by the profile of one kind of machine."""

    settings: Settings
    profile: Profile
    devices: int

    @cached_property
    def work(self) -> Work:
        profile = self.profile
        return work_of(self.settings, profile.prompts, profile.answers, profile.rows)

    @cached_property
    def models(self) -> list[Model]:
        """The models of the training ranks, each whole on one rank."""
        whole = replace(self.settings, runtime=replace(self.settings.runtime, placement={}))
        return models_of(whole, Mesh())

    @cached_property
    def policy(self) -> DecoderConfig:
        return self.models[0].layout.config

    @cached_property
    def judges(self) -> dict[int, DecoderConfig]:
        return judges_of(self.settings)

    def config_of(self, role: str) -> DecoderConfig:
        """A role's configuration; the policy's for a reference that is the policy without its adapters."""
        found = {str(one.role): one.layout.config for one in self.models}
        return (found | {f"judge {number}": config for number, config in self.judges.items()}).get(role, self.policy)

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 2 if self.settings.learn.precision == "bfloat16" else 4

    # --- seconds

    def estimate(self, at: Placement) -> Estimate:
        calls = self.calls(at)
        step, busy = self._step(at, calls)
        idle = max(0.0, 1 - busy / (at.devices * step)) if step else 0.0
        return Estimate(at, calls, step, idle, self.memory(at))

    def calls(self, at: Placement) -> dict[str, float]:
        """Return {call: seconds in a step}, for each call by itself, with nothing else on its devices."""
        work, found = self.work, dict[str, float]()
        if work.sampled:
            found["generate"] = self.generate(at)
            found |= self._rewards(at)
        for role in work.scored:
            found[f"{role} scores"] = self._scores(at.of(role), role, work.share(at.of(role).ranks))
        for role in work.trained:
            found[f"{role} trains"] = self._trains(at.of(role), role, work.share(at.of(role).ranks))
        if (at.ray and work.sampled) or at.lag:
            found["publish"] = self._publish(at)
        return found

    def generate(self, at: Placement, tensor: int = 1, *, flowing: bool = False) -> float:
        """Return the seconds from a step's first to its last token, on the slowest worker; `tensor` devices share a
        worker's matrices. `flowing`: a step's part of the time, if answers of further steps keep all slots filled."""
        decode = self.profile.decode
        summed = 2 * self.policy.layers * self.link("all_reduce", tensor).latency if tensor > 1 else 0.0

        def seconds(shapes: Sequence[Shape]) -> float:
            return decoding(
                shapes,
                self.settings.rollout.slots,
                lambda *numbers: decode.seconds(numbers, at.threads) / tensor + numbers[0] * summed,
            )

        batches, times = self.work.batches(max(1, at.workers))
        if not flowing:
            return times * max(map(seconds, batches))
        return times * sum((seconds(one * AHEAD) - seconds(one)) / (AHEAD - 1) for one in batches) / len(batches)

    def _rewards(self, at: Placement) -> dict[str, float]:
        """Return {reward: seconds}. A judge without processes of its own is in the run's process, on all cores."""
        found, work, s = {}, self.work, self.settings
        for number, reward in enumerate(s.rewards):
            if reward.kind == "judge":
                processes = max(1, reward.workers * reward.tensor * at.ray)
                curve = self.profile.passes[f"judge {number}/score"]
                asked = amounts(work.sampled).times(1 / work.scale / processes).cut(work.score)
                threads = s.threads or (self.profile.devices if at.ray and not self.profile.gpu else at.threads)
                found[f"judge {number}"] = curve.seconds(asked.numbers, threads)
        for name, (constant, each) in self.profile.rewards.items():
            found[name] = constant + each * work.answers
        return found

    def _scores(self, at: Placement, role: str, share: Amounts) -> float:
        return self._called(at) + self._pass(at, f"{role}/score", share.cut(self.work.score), moves=1)

    def _trains(self, at: Placement, role: str, share: Amounts) -> float:
        """Seconds of all updates of a step for one role."""
        epochs, parts = self.work.updates
        part = share.times(1 / parts).cut(self.work.micro)
        model = next(one for one in self.models if one.role == role)
        by_stage, whole = self._by_stage(model, at), model.numbers(model.layout.mesh.place(0))[1]
        numbers, twice = max(by_stage), sum(by_stage) - whole  # a tied embedding is on the first and the last stage
        update = self.profile.updates[role] * numbers / whole / at.tensor / (at.shards if at.sharded else 1)
        summed = self.link("all_reduce", at.width * at.stages).seconds(4 * twice / at.tensor) if twice else 0.0
        if at.shards > 1:
            ring = _ring(at.shards) / (2 if at.sharded else 1)
            summed += self.link("all_reduce", at.trains_on).seconds(4 * numbers / at.tensor * ring)
        each = self._pass(at, f"{role}/train", part, moves=2) + update + summed + 2 * self._called(at)
        return epochs * parts * each

    def _by_stage(self, model: Model, at: Placement) -> list[int]:
        """Return the trained numbers of a model on each stage."""
        layout, mesh = model.layout, Mesh(pipeline=at.stages, spans=at.spans)
        staged = replace(model, layout=Layout(layout.config, layout.head, mesh, layout.lora))
        return [staged.numbers(mesh.place(stage))[1] for stage in range(at.stages)]

    def _pass(self, at: Placement, name: str, asked: Amounts, *, moves: int) -> float:
        """Return the seconds of a call's passes with their communication: shards gather weights; the tensor axis sums
        activations, and the context axis exchanges those of attention, each twice a layer; stages hand on hidden
        states, and their gradients."""
        curve, role = self.profile.passes[name], name.partition("/")[0]
        constant = curve.seconds((asked.passes, 0.0, 0.0, 0.0), at.threads)
        seconds = constant + (curve.seconds(asked.numbers, at.threads) - constant) / at.width
        config = self.config_of(role)
        if at.sharded:
            gathered = self.width * config.parameters / at.tensor * _ring(at.shards) / 2
            seconds += moves * asked.passes * self.link("all_gather", at.trains_on).seconds(gathered)
        heads = config.head_dim * (config.heads + config.kv_heads)  # half of query, key, value and output
        cuts = ((at.tensor, at.tensor, config.width / at.context), (at.context, at.width, heads / at.width / 2))
        for ranks, within, rows in cuts:
            if ranks > 1:
                size, link = self.width * rows * asked.tokens * _ring(ranks), self.link("all_reduce", within)
                seconds += 2 * moves * config.layers * (link.latency * asked.passes + size / link.bandwidth)
        if at.stages == 1:
            return seconds
        parts, head = int(asked.passes), curve.seconds((0.0, 0.0, 0.0, asked.heads), at.threads) / at.width
        hidden = self.width * config.width * asked.tokens / parts / at.width
        hop = self.link("all_reduce", at.width * at.stages).seconds(hidden)
        layers = (seconds - head) / parts / at.stages
        return stages.seconds(at.stages, at.spans, parts, layers, head / parts, hop, trains=moves > 1)

    def link(self, name: str, within: int) -> Link:
        """The named link; the network's, if known, between ranks that are `within` that many neighbours, if a machine
        has fewer devices (ranks of one row are on one node where they fit); else `all_reduce`."""
        links = self.profile.links
        name = "network" if "network" in links and within > self.profile.devices else name
        return links.get(name, links["all_reduce"])

    def _called(self, at: Placement) -> float:
        return self.profile.call if at.ray else 0.0

    def _publish(self, at: Placement) -> float:
        size = self.models[0].published
        return self.profile.links["store"].seconds(size) if at.ray else size / 4e9

    def _step(self, at: Placement, calls: Mapping[str, float]) -> tuple[float, float]:
        """Return the seconds of a step, and the device-seconds of work in it."""
        generate, publish = calls.get("generate", 0.0), calls.get("publish", 0.0)
        by_role = {name: seconds for name, seconds in calls.items() if name.endswith((" scores", " trains"))}
        rewards = sum(calls.values()) - generate - publish - sum(by_role.values())
        learn = sum(self._at_once(at, by_role, what) for what in ("scores", "trains"))
        workers, ranks = (at.workers, sum(at.counts.values()) - at.workers) if at.ray else (1, 1)
        used = sum(seconds * at.of(name.split()[0]).trains_on for name, seconds in by_role.items()) if at.ray else learn
        busy = generate * workers + used
        if not at.ray:
            return sum(calls.values()), busy + rewards
        cores = math.inf if self.profile.gpu else self.devices
        if at.shared or not at.lag:
            slow = self._crowding(at, max(workers * at.threads * (generate > 0), ranks * at.threads))
            tail = self._tail(generate, rewards)
            return max((generate + learn) * slow + tail + publish, (busy * at.threads + rewards) / cores), busy
        slow = self._crowding(at, (ranks + workers) * at.threads)
        flow = self.generate(at, flowing=True) if generate else 0.0
        busy = flow * workers + used
        held = (busy * at.threads + rewards) / cores
        path = (generate + rewards / 8 + learn + publish) / (at.lag + 1)
        step = slow * max(flow, learn + publish, rewards, held, path)
        return step, min(generate, step) * workers + used

    def _at_once(self, at: Placement, by_role: Mapping[str, float], what: str) -> float:
        """Return a step's seconds of scoring, or of training, from those by role: models on the same ranks take turns,
        models on different ranks work at the same time."""
        worker_groups: dict[tuple[str, ...], float] = {(): 0.0}
        for name, seconds in by_role.items():
            role, _, kind = name.rpartition(" ")
            if kind == what:
                where = next((one.roles for one in at.apart if role in one.roles), ())
                worker_groups[where] = worker_groups.get(where, 0.0) + seconds
        return max(worker_groups.values())

    def _tail(self, generate: float, rewards: float) -> float:
        """Return the seconds of rewards after the last answer: others were scored while answers were generated."""
        return max(rewards - generate / 2, rewards / 8)

    def _crowding(self, at: Placement, threads: int) -> float:
        """Return the factor by which work takes longer while other cores work too."""
        if self.profile.gpu or self.devices == 1 or threads <= at.threads:
            return 1.0
        beside = min(1.0, (threads - at.threads) / max(1, self.devices - at.threads))
        return (1 + (self.profile.crowded - 1) * beside) * max(1.0, threads / self.devices)

    # --- one call in a mesh of data times tensor devices of its own (`cluster.py`)

    def passes(self, name: str, data: int, tensor: int) -> float:
        """Seconds of a call without gradients."""
        work = self.work
        asked = amounts(work.sampled or work.learned).times(1 / work.scale / data).cut(work.score)
        return self._pass(Placement(ray=True, ranks=data, tensor=tensor), name, asked, moves=1)

    def training(self, role: str, data: int, tensor: int) -> float:
        """Seconds of all of a role's updates, sharded over data."""
        at = Placement(ray=True, ranks=data, tensor=tensor, sharded=data > 1)
        return self._trains(at, role, self.work.share(data))

    def activations(self, data: int, tensor: int) -> float:
        """Bytes of activations of a pass with gradients, on one device."""
        return self._token() * min(self.work.share(data).tokens / self.work.updates[1], self.work.micro) / tensor

    # --- memory

    def memory(self, at: Placement) -> dict[str, dict[str, float]]:
        """Return {kind of process: {part, such as weights: bytes}}."""
        s, profile, placed = self.settings, self.profile, at.placed(self.settings)
        base = self._process(at)
        models = models_of(placed) if at.ray else self.models
        ranks = {name: self._rank(models, at, stage) for stage, name in enumerate(at.kinds)}
        own: dict[str, dict[str, float]] = {}
        for one in at.apart:
            runtime = replace(placed.runtime.apart[one.name], placement={})
            models = [m for m in models_of(replace(placed, runtime=runtime)) if m.role in one.roles]
            own[f"{one.name} rank"] = self._rank(models, at.of(one.name), 0)
        judges = {"judges": float(self.width * sum(config.parameters for config in self.judges.values()))}
        if not self.work.sampled:
            return (ranks if at.ray else {"run": ranks["rank"]}) | own
        weights = float(self.width * self.policy.parameters)
        cache = {"cache": self.cache(at)}
        if not at.ray:
            engine = {"engine": weights * (0 if profile.gpu else 1) + weights * (at.lag > 0)}
            return {"run": ranks["rank"] | engine | cache | judges}
        moved = {"moved": float(BUFFERS * self.models[0].published)}
        sent = {"moved": moved["moved"] / at.stages}
        worker = {"process": base, "weights": weights, "engine": 0.0 if profile.gpu else weights}
        driver = {"process": base} | ({} if any(one.workers for one in s.rewards if one.kind == "judge") else judges)
        sending = {name: parts | sent for name, parts in ranks.items()}
        return {"driver": driver, **sending, **own, "rollout worker": worker | cache | moved}

    def _process(self, at: Placement) -> float:
        """Bytes of a process without a model."""
        return self.profile.memory.get("process", 0.0) + at.ray * self.profile.memory.get("ray", 0.0)

    def _rank(self, models: Sequence[Model], at: Placement, stage: int) -> dict[str, float]:
        """Return {part: bytes} of a rank with these models, on a stage."""
        place = replace(models[0].layout.mesh.place(0), stage=stage)
        rank = {"process": self._process(at)}
        for part in ("weights", "gradients", "moments", "masters"):
            rank[part] = float(sum(model.held(place)[part] for model in models))
        rank["gathered"] = float(max(model.gathered(stage) for model in models))
        parts = self.work.share(at.ranks).times(1 / self.work.updates[1]).cut(self.work.micro).passes
        waiting = stages.under_way(at.stages, at.spans, int(min(parts, stages.MOST)), stage)
        rank["activations"] = self.activations(at.ranks, at.width) * waiting / at.stages / at.spans
        rank["kept"] = self._kept * min(1.0, rank["activations"] / max(1.0, self.activations(1, 1)))
        return rank

    @cached_property
    def _kept(self) -> float:
        """Return the bytes that the profiled process took beyond all parts with a formula: freed memory that it keeps
        for the next pass, and memory of libraries."""
        if not (peak := self.profile.memory.get("peak")):
            return 0.0
        whole = Costs(self.settings, replace(self.profile, memory={**self.profile.memory, "peak": 0.0}), self.devices)
        return max(0.0, peak - sum(whole.memory(Placement(workers=int(bool(self.work.sampled))))["run"].values()))

    def _token(self) -> float:
        """Return the bytes of activations per token, for the trained model that takes most: as measured, or 20 numbers
        per hidden channel and 3 per inner channel of each layer."""
        taken = [by_token(one.layout.config, self.settings) for one in self.models if one.trained]
        measured = self.profile.memory.get("token")
        return max(taken) * (measured / taken[0] if measured else 1.0)

    def cache(self, at: Placement) -> float:
        s, config = self.settings, self.policy
        prompt = max(self.profile.prompts, default=s.data.max_prompt_tokens)
        rows = min(s.rollout.slots, self.work.answers / max(1, at.workers))
        return rows * (prompt + s.answer_tokens) * config.layers * 2 * self.width * config.kv_heads * config.head_dim


def _ring(ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce, divided by the bytes of the tensor."""
    return 2 * (ranks - 1) / ranks
