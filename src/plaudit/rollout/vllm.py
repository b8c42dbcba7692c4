"""Generation by vLLM 0.32, in this process and on weights of its own.

    generate -> a vLLM request for each sample -> step, step, ... -> Completion
    load -> version, names and digest checked -> weights exchanged in place -> caches emptied -> what is held noted

vLLM draws and computes; texts, stop strings and waiting are done here, so that they mean what they mean in `native.py`.
Left out: several GPUs, adapters apart from their weights, processes (whoever wants an engine in its own starts one).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from plaudit.models.base import LanguageModel
from plaudit.rollout.accepted import Accepted, WeightsError
from plaudit.rollout.engine import TextDecoder, check_request, end_tokens, text_before_stop
from plaudit.rollout.settings import LEAST_TEMPERATURE, VllmSettings
from plaudit.rollout.vllm_library import on_cpu, request, start
from plaudit.rollout.vllm_worker import Lent, blank, give_up, held, reload, take_back
from plaudit.runtime.coroutines import Background
from plaudit.types import Completion, Finish, Sampling


@dataclass(eq=False, slots=True)
class _Sample:
    """One completion in the making."""

    key: str
    prompt: list[int]
    sampling: Sampling
    request: Any
    """The same for vLLM."""
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VllmEngine:
    """An `Engine` whose model is a Hugging Face folder: its config.json, and its weights if it has any.

    Without weights it answers after the first `load`. dtype is that of config.json unless the settings say otherwise.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: TextDecoder,
        *,
        slots: int = 64,
        settings: VllmSettings | None = None,
        ends: Collection[int] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.settings = settings or VllmSettings()
        self.tokenizer, self.ends = tokenizer, frozenset(end_tokens(tokenizer) if ends is None else ends)
        self.version = 0
        self._asleep = self._closed = self._drained = False
        self._lent: list[Lent] | None = None
        self._accepted = Accepted()
        self._weights = any(folder.glob("*.safetensors"))  # whether it has any to answer with
        self.slots = slots
        self._engine = start(folder, self.settings, slots=slots, dummy=not self._weights, say=say)
        self.max_length = int(self._engine.model_config.max_model_len)
        # vLLM refuses an end token that the model cannot draw, such as a family's default in a smaller vocabulary.
        self.ends = frozenset(end for end in self.ends if end < self._engine.model_config.get_vocab_size())
        self._engine.set_weight_version("0")
        self._held = self.held()
        self._waiting: deque[_Sample] = deque()
        self._samples: dict[str, _Sample] = {}  # under way, by key
        self._keys = itertools.count()
        self._driver = Background(self._drive, self._fail)

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        tokenizer: TextDecoder,
        *,
        slots: int = 64,
        settings: VllmSettings | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> VllmEngine:
        """An engine for this model, with its present weights as version 0. Nothing of them is written to a disk."""
        if settings is not None and settings.max_length is not None and settings.max_length > model.max_positions:
            raise ValueError(
                f"rollout.vllm.max_length={settings.max_length}, but the model has {model.max_positions} positions. "
                "Give at most those, or leave it null."
            )
        special = {"bos_token_id": None, "eos_token_id": None}  # the family's may lie outside the vocabulary
        config = special | model.hf_config() | {"dtype": str(model.dtype).removeprefix("torch.")}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            ends = (*end_tokens(tokenizer), *model.special.eos)
            engine = cls(Path(folder), tokenizer, slots=slots, settings=settings, ends=ends, say=say)
        engine.load(dict(model.hf_tensors()), 0)
        return engine

    # Engine

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._samples)

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        if self._asleep or not self._weights:
            missing = "is asleep or closed. Call wake()" if self._asleep else "has no weights. Call load()"
            raise RuntimeError(f"The engine {missing} before generate().")
        check_request(prompt_tokens, plan, self.max_length)
        for sampling in plan:
            if 0 < sampling.temperature < LEAST_TEMPERATURE:
                raise ValueError(
                    f"temperature={sampling.temperature} is below vLLM's least, {LEAST_TEMPERATURE}. Give 0 (greedy), "
                    "a larger one, or set rollout.engine=native."
                )
        samples = [self._sample(prompt_tokens, sampling) for sampling in plan]
        self._waiting += samples
        if samples:
            self._driver.wake()
        try:
            return list(await asyncio.gather(*(sample.future for sample in samples)))
        except asyncio.CancelledError:
            self._drop(samples)
            raise

    async def drain(self) -> None:
        self._drained = True
        while self._samples:
            await asyncio.sleep(0)

    def load(self, weights: Mapping[str, Tensor] | None, version: int, *, sent: str | None = None) -> None:
        """Weights are copied into vLLM, converted to its dtype. `sent` is the sender's `digest` of them, if it has one.

        Raises WeightsError, with the engine as it was, for an older version, for tensors that are not the model's and
        for another digest than `sent`; and where what vLLM holds has changed since the last load.
        """
        if weights is None:
            raise WeightsError("vLLM shares no weights with the learner: give all of them, by Hugging Face names.")
        self._check_awake("load()")
        self._accepted.check(weights, version, sent=sent)
        if self._weights:
            self.confirm()
        self._weights = False  # until all of what follows has succeeded
        self._engine.collective_rpc(reload, args=(weights,))
        # Blocks of the old weights would answer new prompts, silently; sequences under way lose theirs too, and are
        # computed again up to where they are.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise WeightsError("vLLM did not empty its prefix cache, so old weights would still answer. Restart it.")
        self._engine.set_weight_version(str(version))
        self._accepted.take(weights, version)
        self.version, self._weights, self._held = version, True, self.held()
        self._drained = False
        if self._waiting:
            self._driver.wake()

    def go_back(self) -> None:
        """The run went back to a checkpoint: take the next weights whatever their version."""
        self._accepted.go_back()

    def confirm(self) -> tuple[int, str]:
        """The version and the digest of what vLLM computes with now, which is what it held right after `load`.

        Raises WeightsError if it is not. Engines of one kind that loaded the same weights give the same digest.
        """
        version, held = self._engine.get_weight_version(), self.held()
        if version != str(self.version) or held != self._held:
            raise WeightsError(
                f"vLLM holds version {version}, digest {held}, but was given version {self.version} and had digest "
                f"{self._held} then: its weights have changed since. Start the engine anew."
            )
        return self.version, held

    def held(self) -> str:
        """Digest of what vLLM computes with, in its own layout."""
        self._check_awake("A digest of weights")
        [found] = self._engine.collective_rpc(held)
        return str(found)

    def sleep(self) -> None:
        """Gives up the cache and, with settings.sleep_level 2, the weights until the next `load`; with 1 those wait in
        host memory, where a CPU has them anyway. With 0 nothing is given up."""
        if self.busy:
            raise RuntimeError("sleep() while requests are unanswered would lose them. Await them first.")
        level = self.settings.sleep_level
        if level and not self._asleep:
            if on_cpu():
                self._engine.reset_prefix_cache()
                [self._lent] = self._engine.collective_rpc(give_up, args=(level > 1,))
            else:
                self._engine.sleep(level)
            self._weights = self._weights and level == 1
        self._asleep = True

    def wake(self) -> None:
        if self._closed:
            raise RuntimeError("The engine is closed. Make a new one.")
        if self._lent is not None:
            self._engine.collective_rpc(take_back, args=(self._lent,))
            self._lent = None
        elif self._asleep and self.settings.sleep_level:
            self._engine.wake_up()
        self._asleep = False

    def _check_awake(self, what: str) -> None:
        if self._asleep and self.settings.sleep_level:
            raise RuntimeError(f"{what} needs the memory that sleep() gave up. Call wake() first.")

    def close(self) -> None:
        self._fail(RuntimeError("The engine was closed before this request was answered."))
        if not self._closed:
            self._engine.engine_core.shutdown()
        self._asleep = self._closed = True

    # Requests

    def _sample(self, prompt_tokens: Sequence[int], sampling: Sampling) -> _Sample:
        asked = request(len(prompt_tokens), sampling, self.ends, max_length=self.max_length)
        future = asyncio.get_running_loop().create_future()
        return _Sample(str(next(self._keys)), list(prompt_tokens), sampling, asked, future)

    async def _drive(self) -> None:
        """Takes the steps while there is work, lets others run between them; ends when nobody waits."""
        while self._samples or (self._waiting and not self._drained):
            self._advance()
            await asyncio.sleep(0)

    def _admit(self) -> None:
        """Ask vLLM for no more than it decodes at once: what waits in there could not wait for new weights."""
        while self._waiting and not self._drained and len(self._samples) < self.slots:
            sample = self._waiting.popleft()
            self._engine.add_request(sample.key, {"prompt_token_ids": sample.prompt}, sample.request)
            self._samples[sample.key] = sample

    def _advance(self) -> None:
        self._admit()
        for output in self._engine.step():
            sample = self._samples.get(output.request_id)
            if sample is not None:
                self._collect(sample, output.outputs[0])

    def _collect(self, sample: _Sample, piece: Any) -> None:
        """Take in what vLLM has sampled since the last time: everything, unless stop strings have to be watched for."""
        tokens, logprobs = list(piece.token_ids), piece.logprobs.logprobs
        assert len(tokens) == len(logprobs), (len(tokens), len(logprobs))
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError("A sampled log-prob is not finite: the model's weights or logits overflowed.")
        sample.tokens += tokens
        sample.logprobs += logprobs
        if sample.sampling.stop:
            sample.versions += [self.version] * len(tokens)
        else:
            for span in piece.weight_versions:
                sample.versions += [int(span.version)] * (span.end - span.start)
        if piece.finish_reason == "stop":
            self._complete(sample, Finish.EOS, self._text(sample.tokens[:-1]))
        elif (text := text_before_stop(self._text, sample.tokens, sample.sampling)) is not None:
            self._engine.abort_request([sample.key])
            self._complete(sample, Finish.STOP, text)
        elif piece.finish_reason == "length":
            self._complete(sample, Finish.LENGTH, self._text(sample.tokens))
        elif piece.finish_reason is not None:
            raise RuntimeError(f"vLLM ended a request with {piece.finish_reason!r}, which it was not asked to.")

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _complete(self, sample: _Sample, finish: Finish, text: str) -> None:
        del self._samples[sample.key]
        if not sample.future.done():
            sample.future.set_result(
                Completion(
                    tokens=tuple(sample.tokens),
                    logprobs=tuple(sample.logprobs),
                    versions=tuple(sample.versions),
                    text=text,
                    finish=finish,
                )
            )

    def _drop(self, samples: Collection[_Sample]) -> None:
        """Callers gave these up: their places are free from now on."""
        self._waiting = deque(sample for sample in self._waiting if sample not in samples)
        self._engine.abort_request([sample.key for sample in samples if self._samples.pop(sample.key, None)])

    def _fail(self, error: BaseException | None) -> None:
        """Give every caller the error, or cancel them for None."""
        samples = [*self._samples.values(), *self._waiting]
        for sample in samples:  # first: an engine that failed may fail in what follows too
            if not sample.future.done():
                sample.future.cancel() if error is None else sample.future.set_exception(error)
        self._drop(samples)
        if isinstance(error, FloatingPointError):
            self._engine.collective_rpc(blank)
