"""Chats are trained as their templates write them: token for token as transformers renders them, over many shapes."""

import pytest
from chat_shapes import (
    ARGUMENTS,
    BESIDE_TEXT,
    CALLERS,
    CHANNELS,
    IM,
    MARKED,
    SHAPES,
    SPECIAL,
    Shape,
    calling,
    chatml,
    reading,
    roles,
)
from reading import demonstration, demonstration_rows, preference, preference_rows, prompts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from plaudit.data.chat import Chats, shorter
from plaudit.data.fields import DataError
from plaudit.data.reader import parts_of
from plaudit.data.records import Pair, Sample
from plaudit.data.report import DataReport, Tally
from plaudit.data.settings import DataSettings

SYSTEM = {"role": "system", "content": "Be brief."}
ASK, AGAIN = {"role": "user", "content": "Two and two?"}, {"role": "user", "content": "And three?"}
FOUR = {"role": "assistant", "content": "Four."}


@pytest.fixture(scope="module")
def byte_level(make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    return tokenizer


@pytest.fixture(scope="module")
def metaspace():
    """Like Llama 2's: words with a blank before them, one of which is put before whatever text is given."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*map(chr, range(32, 127)), "\n", "▁"} - {" "})
    words = ["<unk>", *letters, "▁A", "▁F", "▁[", "▁<"]
    merges = [("▁", "A"), ("▁", "F"), ("▁", "["), ("▁", "<")]
    model = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    model.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[2:]),
    )


def rendered(shape, tokenizer, messages, **asked):
    """What transformers makes of a chat, as tokens."""
    asked = {"day": "26 Jul 2024", "return_dict": True, **asked}
    return tokenizer.apply_chat_template(messages, chat_template=shape.template, tokenize=True, **asked)


def trained(row, tokenizer):
    return tokenizer.decode([token for token, on in zip(row.tokens, row.trainable, strict=True) if on])


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_have_the_tokens_that_transformers_renders(name, kind, request):
    shape, tokenizer = SHAPES[name], request.getfixturevalue(kind)
    settings, ends = reading(shape, tokenizer)
    chats = [(ASK,), (ASK, FOUR, AGAIN)]
    chats += [(SYSTEM, *turns) for turns in chats] if shape.system else []
    for before in chats:
        for text in ("Five.", " Five\n lines. \n"):
            answer = {"role": "assistant", "content": text}
            record = Sample(prompt="", answer=text, messages=before, where="f:1")
            (row,) = demonstration_rows([record], tokenizer, settings, ends=ends)
            (prompt,) = prompts([Sample(prompt="", messages=before, answer=None, extra={}, where="f:1")],
                                tokenizer, settings, ends=ends)  # fmt: skip
            asked = tuple(rendered(shape, tokenizer, before, add_generation_prompt=True)["input_ids"])
            assert prompt.tokens == asked == row.tokens[: row.trainable.index(True)]
            whole = tuple(rendered(shape, tokenizer, [*before, answer])["input_ids"])
            if shape.exact:
                assert row.tokens == whole[: len(row.tokens)]
                assert tokenizer.decode(whole[len(row.tokens) :]).strip() in ("", "<eos>")  # after the answer's end
            kept = {" ": text, "<": text.lstrip(), "": text.strip()}[shape.strips]
            written = shape.between + kept + shape.end
            assert trained(row, tokenizer).lstrip(" ") == written.lstrip(" ")
            if kind == "byte_level":
                assert trained(row, tokenizer) == written


@pytest.mark.parametrize("name", MARKED)
def test_what_a_template_marks_is_what_is_trained(name, byte_level):
    shape = SHAPES[name]
    settings, ends = reading(shape, byte_level, every_turn=True)
    chat = [SYSTEM, ASK, FOUR, AGAIN, {"role": "assistant", "content": "Five."}]
    marked = rendered(shape, byte_level, chat, return_assistant_tokens_mask=True)
    record = demonstration({"messages": chat}, where="f:1")
    rows = demonstration_rows([record], byte_level, settings, ends=ends)
    assert len(rows) == 2
    length = max(len(row.tokens) for row in rows)
    found = [any(row.trainable[i : i + 1] == (True,) for row in rows) for i in range(length)]
    assert found == [bool(on) for on in marked["assistant_masks"][:length]]
    assert not any(marked["assistant_masks"][length:])


@pytest.mark.parametrize("name", SHAPES)
def test_a_probe_reads_off_how_answers_are_written(name, byte_level):
    shape = SHAPES[name]
    form = Chats(byte_level, *reading(shape, byte_level)).form
    assert (form.asks, form.nests) == (shape.asks, shape.nests)
    assert form.between == ("" if not shape.exact and shape.thoughts else shape.between) or not shape.exact
    assert form.end == ("" if form.other_end else shape.end)
    assert form.open_thought == ("<think>" if shape.thoughts else "")
    assert not form.prints_date


@pytest.mark.parametrize("name", SHAPES)
def test_the_turns_of_a_chat_nest_where_the_probe_says_so(name, byte_level):
    shape = SHAPES[name]
    settings, ends = reading(shape, byte_level, every_turn=True)
    chat = (ASK, FOUR, AGAIN, FOUR, ASK)
    record = Sample(prompt="", answer="Five.", messages=chat, where="f:1")
    rows = [row.tokens for row in demonstration_rows([record], byte_level, settings, ends=ends)]
    assert len(rows) == 3
    assert all(rows[-1][: len(row)] == row for row in rows) == shape.nests


OPEN = [name for name, shape in SHAPES.items() if shape.thoughts]


@pytest.mark.parametrize("name", OPEN)
def test_a_thought_that_is_left_open_is_refused_unless_the_settings_say_what_answers_mean(name, byte_level):
    shape = SHAPES[name]

    def written(answer, thoughts):
        settings, ends = reading(shape, byte_level, thoughts=thoughts, bad_rows=0)
        record = demonstration({"messages": [ASK, {"role": "assistant", **answer}]}, where="f:1")
        (row,) = demonstration_rows([record], byte_level, settings, ends=ends)
        return trained(row, byte_level)

    with pytest.raises(ValueError, match=r"f:1: .*\(<think>\).*data.thoughts=closed"):
        written({"content": "Four."}, None)
    assert written({"content": "Four."}, "closed") == shape.between + "Four." + shape.end
    with pytest.raises(DataError, match=r"data.thoughts=in_content .*</think>"):
        written({"content": "Four."}, "in_content")
    for opening in ("<think>\n", "<think>", ""):  # which the prompt has already
        said = written({"content": f"{opening}Hm.\n</think>\n\nFour."}, "in_content")
        assert "".join(said.split()) == "Hm.</think>Four." + shape.end
    apart = written({"content": "Four.", "reasoning_content": "Hm."}, None)
    assert "".join(apart.split()) == "Hm.</think>Four." + shape.end


def test_thoughts_stand_where_the_template_puts_them(byte_level):
    answer = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
    for name, said in (
        (
            "gpt-oss, channels",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        ),
        ("qwen 3, an empty thought", "<think>\nHm.\n</think>\n\nFour."),
    ):
        shape = SHAPES[name]
        settings, ends = reading(shape, byte_level)
        (row,) = demonstration_rows(
            [demonstration({"messages": [ASK, answer]}, where="f:1")], byte_level, settings, ends=ends
        )
        assert trained(row, byte_level) == said + shape.end
    for name, why in (
        ("chatml", "answer's 'Hm.'"),
        ("thinking switched off, which answers lack", "has no place for them"),
        ("command r7b, a closed thought and a response", "has no place for them"),
    ):
        chats = Chats(byte_level, *reading(SHAPES[name], byte_level))
        with pytest.raises(DataError, match=why):
            chats.completion(chats.prompt([ASK], {}), [ASK], answer, {})


SHORT = "A B D E a d e n s yes no end eos eot turn id im of user < > | _ / 1 True return <|".split()


ALL = SHAPES | {name: Shape(template, **IM) for name, (template, *_) in CALLERS.items()}


@pytest.mark.parametrize("name", ALL)
def test_an_answer_that_stands_in_its_end_token_too_is_trained_like_any_other(name, byte_level):
    """As "e" does in "<|im_end|>", and "D" in Command R's "<|END_OF_TURN_TOKEN|>"."""
    shape = ALL[name]
    settings, ends = reading(shape, byte_level)
    records = [demonstration({"messages": [ASK, {"role": "assistant", "content": text}]}, where="f") for text in SHORT]
    rows = demonstration_rows(records, byte_level, settings, ends=ends)
    assert [trained(row, byte_level) for row in rows] == [shape.between + text + shape.end for text in SHORT]
    pairs = [
        preference({"prompt": [ASK], "chosen": [{"role": "assistant", "content": text}], "rejected": [FOUR]}, where="f")
        for text in SHORT
    ]
    rows = preference_rows(pairs, byte_level, settings, ends=ends)
    assert [trained(row, byte_level) for row in rows[::2]] == [shape.between + text + shape.end for text in SHORT]


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (chatml(), "<think>a</think>b</think>c", "<think>a</think>b</think>c"),
        (chatml(), *("<reasoning>a</reasoning>x<reasoning>b</reasoning>y",) * 2),
        (SHAPES["qwen 3, an empty thought"].template, "<think>a</think>c", "<think>\na\n</think>\n\nc"),
        (SHAPES["qwen 3, an empty thought"].template, "<think>a</think>b</think>c", None),  # it drops b
        (SHAPES["qwen 3, an empty thought"].template, "<reasoning>a</reasoning>c",
         "<think>\n\n</think>\n\n<reasoning>a</reasoning>c"),
        (chatml("<think></think>{{ m.content }}"), "<think>a</think>c", None),  # an empty thought before the answer's
        (chatml("{{ m.content | upper }}"), "four", None),
        (chatml("{{ m.content[:3] }}"), "four", None),
    ],
)  # fmt: skip
def test_thoughts_within_a_text_are_all_written_or_the_row_is_refused(template, content, expected, byte_level):
    ends = byte_level.convert_tokens_to_ids(["<|im_end|>"])
    record = demonstration({"messages": [ASK, {"role": "assistant", "content": content}]}, where="f:1")
    settings = DataSettings(chat_template=template)
    if expected is None:
        with pytest.raises(DataError, match=r"f:1: "):
            demonstration_rows([record], byte_level, settings, ends=ends)
        return
    (row,) = demonstration_rows([record], byte_level, settings, ends=ends)
    assert trained(row, byte_level) == expected + "<|im_end|>"


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": PARAMETERS},
}
OSLO = {"role": "user", "content": "Use get_weather for Oslo."}


def of_calls(*given, content=""):
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": one}} for one in given]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("name", [*CALLERS, "default"])
def test_all_calls_of_an_answer_are_trained_or_the_row_is_refused(name, byte_level):
    one = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}</tool_call>'
    shown = one, one.replace("Oslo", "Rome").replace("3", "4")
    template, first, second = CALLERS.get(name, ("default", *shown))
    end = "<eos>" if template == "default" else "<|im_end|>"
    for answer, expected in (
        (of_calls(ARGUMENTS[0]), first),
        (of_calls(*ARGUMENTS), first and second and first + second),
        (
            of_calls(ARGUMENTS[0], content="Well."),
            first and f"Well.{first}" if name in (*BESIDE_TEXT, "default") else None,
        ),
    ):
        record = demonstration({"messages": [OSLO, answer], "tools": [WEATHER]}, where="f:1")
        settings, ends = DataSettings(chat_template=template), byte_level.convert_tokens_to_ids(["<|im_end|>"])
        if expected is None:
            with pytest.raises(DataError, match=r"does not show call \d of the answer, of 'get_weather', before"):
                demonstration_rows([record], byte_level, settings, ends=ends)
        else:
            (row,) = demonstration_rows([record], byte_level, settings, ends=ends)
            assert trained(row, byte_level) == expected + end
        history = demonstration({"messages": [OSLO, answer, RESULT, FOUR], "tools": [WEATHER]}, where="f:1")
        whole = template == "default" or (second or (first and len(answer["tool_calls"]) == 1))
        if whole:
            assert demonstration_rows([history], byte_level, settings, ends=ends)
        else:
            with pytest.raises(DataError, match=r"does not show turn 2's call of 'get_weather'.*default shows"):
                demonstration_rows([history], byte_level, settings, ends=ends)


def test_a_call_with_an_end_token_in_it_is_refused(byte_level):
    template, ends = CALLERS["hermes"][0], byte_level.convert_tokens_to_ids(["<|im_end|>"])
    record = demonstration({"messages": [OSLO, of_calls({"city": "Oslo<|im_end|>", "days": 3})]}, where="f:1")
    with pytest.raises(DataError, match=r"f:1: .*call 1 of the answer"):
        demonstration_rows([record], byte_level, DataSettings(chat_template=template), ends=ends)


@pytest.mark.parametrize(
    ("tool", "missing"),
    [
        ("", "the tool 'get_weather'"),
        ("{{ t.function.name }}", "the description of the tool 'get_weather'"),
        ("{{ t.function.name }}{{ t.function.description }}", "the parameter 'city' of the tool 'get_weather'"),
        ("{{ t.function.description }}{{ t.function.parameters.properties | join }}", "the tool 'get_weather'"),
    ],
)
def test_a_tool_whose_name_a_text_mentions_is_not_shown_by_that(tool, missing, byte_level):
    record = demonstration({"messages": [OSLO, FOUR], "tools": [WEATHER]}, where="f:1")
    with pytest.raises(DataError, match=f"f:1: .*{missing}"):
        demonstration_rows([record], byte_level, DataSettings(chat_template=calling("", tool=tool)))


def test_the_role_developer_is_the_systems_where_the_template_knows_no_other(byte_level):
    chat = [{"role": "developer", "content": "Be brief."}, ASK]
    known = chatml(before="{# developer #}")
    for template, role in ((chatml(), "system"), (known, "developer")):
        text = Chats(byte_level, DataSettings(chat_template=template)).prompt(chat, {})
        assert text.startswith(f"<|im_start|>{role}\nBe brief.<|im_end|>")


def test_a_tokenizers_templates_without_a_default_are_chosen_by_name(make_tokenizer):
    tokenizer = make_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = {"rag": chatml(), "tool_use": "{{ tools[0].name }}{{ messages[0].content }}"}
    with pytest.raises(DataError, match=r"rag, tool_use .*data.chat_template"):
        Chats(tokenizer, DataSettings()).prompt([ASK], {})
    assert Chats(tokenizer, DataSettings(chat_template="rag")).prompt([ASK], {}).endswith("assistant\n")


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}],
}  # fmt: skip
RESULT = {"role": "tool", "content": "4"}
CALLING = chatml(
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}",
    before="{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}{{ '\\n' }}{% endfor %}",
)


def test_tools_their_calls_and_results_go_through_the_template(byte_level):
    record = demonstration({"messages": [ASK, CALL, RESULT, FOUR], "tools": TOOLS}, where="f:1")
    settings = DataSettings(chat_template=CALLING, every_turn=True)
    ends = byte_level.convert_tokens_to_ids(["<|im_end|>"])
    rows = demonstration_rows([record], byte_level, settings, ends=ends)
    assert [trained(row, byte_level) for row in rows] == ['<call>add{"x": 2}</call><|im_end|>', "Four.<|im_end|>"]
    shape = type(SHAPES["chatml"])(CALLING)
    whole = rendered(shape, byte_level, [ASK, CALL, RESULT, FOUR], tools=TOOLS)["input_ids"]
    assert rows[1].tokens == tuple(whole[: len(rows[1].tokens)])
    assert byte_level.decode(rows[1].tokens).startswith("add: Adds.\n<|im_start|>user\nTwo and two?<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "tools", "template", "said"),
    [
        ([ASK, CALL, RESULT, FOUR], None, CALLING.replace("m in messages", "m in messages if m.role != 'tool'"),
         r"turn 3 \(tool\)"),
        ([SYSTEM, ASK, FOUR, SYSTEM, AGAIN, FOUR], None, roles("{{ m.content }}", "{{ m.content }}", "",
         system="{% if loop.first %}{{ m.content }}{% endif %}"), r"turn 4 \(system\)"),
        ([ASK, FOUR], TOOLS, SHAPES["chatml"].template, "tool 'add'"),
        ([ASK, CALL], None, SHAPES["chatml"].template, "call 1 of the answer, of 'add', before the token that ends it"),
        ([ASK, CALL, ASK, FOUR], None, SHAPES["chatml"].template, "turn 2's call of 'add'"),
        ([ASK, FOUR], None, SHAPES["chatml"].template.replace("m in messages", "m in messages if m.role == 'user'"),
         "answer's 'Four.'"),
        ([ASK, FOUR], None, "{{ raise_exception('no chats') }}", "user: no chats"),
        ([ASK, FOUR], None, "{{ messages[7].content.strip() }}", "turns user"),
    ],
)  # fmt: skip
def test_a_row_of_which_the_template_shows_a_part_is_refused(messages, tools, template, said, byte_level):
    record = demonstration({"messages": messages, "tools": tools}, where="f:1")
    with pytest.raises(DataError, match=f"f:1: .*{said}"):
        demonstration_rows([record], byte_level, DataSettings(chat_template=template))


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"f:3: .*data\.chat_template=default"):
        Chats(tokenizer, DataSettings()).prompt([ASK], {}, where="f:3")


def test_a_rows_own_arguments_go_over_the_settings(byte_level):
    template = chatml(before="{{ 'no ' if enable_thinking is false }}{{ 'thinking ' }}")
    settings = DataSettings(chat_template=template, chat_template_kwargs={"enable_thinking": False})
    for given, said in (({}, "no thinking"), ({"enable_thinking": True}, "thinking")):
        row = {"messages": [ASK, FOUR], "chat_template_kwargs": given}
        (made,) = demonstration_rows([demonstration(row, where="f:1")], byte_level, settings)
        assert byte_level.decode(made.tokens).startswith(f"{said} <|im_start|>")


def test_a_date_that_is_printed_is_told_of_and_can_be_fixed(byte_level):
    shape = SHAPES["a date"]
    assert Chats(byte_level, DataSettings(chat_template=shape.template)).form.prints_date
    fixed = Chats(byte_level, *reading(shape, byte_level))
    assert "Today: 26 Jul 2024\n" in fixed.prompt([ASK], {})
    named = Chats(byte_level, DataSettings(chat_template=shape.template, chat_template_kwargs={"day": "Monday"}))
    assert "Today: Monday\n" in named.prompt([ASK], {})
    assert not named.form.prints_date


def test_both_answers_of_a_pair_are_written_by_the_template(byte_level):
    shape = SHAPES["gpt-oss, channels"]
    settings, ends = reading(shape, byte_level)
    pair = Pair(chosen="Four.", rejected="Five.", chosen_turn={"reasoning_content": "Hm."})
    record = Sample(prompt="", messages=(ASK,), pairs=(pair,), where="f:1")
    said = [trained(row, byte_level) for row in preference_rows([record], byte_level, settings, ends=ends)]
    final = "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert said == [f"{thought}{final}Four.<|return|>", f"{final}Five.<|return|>"]
    assert CHANNELS in shape.template


def test_turns_of_weight_0_are_read_and_not_trained(byte_level):
    chat = [ASK, {**FOUR, "weight": 0}, AGAIN, {**FOUR, "train": True}, ASK, {**FOUR, "content": "No.", "train": False}]
    settings = DataSettings(chat_template=chatml(), every_turn=True)
    (row,) = demonstration_rows([demonstration({"messages": chat}, where="f:1")], byte_level, settings)
    assert trained(row, byte_level) == "Four.<eos>"
    assert byte_level.decode(row.tokens).count("Four.") == 2
    assert "No." not in byte_level.decode(row.tokens)


def test_long_chats_lose_whole_turns_and_keep_the_system_turn_where_they_are_to_be_cut(byte_level):
    chat = (SYSTEM, ASK, FOUR, AGAIN, FOUR, ASK)
    whole = Chats(byte_level, DataSettings(chat_template=chatml()))
    less = (SYSTEM, AGAIN, FOUR, ASK)
    assert shorter(chat) == less
    assert shorter(less) == (SYSTEM, ASK)
    assert shorter((SYSTEM, ASK)) == shorter((ASK,)) == shorter(()) == ()
    room = len(byte_level(whole.prompt(less, {}))["input_ids"])
    limits = {"chat_template": chatml(), "max_prompt_tokens": room, "max_tokens": room + 20}
    asked = Sample(prompt="", messages=chat, answer=None, extra={}, where="f:1")
    shown = Sample(prompt="", answer="Five.", messages=chat, where="f:1")
    tally = Tally(source="f")
    (prompt,) = prompts([asked], byte_level, DataSettings(overlong="truncate", **limits), tally=tally)
    assert (prompt.messages, prompt.text, len(prompt.tokens)) == (less, whole.prompt(less, {}), room)
    (row,) = demonstration_rows([shown], byte_level, DataSettings(overlong="truncate", **limits), tally=tally)
    assert row.tokens[:room] == prompt.tokens
    assert (tally.truncated_prompts, tally.items, dict(tally.dropped)) == (2, 2, {})
    tally = Tally(source="f")
    assert prompts([asked], byte_level, DataSettings(**limits), tally=tally) == []
    assert demonstration_rows([shown], byte_level, DataSettings(**limits), tally=tally) == []
    assert tally.dropped == {"prompt too long": 2}
    tight = DataSettings(chat_template=chatml(), overlong="truncate", max_prompt_tokens=9, max_tokens=30)
    tally = Tally(source="f")
    assert demonstration_rows([shown], byte_level, tight, tally=tally) == []
    assert tally.dropped == {"prompt too long": 1}, "its last question alone is too long"
    long = Sample(prompt="", answer="Five." * 20, messages=chat, where="f:1")
    limits["max_prompt_tokens"] = 200
    limits["max_tokens"] = 210
    for overlong, kept in ((None, 0), ("truncate", 1)):
        settings = DataSettings(overlong=overlong, **limits)
        assert len(demonstration_rows([long], byte_level, settings)) == kept


def test_the_report_shows_how_chats_are_written_and_one_row(byte_level):
    shape = SHAPES["qwen 3, an empty thought"]
    settings, ends = reading(shape, byte_level)
    tally = Tally(source="f")
    (row,) = demonstration_rows(
        [demonstration({"messages": [ASK, FOUR]}, where="f:1")], byte_level, settings, tally=tally, ends=ends
    )
    tally.example = parts_of(row, byte_level)
    report = DataReport(kind="demonstrations", sources=(tally.freeze(),), train_items=1, validation_items=0)
    for line in (
        r"f: chats ask for an answer with '<|im_start|>assistant\n'",
        r"f: before an answer the chat template writes '<think>\n\n</think>\n\n', which is trained",
        r"f: answers end with '<|im_end|>'",
        "f: turns of a chat do not share one pass: the template writes earlier answers in another way",
        r"f: a row: '<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n' | trained: '<think>",
    ):
        assert line in report.table()
    assert "which is trained" not in report.table(measured=True)
    assert report.json()["sources"][0]["chat"]["between"] == shape.between


def test_a_template_that_ends_answers_in_no_end_token_is_told_of(byte_level):
    """As that of a base model whose end token is another one: the policy would never write what its chats show."""
    tally = Tally(source="f")
    record = demonstration({"messages": [ASK, FOUR]}, where="f:1")
    (row,) = demonstration_rows([record], byte_level, DataSettings(chat_template=chatml()), tally=tally)
    assert trained(row, byte_level) == "Four.<eos>"
    report = DataReport(kind="demonstrations", sources=(tally.freeze(),), train_items=1, validation_items=0)
    told = "f: answers end with the tokenizer's eos_token, the chat template ends them with '<|im_end|>'"
    assert told in report.table()


PROGRAMS = {
    "{{ 1 // 0 }}": "division",
    "{{ 'a' * 10**15 }}": "MemoryError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
    "{% for i in range(10**12) %}{% endfor %}": "Range too big",
    "{{ nothing.of.it }}": "undefined",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": r"takes more than 0\.2 s",
    "{{ messages[0]['content'] * 500 }}": "writes more than 1,000 characters",
}


@pytest.mark.parametrize("template", PROGRAMS)
def test_a_template_that_fails_or_never_ends_is_a_bad_row(byte_level, monkeypatch, template):
    monkeypatch.setattr("plaudit.data.chat.RENDER_SECONDS", 0.2 if "0\\." in PROGRAMS[template] else 600)
    monkeypatch.setattr("plaudit.data.chat.MOST_RENDERED", 1000)
    chats = Chats(byte_level, DataSettings(train=("a.jsonl",), chat_template=template))
    for _ in range(2):
        with pytest.raises(DataError, match=f"^here: the chat template .*{PROGRAMS[template]}"):
            chats.prompt([ASK], {}, where="here")


def test_many_rows_that_take_too_long_end_the_reading(byte_level, monkeypatch):
    monkeypatch.setattr("plaudit.data.chat.MOST_RENDERED", 3)
    chats = Chats(byte_level, DataSettings(train=("a.jsonl",), chat_template="default"))
    for _ in range(2):
        with pytest.raises(DataError, match="more than 3 characters"):
            chats.prompt([ASK], {})
    with pytest.raises(ValueError, match=r"3 times\. Set data\.chat_template") as raised:
        chats.prompt([ASK], {})
    assert not isinstance(raised.value, DataError)
