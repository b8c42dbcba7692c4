"""Answers to prompts from a checkpoint, for `assent generate`: to look at, or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from assent.data.load import load_prompts
from assent.data.settings import DataSettings
from assent.data.tokenize import encode_prompt
from assent.models.load import load_model, load_tokenizer
from assent.monitor.console import Reporter
from assent.rollout.build import build_engine
from assent.rollout.rollouter import completion_seed
from assent.runtime.coroutines import finished, together
from assent.types import Completion, Prompt, Sampling


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
) -> list[tuple[Prompt, list[Completion]]]:
    """Answer `prompts` and those of `files`; printed, or written to `out`. Returns them all."""
    if not prompts and not files:
        raise ValueError("no prompts: give --prompt TEXT or --file FILE, once or more")
    tokenizer = load_tokenizer(model)
    asked = [
        Prompt(id=f"prompt:{number}", text=text, tokens=tuple(encode_prompt(text, tokenizer)))
        for number, text in enumerate(prompts)
    ]
    if files:
        whole = DataSettings(train=list(files), max_prompt_tokens=sys.maxsize)  # the engine refuses what is too long
        asked += load_prompts(whole, tokenizer, seed).items
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = build_engine(load_model(model, device=device), tokenizer, slots=64)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
    reporter = Reporter(quiet=out is None and len(asked) < 8)
    with reporter.track("generate", len(asked)) as tracker:

        async def one(number: int, prompt: Prompt) -> list[Completion]:
            plan = [replace(sampling, seed=completion_seed(seed, number, sample)) for sample in range(samples)]
            completions = await engine.generate(prompt.tokens, plan)
            tracker.advance()
            return completions

        answers = finished(together(one(number, prompt) for number, prompt in enumerate(asked)))
    answered = list(zip(asked, answers, strict=True))
    _show(answered, out)
    return answered


def _show(answered: Sequence[tuple[Prompt, list[Completion]]], out: Path | None) -> None:
    if out is None:
        for prompt, completions in answered:
            for completion in completions:
                print(f"{prompt.text} |{completion.text}  [{completion.finish}]")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for prompt, completions in answered:
            for completion in completions:
                record = {"prompt_id": prompt.id, "prompt": prompt.text} | {
                    key: asdict(completion)[key] for key in ("text", "finish", "tokens", "logprobs")
                }
                file.write(json.dumps(record) + "\n")
    print(out)
