"""The chat template of a run: the tokenizer's or the settings', with the settings' arguments fixed in it.

A checkpoint keeps this template. So an evaluation, a judge's server, transformers and vLLM render chats as they were
trained.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from plaudit.data.fields import TEMPLATE_OWN, DataError
from plaudit.data.settings import DataSettings
from plaudit.support.paths import at_home

DEFAULT_TEMPLATE = (
    "{% if tools %}{{ '<|tools|>\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Like ChatML, but with plain text and the end token only, so that any tokenizer can use it without new tokens."""

AS_CHAT = "plaudit_as_chat"
"""Key of a checkpoint's tokenizer_config.json: True if its run rendered prompts as chats. Absent if unknown."""
TODAY = "strftime_now"
"""The function by which templates print today's date."""
DIRECTIVES = ("-d", "-m", *"YmdbBaAyjeHMSp")
"""Format codes that a pinned date supports; the time is midnight."""


def chosen_template(settings: DataSettings, tokenizer: Any) -> Any:
    """Return the chat template: a text, a mapping of several by name, or None, as in `tokenizer.chat_template`.

    `data.chat_template_kwargs` are fixed in it."""
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, Mapping) else {}
    template = named.get(settings.chat_template) or chat_template(settings.chat_template)
    if template is None:
        template = tokenizer.chat_template
    elif settings.chat_template == "default" and adds_bos(tokenizer):
        template = "{{ bos_token }}" + template
    if not template:
        return None
    if isinstance(template, Mapping):
        return {name: pinned(text, settings.chat_template_kwargs) for name, text in template.items()}
    return pinned(template, settings.chat_template_kwargs)


def chat_template(setting: str | None) -> str | None:
    """Return the template that the setting is or names; None for the tokenizer's. Raises DataError without the file."""
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


def pinned(template: str, arguments: Mapping[str, Any]) -> str:
    """Give a template's arguments defaults, which a row's own arguments override, and fix the date of `strftime_now`.

    Raises ValueError for an argument that the template does not read."""
    lines = []
    for name, value in arguments.items():
        if not name.isidentifier() or name in TEMPLATE_OWN:
            raise ValueError(f"data.chat_template_kwargs.{name} cannot be set: the renderer sets it. Leave it out.")
        if not re.search(rf"\b{name}\b", template):
            raise ValueError(
                f"data.chat_template_kwargs.{name} is not read by the chat template. Leave it out, or correct its name."
            )
        if name == TODAY:  # of macros with one name, the last counts
            template = re.sub(rf"\{{% macro {TODAY}\(.*\n", "", template)
            lines.append(_pinned_date(value))
        else:
            lines.append(f"{{% if {name} is not defined %}}{{% set {name} = {plain(value)!a} %}}{{% endif %}}")
    # transformers removes the newline after a block, so the rest of the template renders as before
    return "".join(f"{line}\n" for line in lines if line not in template) + template


def plain(value: Any) -> Any:
    """Convert lists and mappings of settings to Python's own."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, str | int | float | bool | None):
        return value
    return [plain(entry) for entry in value]


def _pinned_date(value: Any) -> str:
    try:
        day = datetime.date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(
            f"data.chat_template_kwargs.{TODAY}={value!r} must be the date that the template prints, as 2026-07-31."
        ) from None
    time = datetime.datetime.combine(day, datetime.time())
    said = "".join(f" | replace('%{one}', {time.strftime('%' + one)!r})" for one in DIRECTIVES)
    return f"{{% macro {TODAY}(format) %}}{{{{ format{said} }}}}{{% endmacro %}}"


def adds_bos(tokenizer: Any) -> bool:
    """True if this tokenizer puts its BOS token before texts, as Llama's does and GPT-2's does not."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    added = list(tokenizer("a", verbose=False)["input_ids"])
    return bool(getattr(tokenizer, "add_bos_token", False)) or added[:1] == [bos]
