"""Shapes of chat templates, each in a few lines of Jinja of its own: what differs between real ones, and nothing else.

`ends` are the model's end tokens beside the tokenizer's eos_token. `between` and `end` are what is trained before and
after an answer's text, worked out by hand.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from plaudit.data.settings import DataSettings

TURN = "{% for m in messages %}"
DONE = "{% endfor %}"


@dataclass(frozen=True)
class Shape:
    template: str
    between: str = ""
    end: str = "<eos>"
    ends: tuple[str, ...] = ()
    nests: bool = True
    system: bool = True
    """A system turn may stand first."""
    strips: str = " "
    """Whitespace that an answer keeps: " " all, "<" none before it, "" none."""
    exact: bool = True
    """What transformers renders begins with prompt and completion."""
    thoughts: str | None = None
    asks: str = ""


def roles(user, assistant, ask, *, system="{{ m.content }}\n", before=""):
    """A template of one form for each role."""
    return (
        f"{before}{TURN}{{% if m.role == 'user' %}}{user}{{% elif m.role == 'system' %}}{system}"
        f"{{% elif m.role == 'assistant' %}}{assistant}{{% endif %}}{DONE}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )


def said(text):
    """A text with the newlines and blanks that Jinja would take as its own."""
    return "{{ " + repr(text) + " }}"


SAY = "{{ m.content }}"
TRIM = "{{ m.content | trim }}"
MARK = "{% generation %}", "{% endgeneration %}"


def chatml(answer=SAY, ask="", *, end="<|im_end|>", mark=False, before=""):
    one, other = MARK if mark else ("", "")
    head = "{{ '<|im_start|>' + m.role + '\\n' }}"
    turn = f"{{% if m.role == 'assistant' %}}{one}{answer}{said(end)}{other}{{% else %}}{SAY}{said(end)}{{% endif %}}"
    opening = said("<|im_start|>assistant\n" + ask)
    return f"{before}{TURN}{head}{turn}{said(chr(10))}{DONE}{{% if add_generation_prompt %}}{opening}{{% endif %}}"


def llama3(answer, *, date="", mark=False):
    one, other = MARK if mark else ("", "")
    head = "{{ '<|h|>' + m.role + '<|/h|>\\n\\n' }}"
    turn = f"{{% if m.role == 'assistant' %}}{one}{answer}<|eot|>{other}{{% else %}}{TRIM}<|eot|>{{% endif %}}"
    return (
        "{{ bos_token }}" + date + f"{TURN}{head}{turn}{DONE}"
        "{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}"
    )


THOUGHT = (  # Qwen 3's: thoughts of the last turn only, from their own key or from the text
    "{% set t = m.reasoning_content or '' %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set t = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
)
LAST_THINKS = (
    THOUGHT + "{% if loop.last or t %}{{ '<think>\\n' + t.strip() + '\\n</think>\\n\\n' + c.lstrip() }}"
    "{% else %}{{ c }}{% endif %}"
)
DROPS_THOUGHTS = "{{ m.content.split('</think>')[-1] }}"  # DeepSeek R1's
CHANNELS = (
    "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
    "<|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
)
IM = {"end": "<|im_end|>", "ends": ("<|im_end|>",), "asks": "<|im_start|>assistant\n"}
EOT = {"end": "<|eot|>", "ends": ("<|eot|>",), "strips": "", "asks": "<|h|>assistant<|/h|>\n\n"}
DATE = (
    "{% if not day is defined %}{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}"
    "{% endif %}{% endif %}"
)

SHAPES = {
    "chatml": Shape(chatml(), **IM),
    "chatml, marked": Shape(chatml(mark=True), **IM),
    "chatml, a default system turn": Shape(
        chatml(
            before="{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
        ),
        **IM,
    ),
    "chatml, stripped": Shape(chatml(TRIM), strips="", **IM),
    "chatml of a base model": Shape(chatml(), asks="<|im_start|>assistant\n", exact=False, nests=False),
    "zephyr": Shape(
        TURN
        + "{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}"
        + DONE
        + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        asks="<|assistant|>\n",
    ),
    "llama 2": Shape(
        roles(
            "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}",
            "{{ ' ' + (m.content | trim) + ' ' + eos_token }}",
            "",
        ),
        between=" ",
        end=" <eos>",
        strips="",
        system=False,
    ),
    "vicuna": Shape(
        roles("{{ 'USER: ' + m.content + ' ' }}", "{{ 'ASSISTANT: ' + m.content + eos_token }}", "ASSISTANT:"),
        between=" ",
        asks="ASSISTANT:",
    ),
    "llama 3": Shape(llama3(TRIM), **EOT),
    "llama 3, marked": Shape(llama3(TRIM, mark=True), **EOT),
    "mistral": Shape(
        roles("[INST] {{ m.content }} [/INST]", "{{ ' ' + m.content + eos_token }}", "", before="{{ bos_token }}"),
        between=" ",
        system=False,
    ),
    "tekken": Shape(
        roles("[INST]{{ m.content }}[/INST]", "{{ m.content + eos_token }}", "", system="[S]{{ m.content }}[/S]"),
    ),
    "gemma": Shape(
        "{{ bos_token }}" + TURN + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
        "{{ m.content | trim }}<end_of_turn>{{ '\\n' }}"
        + DONE
        + "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        end="<end_of_turn>",
        ends=("<end_of_turn>",),
        strips="",
        asks="<start_of_turn>model\n",
    ),
    "phi 3, eos after the whole chat": Shape(
        TURN
        + "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"
        + DONE
        + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
        end="<|end|>",
        ends=("<|end|>",),
        asks="<|end|>\n<|assistant|>\n",
    ),
    "phi 4": Shape(
        TURN
        + "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
        + DONE
        + "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        end="<|im_end|>",
        ends=("<|im_end|>",),
        asks="<|im_start|>assistant<|im_sep|>",
    ),
    "gpt-oss, channels": Shape(
        roles(
            "<|start|>user<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant" + CHANNELS,
            "<|start|>assistant",
            system="<|start|>system<|message|>{{ m.content }}<|end|>",
        ),
        between="<|channel|>final<|message|>",
        end="<|return|>",
        ends=("<|return|>", "<|call|>"),
        nests=False,
        asks="<|start|>assistant",
    ),
    "solar, a header in the answer": Shape(
        TURN
        + "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>"
        + DONE
        + "{% if add_generation_prompt %}<|begin|>assistant{% endif %}",
        between="<|content|>",
        end="<|end|>",
        ends=("<|end|>",),
        asks="<|begin|>assistant",
    ),
    "functionary, the receiver in the answer": Shape(
        TURN + "{{ '<|h|>' + m.role + '<|/h|>\\n\\n' }}{% if m.role == 'assistant' %}{{ '>>>all\\n' }}{% endif %}"
        "{{ m.content }}<|eot|>"
        + DONE
        + "{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n>>>' }}{% endif %}",
        between="all\n",
        end="<|eot|>",
        ends=("<|eot|>",),
        asks="<|h|>assistant<|/h|>\n\n>>>",
    ),
    "command r": Shape(
        TURN
        + "<|S|><|{{ m.role }}|>{{ m.content | trim }}<|E|>"
        + DONE
        + "{% if add_generation_prompt %}<|S|><|assistant|>{% endif %}",
        end="<|E|>",
        ends=("<|E|>",),
        strips="",
        asks="<|S|><|assistant|>",
    ),
    "command r7b, a closed thought and a response": Shape(
        roles(
            "<|S|><|U|>{{ m.content }}<|E|>",
            "<|S|><|C|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|E|>",
            "<|S|><|C|><|START_THINKING|><|END_THINKING|>",
            system="<|S|><|SYS|>{{ m.content }}<|E|>",
        ),
        between="<|START_RESPONSE|>",
        end="<|END_RESPONSE|><|E|>",
        ends=("<|E|>",),
        nests=False,
        exact=False,
        asks="<|S|><|C|><|START_THINKING|><|END_THINKING|>",
    ),
    "granite": Shape(
        TURN
        + "<|r|>{{ m.role }}<|/r|>{{ m.content }}{{ eos_token + '\\n' }}"
        + DONE
        + "{% if add_generation_prompt %}<|r|>assistant<|/r|>{% endif %}",
        asks="<|r|>assistant<|/r|>",
    ),
    "alpaca": Shape(
        roles(
            "{{ '### Instruction:\\n' + m.content + '\\n\\n' }}",
            "{{ '### Response:\\n' + m.content + eos_token + '\\n\\n' }}",
            "{{ '### Response:\\n' }}",
        ),
        asks="### Response:\n",
    ),
    "no end but the next turn": Shape(
        roles(
            "<|user|>{{ '\\n' + m.content }}",
            "<|assistant|>{{ '\\n<think></think>\\n' + (m.content | trim) }}",
            "<|assistant|>",
            system="<|system|>{{ '\\n' + m.content }}",
        ),
        between="\n<think></think>\n",
        end="<|user|>",
        ends=("<|user|>",),
        strips="",
        exact=False,
        asks="<|assistant|>",
    ),
    "qwen 3, an empty thought": Shape(
        chatml(LAST_THINKS), between="<think>\n\n</think>\n\n", nests=False, strips="<", **IM
    ),
    "qwen 3.5, an open thought": Shape(
        chatml(LAST_THINKS, "<think>\n"),
        between="\n</think>\n\n",
        nests=False,
        strips="<",
        thoughts="closed",
        **{**IM, "asks": "<|im_start|>assistant\n<think>\n"},
    ),
    "deepseek r1, an open thought that answers lack": Shape(
        roles("<|U|>{{ m.content }}", "<|A|>" + DROPS_THOUGHTS + "{{ eos_token }}", "{{ '<|A|><think>\\n' }}"),
        between="\n</think>\n\n",
        nests=False,
        exact=False,
        thoughts="closed",
        asks="<|A|><think>\n",
    ),
    "nemotron, a closed thought in one line": Shape(
        chatml("<think></think>{{ m.content }}", "<think>\n"),
        between="</think>",
        nests=False,
        exact=False,
        thoughts="closed",
        **{**IM, "asks": "<|im_start|>assistant\n<think>\n"},
    ),
    "thinking switched off, which answers lack": Shape(
        chatml(ask="<think>\n\n</think>\n\n"),
        nests=False,
        exact=False,
        **{**IM, "asks": "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
    ),
    "an end before the end token": Shape(
        roles(
            "<|U|>{{ '\\n' + m.content + '\\n' }}",
            "<|A|>{{ '\\n' + m.content }}{{ '\\n' }}<|E|>{{ '\\n' }}",
            "<|A|>{{ '\\n' }}",
        ),
        end="\n<|E|>",
        ends=("<|E|>",),
        asks="<|A|>\n",
    ),
    "no generation prompt": Shape(
        TURN + "<|{{ m.role }}|>{{ m.content + eos_token }}" + DONE,
        between="<|assistant|>",
    ),
    "plain words": Shape(
        roles("{{ 'User: ' + m.content + '\\n\\n' }}", "{{ 'Assistant: ' + m.content + '\\n\\n' }}", "Assistant:"),
        between=" ",
        asks="Assistant:",
        exact=False,
        nests=False,
    ),
    "a date": Shape(llama3(TRIM, date=DATE + "{{ 'Today: ' + day + '\\n' }}"), **EOT),
}
MARKED = [name for name, shape in SHAPES.items() if "{% generation %}" in shape.template]


# How templates write tools and calls: a template, and what it makes of one call, two calls and a call beside text; None
# is refused, since a call would be missing from what is trained. ARGUMENTS are those of the calls.
ARGUMENTS = {"city": "Oslo", "days": 3}, {"city": "Rome", "days": 4}
JSON = "{{ t | tojson }}"


def calling(call, *, tool=JSON, first="", last="", after="<|im_end|>", text=SAY, calls="m.tool_calls or []"):
    """Shape of tools, and of calls `c` in turns `m`, with what stands around all calls of a turn."""
    around = [f"{{% if m.tool_calls %}}{said(part)}{{% endif %}}" if part else "" for part in (first, last)]
    loop = f"{around[0]}{{% for c in {calls} %}}{call}{DONE}{around[1]}"
    tools = f"{{% for t in tools or [] %}}{tool}{said(chr(10))}{DONE}"
    turns = f"{TURN}{{{{ '<|im_start|>' + m.role + '\\n' }}}}{text}{loop}{said(after)}{DONE}"
    return f"{tools}{turns}{{% if add_generation_prompt %}}{said('<|im_start|>assistant' + chr(10))}{{% endif %}}"


NAME, GIVEN = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
CALLERS = {
    "hermes": (
        calling("<tool_call>{{ c.function | tojson }}</tool_call>"),
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 4}}</tool_call>',
    ),
    "mistral": (
        calling(f"{NAME}[ARGS]{GIVEN}", first="[TOOL_CALLS]"),
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}',
        'get_weather[ARGS]{"city": "Rome", "days": 4}',
    ),
    "tags of arguments": (
        calling(f"<{NAME}>{{% for k, v in c.function.arguments.items() %}}<k>{{{{ k }}}}<v>{{{{ v }}}}{DONE}"),
        "<get_weather><k>city<v>Oslo<k>days<v>3",
        "<get_weather><k>city<v>Rome<k>days<v>4",
    ),
    "arguments as a text": (
        calling("{{ c.function.name + ' ' + c.function.arguments }}"),
        'get_weather {"city": "Oslo", "days": 3}',
        'get_weather {"city": "Rome", "days": 4}',
    ),
    "escapes": (
        calling("{{ c.function | tojson(ensure_ascii=True) }}", tool="{{ t | string }}"),
        '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 4}}',
    ),
    "a signature": (
        calling(
            f"{NAME}({GIVEN})",
            tool="{{ t.function.name + t.function.description }} {{ t.function.parameters.properties | join(', ') }}",
        ),
        'get_weather({"city": "Oslo", "days": 3})',
        'get_weather({"city": "Rome", "days": 4})',
    ),
    "the first call alone, as gpt-oss": (
        calling(f"{NAME}{GIVEN}", calls="(m.tool_calls or [])[:1]"),
        'get_weather{"city": "Oslo", "days": 3}',
        None,
    ),
    "names without arguments": (calling(NAME), None, None),
    "no call at all, as GigaChat 3": (calling(""), None, None),
    "calls behind the end, as Nemotron Nano 2": (
        calling(f"{NAME}{GIVEN}", text="{% if m.content %}{{ m.content }}<|im_end|>{% endif %}"),
        'get_weather{"city": "Oslo", "days": 3}',
        'get_weather{"city": "Rome", "days": 4}',
    ),
}
BESIDE_TEXT = {"the first call alone, as gpt-oss", *[name for name, shape in CALLERS.items() if shape[2]]} - {
    "calls behind the end, as Nemotron Nano 2"
}
"""Those that show a call after a text of the same turn."""

DAY = {"strftime_now": "2024-07-26"}
SPECIAL = (
    *("<eos>", "<bos>", "<|im_end|>", "<|im_start|>", "<|eot|>", "<|h|>", "<|/h|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<|channel|>", "<|message|>", "<|E|>", "<|user|>", "<end_of_turn>", "<|END_RESPONSE|>"),
)


def reading(shape, tokenizer, **given):
    """The settings for a shape, and its model's end tokens."""
    if "strftime_now" in shape.template:
        given.setdefault("chat_template_kwargs", DAY)
    given = {"thoughts": shape.thoughts, **given}
    return DataSettings(chat_template=shape.template, **given), tokenizer.convert_tokens_to_ids(list(shape.ends))


def train_tokenizer(**special):
    """Byte-level BPE whose only merge is `ab`: one token for it, one for every other ASCII character."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    specials = list(dict.fromkeys(special.values()))
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials) + 1,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(["ab ab ab ab"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)
