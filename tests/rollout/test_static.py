import asyncio
from typing import Any

import pytest
import torch
from tiny_models import OPT, Letters, greedy_reference, prompts, refuses_shaky_weights, transformers_model

from plaudit.models.decoder import Decoder
from plaudit.models.fallback import Fallback
from plaudit.rollout import static
from plaudit.rollout.engine import generate_all
from plaudit.rollout.static import StaticEngine, WholeReader, cache_agrees
from plaudit.types import Finish, Sampling

SHAPES: dict[str, dict[str, Any]] = {
    # Positions from the mask, given positions, no positions (ALiBi), and a cache that is no key-value cache.
    "opt": OPT,
    "gpt_neox": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def fallback(kind: str) -> Fallback:
    return Fallback(transformers_model(kind, **SHAPES[kind]), head="lm")


@pytest.mark.parametrize("kind", SHAPES)
def test_answers_are_those_of_transformers_and_of_a_packed_pass(letters: Letters, kind: str) -> None:
    model = fallback(kind)
    assert cache_agrees(model) == (kind != "mamba")
    plan = [Sampling(temperature=0.0, max_tokens=8), Sampling(temperature=0.7, max_tokens=12, seed=5)]
    questions = prompts(3, 9, 1)
    answers = generate_all(StaticEngine(model, letters, slots=4), questions, plan)
    for question, [greedy, sampled] in zip(questions, answers, strict=True):
        assert greedy.tokens == greedy_reference(model.inner, question, 8)
        assert greedy.finish is Finish.LENGTH
        for sampling, answer in zip(plan, (greedy, sampled), strict=True):
            heads = [question + list(answer.tokens[:count]) for count in range(len(answer.tokens))]
            logp = (WholeReader(model)(heads) / (sampling.temperature or 1.0)).log_softmax(dim=-1)
            expected = logp.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def test_a_row_that_has_ended_does_not_run_out_of_the_context(letters: Letters) -> None:
    model = fallback("opt")  # 64 positions
    full, short = prompts(63, 2)
    [[last], [long]] = generate_all(StaticEngine(model, letters), [full, short], [Sampling(temperature=0.0)])
    assert len(last.tokens) == 1 and last.tokens == greedy_reference(model.inner, full, 1)
    assert len(long.tokens) == 62


def test_end_tokens_stop_strings_versions_and_weights(letters: Letters) -> None:
    model = fallback("gpt_neox")
    [question] = prompts(4)
    engine = StaticEngine(model, letters)
    [[free]] = generate_all(engine, [question], [Sampling(temperature=0.0, max_tokens=10)])
    engine.load(None, 3)
    stop = free.text[4:6]
    [[stopped]] = generate_all(engine, [question], [Sampling(temperature=0.0, max_tokens=10, stop=(stop,))])
    assert (stopped.text, stopped.finish) == (free.text[: free.text.index(stop)], Finish.STOP)
    assert set(stopped.versions) == {3}
    end = free.tokens[3]
    [[ended]] = generate_all(
        StaticEngine(model, letters, ends=[end]), [question], [Sampling(temperature=0.0, max_tokens=10)]
    )
    assert ended.tokens == free.tokens[: free.tokens.index(end) + 1] and ended.finish is Finish.EOS
    engine.load({name: torch.zeros_like(tensor) for name, tensor in model.hf_tensors()}, 4)
    [[uniform]] = generate_all(engine, [question], [Sampling(max_tokens=2)])
    assert uniform.logprobs == pytest.approx([-torch.tensor(300.0).log().item()] * 2)


def test_an_engine_that_does_not_hold_what_it_was_given_says_so(letters: Letters) -> None:
    refuses_shaky_weights(StaticEngine(fallback("opt"), letters))


def test_an_error_reaches_everyone_and_a_cancelled_request_is_dropped(letters: Letters) -> None:
    model = fallback("opt")
    engine = StaticEngine(model, letters, slots=1)

    async def run() -> None:
        gone = asyncio.create_task(engine.generate([1, 2], [Sampling(max_tokens=60)]))
        stays = asyncio.create_task(engine.generate([3], [Sampling(max_tokens=2)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        assert len((await stays)[0].tokens) == 2
        with torch.no_grad():
            model.head.linear.weight[5] = float("nan")  # type: ignore[union-attr, operator]
        both = (engine.generate([token], [Sampling()]) for token in (1, 2))
        errors = await asyncio.gather(*both, return_exceptions=True)
        assert [type(error) for error in errors] == [FloatingPointError] * 2

    asyncio.run(run())
    assert not engine.busy


def test_a_native_decoder_is_refused(pairs: Any, letters: Letters) -> None:
    model, _ = pairs("gpt2")
    assert isinstance(model, Decoder)
    with pytest.raises(TypeError, match="NativeEngine"):
        StaticEngine(model, letters)


def test_answers_are_the_same_from_fewer_slots(letters: Letters, monkeypatch: Any, caplog: Any) -> None:
    """Memory runs out in the middle of three answers: they are read again, two and one at once."""
    questions, plan = prompts(3, 5, 4), [Sampling(seed=1, max_tokens=6)]
    expected = generate_all(StaticEngine(fallback("opt"), letters, slots=3), questions, plan)
    engine, calls, original = StaticEngine(fallback("opt"), letters, slots=3), list[int](), static.sample

    def drawn(logits: torch.Tensor, *given: Any, **named: Any) -> Any:
        calls.append(len(logits))
        if len(calls) > 3 and len(logits) > 2:
            torch.empty(1 << 55, dtype=torch.uint8)
        return original(logits, *given, **named)

    monkeypatch.setattr(static, "sample", drawn)
    found = generate_all(engine, questions, plan)
    assert [[one.tokens for one in answers] for answers in found] == [[a.tokens for a in b] for b in expected]
    assert [[len(one.logprobs) for one in answers] for answers in found] == [[6], [6], [6]]
    assert engine.slots == 1
    assert "3 answers" in caplog.text and "rollout.slots" in caplog.text
