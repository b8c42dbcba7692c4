"""A judge reads chats as its own rows were written, whatever the policy's look like."""

import asyncio
import threading
from pathlib import Path

import pytest
from reading import preference_rows, prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plaudit.data.reader import encode_texts
from plaudit.data.records import Pair, Sample
from plaudit.data.settings import DataSettings
from plaudit.data.template import AS_CHAT
from plaudit.evaluate.judge import Judge, JudgeInput, judge_reward
from plaudit.types import Completion, Finish, Prompt, Score

ASK = {"role": "user", "content": "Two and two?"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}: {% else %}> {% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %} <|end|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
OPEN = CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML


def characters(template, *, first=0):
    """A token for each character, and special ones; `first` shifts their numbers."""
    special = ["<eos>", "<|im_start|>", "<|im_end|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet[first:] + alphabet[:first])}, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", chat_template=template)


def asked(tokenizer, *messages, extra=None):
    question = Sample(prompt="", messages=messages, answer=None, extra=extra or {}, where="f:1")
    (prompt,) = prompts([question], tokenizer, DataSettings())
    return prompt


def answered(tokenizer, text, end="", *, finish=Finish.EOS):
    (tokens,) = encode_texts([text + end], tokenizer)
    return Completion(
        tokens=tokens, logprobs=(0.0,) * len(tokens), versions=(0,) * len(tokens), text=text, finish=finish
    )


def trained_on(tokenizer, ends, text, thoughts=None, ask=ASK):
    """What the judge's own data would make of it."""
    record = Sample(prompt="", messages=(ask,), pairs=(Pair(chosen=text, rejected="?"),), where="f:1")
    return preference_rows([record], tokenizer, DataSettings(thoughts=thoughts), ends=ends)[0].tokens


@pytest.mark.parametrize("template", [CHATML, CHANNELS, OPEN, NO_SYSTEM])
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("finish", list(Finish))
def test_it_reads_what_its_rows_would_be(template, first, finish):
    """Other templates, another vocabulary and other end tokens of the policy change nothing, nor does an answer that is
    part of the end token's text."""
    policy, own = characters(CHATML), characters(template, first=first)
    ends = own.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    reading = JudgeInput(own, ends)
    for text in ("Four.", "d", "<"):
        completion = answered(policy, text, "<|im_end|>" if finish is Finish.EOS else "", finish=finish)
        sequence = reading.sequence(asked(policy, ASK), completion, sampled=first == 0)
        assert sequence == trained_on(own, ends, text, "closed" if template is OPEN else None)


def test_sampled_tokens_are_kept_where_the_prompt_is_the_judges_own():
    """No tokenizer would make them of the text; the end that was sampled becomes the judge's."""
    own = characters(CHATML)
    im_end, other = own.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    prompt, reading = asked(own, ASK), JudgeInput(own, [im_end, other])
    for tokens, finish in (((1, 2, other), Finish.EOS), ((1, 2, im_end), Finish.EOS), ((1, 2), Finish.LENGTH)):
        completion = Completion(tokens=tokens, logprobs=(), versions=(), text="no such text", finish=finish)
        assert reading.sequence(prompt, completion, sampled=True) == (*prompt.tokens, 1, 2, im_end)
    spaced = characters(CHANNELS)
    prompt, reading = asked(spaced, ASK), JudgeInput(spaced, [im_end, other])
    completion = answered(spaced, ": Four.", " <|end|>")
    assert reading.sequence(prompt, completion, sampled=True) == trained_on(spaced, [im_end, other], "Four.")


def test_plain_prompts_are_read_as_the_judge_was_trained_unless_it_is_told():
    own = characters(CHATML)
    prompt = Prompt(id="p", text="Q:", tokens=encode_texts(["Q:"], own)[0])
    ends = own.convert_tokens_to_ids(["<|im_end|>"])
    chat = own.decode(trained_on(own, ends, "A", ask={"role": "user", "content": "Q:"}))
    for trained, told, read in ((None, None, chat), (False, None, "Q:A<eos>"), (True, False, "Q:A<eos>")):
        own.init_kwargs[AS_CHAT] = trained
        reading = JudgeInput(own, ends, told)
        for sampled in (True, False):
            sequence = reading.sequence(prompt, answered(own, "A", "<|im_end|>"), sampled=sampled)
            assert own.decode(sequence) == read
    chat = asked(own, ASK)
    own.chat_template = None  # a judge that was trained on texts
    text = JudgeInput(own, ()).sequence(chat, answered(own, "Four."), sampled=False)
    assert own.decode(text) == chat.text + "Four.<eos>"


def test_tools_of_the_row_are_shown_to_the_judge():
    own = characters("{% for t in tools or [] %}{{ t.name }} {% endfor %}" + CHATML)
    prompt = asked(own, ASK, extra={"tools": [{"name": "add"}]})
    sequence = JudgeInput(own, ()).sequence(prompt, answered(own, "Four."), sampled=False)
    assert own.decode(sequence).startswith("add <|im_start|>user")


def test_a_chat_that_the_judges_template_refuses_has_no_score_but_a_reason():
    own = characters(NO_SYSTEM)
    prompt = asked(characters(CHATML), {"role": "system", "content": "Be brief."}, ASK)
    reward = judge_reward(lambda rows: [1.0] * len(rows), own, own, ends=(), longest=999)
    (score,) = asyncio.run(reward.score(prompt, [answered(own, "Four.")]))
    assert isinstance(score, Score) and score.value is None
    assert "system, user" in str(score.reason)
    (score,) = asyncio.run(reward.score(asked(own, ASK), [answered(own, "Four.")]))
    assert score.value == 1.0


@pytest.mark.slow
def test_in_a_thread_a_judge_says_the_same_and_others_go_on(judge: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, score = Judge.load(str(judge)), Judge.of_sequences
    sequences = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]
    here = loaded.reward(None)
    went_on = threading.Event()

    def slow(self: Judge, sequences: list[tuple[int, ...]]) -> list[float]:
        assert went_on.wait(60.0), "the event loop went on meanwhile"
        return score(self, sequences)

    async def steps() -> None:
        expected = await here.scored(sequences)
        monkeypatch.setattr(Judge, "of_sequences", slow)
        asked = asyncio.ensure_future(loaded.reward(None, thread=True).scored(sequences))
        await asyncio.sleep(0.05)
        went_on.set()
        assert await asked == expected

    asyncio.run(steps())
