"""Generation by vLLM 0.32, driven from this process and on its own weights.

    generate -> a vLLM request for each sample -> step, step, ... -> Completion
    load -> version, names and digest checked -> weights exchanged in place -> caches emptied -> digest noted

vLLM computes and samples. Texts, stop strings and waiting are handled here, with the same meaning as in `native.py`.
With `settings.devices` vLLM starts as many processes that share each matrix and read new weights from a file in memory.
Left out: adapters without their model, and processes that share the engine's requests.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from plaudit.models.base import LanguageModel
from plaudit.rollout.accepted import Accepted
from plaudit.rollout.queued import DIVERGED, Draft, QueuedEngine
from plaudit.rollout.settings import LEAST_TEMPERATURE, VllmStart
from plaudit.rollout.text import TextDecoder, end_tokens
from plaudit.rollout.vllm_library import on_cpu, request, start
from plaudit.rollout.vllm_worker import Lent, blank, give_up, held, reload, take_back
from plaudit.runtime.worker import OutOfStep, reason_of
from plaudit.types import Sampling
from plaudit.weights.pieces import WeightsError

CACHE_AND_WEIGHTS = 2
"""vLLM's sleep level that frees KV cache and weights: the next update sends the weights anyway."""


class VllmEngine(QueuedEngine):
    """An `Engine` whose model is a Hugging Face folder: its config.json, and its weights if it has any.

    Without weights it answers after the first `load`. dtype is that of config.json unless the settings say otherwise.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: TextDecoder,
        *,
        slots: int = 64,
        settings: VllmStart | None = None,
        ends: Collection[int] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.settings = settings or VllmStart()
        self._weights = any(folder.glob("*.safetensors"))  # True once it has weights
        self._engine = start(folder, self.settings, slots=slots, dummy=not self._weights, say=say)
        config = self._engine.model_config
        # vLLM refuses an end token that the model cannot draw, such as a family's default in a smaller vocabulary.
        found = {end for end in (end_tokens(tokenizer) if ends is None else ends) if end < config.get_vocab_size()}
        super().__init__(tokenizer, slots=slots, max_length=int(config.max_model_len), ends=found)
        self._closed = False
        self._lent: list[Lent] | None = None
        self._accepted = Accepted()
        self._engine.set_weight_version("0")
        self._held = self.held()
        self._drafts: dict[str, Draft] = {}  # running drafts by vLLM's request id
        self._keys = itertools.count()

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        tokenizer: TextDecoder,
        *,
        slots: int = 64,
        settings: VllmStart | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> VllmEngine:
        """Make an engine for this model, and load the model's present weights into it as version 0."""
        settings, most = settings or VllmStart(), model.max_positions
        settings = replace(settings, max_length=min(settings.max_length or most, most))
        special = {"bos_token_id": None, "eos_token_id": None}  # the family's may lie outside the vocabulary
        config = special | model.hf_config() | {"dtype": str(model.dtype).removeprefix("torch.")}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            ends = (*end_tokens(tokenizer), *model.special.eos)
            engine = cls(Path(folder), tokenizer, slots=slots, settings=settings, ends=ends, say=say)
        engine.load(dict(model.hf_tensors()), 0)
        return engine

    # Engine

    def drafts(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Draft]:
        if not self._asleep and not self._weights:
            raise RuntimeError("The engine has no weights. Call load() before generate().")
        for sampling in plan:
            if 0 < sampling.temperature < LEAST_TEMPERATURE:
                raise ValueError(
                    f"temperature={sampling.temperature} is below vLLM's least, {LEAST_TEMPERATURE}: give 0 (greedy) "
                    "or a higher one, or set rollout.engine=native"
                )
        return super().drafts(prompt_tokens, plan)

    def load(self, weights: Mapping[str, Tensor] | None, version: int, *, sent: str | None = None) -> None:
        """Copy weights into vLLM, converted to its dtype. `sent` is the sender's `digest` of them, if it has one.

        Raises WeightsError and leaves the engine unchanged for an older version, for tensors that are not the model's,
        for another digest than `sent`, and if vLLM's weights have changed since the last load.
        """
        if weights is None:
            raise WeightsError("vLLM shares no weights with the learner: give all of them, by Hugging Face names.")
        self._check_awake("load()")
        self._accepted.check(weights, version, sent=sent)
        if self._weights:
            self.confirm()
        self._weights = False  # until the load below has succeeded
        if self.settings.devices == 1:
            self._everywhere(reload, weights)
        else:
            with _in_memory(weights) as file:
                self._everywhere(reload, file)
        # Blocks of the old weights would answer new prompts, silently; sequences under way lose theirs too, and are
        # computed again up to where they are.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise WeightsError("vLLM did not empty its prefix cache, so old weights would still answer. Restart it.")
        self._engine.set_weight_version(str(version))
        self._accepted.take(weights, version)
        self._weights, self._held = True, self.held()
        self._loaded(version)

    def go_back(self) -> None:
        """Take the next weights whatever their version: the run went back to a checkpoint."""
        self._accepted.go_back()

    def confirm(self) -> tuple[int, str]:
        """Return version and digest of vLLM's present weights. Raises WeightsError if they have changed since `load`.

        Engines of one kind that loaded the same weights have the same digest.
        """
        version, held = self._engine.get_weight_version(), self.held()
        if version != str(self.version) or held != self._held:
            raise WeightsError(
                f"vLLM holds version {version} with digest {held}, but had version {self.version} with digest "
                f"{self._held} after load(): its weights have changed. Restart the engine."
            )
        return self.version, held

    def held(self) -> str:
        """Return the digest of vLLM's weights, in its own layout."""
        self._check_awake("A digest of weights")
        return " ".join(self._everywhere(held))

    def sleep(self) -> None:
        """Free the KV cache and the weights, unless settings.sleeps is false. `wake` does not restore the weights."""
        gives_up = self.settings.sleeps and not self._asleep
        super().sleep()
        if gives_up:
            if on_cpu():
                self._engine.reset_prefix_cache()
                [self._lent] = self._engine.collective_rpc(give_up)
            else:
                self._engine.sleep(CACHE_AND_WEIGHTS)
            self._weights = False

    def wake(self) -> None:
        if self._closed:
            raise RuntimeError("The engine is closed. Make a new one.")
        if self._lent is not None:
            self._engine.collective_rpc(take_back, args=(self._lent,))
            self._lent = None
        elif self._asleep and self.settings.sleeps:
            self._engine.wake_up()
        super().wake()

    def _check_awake(self, what: str) -> None:
        if self._asleep and self.settings.sleeps:
            raise RuntimeError(f"{what} needs the memory that sleep() gave up. Call wake() first.")

    def close(self) -> None:
        super().close()
        if not self._closed:
            self._engine.engine_core.shutdown()
        self._closed = True

    # Steps

    def _advance(self) -> None:
        # vLLM gets no more requests than it decodes at once: requests queued inside it could not wait for new weights.
        for draft in self._queue.take(self.slots - len(self._drafts)):
            key, size = str(next(self._keys)), len(draft.prompt)
            asked = request(size, draft.sampling, self.ends, max_length=self.max_length)
            self._engine.add_request(key, {"prompt_token_ids": draft.prompt}, asked)
            self._drafts[key] = draft
        for output in self._stepped():
            if output.request_id in self._drafts:
                self._collect(output.request_id, output.outputs[0])

    def _stepped(self) -> list[Any]:
        with self._in_step():
            return list(self._engine.step())

    def _everywhere(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `work(worker, *arguments)` in each of vLLM's workers; return their results."""
        with self._in_step():
            return list(self._engine.collective_rpc(work, args=arguments))

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """With several processes, raise any error as OutOfStep: if one has failed, all have to be replaced."""
        try:
            yield
        except Exception as error:
            if self.settings.devices == 1:
                raise
            raise OutOfStep(f"a process of vLLM failed ({type(error).__name__}: {reason_of(error)})") from error

    def _collect(self, key: str, piece: Any) -> None:
        """Add new tokens to their draft; answer it if it ended. Without stop strings vLLM reports once, at the end."""
        draft, tokens, logprobs = self._drafts[key], list(piece.token_ids), piece.logprobs.logprobs
        assert len(tokens) == len(logprobs), (len(tokens), len(logprobs))
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(DIVERGED)
        draft.tokens += tokens
        draft.logprobs += logprobs
        if not draft.sampling.stop:
            for span in piece.weight_versions:
                draft.versions += [int(span.version)] * (span.end - span.start)
        draft.drawn_by(self.version)
        reason = piece.finish_reason
        ending = self._ending(draft, ended=reason == "stop", full=reason == "length")
        if ending is None and reason is not None:
            raise RuntimeError(f"vLLM ended a request with {reason!r}, which was not requested.")
        if ending is not None:
            del self._drafts[key]
            if reason is None:
                self._engine.abort_request([key])
            self._answer(draft, *ending)

    def _withdraw(self, drafts: Collection[Draft]) -> None:
        gone = [key for key, draft in self._drafts.items() if draft in drafts]
        for key in gone:
            del self._drafts[key]
        self._engine.abort_request(gone)

    def _forget(self) -> None:
        self._withdraw(self._drafts.values())

    def _failed(self, error: BaseException | None) -> None:
        super()._failed(error)
        if isinstance(error, FloatingPointError):
            self._everywhere(blank)


@contextmanager
def _in_memory(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """While active, keep the weights in a safetensors file, in /dev/shm if that exists. Yield the file's path."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        file = Path(folder) / "weights.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, file)
        yield str(file)
