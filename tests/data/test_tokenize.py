"""Token masks worked by hand. The test tokenizer has one token a character, but one for `ab`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import demonstration_rows, judgement_rows, preference_rows, prompts

from plaudit.data.fields import DataError
from plaudit.data.reader import AT_ONCE, encode_prompt, encode_texts
from plaudit.data.records import Pair, Sample, Verdict
from plaudit.data.report import Budget, DataReport, Tally
from plaudit.data.settings import DataSettings
from plaudit.learn.prefixes import shared

USER = {"role": "user", "content": "q"}


def shown(prompt, completion, where="f:1"):
    return Sample(prompt=prompt, answer=completion, messages=(), where=where)


def compared(prompt, *pairs, margin=0.0):
    made = tuple(Pair(chosen=chosen, rejected=rejected, margin=margin) for chosen, rejected in pairs)
    return Sample(prompt=prompt, messages=(), pairs=made, where="f:1")


def asked(prompt, messages=(), answer=None):
    return Sample(prompt=prompt, messages=messages, answer=answer, extra={"level": 1}, where="f:1")


def ids(tokenizer, text):
    return encode_texts([text], tokenizer)[0]


def test_the_prompt_is_masked_and_the_answer_and_its_end_are_trained(tokenizer):
    x, y, ab, end = (ids(tokenizer, text)[0] for text in ("x", "y", "ab", "<eos>"))
    (row,) = demonstration_rows([shown("xy", "aby")], tokenizer, DataSettings())
    assert row.tokens == (x, y, ab, y, end)
    assert row.trainable == (False, False, True, True, True)


def test_a_token_that_spans_the_seam_of_prompt_and_answer_belongs_to_the_answer(tokenizer):
    x, ab, end = (ids(tokenizer, text)[0] for text in ("x", "ab", "<eos>"))
    tally = Tally(source="f")
    (row,) = demonstration_rows([shown("xa", "bx")], tokenizer, DataSettings(), tally=tally)
    assert (row.tokens, row.trainable) == ((x, ab, x, end), (False, True, True, True))
    assert [what for what in tally.noted if "begins within the prompt" in what]
    (prompt,) = prompts([asked("xa")], tokenizer, DataSettings())
    assert prompt.tokens == encode_prompt("xa", tokenizer) == (x, *ids(tokenizer, "a"))
    chosen, rejected = preference_rows([compared("xa", ("b", "x"))], tokenizer, DataSettings())
    assert (chosen.tokens, rejected.tokens) == ((x, ab, end), (x, *ids(tokenizer, "a"), x, end))
    (row,) = demonstration_rows([shown("a", "b")], tokenizer, DataSettings())
    assert (row.tokens, row.trainable) == ((end, ab, end), (False, True, True)), "a row's first token is not trained"


def test_many_texts_are_encoded_in_their_order(tokenizer):
    texts = [str(number) for number in range(2 * AT_ONCE + 1)]
    assert [tokenizer.decode(tokens) for tokens in encode_texts(texts, tokenizer)] == texts
    assert encode_texts([], tokenizer) == []


def test_an_empty_prompt_opens_with_the_end_token_where_there_is_no_bos(tokenizer):
    (row,) = demonstration_rows([shown("", "x")], tokenizer, DataSettings())
    end = tokenizer.eos_token_id
    assert row.tokens == (end, *ids(tokenizer, "x"), end)
    assert row.trainable == (False, True, True)


def test_bos_stands_in_front_once_where_the_tokenizer_adds_it(make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<bos>", eos_token="<eos>")
    bos, x = tokenizer.bos_token_id, ids(tokenizer, "x")[0]
    assert encode_prompt("x", tokenizer) == (x,)
    assert encode_prompt("", tokenizer) == (bos,)
    tokenizer.add_bos_token = True
    assert encode_prompt("x", tokenizer) == (bos, x)
    assert encode_prompt("<bos>x", tokenizer) == (bos, x)
    assert encode_prompt("", tokenizer) == (bos,)
    limits = DataSettings(max_prompt_tokens=3, max_tokens=6)
    (row,) = demonstration_rows([shown("vwxyz", "x")], tokenizer, limits)
    assert tokenizer.decode(row.tokens) == "<bos>yzx<eos>"  # the beginning goes, BOS stays


def test_bos_is_recognised_by_what_the_tokenizer_does(make_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos_token="<bos>", eos_token="<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    assert encode_prompt("x", tokenizer) == tuple(tokenizer("x")["input_ids"]) == (0, *ids(tokenizer, "x"))


def test_an_answer_that_was_cut_has_no_end_token(tokenizer):
    limits = DataSettings(max_prompt_tokens=2, max_tokens=5)
    tally = Tally(source="f")
    rows = demonstration_rows(
        [shown("wxyz", "12"), shown("wxyz", "123"), shown("w", "12")], tokenizer, limits, tally=tally
    )
    assert [tokenizer.decode(row.tokens) for row in rows] == ["yz12<eos>", "yz123", "w12<eos>"]
    assert (tally.truncated_prompts, tally.truncated_completions, tally.items) == (2, 1, 3)
    assert tally.trained_tokens == 3 + 3 + 3


def test_a_text_that_is_much_too_long_is_cut_before_it_is_tokenised(tokenizer, monkeypatch):
    """30 MB took minutes. The longest token has five characters: 5 n + 1 of them are more than n tokens, so that 11 of
    the prompt and 26 of the answer are read together."""
    seen = []
    encode = type(tokenizer).__call__

    def watched(self, texts, **further):
        seen.extend(map(len, texts))
        return encode(self, texts, **further)

    monkeypatch.setattr(type(tokenizer), "__call__", watched)
    limits, long = DataSettings(max_prompt_tokens=2, max_tokens=5), "12345678" * 1_000_000
    tally = Tally(source="f")
    (row,) = demonstration_rows([shown(long, long)], tokenizer, limits, tally=tally)
    assert (tokenizer.decode(row.tokens), tally.truncated_completions, tally.truncated_prompts) == ("78123", 1, 1)
    (prompt,) = prompts([asked(long)], tokenizer, limits)
    assert prompt.text == "78"
    rows = preference_rows([compared(long, (long, "b"))], tokenizer, limits)
    assert [tokenizer.decode(row.tokens) for row in rows] == ["78123", "78b<eos>"]
    assert max(seen) == 11 + 26
    limits.overlong = "drop"
    assert demonstration_rows([shown(long, "a"), shown("a", long)], tokenizer, limits, tally=tally) == []
    assert tally.dropped == {"prompt too long": 1, "answer too long": 1}


def test_an_end_token_that_is_written_out_is_not_doubled_and_not_trained_inside(tokenizer):
    tally = Tally(source="f")
    rows = demonstration_rows([shown("x", "y<eos>"), shown("x", "y<eos>z")], tokenizer, DataSettings(), tally=tally)
    assert [tokenizer.decode(row.tokens) for row in rows] == ["xy<eos>"]
    assert tally.dropped == {"end token inside the answer": 1}


@pytest.mark.parametrize(
    ("record", "dropped", "message"),
    [
        (shown("wxyz", "1"), "prompt too long", "f:1: .*4 tokens.*data.max_prompt_tokens=2"),
        (shown("w", "12345"), "answer too long", "f:1: .*6 tokens.*data.max_tokens=5 leaves 4"),
    ],
)
def test_overlong_rows_are_dropped_and_counted_or_refused(tokenizer, record, dropped, message):
    limits = DataSettings(max_prompt_tokens=2, max_tokens=5, overlong="drop")
    tally = Tally(source="f")
    assert len(demonstration_rows([record, shown("w", "1")], tokenizer, limits, tally=tally)) == 1
    assert tally.dropped == {dropped: 1}
    limits.overlong = "error"
    with pytest.raises(DataError, match=message):
        demonstration_rows([record], tokenizer, limits)


def test_pairs_stand_side_by_side_and_share_the_weight_of_their_prompt(tokenizer):
    records = [compared("p", ("1", "2"), ("3", "4")), compared("q", ("5", "6"), margin=0.5)]
    rows = preference_rows(records, tokenizer, DataSettings())
    assert [tokenizer.decode(row.tokens) for row in rows] == [f"p{i}<eos>" for i in "1234"] + ["q5<eos>", "q6<eos>"]
    assert [row.group for row in rows] == [0, 0, 0, 0, 1, 1]
    assert [row.weight for row in rows] == [0.5] * 4 + [1.0] * 2
    assert [row.margin for row in rows] == [0, 0, 0, 0, 0.5, 0]


def test_pairs_of_long_prompts_are_shortened_or_dropped_and_counted(tokenizer):
    records = [compared("wxyz", ("1", "2")), compared("w", ("3", "4"))]
    limits, tally = DataSettings(max_prompt_tokens=2, max_tokens=5), Tally(source="f")
    rows = preference_rows(records, tokenizer, limits, tally=tally)
    assert [tokenizer.decode(row.tokens) for row in rows] == ["yz1<eos>", "yz2<eos>", "w3<eos>", "w4<eos>"]
    assert (tally.truncated_prompts, tally.items, tally.prompt_lengths) == (1, 2, {2: 1, 1: 1})
    limits.overlong, tally = "drop", Tally(source="f")
    rows = preference_rows(records, tokenizer, limits, tally=tally)
    assert [(tokenizer.decode(row.tokens), row.group) for row in rows] == [("w3<eos>", 0), ("w4<eos>", 0)]
    assert (tally.dropped, tally.items) == ({"prompt too long": 1}, 1)


def test_useless_and_surplus_pairs_are_left_out_and_counted(tokenizer):
    limits = DataSettings(max_prompt_tokens=1, max_tokens=4, max_pairs_per_prompt=2)
    records = [
        compared("p", ("1", "1"), ("1234", "1235"), ("1", "2"), ("3", "4"), ("5", "6")),
        compared("q", ("1", "1")),
        compared("r", ("1", "2")),
    ]
    tally = Tally(source="f")
    rows = preference_rows(records, tokenizer, limits, tally=tally)
    assert [tokenizer.decode(row.tokens[1:2]) for row in rows] == ["1", "2", "3", "4", "1", "2"]
    assert [row.group for row in rows] == [0, 0, 0, 0, 1, 1]
    assert tally.pairs_dropped == {
        "chosen equals rejected": 2,
        "chosen equals rejected once cut": 1,
        "beyond max_pairs_per_prompt=2": 1,
    }
    assert tally.dropped == {"no usable pair": 1}
    assert (tally.pairs, tally.items, tally.rows) == (3, 2, 6)


def test_prompts_lose_their_beginning_and_keep_their_answer(tokenizer):
    tally = Tally(source="f")
    (prompt,) = prompts([asked("wxyz", answer="7")], tokenizer, DataSettings(max_prompt_tokens=2), tally=tally)
    assert (prompt.id, prompt.text, prompt.answer, prompt.source) == ("f:1", "yz", "7", "f")
    assert tokenizer.decode(prompt.tokens) == "yz", "rewards and judges see what the policy read"
    assert prompt.extra == {"level": 1}
    assert tally.truncated_prompts == 1


def test_templates_wrap_plain_prompts(tokenizer):
    (plain,) = prompts([asked("{a}")], tokenizer, DataSettings(prompt_template="Q: {prompt}\nA:"))
    assert plain.text == "Q: {a}\nA:"
    (chat,) = prompts([asked("q")], tokenizer, DataSettings(system="s", chat_template="default"))
    assert chat.text == "<|system|>\ns\n<|user|>\nq\n<|assistant|>\n"
    assert chat.messages == ({"role": "system", "content": "s"}, USER)


def test_a_chat_is_trained_on_its_answer_as_it_would_be_asked(tokenizer):
    chats = DataSettings(chat_template="default")
    record = Sample(prompt="", answer="a", messages=(USER,), where="f:1")
    (row,) = demonstration_rows([record], tokenizer, chats)
    (prompt,) = prompts([asked("", messages=(USER,))], tokenizer, chats)
    assert row.tokens == (*prompt.tokens, *ids(tokenizer, "a"), tokenizer.eos_token_id)


def turn(role, content):
    return {"role": role, "content": content}


def test_every_turn_of_a_chat_is_trained_where_asked_for(tokenizer):
    """Of three assistant turns one is blank; what opens a chat answers nothing."""
    opening, blank = turn("assistant", "o"), turn("assistant", " ")
    messages = (opening, USER, turn("assistant", "a"), USER, blank, USER)
    chat = Sample(prompt="", answer="b", messages=messages, where="f:1")
    tally = Tally(source="f")
    for every, counts in ((False, 1), (True, 2)):
        given = DataSettings(chat_template="default", every_turn=every)
        rows = demonstration_rows([chat, shown("x", "y")], tokenizer, given, tally=tally, first_group=3)
        assert [row.group for row in rows] == [3] * counts + [4]
        trained = [tokenizer.decode([t for t, on in zip(row.tokens, row.trainable, strict=True) if on]) for row in rows]
        assert trained == ["a<eos>", "b<eos>", "y<eos>"][2 - counts :]
        for row, asks in zip(rows, (messages[:2], messages)[2 - counts :], strict=False):
            (prompt,) = prompts([asked("", messages=asks)], tokenizer, given)
            assert row.tokens[: row.trainable.index(True)] == prompt.tokens
    assert (tally.items, tally.rows) == (4, 5)


def test_every_turn_is_what_the_whole_chat_says_up_to_there(tokenizer):
    """So it has the log-probs that it has in one pass over the chat, and is computed in one (learn/prefixes.py)."""
    given = DataSettings(chat_template="default", every_turn=True)
    chat = (turn("system", "s"), USER, turn("assistant", "a"), USER, turn("assistant", "b"), USER)
    record = Sample(prompt="", answer="c", messages=chat, where="f:1")
    rows = [list(row.tokens) for row in demonstration_rows([record], tokenizer, given)]
    assert len(rows) == 3
    assert all(row == rows[-1][: len(row)] for row in rows)
    assert shared(rows)[0] == rows[-1]


def test_turns_that_do_not_fit_are_counted_and_a_chat_without_any_is_dropped(tokenizer):
    limits = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "every_turn": True}
    chat = (turn("user", "xy"), turn("assistant", "1"), turn("user", "long"))
    records = [
        Sample(prompt="", answer="2", messages=chat, where="f:1"),
        Sample(prompt="", answer="2", messages=chat[2:], where="f:2"),
    ]
    tally = Tally(source="f")
    (row,) = demonstration_rows(records, tokenizer, DataSettings(max_prompt_tokens=3, **limits), tally=tally)
    assert tokenizer.decode(row.tokens) == "xy1<eos>"
    assert (tally.items, tally.rows) == (1, 1)
    assert (tally.turns_dropped, tally.dropped) == ({"prompt too long": 1}, {"prompt too long": 1})


def test_a_chat_with_a_turn_that_the_template_refuses_is_one_bad_row(tokenizer):
    template = "{% if messages | length > 2 %}{{ raise_exception('two turns') }}{% endif %}x"
    given = DataSettings(chat_template=template, every_turn=True)
    record = Sample(prompt="", answer="b", messages=(USER, turn("assistant", "a"), USER), where="f:1")
    tally = Tally(source="f", budget=Budget(1))
    assert demonstration_rows([record, shown("x", "y")], tokenizer, given, tally=tally)[0].group == 0
    assert (len(tally.bad), tally.items, tally.rows) == (1, 1, 1)


def test_a_tokenizer_without_an_end_token_is_refused(make_tokenizer):
    with pytest.raises(DataError, match="eos_token"):
        demonstration_rows([shown("x", "y")], make_tokenizer(bos_token="<bos>"), DataSettings())


@given(
    prompt=st.text(max_size=8),
    completion=st.text(min_size=1, max_size=8),
    limit=st.integers(1, 6),
    room=st.integers(1, 6),
)
def test_rows_fit_and_end_exactly_where_the_answer_did(tokenizer, prompt, completion, limit, room):
    limits = DataSettings(max_prompt_tokens=limit, max_tokens=limit + room)
    (row,) = demonstration_rows([shown(prompt, completion)], tokenizer, limits)
    assert len(row.tokens) == len(row.trainable) <= limits.max_tokens
    assert not row.trainable[0]
    start = row.trainable.index(True)
    assert all(row.trainable[start:])
    whole = ids(tokenizer, completion)
    answer = row.tokens[start:]
    fitting = limits.max_tokens - start
    assert answer == ((*whole, tokenizer.eos_token_id) if len(whole) < fitting else whole[:fitting])


def test_a_shortened_prompt_tells_what_is_left_of_it_without_bos(make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_bos_token = True
    for limit, text, read in ((4, "xyz", "<bos>xyz"), (2, "z", "<bos>z"), (1, "z", "z")):
        tally = Tally(source="f")
        found = prompts([asked("vwxyz")], tokenizer, DataSettings(max_prompt_tokens=limit, max_tokens=9), tally=tally)
        assert [(one.text, tokenizer.decode(one.tokens)) for one in found] == [(text, read)]
        assert (tally.items, tally.truncated_prompts, tally.prompt_lengths) == (1, 1, {limit: 1})
    tally = Tally(source="f")
    prompts([asked("vwxyz")], tokenizer, DataSettings(max_prompt_tokens=6, max_tokens=9), tally=tally)
    assert (tally.truncated_prompts, tally.prompt_lengths) == (0, {6: 1})


def called(prompt, **answers):
    """A judgement: an answer and whether it is good, each."""
    verdicts = tuple(Verdict(answer=answer, good=good) for answer, good in answers.items())
    return Sample(prompt=prompt, messages=(), verdicts=verdicts, where="f:1")


def test_each_judged_answer_stands_before_its_prompt_with_an_answer_to_another_one(tokenizer):
    records = [called("p", x=True, y=False), called("p", z=False), called("q", w=True)]
    tally = Tally(source="f")
    rows = judgement_rows(records, tokenizer, DataSettings(), tally=tally, first_group=5)
    texts = [tokenizer.decode(row.tokens) for row in rows]
    assert texts == ["px<eos>", "pw<eos>", "py<eos>", "pw<eos>", "pz<eos>", "pw<eos>", "qw<eos>", "qx<eos>"]
    assert all(row.trainable == (False, True, True) for row in rows)
    assert [row.reward for row in rows[::2]] == [1.0, -1.0, -1.0, 1.0]
    assert {row.reward for row in rows[1::2]} == {0.0}
    assert [row.group for row in rows] == [5, 5, 5, 5, 6, 6, 7, 7]
    assert (tally.rows, tally.items, tally.trained_tokens) == (4, 3, 8), "mismatched rows are not trained"
    assert tally.verdicts == {"good": 2, "bad": 2}
    assert (
        "f: answers good: 2"
        in DataReport(kind="judgements", sources=(tally.freeze(),), train_items=3, validation_items=0).table()
    )


def test_without_another_prompt_nothing_of_the_second_row_is_trainable(tokenizer):
    judged, alone = judgement_rows([called("p", x=True)], tokenizer, DataSettings())
    assert (judged.trainable, alone.trainable) == ((False, True, True), (False,))
    assert alone.tokens == judged.tokens[:1]


def test_a_borrowed_answer_is_another_one_even_where_most_are_equal(tokenizer):
    """Yes and no: with its own text borrowed, a row's gain would be estimated from itself."""
    records = [called("p", x=True), called("q", x=True), called("r", y=False)]
    texts = [tokenizer.decode(row.tokens) for row in judgement_rows(records, tokenizer, DataSettings())]
    assert texts == ["px<eos>", "py<eos>", "qx<eos>", "qy<eos>", "ry<eos>", "rx<eos>"]
    rows = judgement_rows(records[:2], tokenizer, DataSettings())
    assert [row.trainable for row in rows[1::2]] == [(False,)] * 2, "all answers are the same"


def test_answers_that_say_nothing_are_left_out_and_the_borrowed_one_is_cut_to_its_room(tokenizer):
    limits = DataSettings(max_prompt_tokens=3, max_tokens=5, max_pairs_per_prompt=1)
    both = (Verdict(answer="x", good=True), Verdict(answer="x", good=False))
    again = (Verdict(answer="y", good=True), Verdict(answer="y", good=True), *map(bad, "zuv"))
    tally = Tally(source="")
    records = [Sample(prompt="p", messages=(), verdicts=verdicts, where="f:1") for verdicts in (both, (*both, *again))]
    rows = judgement_rows([*records, called("123", long=True)], tokenizer, limits, tally=tally)
    texts = [tokenizer.decode(row.tokens) for row in rows]
    assert texts == ["py<eos>", "plo", "pz<eos>", "plo", "123lo", "123y<eos>"]
    assert tally.dropped == {"called good and bad": 1}
    assert tally.verdicts == {
        "good": 2,
        "bad": 1,
        "left out, called good and bad": 1,
        "left out, beyond two for each of max_pairs_per_prompt=1": 2,
    }
    assert tally.truncated_completions == 1


def bad(answer):
    return Verdict(answer=answer, good=False)
