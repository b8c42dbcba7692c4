"""Use a trained reward model by itself, with nothing but transformers: score answers, or check it on preference pairs.

    python examples/score_with_reward_model.py MODEL --prompt "The film" --answer " is fine ." --answer " is dull ."
    python examples/score_with_reward_model.py MODEL --pairs data/demo/preferences_validation.jsonl

MODEL is a checkpoint's folder, runs/reward/checkpoints/judge/... A higher score is a better answer; only differences
between answers to one prompt mean something.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def load(folder: str) -> tuple[Any, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def scores(model: Any, tokenizer: Any, texts: list[tuple[str, str]], *, batch: int = 32) -> list[float]:
    """One score for each (prompt, answer).

    As in training, prompt and answer are encoded apart, so that no token spans the two, and the end token follows: a
    judge asked about texts without it is markedly worse. Padding is on the right and masked.
    """
    rows = [
        tokenizer(prompt)["input_ids"]
        + tokenizer(answer, add_special_tokens=False)["input_ids"]
        + [tokenizer.eos_token_id]
        for prompt, answer in texts
    ]
    room = model.config.max_position_embeddings
    if (longest := max(map(len, rows), default=0)) > room:
        raise ValueError(f"a text has {longest} tokens, the model has room for {room}: shorten it")
    found: list[float] = []
    for start in range(0, len(rows), batch):
        padded = tokenizer.pad({"input_ids": rows[start : start + batch]}, padding_side="right", return_tensors="pt")
        found += model(**padded).logits[:, 0].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--answer", action="append", default=[], help="An answer to score; repeat for several.")
    parser.add_argument("--pairs", type=Path, help="JSON lines with prompt, chosen and rejected.")
    arguments = parser.parse_args()
    if not arguments.answer and arguments.pairs is None:
        parser.error("give --answer or --pairs")
    model, tokenizer = load(arguments.model)
    asked = [(arguments.prompt, answer) for answer in arguments.answer]
    for (prompt, answer), score in zip(asked, scores(model, tokenizer, asked), strict=True):
        print(f"{score:+.4f}  {prompt}{answer}")
    if arguments.pairs is not None:
        pairs = [json.loads(line) for line in arguments.pairs.read_text(encoding="utf-8").splitlines()]
        chosen = scores(model, tokenizer, [(pair["prompt"], pair["chosen"]) for pair in pairs])
        rejected = scores(model, tokenizer, [(pair["prompt"], pair["rejected"]) for pair in pairs])
        right = sum(c > r for c, r in zip(chosen, rejected, strict=True))
        print(f"{right} of {len(pairs)} pairs ordered as labelled: {right / len(pairs):.1%}")


if __name__ == "__main__":
    main()
