"""Chats as Qwen 3.5 writes them, for a folder whose name the package renderers does not know (docs/environments.md)."""

from typing import Any

from renderers import Qwen35RendererConfig, create_renderer


def qwen35(tokenizer: Any) -> Any:
    return create_renderer(tokenizer, Qwen35RendererConfig())
