import asyncio
import copy
from typing import Any

import pytest
import torch
from tiny_models import Letters, greedy_reference, prompts, refuses_shaky_weights

from plaudit.models.decoder import Decoder
from plaudit.rollout.engine import generate_all
from plaudit.rollout.native import NativeEngine
from plaudit.types import Completion, Finish, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=15)


@torch.no_grad()
def rescored(model: Decoder, prompt: list[int], completion: Completion, sampling: Sampling) -> torch.Tensor:
    """Log-probs of the completion's tokens from one packed pass over prompt and answer."""
    tokens = torch.tensor([*prompt, *completion.tokens])
    logits = model.head(model(tokens, model.packed([len(tokens)]))).float() / (sampling.temperature or 1.0)
    logp = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
    return logp.gather(1, tokens[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "mistral"])
def test_greedy_tokens_are_those_of_transformers(pairs: Any, letters: Letters, kind: str) -> None:
    model, reference = pairs(kind)
    questions = prompts(1, 9, 4, 30, 2, 17, 5)
    engine = NativeEngine(model, letters, slots=3)  # fewer than requests: rows are refilled and moved
    answers = generate_all(engine, questions, [GREEDY])
    for question, [answer] in zip(questions, answers, strict=True):
        assert answer.tokens == greedy_reference(reference, question, 15)
        assert answer.finish is Finish.LENGTH
        assert len(set(answer.tokens)) > 3  # a model that repeats one token would prove nothing


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_logprobs_equal_a_packed_pass(pairs: Any, letters: Letters, kind: str) -> None:
    model, _ = pairs(kind)
    plan = [
        Sampling(seed=1, max_tokens=12),
        Sampling(seed=2, max_tokens=30, temperature=0.6),
        Sampling(seed=3, max_tokens=3, temperature=1.7),
        Sampling(seed=4, max_tokens=21),
        GREEDY,
    ]
    questions = prompts(6, 2, 11, 3)
    for slots in (2, 7, 64):  # groups larger than the slots, cut by them, and all at once
        answers = generate_all(NativeEngine(model, letters, slots=slots), questions, plan)
        for question, group in zip(questions, answers, strict=True):
            for sampling, answer in zip(plan, group, strict=True):
                assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions) == sampling.max_tokens
                torch.testing.assert_close(
                    torch.tensor(answer.logprobs), rescored(model, question, answer, sampling), atol=1e-5, rtol=0
                )


def test_what_is_sampled_depends_on_the_seed_and_not_on_the_others(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("llama")
    plan = [Sampling(seed=seed, max_tokens=9, top_k=20 * (seed % 2)) for seed in range(4)]
    questions = prompts(5, 8, 3)
    together = generate_all(NativeEngine(model, letters, slots=64), questions, plan)
    crowded = generate_all(NativeEngine(model, letters, slots=5), questions, plan)
    alone = [
        [generate_all(NativeEngine(model, letters), [question], [sampling])[0][0].tokens for sampling in plan]
        for question in questions
    ]
    assert [[answer.tokens for answer in group] for group in together] == alone
    assert [[answer.tokens for answer in group] for group in crowded] == alone
    assert len({answer.tokens for answer in together[0]}) == 4


def test_the_same_requests_give_the_same_bits(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("gpt2")
    plan = [Sampling(seed=seed, max_tokens=5 + 7 * seed) for seed in range(3)]
    runs = [generate_all(NativeEngine(model, letters, slots=4), prompts(4, 9, 2), plan) for _ in range(2)]
    assert runs[0] == runs[1]
    engine = NativeEngine(model, letters, slots=4)
    generate_all(engine, prompts(60), [Sampling(max_tokens=30)])  # a used engine is no different
    assert generate_all(engine, prompts(4, 9, 2), plan) == runs[0]


def test_an_end_token_ends_the_answer_and_is_kept(pairs: Any, letters: Letters) -> None:
    model, reference = pairs("llama")
    [question] = prompts(6)
    whole = greedy_reference(reference, question, 15)
    end = whole[4]
    first = whole.index(end)
    engine = NativeEngine(model, letters, ends=[end])
    [[answer]] = generate_all(engine, [question], [GREEDY])
    assert answer.tokens == whole[: first + 1] and answer.finish is Finish.EOS
    assert answer.text == letters.decode(list(whole[:first]), skip_special_tokens=True)


def test_no_end_token_before_min_tokens(pairs: Any, letters: Letters) -> None:
    model, reference = pairs("llama")
    [question] = prompts(6)
    end = greedy_reference(reference, question, 1)[0]
    engine = NativeEngine(model, letters, ends=[end])
    plan = [Sampling(temperature=0.0, max_tokens=8, min_tokens=least) for least in (0, 3)]
    [[free, bound]] = generate_all(engine, [question], plan)
    assert free.tokens == (end,) and free.text == ""
    assert end not in bound.tokens[:3] and len(bound.tokens) >= 4


def test_stop_strings_cut_the_text_and_keep_the_tokens(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("gpt2")
    [question] = prompts(6)
    engine = NativeEngine(model, letters)
    [[free]] = generate_all(engine, [question], [GREEDY])
    assert free.text == letters.decode(list(free.tokens), skip_special_tokens=True), "its last token too"
    stop = free.text[5:8]
    place = free.text.index(stop)
    plan = [
        Sampling(temperature=0.0, max_tokens=15, stop=("never", stop)),
        Sampling(temperature=0.0, max_tokens=15, stop=(stop,), min_tokens=12),
        Sampling(temperature=0.0, max_tokens=place + 3, stop=(stop,)),
        Sampling(temperature=0.0, max_tokens=15, stop=("!",)),
    ]
    [[stopped, late, at_limit, unstopped]] = generate_all(engine, [question], plan)
    assert (stopped.text, stopped.finish) == (free.text[:place], Finish.STOP)
    assert stopped.tokens == free.tokens[: place + 3]
    assert (late.text, late.finish, len(late.tokens)) == (free.text[:place], Finish.STOP, 12)
    assert at_limit.finish is Finish.STOP
    assert (unstopped.tokens, unstopped.text, unstopped.finish) == (free.tokens, free.text, Finish.LENGTH)


def test_an_answer_never_passes_the_context(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("gpt2")  # 96 learned positions
    [full, long] = prompts(95, 90)
    answers = generate_all(NativeEngine(model, letters), [full, long], [Sampling(max_tokens=50)])
    assert [len(group[0].tokens) for group in answers] == [1, 6]
    assert answers[1][0].finish is Finish.LENGTH
    with pytest.raises(ValueError, match=r"96 .* 96"):
        asyncio.run(NativeEngine(model, letters).generate(prompts(96)[0], [GREEDY]))
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(NativeEngine(model, letters).generate([], [GREEDY]))


def test_prompts_beyond_the_prefill_budget_wait_their_turn(pairs: Any, letters: Letters) -> None:
    model, reference = pairs("llama")
    questions = prompts(20, 3, 25, 4)
    answers = generate_all(NativeEngine(model, letters, prefill_tokens=10), questions, [GREEDY])
    assert [group[0].tokens for group in answers] == [greedy_reference(reference, q, 15) for q in questions]


def test_tokens_carry_the_version_that_sampled_them(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("llama")
    engine = NativeEngine(model, letters, slots=1)

    async def run() -> list[Completion]:
        task = asyncio.create_task(engine.generate(prompts(4)[0], [GREEDY, GREEDY]))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.load(None, 7)
        return await task

    first, second = asyncio.run(run())
    assert sorted(set(first.versions)) == [0, 7] and first.versions == tuple(sorted(first.versions))
    assert set(second.versions) == {7}
    assert first.tokens == second.tokens  # the weights were the same


def test_loaded_weights_are_the_ones_that_answer(pairs: Any, letters: Letters) -> None:
    native, reference = pairs("llama")
    other = Decoder(native.config)
    other.initialise(5)
    engine = NativeEngine(other, letters)
    questions = prompts(6, 3)
    expected = [greedy_reference(reference, question, 15) for question in questions]
    assert [group[0].tokens for group in generate_all(engine, questions, [GREEDY])] != expected
    engine.load(dict(native.hf_tensors()), 1)
    assert [group[0].tokens for group in generate_all(engine, questions, [GREEDY])] == expected
    with pytest.raises(ValueError, match="missing"):
        engine.load({}, 2)


def test_an_engine_that_does_not_hold_what_it_was_given_says_so(pairs: Any, letters: Letters) -> None:
    refuses_shaky_weights(NativeEngine(copy.deepcopy(pairs("llama")[0]), letters))


def test_a_model_may_change_its_precision_between_requests(pairs: Any, letters: Letters) -> None:
    model = copy.deepcopy(pairs("llama")[0])
    engine = NativeEngine(model, letters, slots=2)
    plan = [Sampling(max_tokens=5, temperature=0.0)]
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        (found,) = asyncio.run(engine.generate([5, 6, 7], plan))
        (fresh,) = asyncio.run(NativeEngine(model, letters, slots=2).generate([5, 6, 7], plan))
        assert found == fresh


def test_a_sample_admitted_after_new_weights_owes_nothing_to_the_old(pairs: Any, letters: Letters) -> None:
    native, _ = pairs("llama")
    model = Decoder(native.config)
    model.initialise(5)
    engine = NativeEngine(model, letters, slots=2)
    [question] = prompts(6)
    plan = [Sampling(max_tokens=4), Sampling(max_tokens=15), Sampling(max_tokens=8, seed=3), Sampling(max_tokens=8)]

    async def run() -> list[Completion]:
        task = asyncio.create_task(engine.generate(question, plan))
        for _ in range(4):
            await asyncio.sleep(0)
        engine.load(dict(native.hf_tensors()), 1)  # the first two are under way, the second outlives the first
        return await task

    answers = asyncio.run(run())
    assert set(answers[1].versions) == {0, 1}
    for sampling, answer in list(zip(plan, answers, strict=True))[2:]:
        assert set(answer.versions) == {1}
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), rescored(native, question, answer, sampling), atol=1e-5, rtol=0
        )


def test_an_error_reaches_everyone_and_the_engine_recovers(pairs: Any, letters: Letters) -> None:
    native, _ = pairs("gpt2")
    model = Decoder(native.config)
    model.load_state_dict(native.state_dict())
    engine = NativeEngine(model, letters, slots=2)
    expected = generate_all(engine, prompts(5, 3, 2), [GREEDY])
    model.norm.weight.data[0] = float("nan")

    async def run() -> list[Any]:
        plan = [GREEDY, Sampling(), Sampling(top_k=5)]
        requests = (engine.generate(question, plan) for question in prompts(5, 3, 2))
        return await asyncio.gather(*requests, return_exceptions=True)

    assert [type(error) for error in asyncio.run(run())] == [FloatingPointError] * 3
    assert not engine.busy
    model.load_state_dict(native.state_dict())
    assert generate_all(engine, prompts(5, 3, 2), [GREEDY]) == expected


def test_a_cancelled_request_gives_its_rows_back(pairs: Any, letters: Letters) -> None:
    model, reference = pairs("llama")
    engine = NativeEngine(model, letters, slots=3)
    [first, second, third] = prompts(5, 7, 4)

    async def run() -> list[list[Completion]]:
        gone = asyncio.create_task(engine.generate(first, [Sampling(max_tokens=80), Sampling(max_tokens=80)]))
        stays = asyncio.create_task(engine.generate(second, [GREEDY]))
        waits = asyncio.create_task(engine.generate(third, [GREEDY]))
        for _ in range(4):
            await asyncio.sleep(0)
        gone.cancel()
        answers = await asyncio.gather(stays, waits)
        assert gone.cancelled()
        return answers

    answers = asyncio.run(run())
    assert [group[0].tokens for group in answers] == [greedy_reference(reference, q, 15) for q in (second, third)]

    async def alone() -> None:
        gone = asyncio.create_task(engine.generate(first, [Sampling(max_tokens=80)] * 5))
        for _ in range(4):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert not engine.busy  # neither the rows nor the samples that still waited are left

    asyncio.run(alone())


def test_sleep_and_close(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("gpt2")
    engine = NativeEngine(model, letters)
    before = generate_all(engine, prompts(4), [GREEDY])
    engine.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        asyncio.run(engine.generate([1], [GREEDY]))
    engine.wake()
    assert generate_all(engine, prompts(4), [GREEDY]) == before

    async def run() -> None:
        task = asyncio.create_task(engine.generate([1], [GREEDY]))
        await asyncio.sleep(0)
        assert engine.busy
        with pytest.raises(RuntimeError, match="unanswered"):
            engine.sleep()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task

    asyncio.run(run())


def test_progress_counts_prompts(pairs: Any, letters: Letters) -> None:
    seen: list[tuple[int, int]] = []
    engine = NativeEngine(pairs("gpt2")[0], letters, slots=1)
    generate_all(engine, prompts(2, 3, 4), [GREEDY], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"stop": ("",)}]
)
def test_settings_that_mean_nothing_are_refused(pairs: Any, letters: Letters, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        asyncio.run(NativeEngine(pairs("gpt2")[0], letters).generate([1], [Sampling(**wrong)]))
