"""The native engine: generation in-process on the learner's own decoder, so that sampler and learner never disagree.

    generate -> waiting request -> admit (prompt computed once, into free rows) -> [decode, sample]* -> Completion

Continuous batching: rows of finished sequences are refilled at the next step, active sequences always fill the first n
rows of the cache, and no work is done for empty ones. One asyncio task takes the steps while there is work. Where free
rows admit only some of a request's samples, the later ones copy the prompt's cache from a sibling that still runs; if
none does, or the weights changed since, the prompt is computed again. A step of decoding is one kernel on the CPU
(`models/steps.py`) and a recorded one on a GPU (`models/graphs.py`). Left out: paging, chunked prefill, speculation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from plaudit.maths.invariant import filled_up
from plaudit.models.cache import Cache, Decode, Joined, Prefill
from plaudit.models.decoder import Decoder
from plaudit.models.graphs import Record, RecordedSteps
from plaudit.models.layout import fill, layout
from plaudit.models.packed import kernel_rows, stamp
from plaudit.models.pages import PageCache, make_cache
from plaudit.models.steps import Steps, laid_out
from plaudit.rollout.accepted import check_held, check_names
from plaudit.rollout.engine import TextDecoder, check_request, end_tokens, text_before_stop
from plaudit.rollout.rows import Active, Admission, Counts, Request, Rows
from plaudit.rollout.sampler import Draw, sample
from plaudit.runtime.coroutines import Background
from plaudit.types import Completion, Finish, Sampling

log = logging.getLogger(__name__)

LENGTH_STEP = 64
"""The cache grows in multiples of this many tokens."""


class NativeEngine:
    """An `Engine` on a `Decoder` whose parameters it shares with whoever trains it.

    slots: sequences decoded at once. max_length: prompt and answer together, the model's positions by default; the
    cache takes only what the requests need. prefill_tokens: prompts computed in one pass have at most this many
    tokens together (a longer one goes alone). recorder: gives what records a step of decoding on a device to be
    repeated; where that fails, the engine says so once and goes on without.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextDecoder,
        *,
        slots: int = 64,
        max_length: int | None = None,
        ends: Collection[int] | None = None,
        prefill_tokens: int = 8192,
        recorder: Callable[[torch.device], Record] | None = None,
    ):
        positions = model.max_positions
        if max_length is not None and max_length > positions:
            raise ValueError(f"max_length={max_length}, but the model has {positions} positions. Give at most those.")
        if slots < 1:
            raise ValueError(f"slots={slots}: the engine decodes at least one sequence. Give 1 or more.")
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.max_length = max_length or positions
        self.prefill_tokens = prefill_tokens
        self.ends = frozenset((*end_tokens(tokenizer), *model.special.eos) if ends is None else ends)
        self.version = 0
        self.counts = Counts()
        self.device = model.device
        self._end_ids = torch.tensor(sorted(self.ends), dtype=torch.int64, device=self.device)
        self._waiting: deque[Request] = deque()
        self._active: list[Active] = []
        self._step = 0
        self._driver = Background(self._drive, self._fail)
        self._asleep = self._drained = False
        self._recorder = recorder
        self._lays_out = recorder is None and self.device.type == "cpu"
        self._forget()

    def _forget(self) -> None:
        """Drop the cache and the rows; the next request makes them anew."""
        self._cache: Cache | None = None
        self._recorded: RecordedSteps | None = None
        self._rows: Rows | None = None
        self._draw = Draw.of([])
        self._reader, self._precision = self.model, self.model.dtype
        self._steps: Steps | None = None
        self._parameters: tuple[Tensor, ...] = ()
        self._stamp: tuple[int, ...] = ()

    # Engine

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        if self._asleep:
            raise RuntimeError("The engine is asleep or closed. Call wake() before generate().")
        check_request(prompt_tokens, plan, self.max_length)
        if not plan:
            return []
        loop = asyncio.get_running_loop()
        request = Request(list(prompt_tokens), plan, loop.create_future())
        self._waiting.append(request)
        self._driver.wake()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._withdraw(request)
            raise

    async def drain(self) -> None:
        self._drained = True
        while self._active:
            await asyncio.sleep(0)

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Weights are copied into the decoder. Sequences under way keep their cache."""
        if weights is not None:
            self._copy(weights)
        for sequence in self._active:
            sequence.drawn_by(self.version)
        self.version, self._drained = version, False
        if self._waiting:
            self._driver.wake()

    def sleep(self) -> None:
        if self.busy:
            raise RuntimeError("sleep() while requests are unanswered would lose them. Await them first.")
        self._forget()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        self._fail(RuntimeError("The engine was closed before this request was answered."))
        self._asleep = True

    # Steps

    async def _drive(self) -> None:
        """Takes waiting requests, waits for nothing, lets others run between steps; ends when no work is left."""
        while self._active or (self._waiting and not self._drained):
            self._advance()
            await asyncio.sleep(0)

    @torch.no_grad()
    def _advance(self) -> None:
        """One new token for every active sequence, after free rows were given to waiting ones."""
        running = len(self._active)
        admission = self._admit()
        logits = self._read(running, admission.fresh)
        if admission.sequences:
            logits = self._start(running, admission, logits)
        self._step += 1
        self.counts.steps += 1
        self.counts.tokens += len(self._active)
        self.counts.prompt_tokens += sum(len(self._active[row].request.tokens) for row in admission.fresh)
        self._collect(logits)

    def _read(self, running: int, fresh: Sequence[int]) -> Tensor:
        """Logits after the last token of each running row and after the prompt of each fresh one: in one pass over the
        weights, or in two where the first is a step of its own kind, by one kernel or recorded."""
        model, prompts = self._current(running), self._prompts(fresh) if fresh else None
        longest = self._step + max((len(one.request.tokens) - one.born for one in self._active[:running]), default=0)
        stepped = self._stepped(running, longest) if running else None
        if stepped is not None and prompts is None:
            return stepped
        if stepped is not None or not running:
            assert prompts is not None, "no step is taken without work"
            hidden = model(*prompts, prompts[1].ends)
        else:
            assert self._cache is not None
            # Idle rows fill the last kernel up, at once and not in every layer; what they write weighs nothing.
            whole = min(filled_up(running, kernel_rows()), self.slots) if self._reader is not self.model else running
            last, positions = self._newest(whole, longest)
            decode = Decode(self._cache, positions, longest)
            if prompts is None:
                hidden = model(last, decode)[:running]
            else:
                tokens, prefill = prompts
                read = torch.cat((torch.arange(running, device=self.device), whole + prefill.ends))
                hidden = model(torch.cat((last, tokens)), Joined(decode, prefill), read)
        logits: Tensor = model.head(hidden).float()
        return logits if stepped is None else torch.cat((stepped, logits))

    def _prompts(self, fresh: Sequence[int]) -> tuple[Tensor, Prefill]:
        """The prompts of these rows end to end, and where they are to be written."""
        assert self._cache is not None
        prompts = [self._active[row].request.tokens for row in fresh]
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        return tokens, Prefill(self._cache, fresh, [len(prompt) for prompt in prompts])

    def _newest(self, count: int, longest: int) -> tuple[Tensor, Tensor]:
        """The newest token of each row in front, and its position, the largest of a running row being longest - 1."""
        rows = self._rows
        assert rows is not None
        # An idle row is where a sequence ended: past `longest` and behind a window it would see nothing and write NaN,
        # and the next sequence there, for which that is masked, would read NaN.
        return rows.last[:count], (rows.prompt[:count] + rows.emitted[:count] - 1).clamp_(0, longest - 1)

    def _stepped(self, running: int, longest: int) -> Tensor | None:
        """Logits of the running rows by one kernel or a recorded step; None where there is neither."""
        cache = self._cache
        assert cache is not None
        if self._steps is not None:
            assert isinstance(cache, PageCache), type(cache)
            return self._steps.logits(cache, *self._newest(running, longest))
        if self._recorder is None:
            return None
        try:
            if self._recorded is None:
                self._recorded = RecordedSteps(self.model, cache, self._recorder(self.device))
            tokens, positions = self._newest(self._recorded.rows(running), longest)
            return self._recorded.logits(tokens, positions, running=running, longest=longest)
        except RuntimeError as error:
            log.warning("decoding goes on without CUDA graphs (rollout.cuda_graphs): one was recorded, but %s", error)
            self._recorder = self._recorded = None
            return None

    def _current(self, running: int) -> Decoder:
        """The model as it is now, laid out anew: whoever trains it may have written to its parameters, and replaced
        them while nothing ran."""
        if not running and self._recorded is not None and self._recorded.stale():
            self._recorded = None
        if self._lays_out:
            if not running:
                self._parameters = tuple(self.model.parameters())
            if (now := stamp(self._parameters)) != self._stamp:
                (self._reader, self._steps), self._stamp = laid_out(self.model), now
        return self._reader

    def _start(self, running: int, admission: Admission, logits: Tensor) -> Tensor:
        """Give admitted rows what they share with the row that holds their prompt; the logits of all active rows."""
        assert self._cache is not None and self._rows is not None
        for number, row in enumerate(admission.fresh, running):
            self._active[row].request.first = logits[number].clone()  # sampling writes into logits
        if admission.copies:
            sources, targets = zip(*admission.copies, strict=True)
            length = max(len(self._active[row].request.tokens) for row in sources)
            self._cache.copy(sources, targets, length)
        self._rows.start(running, admission.sequences)
        self._draw = Draw.of([sequence.sampling for sequence in self._active], self.device)
        if len(admission.fresh) < len(admission.sequences):
            first = [one.request.first for one in admission.sequences if one.request.first is not None]
            logits = torch.cat((logits[:running], torch.stack(first)))
        for sequence in admission.sequences:
            if sequence.request.admitted == len(sequence.request.plan):
                sequence.request.first = None
        return logits

    def _collect(self, logits: Tensor) -> None:
        """Sample, note what was sampled, and take out the rows that ended. `news` is the step's one wait for the device
        where no sequence begins or ends, and top-p is 1."""
        rows = self._rows
        assert rows is not None
        n = len(self._active)
        emitted = rows.emitted[:n]
        place = emitted[:, None].clone()
        uniform = rows.uniforms[:n].gather(1, place)[:, 0]
        tokens, logprobs = sample(logits, self._draw, uniform, emitted=emitted, ends=self._end_ids)
        rows.logprobs[:n].scatter_(1, place, logprobs[:, None])
        rows.last[:n] = tokens
        emitted += 1
        ended = torch.isin(tokens, self._end_ids)
        # 0: goes on, 1: length, 2: end token, 4 or more: the model has diverged.
        codes = (emitted >= rows.limit[:n]) + 2 * ended + 4 * ~logprobs.isfinite()
        news = torch.stack((codes, tokens)).tolist()
        finished: dict[int, tuple[Finish, str | None]] = {}
        for row, (sequence, code, token) in enumerate(zip(self._active, *news, strict=True)):
            if code >= 4:
                raise FloatingPointError("A sampled log-prob is not finite: the model's weights or logits overflowed.")
            sequence.tokens.append(token)
            # The text in front of a stop string that the newest token completed (or, at min_tokens, any token so far).
            asked = code < 2 and sequence.sampling.stop
            stopped = text_before_stop(self._text, sequence.tokens, sequence.sampling) if asked else None
            if stopped is not None:
                finished[row] = Finish.STOP, stopped
            elif code:
                finished[row] = (Finish.EOS if code >= 2 else Finish.LENGTH), None
        if finished:
            self._complete(finished)
            self._remove(finished)

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _complete(self, finished: Mapping[int, tuple[Finish, str | None]]) -> None:
        """Answer for these rows: how each ended, and its text where a stop string cut it."""
        assert self._rows is not None
        sequences = [self._active[row] for row in finished]
        found = self._rows.logprobs_of(list(finished), max(len(sequence.tokens) for sequence in sequences))
        for sequence, logprobs, (finish, text) in zip(sequences, found, finished.values(), strict=True):
            tokens, request = sequence.tokens, sequence.request
            request.done[sequence.member] = Completion(
                tokens=tuple(tokens),
                logprobs=tuple(logprobs[: len(tokens)]),
                versions=tuple(sequence.drawn_by(self.version)),
                text=self._text(tokens[:-1] if finish is Finish.EOS else tokens) if text is None else text,
                finish=finish,
            )
            if len(request.done) == len(request.plan) and not request.future.done():
                request.future.set_result([request.done[member] for member in range(len(request.plan))])

    # Rows

    def _admit(self) -> Admission:
        """Give free rows to waiting requests, first come first served; none while weights are awaited."""
        base, budget = len(self._active), self.prefill_tokens
        new = Admission()
        holders = {
            id(sequence.request): row for row, sequence in enumerate(self._active) if sequence.version == self.version
        }
        while self._waiting and not self._drained and (room := self.slots - base - len(new.sequences)):
            request = self._waiting[0]
            holder = holders.get(id(request)) if request.first is not None else None
            if holder is None:
                if new.fresh and len(request.tokens) > budget:
                    break
                budget -= len(request.tokens)
                holder = base + len(new.sequences)
                new.fresh.append(holder)
            for member in range(request.admitted, min(request.admitted + room, len(request.plan))):
                row = base + len(new.sequences)
                if row != holder:
                    new.copies.append((holder, row))
                limit = min(request.plan[member].max_tokens, self.max_length - len(request.tokens))
                new.sequences.append(Active(request, member, limit, self._step, self.version))
                request.admitted += 1
            if request.admitted == len(request.plan):
                self._waiting.popleft()
        if new.sequences:
            self._make_room(new.sequences)
            self._active += new.sequences
        return new

    def _make_room(self, admitted: Sequence[Active]) -> None:
        answer = max(sequence.limit for sequence in admitted)
        total = max(len(sequence.request.tokens) + sequence.limit for sequence in admitted)
        total, answer = (-(-size // LENGTH_STEP) * LENGTH_STEP for size in (total, answer))
        config = self.model.config
        if self._cache is None or not (self._active or self._precision is self.model.dtype):
            self._precision = self.model.dtype
            self._cache = make_cache(config, self.slots, total, dtype=self._precision, device=self.device)
        elif self._cache.length < total:
            self._cache, self._recorded = self._cache.grown(config, total), None
        if self._rows is None:
            self._rows = Rows(self.slots, answer, self.device)
        elif self._rows.length < answer:
            self._rows = self._rows.grown(answer)

    def _remove(self, gone: Collection[int]) -> None:
        """Free these rows and close the gaps with the last ones."""
        kept = len(self._active) - len(gone)
        gaps = sorted(row for row in gone if row < kept)
        movers = [row for row in range(kept, len(self._active)) if row not in gone]
        if gaps:
            assert self._cache is not None and self._rows is not None
            length = max(len(self._active[row].request.tokens) + self._step - self._active[row].born for row in movers)
            self._cache.move(movers, gaps, length)
            self._rows.move(movers, gaps)
            for gap, mover in zip(gaps, movers, strict=True):
                self._active[gap] = self._active[mover]
        del self._active[kept:]
        self._draw = Draw.of([sequence.sampling for sequence in self._active], self.device)

    def _withdraw(self, request: Request) -> None:
        """A caller gave up: its rows are free from now on."""
        if request in self._waiting:
            self._waiting.remove(request)
        rows = [row for row, sequence in enumerate(self._active) if sequence.request is request]
        if rows:
            self._remove(rows)

    def _fail(self, error: BaseException | None) -> None:
        """Give every caller the error, or cancel them for None, and start from nothing."""
        requests = dict.fromkeys((*self._waiting, *(sequence.request for sequence in self._active)))
        self._waiting.clear()
        self._active.clear()
        self._forget()
        for request in requests:
            if not request.future.done():
                request.future.cancel() if error is None else request.future.set_exception(error)

    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        if self.model.lora is not None:
            raise ValueError("Published weights have adapters merged in, this model has some too: merge_lora(model).")
        own = dict(self.model.named_parameters())
        parts = layout(self.model.config, self.model.head_kind, own)
        check_names(weights, parts)
        for name, part in parts.items():
            fill(own[part.ours], part, weights[name], name=name)
        check_held(dict(self.model.hf_tensors()), weights)
