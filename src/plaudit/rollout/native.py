"""The native engine: generation in-process on the learner's own decoder, so that sampler and learner never disagree.

    generate -> waiting drafts -> admit (prompt computed once, into free rows) -> [decode, sample]* -> Completion
    an episode's turn -> its cache is kept -> the next turn goes on from it: what is new is read a token a step

Continuous batching: rows of finished sequences are refilled at the next step. Active sequences always fill the first n
rows of the table (`decode/table.py`), so that empty rows cost no work. One asyncio task takes the steps while there is
work (`queued.py`). If free rows admit only some of a prompt's samples, the later ones copy its cache from a sibling
that still runs. Without such a sibling, or after new weights, the prompt is computed again. `decode/forward.py`
computes the logits.

A later turn of an episode is admitted before other drafts. If its cache was dropped, or is on a lost worker, the first
prompt is computed again, and all later tokens a step each, as the first time: bits do not depend on what was kept.
Left out: paging, chunked prefill, speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.models.decoder import Decoder
from plaudit.rollout.decode.decoding import Admission, Decoding
from plaudit.rollout.decode.graphs import Record
from plaudit.rollout.decode.table import Table
from plaudit.rollout.queued import DIVERGED, Draft, QueuedEngine
from plaudit.rollout.sampler import sample
from plaudit.rollout.settings import KEPT
from plaudit.rollout.text import TextDecoder, end_tokens
from plaudit.runtime.memory import memory_tried
from plaudit.types import Finish, Sampling


@dataclass(slots=True)
class Counts:
    """Work of an engine so far. Active rows get a token per step: tokens / steps is the mean number of active rows."""

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    """Tokens of computed prompts; a prompt that several samples share counts once."""


class NativeEngine(QueuedEngine):
    """An `Engine` on a `Decoder` whose parameters it shares with the learner.

    slots: sequences decoded at once. max_length: most tokens of prompt and answer together, the model's positions by
    default; the KV cache is only as long as the requests need. prefill_tokens: most prompt tokens of one pass; a longer
    prompt has its own pass. recorder: as in `Forward`. decoding: replaces the engine's own `Decoding`, if several
    processes share the model (`led.py`).
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
        decoding: Decoding | None = None,
    ):
        positions = model.max_positions
        if max_length is not None and max_length > positions:
            raise ValueError(f"max_length={max_length} is above the model's {positions} positions: give at most those")
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1: the engine decodes one sequence or more")
        super().__init__(
            tokenizer,
            slots=slots,
            max_length=max_length or positions,
            ends=(*end_tokens(tokenizer), *model.special.eos) if ends is None else ends,
        )
        self.model, self.prefill_tokens = model, prefill_tokens
        self.counts = Counts()
        self.decoding = decoding or Decoding(model, recorder)
        self.forward = self.decoding.forward
        self._end_ids = torch.tensor(sorted(self.ends), dtype=torch.int64, device=model.device)
        self._forget()

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Copy weights into the decoder; for None, only take the new version. Running sequences keep their KV cache. So
        do finished turns while others run; if none does, the next turns are computed from their start."""
        if not self._queue.under_way:
            self.decoding.drop()
        if weights is not None:
            self.decoding.take(weights, version)
        self._loaded(version)

    @property
    def table(self) -> Table | None:
        return self.decoding.table

    def _forget(self) -> None:
        self._first: dict[int, Tensor] = {}  # id(prompt) -> logits (vocab,) for its waiting samples
        self.decoding.forget()

    def _withdraw(self, drafts: Collection[Draft]) -> None:
        active = self.table.drafts if self.table else []
        self.decoding.remove([row for row, draft in enumerate(active) if draft in drafts])

    def _advance(self) -> None:
        with memory_tried() as failed:
            self._step()
        if failed:
            self._begin_again(self._queue.under_way)

    @torch.no_grad()
    def _step(self) -> None:
        """Give free rows to waiting drafts, then every active draft a new token."""
        running = self.decoding.running
        admission = self._admit(running)
        table, logits = self.decoding.logits(admission, self.slots)
        if admission.drafts:
            logits = self._begun(table, running + admission.resumed, admission, logits)
        self.counts.steps += 1
        self.counts.tokens += len(table.drafts)
        self.counts.prompt_tokens += sum(len(table.drafts[row].prompt) for row in admission.fresh)
        self._collect(table, logits)

    def _draft(self, prompt: list[int], sampling: Sampling, limit: int) -> Draft:
        if sampling.episode is None:
            return super()._draft(prompt, sampling, limit)
        first = prompt[: sampling.first]
        same = next((draft.prompt for draft in self._queue.unanswered if draft.prompt == first), first)
        return Draft(same, sampling, limit, further=prompt[sampling.first :])

    def _admit(self, running: int) -> Admission:
        """Give free rows to waiting drafts, in order and within prefill_tokens; to none while the queue is drained."""
        budget, new, waiting = self.prefill_tokens, Admission(), self._queue.waiting
        active = self.table.drafts if self.table else []
        holders = {
            id(draft.prompt): row
            for row, draft in enumerate(active)
            if not draft.further and draft.begun_by(self.version) and id(draft.prompt) in self._first
        }
        resumed = set[int | None]()
        while self._queue.open and (row := running + len(new.drafts)) < self.slots:
            prompt, episode = waiting[0].prompt, waiting[0].sampling.episode
            if episode not in resumed and self.decoding.kept.fits(waiting[0]):
                if len(resumed) < len(new.drafts):
                    break  # the first of the next step: resumed rows come first
                resumed.add(episode)
            elif (holder := holders.get(id(prompt))) is not None:
                new.copies.append((holder, row))
            elif new.fresh and len(prompt) > budget:
                break
            else:
                budget -= len(prompt)
                holders[id(prompt)] = row
                new.fresh.append(row)
            new.drafts.append(waiting.popleft())
        new.resumed = len(resumed)
        return new

    def _begun(self, table: Table, running: int, admission: Admission, logits: Tensor) -> Tensor:
        """Return a row of logits per active draft, copied for drafts of one prompt and kept for those that wait.
        `running`: rows whose token a step has read."""
        prompts = [id(table.drafts[row].prompt) for row in admission.fresh]
        first = self._first | dict(zip(prompts, logits[running:], strict=True))
        waits = next((id(draft.prompt) for draft in self._queue.waiting if not draft.further), 0)
        self._first = {waits: first[waits].clone()} if waits in first else {}  # sampling writes into logits
        if admission.copies:
            begun = [first[id(one.prompt)] for one in admission.drafts[admission.resumed :]]
            logits = torch.cat((logits[:running], torch.stack(begun)))
        return logits

    def _collect(self, table: Table, logits: Tensor) -> None:
        """Sample a token for each row and store it, or the next one of its prompt; answer and remove ended rows. Raises
        FloatingPointError for a log-prob that is not finite. If no row begins or ends and top-p is 1, the host waits
        for the device once."""
        rows, n = table.rows, len(table.drafts)
        emitted = rows.emitted[:n]
        place = emitted[:, None].clone()
        uniform = rows.uniforms[:n].gather(1, place)[:, 0]
        tokens, logprobs = sample(logits, table.draw, uniform, emitted=emitted, ends=self._end_ids)
        rows.logprobs[:n].scatter_(1, place, logprobs[:, None])
        known = {row: token for row, draft in enumerate(table.drafts) if (token := draft.given) is not None}
        if known:
            tokens[torch.tensor([*known], device=tokens.device)] = torch.tensor([*known.values()], device=tokens.device)
        self.decoding.drawn(tokens, list(known))
        ended = torch.isin(tokens, self._end_ids)
        # 0: the sequence continues, 1: length limit, 2: end token, 4 or more: the model has diverged.
        codes = (emitted >= rows.limit[:n]) + 2 * ended + 4 * ~logprobs.isfinite()
        news = torch.stack((codes, tokens)).tolist()
        finished: dict[int, tuple[Finish, str]] = {}
        for row, (draft, code, token) in enumerate(zip(table.drafts, *news, strict=True)):
            if code >= 4:
                raise FloatingPointError(DIVERGED)
            if row in known:
                draft.read += 1
                continue
            draft.tokens.append(token)
            if code or draft.sampling.stop:
                ending = self._ending(draft, ended=code >= 2, full=code == 1)
                finished |= {} if ending is None else {row: ending}
        if finished:
            longest = max(len(table.drafts[row].tokens) for row in finished)
            for row, found in zip(finished, rows.logprobs_of(list(finished), longest), strict=True):
                draft = table.drafts[row]
                draft.logprobs = found[: len(draft.tokens)]
                self._answer(draft, *finished[row])
            turns = [row for row in finished if table.drafts[row].sampling.episode is not None]
            if turns:
                self.decoding.keep(turns, KEPT * self.slots)
            self.decoding.remove(finished)
