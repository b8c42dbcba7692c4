"""Chats to text through the tokenizer's chat template.

The template renders only what comes before an answer; the answer itself is the assistant's text as it stands with the
end token behind it, the same for SFT, preferences and what a policy samples. Whatever else a template writes behind an
answer (a newline, an empty thought) is neither trained nor asked for. Leaves out tools, their calls,
thoughts apart from the content, and images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plaudit.data.fields import DataError
from plaudit.paths import at_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""ChatML-like, in plain text and the end token alone, so that it serves any tokenizer without new tokens."""


def chat_template(setting: str | None) -> str | None:
    """The template that the setting asks for; None is the tokenizer's own."""
    if setting is None:
        return None
    if setting == "default":
        return DEFAULT_TEMPLATE
    if "{" in setting:
        return setting
    path = at_home(setting)
    if not path.is_file():
        raise DataError(
            f"data.chat_template={setting!r} is neither null (the tokenizer's own), 'default', a Jinja template "
            "nor a file."
        )
    return path.read_text(encoding="utf-8")


def render(
    messages: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    where: str = "",
) -> str:
    """The text that asks for the next assistant turn."""
    import jinja2

    if template is None and not tokenizer.chat_template:
        raise DataError(
            "the row is a chat, and the tokenizer has no chat template. Set data.chat_template=default (or a template "
            "of your own), or use a tokenizer of an instruction-tuned model.",
            where,
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses the turns {roles}: {error}", where) from error
    return str(text)


def other_end(tokenizer: PreTrainedTokenizerBase, *, template: str | None = None) -> str:
    """What the template writes behind an answer where that is not the end token first; nothing where it is, or where it
    writes nothing."""
    import jinja2

    answer = "an answer"
    chat = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False))
    except (jinja2.TemplateError, ValueError, TypeError):
        return ""  # it is for other chats than this one
    behind = text.rpartition(answer)[2].strip() if answer in text else ""
    return "" if behind.startswith(str(tokenizer.eos_token)) else behind
