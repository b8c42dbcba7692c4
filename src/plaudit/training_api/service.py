"""What the API's calls do: sessions and models, training, saves, sampling.

    a request that was read -> a future; in its turn -> ThreadGroup or Ranks, of Adapters; Sampler -> result

Left out: HTTP (`server.py`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from plaudit.learn.settings import OptimizerSettings
from plaudit.models.decoder import Decoder
from plaudit.models.files import read_json
from plaudit.models.lora import load_lora
from plaudit.rollout.accepted import take_weights
from plaudit.runtime.memory import give_back_memory
from plaudit.runtime.worker import WorkerLost
from plaudit.support.fields import nearest
from plaudit.training_api.adapters import ABOUT, Adapters
from plaudit.training_api.asked import options_of, question_of, read
from plaudit.training_api.losses import batch_of
from plaudit.training_api.ranks import Ranks, ThreadGroup
from plaudit.training_api.samplers import Sampler
from plaudit.training_api.sessions import STATE, ApiError, Model, Result, Sessions
from plaudit.training_api.wire import read_request, sample_reply, training_reply

SAVES = 1000
"""Most saves of a model."""
IDLE_SECONDS = 10.0
"""Seconds without work after which freed memory goes back to the system."""
TRAINING, SAMPLING = "weights", "sampler_weights"
NAME = r"[\w-][\w.-]{0,127}"
SAVE = re.compile(rf"tinker://([0-9a-f]{{32}}:train:\d{{1,9}})/({TRAINING}|{SAMPLING})/({NAME})", re.ASCII)
LOST = "the ranks were lost since this request was sent, and the model went on from its last save: send it again"
Work = Callable[[Model], Awaitable[Result]]


class Service:
    """What the routes call. `name`: the base model's, for clients. `models`: most in training."""

    def __init__(
        self,
        group: ThreadGroup | Ranks,
        base: Decoder,
        tokenizer: Any,
        *,
        folder: Path,
        name: str,
        models: int,
        heartbeat: float,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.group, self.base, self.folder, self.name, self.models, self.say = group, base, folder, name, models, say
        self.sizes = {"vocabulary": base.vocab_size, "positions": base.max_positions}
        self.sessions = Sessions(folder, heartbeat, self._ended)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A name's lock, and under "" the lock of all: each name waits for it with one call, so names take turns."""
        self._sampler = partial(Sampler, base, tokenizer)
        self._last = self._sampler()
        self._dropping: dict[str, asyncio.Task[Any]] = {}
        self._losses = 0
        self._thread = ThreadPoolExecutor(1)
        self._idle: asyncio.TimerHandle | None = None

    def _ended(self, model: Model) -> None:
        self.say(f"{model.id} goes: its session has ended")
        task = self._turn(model.id, lambda: self.group.each(Adapters.drop, model.id))
        self._dropping[model.id] = task
        task.add_done_callback(lambda done: (self._dropping.pop(model.id), self._turns.pop(model.id)))

    def _turn(self, name: str, call: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        """Begin a call that computes, in the turn of its name. Calls of one name run in their order."""

        async def turn() -> Any:
            async with self._turns[name], self._turns[""]:
                try:
                    return await call()
                except WorkerLost as lost:
                    await self._again(lost)
                    raise ApiError(f"{lost}; {LOST}", 503) from lost
                finally:
                    self._worked()

        return asyncio.create_task(turn())

    def _worked(self) -> None:
        """Give freed memory back if no call ends for IDLE_SECONDS, and none is in its turn then."""

        def idle() -> None:
            if not self._turns[""].locked():
                give_back_memory()

        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, idle)

    def _check(self, name: str | None, optimizer: Any = None) -> None:
        """Raise ValueError for another base model or optimizer than those that are served."""
        if name not in (None, self.name):
            raise ApiError(f"there is no base model {name!r:.80}{nearest(name, [self.name])}", 404)
        read("optimizer_config", optimizer or {})

    # Sessions and models

    def capabilities(self) -> Any:
        about = {"model_name": self.name, "max_context_length": self.base.max_positions}
        return {"supported_models": [about | {"trainable": True, "sampleable": True}]}

    def heartbeat(self, body: Any) -> Any:
        self.sessions.of(read("session_heartbeat", body).session_id)
        return {"type": "session_heartbeat"}

    def finish(self, session: str) -> Any:
        self.sessions.end(session)
        return {}

    def create(self, body: Any) -> Any:
        one = read("create_model", body)
        lora = read("lora_config", one.lora_config)  # only adapters are trained
        self._check(one.base_model, one.optimizer_config)
        return self._created(one, lora.rank, secrets.randbelow(1 << 31) if lora.seed is None else lora.seed)

    def _created(self, one: Any, rank: int, seed: int, work: Work | None = None) -> Any:
        """Begin to create a model, and then to do this work."""
        session = self.sessions.of(one.session_id)
        key = f"{session.id}:train:{one.model_seq_id}"
        if key not in session.models:
            if len(self.sessions.models) >= self.models:
                raise ApiError(f"the server has its {self.models} models in training (--models): end a session first")
            session.models[key] = Model(id=key, session=session.id, base=self.name, rank=rank, seed=seed)
        model = session.models[key]

        async def created() -> Result:
            try:
                await self.group.each(Adapters.create, key, rank, seed)
                result: Result = {"type": "create_model", "model_id": key} if work is None else await work(model)
            except Exception:  # such as of a save that does not fit
                session.models.pop(key, None)
                await self.group.each(Adapters.drop, key)
                raise
            self.sessions.write(model)
            return result

        return {"request_id": self.sessions.begin(f"{key}:create", lambda: self._turn(key, created))}

    def info(self, body: Any) -> Any:
        model = self.sessions.model(read("get_info", body).model_id)
        about = {"model_name": self.name, "arch": self.base.config.family, "tokenizer_id": self.name}
        return {"model_data": about, "model_id": model.id, "is_lora": True, "lora_rank": model.rank}

    # Training

    def _train(self, key: str, seq_id: int, work: Work) -> Any:
        """Begin the work of a model's request, the same number only once."""
        model, request, losses = self.sessions.model(key), f"{key}:{seq_id}", self._losses

        async def unless_lost() -> Result:
            if losses != self._losses:
                raise ApiError(LOST, 503)
            return await work(model)

        if seq_id <= model.last and request not in self.sessions.of(key).futures:
            raise ApiError(f"seq_id={seq_id} is not above {model.last}, the last one of {key}")
        self.sessions.begin(request, lambda: self._turn(key, unless_lost))
        model.last = max(model.last, seq_id)
        return {"request_id": request}

    def compute(self, body: bytes) -> Any:
        one, data = read_request(body)
        options = options_of(one.loss, {option.key: option.value.text or option.value.number for option in one.options})
        batch = batch_of(data, one.loss, **self.sizes)
        named = one.model_id, one.loss, options, not one.forward

        async def work(model: Model) -> Result:
            parts = await self.group.split(Adapters.compute, batch, *named)
            found = {row: column for logprobs, _ in parts for row, column in logprobs.items()}
            return training_reply([found[row][1:].numpy() for row in range(len(batch))], {"loss:sum": parts[0][1]})

        return self._train(one.model_id, one.seq_id, work)

    def step(self, body: Any) -> Any:
        one = read("optim_step", body)
        adam = read("adam_params", one.adam_params)
        settings = OptimizerSettings(
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_gradient_norm=max(adam.grad_clip_norm, 0.0),
        )

        async def work(model: Model) -> Result:
            metrics = (await self.group.each(Adapters.step, model.id, settings, adam.learning_rate))[0]
            told = {"steps_lost": float(model.lost)} if model.lost else {}
            model.steps, model.lost = model.steps + 1, 0
            self.sessions.write(model)
            return {"metrics": metrics | told}

        return self._train(one.model_id, one.seq_id, work)

    # Saves

    def save(self, body: Any) -> Any:
        one = read("save_weights", body)
        return self._saved(one, TRAINING, one.path or f"step-{one.seq_id}", overwrite=bool(one.overwrite))

    def save_for_sampler(self, body: Any) -> Any:
        one = read("save_weights_for_sampler", body)
        if one.path is not None:
            return self._saved(one, SAMPLING, one.path, overwrite=True)

        async def work(model: Model) -> Result:
            tensors = (await self.group.each(Adapters.tensors, model.id))[0]
            sampler = self._sampler(partial(take_weights, weights=tensors), model.rank)
            key = self.sessions.keep(model.session, one.sampling_session_seq_id, sampler)
            return {"sampling_session_id": key}

        return self._train(one.model_id, one.seq_id, work)

    def _saved(self, one: Any, kind: str, name: str, *, overwrite: bool) -> Any:
        """Begin to save a model for training (with its optimizer's state) or for sampling."""
        if not re.fullmatch(NAME, name, re.ASCII):
            raise ApiError(f"path={name!r:.60} is no name of a save: give letters, digits, '.', '_' and '-'")

        async def work(model: Model) -> Result:
            path, folder = f"tinker://{model.id}/{kind}/{name}", self.folder / model.id / kind
            target, part = folder / name, folder / f".{name}"
            if target.exists() and not overwrite:
                raise ApiError(f"there is a save {path}: give another name, or overwrite=True")
            if folder.exists() and sum(1 for _ in folder.iterdir()) >= SAVES:
                raise ApiError(f"{model.id} has its {SAVES} saves: delete some of them on the server")
            shutil.rmtree(part, ignore_errors=True)
            about = {"base_model": self.name, "rank": model.rank, "steps": model.steps}
            await self.group.each(Adapters.save, model.id, part, about, kind == TRAINING)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            if kind == TRAINING:
                model.saved, model.saved_steps, model.optimizer = path, model.steps, True
                self.sessions.write(model)
            return {"path": path}

        return self._train(one.model_id, one.seq_id, work)

    def load(self, body: Any) -> Any:
        one = read("load_weights", body)
        folder, about = self._about(one.path)
        self._check(one.base_model, one.optimizer_config)

        async def work(model: Model) -> Result:
            await self.group.each(Adapters.load, model.id, folder, bool(one.optimizer))
            model.steps = model.saved_steps = about["steps"]
            model.saved, model.optimizer = one.path, bool(one.optimizer)
            self.sessions.write(model)
            return {"type": "load_weights", "path": one.path, "model_id": model.id}

        if one.model_id is None:
            return self._created(one, about["rank"], 0, work)
        return self._train(one.model_id, one.seq_id, work)

    def weights_info(self, body: Any) -> Any:
        about = self._about(read("weights_info", body).tinker_path)[1]
        parts = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        return {"base_model": about["base_model"], "is_lora": True, "lora_rank": about["rank"], **parts}

    def _about(self, path: str) -> tuple[Path, dict[str, Any]]:
        """Return the folder of a save, and what it says about itself. Raises ApiError."""
        found = SAVE.fullmatch(path)
        folder = self.folder.joinpath(*found.groups()) if found else None
        if folder is None or not (folder / ABOUT).is_file():
            raise ApiError(f"there is no save {path!r:.200} on this server", 404)
        about: dict[str, Any] = read_json(folder / ABOUT)
        self._check(about["base_model"])
        return folder, about

    async def open(self) -> None:
        """Start the ranks, and go on with the models of an earlier server, each from its last save."""
        await self.group.form()
        for file in sorted(self.folder.glob(f"*/{STATE}")):
            model = Model(**read_json(file) | {"last": 0})
            if model.base == self.name:
                self.sessions.add(model.session).models[model.id] = model
                await self._restore(model)

    async def _again(self, lost: WorkerLost) -> None:
        """Start the ranks again, and go on with all models."""
        self.say(f"lost {lost}")
        self._losses += 1
        await self.group.form(lost)
        for model in self.sessions.models:
            await self._restore(model)

    async def _restore(self, model: Model) -> None:
        """Go on with a model from its last save, or from its start, and say what is lost."""
        await self.group.each(Adapters.create, model.id, model.rank, model.seed)
        if model.saved:
            await self.group.each(Adapters.load, model.id, self._about(model.saved)[0], model.optimizer)
        model.lost, model.steps = model.lost + model.steps - model.saved_steps, model.saved_steps
        self.sessions.write(model)
        start = model.saved or "its start, as it was never saved"
        self.say(f"{model.id} goes on from {start} (step {model.steps}); {model.lost} later steps are lost")

    # Sampling

    def create_sampler(self, body: Any) -> Any:
        one = read("create_sampling_session", body)
        self._check(one.base_model)
        sampler = self._sampler()
        if one.model_path is not None:
            folder, about = self._about(one.model_path)
            sampler = self._sampler(partial(load_lora, folder=folder), about["rank"])
        return {"sampling_session_id": self.sessions.keep(one.session_id, one.sampling_session_seq_id, sampler)}

    def sampler(self, key: str) -> Any:
        return {"sampler_id": key, "base_model": self.name}

    def sample(self, body: Any) -> Any:
        one = read("sample", body)
        asked, key = question_of(one, **self.sizes), one.sampling_session_id
        sampler = self.sessions.sampler(key)

        async def work() -> Result:
            if sampler is not self._last:
                self._last.rest()
                self._last = sampler
            scores = await sampler.scores(asked, self._scoring) if asked.scored else None
            answers = await sampler.answers(asked)
            if sampler is not self._last:
                sampler.rest()
            self._worked()
            return sample_reply(answers, scores)

        request = self.sessions.begin(f"{key}:{one.seq_id}", lambda: asyncio.ensure_future(work()))
        return {"request_id": request, "sample_sequence_ids": [f"{request}:{n}" for n in range(asked.count)]}

    def _scoring(self, call: Callable[[], None]) -> Awaitable[None]:
        loop = asyncio.get_running_loop()
        return self._turn("scores", lambda: loop.run_in_executor(self._thread, call))
