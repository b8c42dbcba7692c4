"""`plaudit generate`: answer prompts with a checkpoint; print the answers or write them as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit.data.fields import TEMPLATE_COLUMNS
from plaudit.data.load import load_prompts
from plaudit.data.reader import Asked, Reader
from plaudit.data.records import Sample
from plaudit.evaluate.measures import computing
from plaudit.evaluate.policy import Policy
from plaudit.evaluate.settings import GenerateSettings
from plaudit.monitor.console import Reporter
from plaudit.support.paths import at_home, check_writable
from plaudit.support.plugins import load_plugins
from plaudit.support.visible import visible
from plaudit.types import Completion, Prompt


def generate(settings: GenerateSettings, prompts: Sequence[str] = ()) -> list[tuple[Prompt, list[Completion]]]:
    """Answer `prompts` and the prompts of `settings.prompts`. Print the answers or write them to `settings.output`, and
    return them. By default, prompts become user turns of chats if the checkpoint was trained on chats."""
    load_plugins(settings.plugins)
    settings.check()
    if not prompts and settings.prompts is None:
        raise ValueError("no prompts: give --prompt TEXT, once or more, or prompts=FILE")
    out = None if settings.output is None else at_home(settings.output)
    if out is not None:
        if out.exists() and not settings.overwrite:
            raise ValueError(f"{out} exists already: give another output, or set overwrite=true")
        out.parent.mkdir(parents=True, exist_ok=True)
        check_writable(out)
    policy = Policy.load(settings.model, device=computing(settings))
    asked = _asked(prompts, policy, settings)
    reporter = Reporter(quiet=out is None and len(asked) < 8)
    with reporter.track("generate", len(asked)) as tracker:
        groups = policy.answers(
            asked, settings.sampling, seed=settings.seed, advance=lambda done: tracker.advance(), cut=True
        )
    answered = [(group[0].prompt, [answer.completion for answer in group]) for group in groups]
    _show(answered, out)
    return answered


def _asked(prompts: Sequence[str], policy: Policy, settings: GenerateSettings) -> list[Prompt]:
    """Read all prompts. Raises ValueError for a prompt that is too long for the model."""
    ends = policy.model.special.eos
    reader = Reader(policy.tokenizer, settings.data, ends)
    asked = [Asked(Sample(prompt=text, where=f"prompt:{number}")) for number, text in enumerate(prompts)]
    found = [
        Prompt(id=one.where, text=one.text, tokens=one.tokens, messages=one.messages)
        for one in reader.encoded([reader.written(each) for each in asked])
    ]
    if settings.prompts is not None:
        read = replace(settings.data, train=settings.prompts, limit=settings.limit)
        found += load_prompts(read, policy.tokenizer, 0, ends).items
    room = policy.model.max_positions - 1
    for prompt in found:
        if len(prompt.tokens) > room:
            raise ValueError(
                f"{prompt.id} has {len(prompt.tokens)} tokens ({prompt.text[:40]!r}...), and the model has room for "
                f"{room} before an answer. Shorten it, or leave it out."
            )
    return found


def _show(answered: Sequence[tuple[Prompt, list[Completion]]], out: Path | None) -> None:
    if out is None:
        for prompt, completions in answered:
            for completion in completions:
                print(visible(f"{prompt.text} |{completion.text}  [{completion.finish}]"))
        return
    with out.open("w", encoding="utf-8") as file:
        for prompt, completions in answered:
            for completion in completions:
                file.write(json.dumps(_row(prompt, completion)) + "\n")
    print(f"{sum(len(completions) for _, completions in answered):,} answers: {out}")


def _row(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """Return an answer as a row of the dialect prompt/completion, with the columns that rules and templates need."""
    asked = {"prompt_id": prompt.id, "prompt": list(prompt.messages) or prompt.text, "completion": completion.text}
    reference = {} if prompt.answer is None else {"answer": prompt.answer}
    template = {name: prompt.extra[name] for name in TEMPLATE_COLUMNS if name in prompt.extra}
    numbers = {"tokens": list(completion.tokens), "logprobs": list(completion.logprobs)}
    return asked | reference | template | {"finish": completion.finish} | numbers
