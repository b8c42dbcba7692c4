"""An episode's turns go on from the caches of the turns before, with the bits that they would have without."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import OBSERVED, STOP, Letters, episodes, played, prompts

from plaudit.models.decoder import Decoder
from plaudit.rollout import native
from plaudit.rollout.native import NativeEngine
from plaudit.types import Completion, Sampling


@pytest.fixture
def model(pairs: Any) -> Decoder:
    return pairs("llama")[0]  # type: ignore[no-any-return]


def several(count: int = 3) -> list[list[int]]:
    """Questions, each twice: two samples of a prompt."""
    return [question for question in prompts(*range(4, 4 + count)) for _ in range(2)]


def longest_of(found: Sequence[Sequence[Completion]]) -> int:
    return max(len(turns) for turns in found)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_logprobs_of_later_turns_equal_a_packed_pass_over_the_whole_episode(
    pairs: Any, letters: Letters, kind: str
) -> None:
    model, questions = pairs(kind)[0], several()
    found = episodes(NativeEngine(model, letters), questions)
    assert longest_of(found) >= 3
    for question, turns in zip(questions, found, strict=True):
        whole, places, logprobs = list(question), list[int](), list[float]()
        for number, turn in enumerate(turns):
            whole.extend(OBSERVED[number - 1] if number else [])
            places += range(len(whole), len(whole) + len(turn.tokens))
            logprobs.extend(turn.logprobs)
            whole.extend(turn.tokens)
        tokens = torch.tensor(whole)
        with torch.no_grad():
            logits = model.head(model(tokens, model.packed([len(whole)]))).float()
        own = logits.log_softmax(dim=-1)[torch.tensor(places) - 1].gather(1, tokens[places][:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), own, atol=1e-5, rtol=0)


def test_an_episode_has_the_same_bits_whatever_was_kept_and_beside_whatever(
    kernels: None, model: Decoder, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = several()
    engine = NativeEngine(model, letters, slots=64)
    found = episodes(engine, questions)
    assert engine.counts.prompt_tokens == sum({len(one): len(one) for one in questions}.values())  # each prompt once
    for slots, wait in ((2, 0), (3, 7)):
        assert episodes(NativeEngine(model, letters, slots=slots), questions, wait=wait) == found
    monkeypatch.setattr(native, "KEPT", 0)
    without = NativeEngine(model, letters, slots=64)
    assert episodes(without, questions) == found
    assert not without.decoding.kept.turns
    assert without.counts.prompt_tokens > engine.counts.prompt_tokens
    assert without.counts.steps > 2 * engine.counts.steps  # all tokens of each context are read again


def test_a_turn_reads_only_what_is_new(model: Decoder, letters: Letters) -> None:
    most = 0
    for question in prompts(30, 31, 32, 33, 34):
        engine = NativeEngine(model, letters)
        (turns,) = episodes(engine, [question])
        observed = sum(len(said) for said in OBSERVED[: len(turns) - 1])
        assert engine.counts.prompt_tokens == len(question)
        assert engine.counts.steps == sum(len(turn.tokens) for turn in turns) + observed
        most = max(most, len(turns))
    assert most > 2


def test_only_so_many_turns_are_kept_and_the_oldest_is_dropped(model: Decoder, letters: Letters) -> None:
    engine = NativeEngine(model, letters, slots=1)
    plan = [Sampling(seed=seed, max_tokens=9, stop=STOP, episode=seed, first=4) for seed in range(40)]
    (question,) = prompts(4)
    for one in plan:
        asyncio.run(engine.generate(question, [one]))
    assert list(engine.decoding.kept.turns) == [38, 39]


def test_another_first_prompt_is_computed_in_one_pass(model: Decoder, letters: Letters) -> None:
    """An episode whose template rewrites history: nothing of the kept cache is used."""
    engine, (question,) = NativeEngine(model, letters), prompts(8)
    one = Sampling(seed=3, max_tokens=9, stop=STOP, episode=1, first=8)
    (turn,) = asyncio.run(engine.generate(question, [one]))
    context = [*question, *turn.tokens, 40, 41]
    rewritten = replace(one, seed=4, first=len(context))
    found = asyncio.run(engine.generate(context, [rewritten]))
    assert found == asyncio.run(NativeEngine(model, letters).generate(context, [rewritten]))
    assert engine.counts.prompt_tokens == 8 + len(context)


def test_two_turns_of_one_number_at_once_and_a_cancelled_one(kernels: None, model: Decoder, letters: Letters) -> None:
    """Episodes of one number may be different ones: what is kept is used only for the tokens that it belongs to."""
    (one, other) = prompts(5, 6)

    async def both(engine: NativeEngine) -> list[list[Completion]]:
        given_up = asyncio.ensure_future(played(engine, one, 7))
        for _ in range(4):
            await asyncio.sleep(0)
        given_up.cancel()
        return await asyncio.gather(*(played(engine, question, 7) for question in (one, other, one)))

    found = asyncio.run(both(NativeEngine(model, letters, slots=2)))
    alone = [asyncio.run(played(NativeEngine(model, letters), question, 7)) for question in (one, other, one)]
    assert found == alone


def test_new_weights_between_turns(pairs: Any, letters: Letters) -> None:
    """While other answers are under way, a kept cache stays, as theirs does; else it is dropped."""
    model = copy.deepcopy(pairs("llama")[0])
    engine, (question,) = NativeEngine(model, letters), prompts(6)
    first = Sampling(seed=1, max_tokens=9, stop=STOP, episode=1, first=6)

    async def turns(*, busy: bool) -> bool:
        await engine.generate(question, [first])
        other = asyncio.ensure_future(engine.generate([1, 2], [Sampling(max_tokens=20)])) if busy else None
        for _ in range(3):
            await asyncio.sleep(0)
        engine.load(None, engine.version + 1)
        kept = bool(engine.decoding.kept.turns)
        if other is not None:
            await other
        return kept

    assert asyncio.run(turns(busy=True))
    assert not asyncio.run(turns(busy=False))
    engine.sleep()
    assert not engine.decoding.kept.turns


def test_a_turn_without_its_first_tokens_is_refused(model: Decoder, letters: Letters) -> None:
    for first in (0, 4):
        with pytest.raises(ValueError, match="from 1 to the 3 tokens"):
            asyncio.run(NativeEngine(model, letters).generate([1, 2, 3], [Sampling(episode=1, first=first)]))
