"""What stands between two turns is what the template writes there, over many shapes of templates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import worlds
from chat_shapes import CALLERS, IM, SHAPES, SPECIAL, Shape, calling, chatml, reading, train_tokenizer
from scripted import Scripted

from plaudit.data.chat import Chats
from plaudit.data.fields import DataError
from plaudit.data.settings import DataSettings
from plaudit.environments.base import World
from plaudit.environments.calls import CallForm, call_form
from plaudit.environments.episodes import Player
from plaudit.environments.settings import EnvironmentSettings
from plaudit.types import Completion, Episode, Prompt, Sampling

ASK = {"role": "user", "content": "Two and two?"}
WORLDS = Path(worlds.__file__)
REWRITTEN = {
    "chatml of a base model": "its end token is not the template's",
    "plain words": "its turns end without the model's end token",
    "gpt-oss, channels": "an earlier turn ends in <|end|>, not in <|return|>",
    "command r7b, a closed thought and a response": "an earlier turn has no empty thought",
    "qwen 3, an empty thought": "likewise",
    "qwen 3.5, an open thought": "likewise",
    "deepseek r1, an open thought that answers lack": "thoughts are dropped",
    "thinking switched off, which answers lack": "an earlier turn has no empty thought",
}
"""Shapes that write an earlier turn in another way than it was sampled."""
THINKING = (
    "gpt-oss, channels",
    "qwen 3, an empty thought",
    "qwen 3.5, an open thought",
    "deepseek r1, an open thought that answers lack",
    "nemotron, a closed thought in one line",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(bos_token="<bos>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    return made


def played(
    chats: Chats,
    texts: list[str],
    world: str,
    ends: Any = (),
    *,
    file: Any = WORLDS,
    extra: Any = None,
    arguments: Any = None,
    stop: tuple[str, ...] = (),
    special_tokens: bool = False,
    **settings: Any,
) -> tuple[Completion, Episode, Scripted]:
    engine = Scripted(chats.tokenizer, texts, ends, stop)
    player = Player(engine, chats, World(EnvironmentSettings(function=f"{file}:{world}", **settings)))
    text = chats.prompt([ASK], arguments or {})
    tokens = tuple(chats.tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = Prompt(id="p", text=text, tokens=tokens, messages=(ASK,), extra=extra or {})
    plan = [Sampling(max_tokens=200, stop=stop, special_tokens=special_tokens)]
    (answer,) = asyncio.run(player.play(prompt, plan))
    assert answer.episode is not None
    return answer, answer.episode, engine


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("name", "thinks"), [*((name, False) for name in SHAPES), *((name, True) for name in THINKING)]
)
def test_each_turn_is_asked_for_with_what_the_template_writes(name: str, thinks: bool, tokenizer: Any) -> None:
    """The policy says what the template writes for an answer, three times; what it must have been asked with each time
    is the template's own full rendering of the chat so far."""
    shape: Shape = SHAPES[name]
    settings, ends = reading(shape, tokenizer)
    chats = Chats(tokenizer, settings, ends)
    chat: list[dict[str, Any]] = [dict(ASK)]
    texts, wanted = [], []
    for turn in range(3):
        wanted.append(chats.prompt(chat, {}))
        answer = {"role": "assistant", "content": f"Answer {turn}."}
        answer |= {"reasoning_content": f"Hm {turn}"} if thinks else {}
        texts.append(chats.completion(wanted[-1], chat, answer, {}))
        chat += [answer, {"role": "user", "content": f"{turn} said."}]
    answer, episode, engine = played(chats, texts, "Listener", ends)
    assert episode.earned is not None and episode.earned.value == 1.0, episode.earned
    said = [one["content"] for one in episode.messages if one["role"] == "assistant"]
    assert said == ["Answer 0.", "Answer 1.", "Answer 2."]
    for tokens, text in zip(engine.asked, wanted, strict=True):
        found = tokenizer.decode(tokens)
        assert squeezed(found) == squeezed(text)
    if not thinks:
        assert len(episode.restarts) == (2 if name in REWRITTEN else 0)
        sampled = [token for token, mine in zip(answer.tokens, episode.sampled, strict=True) if mine]
        assert squeezed(tokenizer.decode(sampled)).replace("<eos>", "") == squeezed("".join(texts)).replace("<eos>", "")


def test_each_sampled_token_is_in_one_sequence_behind_what_it_was_asked_with(tokenizer: Any) -> None:
    """An earlier turn's empty thought is dropped, so each turn has a sequence of its own, worked out by hand."""
    shape: Shape = SHAPES["thinking switched off, which answers lack"]
    settings, ends = reading(shape, tokenizer)
    chats = Chats(tokenizer, settings, ends)
    answer, episode, engine = played(chats, ["A.<|im_end|>", "B.<|im_end|>", "C.<|im_end|>"], "Listener", ends)
    prompt = engine.asked[0]
    sequences = [(tuple(prefix), part) for prefix, part in episode.sequences(prompt)]
    shown = [(tokenizer.decode(prefix), tokenizer.decode(answer.tokens[part])) for prefix, part in sequences]
    ask, think = "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    first = f"{ask}A.<|im_end|>"
    heard = "\n<|im_start|>user\n{} said.<|im_end|>\n<|im_start|>assistant\n"
    assert shown == [
        (ask + think, "A.<|im_end|>"),
        (first, f"{heard.format(0)}{think}B.<|im_end|>"),
        (f"{first}{heard.format(0)}B.<|im_end|>", f"{heard.format(1)}{think}C.<|im_end|>"),
    ]
    asked = [prefix + tuple(answer.tokens[part])[: episode.sampled[part].index(1)] for prefix, part in sequences]
    assert asked == engine.asked


# Calls


def hermes(name: str = "add", arguments: str = '{"a": 2, "b": 3}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


LLAMA = calling('{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}')
MISTRAL = calling("{{ c.function | tojson }}", first="[TOOL_CALLS] [", last="]")
READ = {
    "hermes": (CALLERS["hermes"][0], CallForm("<tool_call>", "name", "arguments"), hermes()),
    "llama 3": (LLAMA, CallForm("", "name", "parameters"), '{"name": "add", "parameters": {"a": 2, "b": 3}}'),
    "mistral": (
        MISTRAL,
        CallForm("[TOOL_CALLS]", "name", "arguments"),
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]',
    ),
    "default": ("default", CallForm("<tool_call>", "name", "arguments"), hermes()),
}


@pytest.mark.parametrize("name", READ)
def test_a_call_is_made_and_its_result_is_read(name: str, tokenizer: Any) -> None:
    template, form, call = READ[name]
    chats = Chats(tokenizer, DataSettings(chat_template=template), chats_ends(tokenizer), TOOLS)
    assert call_form(chats) == form
    end = "<eos>" if name == "default" else "<|im_end|>"
    answer, episode, engine = played(chats, [f"{call}{end}", f"It is 5.{end}"], "Sums", chats_ends(tokenizer))
    assert episode.earned is not None and episode.earned.value == 5.0, episode.earned
    assert episode.counts == {"turns": 2, "calls": 1, "failed_calls": 0, "unread_calls": 0}
    assert [one["role"] for one in episode.messages] == ["assistant", "tool", "assistant"]
    assert episode.messages[1]["content"] == "5"
    assert answer.text == "It is 5."
    assert '"add"' in tokenizer.decode(engine.asked[0]), "the prompt shows the tool"
    heard = tokenizer.decode(engine.asked[1][len(engine.asked[0]) :])
    assert heard.startswith(f"{call}{end}"), "the tokens are those that were sampled"
    assert heard.removeprefix(f"{call}{end}").count("5") == 1
    assert episode.restarts == ()


@pytest.mark.parametrize(
    ("text", "counts", "says"),
    [
        (hermes("sub"), (1, 1, 0), "error: there is no tool 'sub', but add, wait"),
        (hermes(arguments='{"a": 2}'), (1, 1, 0), "error: TypeError: missing a required argument: 'b'"),
        (hermes(arguments='{"a": 2, "b": null}'), (1, 1, 0), "error: TypeError: unsupported operand"),
        (hermes() + hermes(arguments='{"a": 1, "b": 1}'), (2, 0, 0), "5"),
        (f"First {hermes()}", (1, 0, 0), "5"),
        ("<tool_call>{oops</tool_call>", (0, 0, 1), None),
        ('<tool_call>{"name": 3}</tool_call>', (0, 0, 1), None),
        ("No call.", (0, 0, 0), None),
    ],
)
def test_what_goes_wrong_with_a_call_is_told_to_the_policy_and_counted(
    text: str, counts: tuple[int, ...], says: str | None, tokenizer: Any
) -> None:
    chats = Chats(tokenizer, DataSettings(chat_template="default"), (), TOOLS)
    _, episode, _ = played(chats, [f"{text}<eos>", "Done.<eos>"], "Sums")
    found = episode.counts
    assert tuple(found[name] for name in ("calls", "failed_calls", "unread_calls")) == counts
    told = [one["content"] for one in episode.messages if one["role"] == "tool"]
    assert len(told) == counts[0]
    assert says is None or told[0].startswith(says)
    assert found["turns"] == (1 if says is None else 2), "a message without a call ends the episode"


def test_a_tool_that_hangs_fails_its_episode(tokenizer: Any) -> None:
    chats = Chats(tokenizer, DataSettings(chat_template="default"), (), TOOLS)
    _, episode, _ = played(chats, [f"{hermes('wait', '{}')}<eos>"], "Sums", timeout=1.0)
    assert episode.earned is not None and "wait took more than 1 s" in str(episode.earned.reason)


@pytest.mark.parametrize("name", [name for name, (_, call, _) in CALLERS.items() if name not in ("hermes", "escapes")])
def test_templates_whose_calls_are_no_json_are_refused(name: str, tokenizer: Any) -> None:
    chats = Chats(tokenizer, DataSettings(chat_template=CALLERS[name][0]), chats_ends(tokenizer), TOOLS)
    with pytest.raises(DataError, match=r"data\.chat_template"):
        call_form(chats)


def test_a_template_that_hides_what_the_environment_says_is_refused(tokenizer: Any) -> None:
    template = chatml().replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    chats = Chats(tokenizer, DataSettings(chat_template=template), chats_ends(tokenizer))
    _, episode, _ = played(chats, ["A.<|im_end|>"], "Tells", chats_ends(tokenizer))
    assert episode.earned is not None
    assert "does not show a message of the role 'tool'" in str(episode.earned.reason)


def chats_ends(tokenizer: Any) -> list[int]:
    return list(tokenizer.convert_tokens_to_ids(list(IM["ends"])))


TOOLS = World(EnvironmentSettings(function=f"{WORLDS}:Sums")).schemas
