"""Figures of policies and judges: perplexity, KL, preferences, generation, comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from plaudit.batch import Batch
from plaudit.evaluate.comparison import comparison_figures, side_by_side
from plaudit.evaluate.generation import distinct, generation_figures, pass_figures, reward_figures
from plaudit.evaluate.judge import Judge
from plaudit.evaluate.kl import kl_figures
from plaudit.evaluate.perplexity import perplexity
from plaudit.evaluate.policy import Answer, Answers, Policy, finished, scored
from plaudit.evaluate.preference import implied_margins, judge_margins, margin_figures
from plaudit.evaluate.settings import SamplingSettings
from plaudit.evaluate.statistics import mean_interval, share_interval
from plaudit.models.load import fresh_model, load_tokenizer
from plaudit.rewards.functions import FunctionReward
from plaudit.types import Completion, Finish, Prompt, Row, Score

if TYPE_CHECKING:
    from conftest import Task


def row(tokens: list[int], prompt: int, group: int = 0) -> Row:
    return Row(tokens=tuple(tokens), trainable=tuple(place >= prompt for place in range(len(tokens))), group=group)


def answer(text: str, value: float | None = None, *, tokens: int = 3, finish: Finish = Finish.EOS) -> Answer:
    completion = Completion(
        tokens=(5,) * tokens, logprobs=(-1.0,) * tokens, versions=(0,) * tokens, text=text, finish=finish
    )
    score = Score(value=value, reason=None if value is not None else "broken")
    return Answer(prompt=Prompt(id="p", text="p", tokens=(4,)), completion=completion, scores={"gold": score})


def prompts(policy: Policy, *texts: str) -> list[Prompt]:
    return [Prompt(id=text, text=text, tokens=tuple(policy.tokenizer(text)["input_ids"])) for text in texts]


def test_a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large(task: Task) -> None:
    policy = task.policy()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    found = perplexity(policy, [row([5, 6, 7, 8], 1), row([9, 10, 11], 2, group=1)])
    assert found["perplexity"].value == pytest.approx(policy.model.vocab_size, rel=1e-5)
    # every token is equally surprising, so there is no spread
    assert found["perplexity"].high == pytest.approx(policy.model.vocab_size, rel=1e-4)


def test_perplexity_is_the_exponential_of_transformers_loss(task: Task) -> None:
    from transformers import AutoModelForCausalLM

    policy, theirs = task.policy(), AutoModelForCausalLM.from_pretrained(task.first).eval()
    rows = [row([5, 60, 7, 8, 90], 2, group=4), row([9, 10, 11], 1, group=5), row([30, 31], 1, group=6)]
    total = count = 0.0
    for one in rows:
        labels = [token if trained else -100 for token, trained in zip(one.tokens, one.trainable, strict=True)]
        with torch.no_grad():
            loss = theirs(input_ids=torch.tensor([one.tokens]), labels=torch.tensor([labels])).loss
        total, count = total + float(loss) * sum(one.trainable), count + sum(one.trainable)
    for budget in (4, 10_000):  # row by row, and all at once
        found = perplexity(policy, rows, token_budget=budget)
        assert found["perplexity"].value == pytest.approx(math.exp(total / count), rel=1e-5)
        assert found["nll"].count == 3


def test_the_turns_of_a_chat_are_one_observation(task: Task) -> None:
    """Counted one by one, which depend on each other, they made the interval too narrow."""
    policy = task.policy()
    turns = [row([5, 60, 7], 2), row([5, 60, 7, 8, 90], 4), row([9, 10, 11], 1, group=3)]
    whole = Row(tokens=(5, 60, 7, 8, 90), trainable=(False, False, True, False, True))
    found, expected = (perplexity(policy, rows)["nll"] for rows in (turns, [whole, turns[-1]]))
    assert (found.count, found.value) == (2, pytest.approx(expected.value, rel=1e-5))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-3)


def test_answers_depend_on_seed_and_place_alone(task: Task) -> None:
    policy = task.policy()
    asked = prompts(policy, "We saw it .", "The acting", "A film")
    narrow, wide = SamplingSettings(max_tokens=12, samples=2, slots=1), SamplingSettings(max_tokens=12, samples=2)
    one, other = policy.answers(asked, narrow, seed=4), policy.answers(asked, wide, seed=4)

    def drawn(answers: Answers) -> list[tuple[int, ...]]:
        return [one.completion.tokens for group in answers for one in group]

    assert drawn(one) == drawn(other)
    assert len(set(drawn(one))) == 6
    assert drawn(policy.answers(asked, wide, seed=5)) != drawn(one)
    assert len(set(drawn(policy.answers([asked[0]] * 4, wide, seed=4)))) == 8  # a prompt's place has its own stream


def test_kl_of_a_model_with_itself_is_zero(task: Task) -> None:
    policy, same = task.policy(), task.policy()
    answers = policy.answers(prompts(policy, "We saw", "The"), SamplingSettings(max_tokens=8), seed=0)
    for figure in kl_figures(policy, same, answers, temperature=1.0).values():
        assert (figure.value, figure.low, figure.high) == (0.0, 0.0, 0.0)


@pytest.mark.slow
def test_kl_of_a_policy_from_the_uniform_one_is_its_missing_entropy(task: Task) -> None:
    policy, uniform = task.policy(), task.policy()
    with torch.no_grad():
        for parameter in uniform.model.parameters():
            parameter.zero_()
    # KL(p || uniform) = log V - H(p) for the first token alone; p is the model's own distribution after the prompt.
    asked = prompts(policy, "We saw it .")
    answers = policy.answers(asked, SamplingSettings(max_tokens=1, samples=3000), seed=0)
    found = kl_figures(policy, uniform, answers, temperature=1.0)
    tokens = torch.tensor(asked[0].tokens)
    with torch.no_grad():
        logits = policy.model.head(policy.model(tokens, policy.model.packed([len(tokens)])))[-1]
    p = logits.softmax(-1)
    exact = math.log(policy.model.vocab_size) + float((p * p.log()).sum())
    assert exact > 0.2
    d = torch.tensor([one.logprob for group in answers for one in group]) + math.log(policy.model.vocab_size)
    assert found["kl"].value == pytest.approx(float(d.mean()), abs=1e-4)
    error = float(d.std()) / math.sqrt(3000)
    assert abs(found["kl"].value - exact) < 4 * error
    assert found["kl_k3"].value > 0
    assert found["kl/token"].value == pytest.approx(found["kl"].value)  # one token an answer


def test_no_kl_and_no_bound_of_one_is_below_zero(task: Task) -> None:
    """Of a reference so close that the mean of k1 is negative by chance for some answers."""
    policy, near, below = task.policy(), task.policy(), 0
    with torch.no_grad():
        for parameter in near.model.parameters():
            parameter.mul_(1.002)
    for seed in range(8):
        answers = policy.answers(prompts(policy, "We saw", "The", "A"), SamplingSettings(max_tokens=6), seed=seed)
        batch = Batch.of([row for group in answers for one in group for row in one.rows()])
        raw = float((policy.logprobs(batch) - near.logprobs(batch)).double().sum()) / 3
        found = kl_figures(policy, near, answers, temperature=1.0)
        assert found["kl"].value == pytest.approx(max(raw, 0.0), rel=1e-5)
        assert all(0 <= figure.low <= figure.value <= figure.high for figure in found.values())
        below += raw < 0
    assert 0 < below < 8


def test_kl_sums_over_an_answer_and_averages_over_tokens(task: Task) -> None:
    policy, other = task.policy(), Policy.load(task.second)
    answers = policy.answers(prompts(policy, "We saw", "The", "A"), SamplingSettings(max_tokens=9, samples=2), seed=0)
    found = kl_figures(policy, other, answers, temperature=1.0)
    batch = Batch.of([row for group in answers for one in group for row in one.rows()])
    d = (policy.logprobs(batch) - other.logprobs(batch)).split(batch.lengths.tolist())
    sums = [float(part.double().sum()) for part in d]
    tokens = [len(one.completion.tokens) for group in answers for one in group]
    assert found["kl"].value == pytest.approx(sum(sums) / 6, rel=1e-6)
    assert found["kl/token"].value == pytest.approx(sum(sums) / sum(tokens), rel=1e-6)
    assert found["kl"].count == 3  # prompts are independent, two answers to one are not


def test_other_vocabularies_are_refused(task: Task) -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    policy = task.policy()
    with pytest.raises(ValueError, match="vocabularies"):
        kl_figures(policy, Policy(policy.model, Other()), [[answer("x")]], temperature=1.0)
    with pytest.raises(ValueError, match="vocabularies"):
        implied_margins(policy, Policy(policy.model, Other()), [row([5, 6], 1), row([5, 7], 1)])


def test_margins_by_hand() -> None:
    found = margin_figures([2.0, -1.0, 0.0, 3.0], [0, 1, 2, 3])  # right, wrong, a tie, right
    assert found["accuracy"].value == pytest.approx(2.5 / 4)
    assert found["margin"].value == pytest.approx(1.0)


def test_pairs_of_one_prompt_count_as_one() -> None:
    # Prompt 7: right, right, wrong, a tie: 2.5 / 4, mean margin 1. Prompt 4: right, margin 3.
    found = margin_figures([2.0, 4.0, -2.0, 0.0, 3.0], [7, 7, 7, 7, 4])
    assert found["accuracy"] == share_interval([2.5 / 4, 1.0])
    assert found["margin"] == mean_interval([1.0, 3.0])


def test_a_judge_orders_pairs_by_its_score(task: Task) -> None:
    judge = Judge.load(task.judge)
    rows = [row([5, 6, 7], 1), row([5, 8], 1), row([9, 10], 1), row([9, 11, 12, 13], 1)]
    alone = [judge.of_sequences([one.tokens])[0] for one in rows]
    expected = [alone[0] - alone[1], alone[2] - alone[3]]
    assert judge_margins(judge, rows) == pytest.approx(expected, abs=1e-5)
    swapped = [rows[1], rows[0], rows[3], rows[2]]
    right, wrong = (margin_figures(judge_margins(judge, some), [0, 1])["accuracy"].value for some in (rows, swapped))
    assert right + wrong == pytest.approx(1.0)
    narrow = Judge(judge.model, judge.tokenizer, token_budget=1)
    assert judge_margins(narrow, rows) == pytest.approx(expected, abs=1e-5)


def test_a_judge_reads_other_vocabularies_as_text_and_ends_what_was_cut(task: Task) -> None:
    judge = Judge.load(task.judge)
    own = judge.tokenizer
    text = answer(" was superb .", finish=Finish.LENGTH)
    prompt = Prompt(id="p", text="The acting", tokens=(1, 2))

    class Foreign:
        def get_vocab(self) -> dict[str, int]:
            return {}

    scores = finished(judge.reward(Foreign()).score(prompt, [text.completion]))
    tokens = (*own("The acting")["input_ids"], *own(" was superb .")["input_ids"], own.eos_token_id)
    assert [score.value for score in scores] == pytest.approx(judge.of_sequences([tokens]))


def test_implied_margins_compare_log_ratios(task: Task) -> None:
    policy, reference = task.policy(), Policy.load(task.second)
    rows = [row([5, 6, 7], 1), row([5, 8], 1)]

    def logp(model: Policy, one: Row) -> float:
        return float(model.logprobs(Batch.of([one])).sum())

    ratios = [logp(policy, one) - logp(reference, one) for one in rows]
    assert implied_margins(policy, reference, rows) == pytest.approx([ratios[0] - ratios[1]], abs=1e-4)
    assert implied_margins(policy, policy, rows) == [0.0]


def test_distinct_by_hand() -> None:
    assert distinct(["a b a", "a b"], 1) == pytest.approx(2 / 5)
    assert distinct(["a b a", "a b"], 2) == pytest.approx(2 / 3)  # ab ba | ab
    assert distinct(["a"], 2) is None


def test_generation_figures_by_hand() -> None:
    answers = [[answer("a b", tokens=2), answer("a", tokens=4)], [answer("d", tokens=7, finish=Finish.LENGTH)]]
    found = generation_figures(answers)
    assert found["length"].value == pytest.approx(5.0)  # type: ignore[union-attr]  # (3 + 7) / 2: prompts count alike
    assert found["unfinished"].value == pytest.approx(1 / 2)  # type: ignore[union-attr]  # (0 + 1) / 2
    assert 0 < found["unfinished"].low < found["unfinished"].high < 1  # type: ignore[union-attr]
    assert (found["distinct_1"], found["distinct_2"]) == (3 / 4, 1.0)  # a b d of four words, one pair
    assert "distinct_2" not in generation_figures([[answer("a"), answer("b")]])  # no pair


def test_rewards_average_over_prompts_and_count_failures() -> None:
    answers = [[answer("a", 1.0), answer("b", 0.0)], [answer("c", 1.0), answer("d")], [answer("e"), answer("f")]]
    found = reward_figures(answers)
    assert found["reward/gold"].value == pytest.approx(0.75)  # type: ignore[union-attr]  # (1/2 + 1) / 2
    assert found["reward/gold/failed"] == 3.0
    assert "reward/gold/not_applicable" not in found
    with pytest.raises(ValueError, match="broken"):
        reward_figures([[answer("a")]])


def test_what_only_says_right_or_wrong_is_a_share() -> None:
    """Student's t has no width where all answers are right."""
    right, mixed = [[answer("a", 1.0)] * 2, [answer("b", 1.0)] * 2], [[answer("a", 1.0), answer("a", 0.0)]] * 2
    assert reward_figures(right)["reward/gold"] == share_interval([1.0, 1.0])
    assert reward_figures(mixed)["reward/gold"] == share_interval([0.5, 0.5])
    assert reward_figures([[answer("a", 1.0), answer("a", 0.5)]] * 2)["reward/gold"] == mean_interval([0.75, 0.75])
    assert pass_figures(right, ["gold"], [1], least=1.0)["pass@1/gold"] == share_interval([1.0, 1.0])
    found = comparison_figures(right, mixed, seed=0)
    share = share_interval([0.75, 0.75])  # a mean gap of 1/2, from [-1, 1] to [0, 1]
    assert found["difference/gold"] == share.map(lambda value: 2 * value - 1)
    assert found["reward/gold/first"] == share_interval([1.0, 1.0])


def test_parts_of_a_reward_are_averaged_as_it_is() -> None:
    """A part counts where it is: beside no score, and not where it is infinite. One called `failed` is no count."""

    def gold(completion: str) -> dict[str, float | None]:
        parts = {"right": float(completion == "a"), "failed": 7.0} | ({"form": math.inf} if completion == "d" else {})
        return {"reward": None if completion == "b" else 0.5, "form": float(len(completion)), **parts}

    groups = [[answer("a"), answer("b")], [answer("ccc"), answer("d")]]
    answers = scored(groups, {"gold": FunctionReward(gold)})
    found = reward_figures(answers)
    assert list(found) == ["reward/gold", "reward/gold/form", "reward/gold/right", "reward/gold/not_applicable"]
    assert found["reward/gold/form"] == mean_interval([1.0, 3.0])
    assert found["reward/gold/right"] == share_interval([0.5, 0.0])
    lines = [one.json() for group in answers for one in group]
    assert lines[1]["parts"] == {"gold/form": 1.0, "gold/right": 0.0, "gold/failed": 7.0}
    assert lines[3]["parts"] == {"gold/right": 0.0, "gold/failed": 7.0}


def test_answers_that_a_reward_is_not_meant_for_are_counted_apart() -> None:
    def gold(completion: str) -> float | None:
        return None if completion == "b" else 1 / len(completion)

    answers = [[answer("a"), answer("b"), answer("b"), answer("")]]
    found = reward_figures(scored(answers, {"gold": FunctionReward(gold)}))
    assert found["reward/gold"].value == 1.0  # type: ignore[union-attr]
    assert (found["reward/gold/failed"], found["reward/gold/not_applicable"]) == (1.0, 2.0)


def test_scores_reach_the_answers_they_belong_to() -> None:
    answers = [[answer(f"{p} {k}") for k in range(2)] for p in range(70)]  # more than are scored at once

    async def number(completion: str) -> float:
        return float(completion.split()[0]) * 10 + float(completion.split()[1])

    found = scored(answers, {"number": FunctionReward(number)})
    assert [[one.scores["number"].value for one in group] for group in found] == [
        [p * 10.0, p * 10.0 + 1] for p in range(70)
    ]
    assert found[0][0].scores["gold"].reason == "broken"  # what was known stays


def test_comparison_by_hand() -> None:
    ours = [[answer("", 1.0)], [answer("", 0.0)], [answer("", 0.5)], [answer("", 9.0)]]
    theirs = [[answer("", 0.0)], [answer("", 1.0)], [answer("", 0.5)], [answer("", None)]]
    found = comparison_figures(ours, theirs, seed=0)
    assert found["win_rate/gold"].value == pytest.approx(0.5)  # a win, a loss, a tie; the last pair has no score
    assert found["win_rate/gold"].count == 3
    assert found["difference/gold"].value == pytest.approx(0.0)
    assert found["reward/gold/first"].value == pytest.approx(10.5 / 4)
    swapped = comparison_figures(theirs, ours, seed=0)
    assert swapped["win_rate/gold"].count == 3, "whichever of the two lacks it"
    better = comparison_figures(theirs[:3], [[answer("", -1.0)]] * 3, seed=0)
    assert better["win_rate/gold"] == share_interval([1.0] * 3)
    assert better["difference/gold"] == mean_interval([1.0, 2.0, 1.5])


def test_a_model_against_itself_wins_half(task: Task) -> None:
    policy = task.policy()
    asked, sampling = prompts(policy, "We saw", "The", "A film"), SamplingSettings(max_tokens=10)
    reward = {"judge": Judge.load(task.judge).reward(policy.tokenizer)}
    one, other = (scored(policy.answers(asked, sampling, seed=2), reward) for _ in range(2))
    found = comparison_figures(one, other, seed=0)
    assert found["win_rate/judge"] == share_interval([0.5] * 3)
    assert found["difference/judge"].low == found["difference/judge"].high == 0.0
    assert [pair.first.completion for pair in side_by_side(one, other)] == [
        pair.second.completion for pair in side_by_side(one, other)
    ]


def test_texts_beyond_the_context_are_refused(task: Task) -> None:
    policy, judge = task.policy(), Judge.load(task.judge)
    long = row([5] * 161, 1)
    calls: list[Callable[[], object]] = [
        lambda: perplexity(policy, [long]),
        lambda: judge.of_sequences([long.tokens]),
        lambda: policy.answers(prompts(policy, "We saw"), SamplingSettings(max_tokens=160), seed=0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="160 positions"):
            call()
    (asked,) = prompts(policy, "We saw")
    room, steps = 160 - len(asked.tokens), list[int]()
    answers = policy.answers([asked], SamplingSettings(max_tokens=room, samples=2), seed=0, advance=steps.append)
    assert (len(answers[0]), steps) == (2, [2]), "all of the context may be used"


def test_answers_come_inside_a_running_loop_too(task: Task) -> None:
    import asyncio

    policy = task.policy()
    asked, sampling = prompts(policy, "We saw"), SamplingSettings(max_tokens=5)

    async def notebook() -> Answers:
        return policy.answers(asked, sampling, seed=1)

    assert asyncio.run(notebook()) == policy.answers(asked, sampling, seed=1)

    async def failing() -> None:
        raise KeyError("lost")

    async def in_notebook() -> None:
        finished(failing())

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(in_notebook())


def test_fresh_models_are_policies_without_a_checkpoint(task: Task) -> None:
    tokenizer = load_tokenizer(str(task.files.tokenizer))
    model = fresh_model({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}, vocab_size=len(tokenizer))
    policy = Policy(model, tokenizer)
    found = policy.answers(prompts(policy, "We saw"), SamplingSettings(max_tokens=3), seed=0)
    assert 1 <= len(found[0][0].completion.tokens) <= 3
