"""`plaudit serve` and `plaudit chat`: a policy that answers over HTTP, by OpenAI's protocol, or in the terminal.

checkpoint -> engine -> environments/speaker.py -> environments/server.py -> uvicorn, or a loop over lines
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click

from plaudit.commands.errors import plain_errors
from plaudit.commands.options import TakesOptions, address_options, compute_options, plugin_option, traceback_option
from plaudit.support.paths import at_home
from plaudit.support.visible import visible

MOST = 1024
"""Limit of an answer's tokens, unless an option sets another one."""
engine_option = click.option("--engine", type=click.Choice(["native", "vllm"]), default="native", show_default=True)


@click.command(cls=TakesOptions)
@click.argument("model", type=click.Path())
@address_options(8000)
@compute_options
@engine_option
@click.option("--slots", type=click.IntRange(1), default=64, show_default=True, help="Answers decoded at once.")
@click.option("--max-tokens", type=click.IntRange(1), default=MOST, show_default=True, help="Longest answer.")
@plugin_option
@traceback_option
def serve(model: str, host: str, port: int, token_env: str, plugins: tuple[str, ...], **options: Any) -> None:
    """Serve a policy over HTTP by OpenAI's protocol: a run, a checkpoint's folder, a GGUF file, or a hub id."""
    with plain_errors(plugins=plugins):
        from plaudit.commands.listening import address_of, bounded_protocol, listen, serve_http
        from plaudit.commands.serve import token_of

        token, names = token_of(host, token_env), ("localhost", socket.gethostname(), host, *options.pop("allow_hosts"))
        listening, most = listen(host, port), options.pop("max_tokens")
        speaker = _speaker(model, **options)
        from plaudit.environments.server import application

        name, url = at_home(model).resolve().name.removesuffix(".gguf"), f"{address_of(listening)}/v1"
        app: Any = application(speaker, model=name, names=names, most=most, token=token)
        say(f"serving {name} on {url}, {'with a' if token else 'without a'} token")
        say(f"messages are read as {'chats' if speaker.as_chat else 'plain text'} (--chat, --text)")
        key = f' -H "Authorization: Bearer ${token_env}"' * bool(token)
        say(f"curl {url}/chat/completions -H 'Content-Type: application/json'{key} \\")
        say("""  -d '{"messages": [{"role": "user", "content": "Hello"}]}'""")
        try:
            serve_http(app, bounded_protocol(), listening)
        finally:
            speaker.engine.close()


@click.command(cls=TakesOptions)
@click.argument("model", type=click.Path())
@compute_options
@engine_option
@click.option("--system", help="A system turn before the first question.")
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True, help="0 is greedy.")
@click.option("--max-tokens", type=click.IntRange(1), default=MOST, show_default=True, help="Longest answer.")
@click.option("--seed", type=int, help="Seed of every answer; default: another one each time.")
@plugin_option
@traceback_option
def chat(model: str, system: str | None, plugins: tuple[str, ...], **options: Any) -> None:
    """Talk with a policy in the terminal. /reset forgets the conversation, /quit ends it; Ctrl-C stops an answer."""
    with plain_errors(plugins=plugins):
        drawn = {name: options.pop(name) for name in ("temperature", "max_tokens", "seed")}
        speaker = _speaker(model, slots=1, **options)
        from plaudit.environments.protocol import ChatRequest, RequestError

        first = [{"role": "system", "content": system}] if system else []
        messages = [*first]
        with closing(speaker.engine), asyncio.Runner() as runner:
            for line in _lines():
                asked = [*messages, {"role": "user", "content": line}]
                try:
                    answer = (
                        None if line == "/reset" else runner.run(_spoken(speaker, ChatRequest(messages=asked, **drawn)))
                    )
                except KeyboardInterrupt:
                    say("")
                except RequestError as error:
                    click.echo(visible(f"error: {error} (/reset forgets the conversation)"), err=True)
                else:
                    messages = [*first] if answer is None else [*asked, answer]


async def _spoken(speaker: Any, request: Any) -> dict[str, Any]:
    """Print the answer of a Speaker to a ChatRequest as it is sampled, and return its message."""
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    async for piece in speaker.speech(request).pieces([]):
        for name, text in piece["delta"].items():
            if name != "role":
                say(text, nl=False)
                answer[name] = answer.get(name, "") + text
    say("")
    return answer


def _lines() -> Iterator[str]:
    """Yield the lines that are typed, up to the end or /quit, without empty ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line


def _speaker(model: str, *, device: str, dtype: str, threads: int, **options: Any) -> Any:
    import torch

    from plaudit.environments.speaker import Speaker
    from plaudit.evaluate.policy import Policy
    from plaudit.models.device import device_of

    torch.set_num_threads(threads or torch.get_num_threads())
    policy = Policy.load(model, device=device_of(device), dtype=getattr(torch, dtype))
    return Speaker.of(policy.model, policy.tokenizer, say=say, **options)


def say(text: str, *, nl: bool = True) -> None:
    click.echo(visible(text), nl=nl)
