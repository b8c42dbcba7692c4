"""Renderers for tests: a chat as lines, with calls in a form that no chat template here writes."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

NAMES = ("a", "b")


class Lines:
    """A turn is `role> content`, a call `name(1, 2)` after an exclamation mark."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, messages: list[dict[str, Any]], ask: bool) -> str:
        lines = []
        for one in messages:
            calls = [call["function"] for call in one.get("tool_calls", ())]
            made = "".join(f"!{call['name']}({', '.join(map(str, call['arguments'].values()))})" for call in calls)
            lines.append(f"{one['role']}> {one['content']}{made}\n")
        return "".join(lines) + ("assistant> " if ask else "")

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        shown = "".join(f"tool: {tool['function']['name']}\n" for tool in tools or ())
        return self.encoded(shown + self.text(messages, add_generation_prompt))

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        assert self.tokenizer.decode(prompt_ids).endswith("assistant> "), "it hears what the answer follows"
        text = self.tokenizer.decode(token_ids)
        content, *attempts = text.split("!") if tools else [text]
        calls = []
        for attempt in attempts:
            name, _, given = attempt.strip().removesuffix(")").partition("(")
            try:
                arguments = dict(zip(NAMES, ast.literal_eval(f"[{given}]"), strict=True))
                calls.append(SimpleNamespace(status="ok", name=name, arguments=arguments))
            except (SyntaxError, ValueError):
                calls.append(SimpleNamespace(status="malformed_structure", name=None, arguments=None))
        thoughts, mark, rest = content.partition(" so ")
        content, thoughts = (rest, thoughts) if mark else (content, "")
        return SimpleNamespace(content=content, reasoning_content=thoughts or None, tool_calls=calls)

    def bridge_to_next_turn(self, prompt: Any, completion: Any, new_messages: Any, *, tools: Any = None) -> Any:
        return SimpleNamespace(token_ids=[*prompt, *completion, *self.encoded("\n" + self.text(new_messages, True))])


class Again(Lines):
    """Can append to no chat, so each is written again as a whole."""

    def bridge_to_next_turn(self, *given: Any, **more: Any) -> Any:
        return None


class Forgets(Lines):
    """Leaves out the first token of what was sampled."""

    def bridge_to_next_turn(self, prompt: Any, completion: Any, new_messages: Any, *, tools: Any = None) -> Any:
        return super().bridge_to_next_turn(prompt, completion[1:], new_messages)


class Breaks(Lines):
    def parse_response(self, *given: Any, **more: Any) -> Any:
        raise KeyError("unknown form")


def nothing(tokenizer: Any) -> object:
    return object()
