"""`plaudit generate`: answer prompts with a checkpoint; print the answers or write them as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit.data.fields import TEMPLATE_COLUMNS
from plaudit.data.formats import question_of
from plaudit.data.load import load_prompts
from plaudit.data.reader import Asked, Reader
from plaudit.data.records import Sample
from plaudit.data.settings import DataSettings
from plaudit.evaluate.policy import Policy
from plaudit.evaluate.settings import SamplingSettings
from plaudit.models.device import device_of
from plaudit.monitor.console import Reporter
from plaudit.support.visible import visible
from plaudit.types import Completion, Prompt


def generate(
    model: str,
    *,
    prompts: Sequence[str] = (),
    files: Sequence[str] = (),
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 64,
    seed: int = 0,
    device: str = "auto",
    out: Path | None = None,
    as_chat: bool | None = None,
    system: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[tuple[Prompt, list[Completion]]]:
    """Answer `prompts` and those of `files`. Print the answers or write them to `out`, and return them.

    `as_chat` and `system` are as in `data` of a run; by default, prompts are sent as chats if the checkpoint was
    trained on chats. `template_arguments` go to its chat template."""
    if not prompts and not files:
        raise ValueError("no prompts: give --prompt TEXT or --file FILE, once or more")
    if samples < 1:
        raise ValueError(f"samples={samples}: a prompt gets at least one completion. Give 1 or more.")
    sampling = SamplingSettings(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, samples=samples
    )
    if out is not None:
        _writable(out)
    policy = Policy.load(model, device=device_of(device))
    how = DataSettings(shuffle=False, max_prompt_tokens=sys.maxsize, as_chat=as_chat, system=system)
    how.chat_template_kwargs = dict(template_arguments or {})
    asked = _asked(prompts, files, policy, how)
    reporter = Reporter(quiet=out is None and len(asked) < 8)
    with reporter.track("generate", len(asked)) as tracker:
        groups = policy.answers(asked, sampling, seed=seed, advance=lambda done: tracker.advance(), cut=True)
    answered = [(group[0].prompt, [answer.completion for answer in group]) for group in groups]
    _show(answered, out)
    return answered


def _asked(prompts: Sequence[str], files: Sequence[str], policy: Policy, settings: DataSettings) -> list[Prompt]:
    """Read all prompts without truncation. Raises ValueError for a prompt that is too long for the model."""
    ends = policy.model.special.eos
    reader = Reader(policy.tokenizer, settings, ends)
    asked = [Asked(question_of(Sample(prompt=text, where=f"prompt:{number}"))) for number, text in enumerate(prompts)]
    found = [
        Prompt(id=one.where, text=one.text, tokens=one.tokens, messages=one.messages)
        for one in reader.encoded([reader.written(each) for each in asked])
    ]
    if files:
        found += load_prompts(replace(settings, train=list(files)), policy.tokenizer, 0, ends).items
    room = policy.model.max_positions - 1
    for prompt in found:
        if len(prompt.tokens) > room:
            raise ValueError(
                f"{prompt.id} has {len(prompt.tokens)} tokens ({prompt.text[:40]!r}...), and the model has room for "
                f"{room} before an answer. Shorten it, or leave it out."
            )
    return found


def _writable(out: Path) -> None:
    """Raise ValueError if `out` is not writable. Called before anything is loaded, since answers would be lost."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        there = out.exists()
        out.open("a").close()
        if not there:
            out.unlink()
    except OSError as error:
        raise ValueError(f"cannot write the answers to {out}: {error.strerror}. Give another --out.") from error


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
    print(out)


def _row(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """An answer in the dialect prompt/completion, with what rules and chat templates ask for."""
    asked = {"prompt_id": prompt.id, "prompt": list(prompt.messages) or prompt.text, "completion": completion.text}
    reference = {} if prompt.answer is None else {"answer": prompt.answer}
    template = {name: prompt.extra[name] for name in TEMPLATE_COLUMNS if name in prompt.extra}
    numbers = {"tokens": list(completion.tokens), "logprobs": list(completion.logprobs)}
    return asked | reference | template | {"finish": completion.finish} | numbers
