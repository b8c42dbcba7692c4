"""transformers' `generate` as a contender: `contender_transformers.py TASK`, all prompts at once, padded on the left.

Rows that have all their tokens stay in the batch until the longest one is done: that is how `generate` works.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import torch
from gate import Gate
from task import Task, read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList


class Lengths(StoppingCriteria):  # type: ignore[misc]
    """Each row ends after its own number of new tokens."""

    def __init__(self, lengths: list[int]):
        self.lengths, self.prompt = torch.tensor(lengths), 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.prompt >= self.lengths


@torch.inference_mode()
def main() -> None:
    task = Task.read(sys.argv[1])
    gate = Gate(steps=task.steps, repeats=task.repeats)
    torch.set_num_threads(task.threads)
    dtype = getattr(torch, task.dtype)
    model = AutoModelForCausalLM.from_pretrained(task.path("policy"), dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(task.path("policy"), padding_side="left")
    asked = tokenizer([row["prompt"] for row in read_rows(task.data)], return_tensors="pt", padding=True)
    prompt = asked["input_ids"].shape[1]
    lengths = task.lengths()
    stop = Lengths(lengths)
    stop.prompt = prompt
    sampling = {} if task.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max(lengths),
        do_sample=not task.greedy,
        num_return_sequences=task.samples,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    model.generation_config = config  # else its end token comes in again
    torch.manual_seed(0)
    for _ in range(gate.total):
        answers = model.generate(**asked, generation_config=config, stopping_criteria=StoppingCriteriaList([stop]))
        answers = [row[:n].tolist() for row, n in zip(answers[:, prompt:], lengths, strict=True)]
        gate.passed(sum(map(len, answers)))
    figures = {"length": sum(map(len, answers)) / len(answers)}
    versions = {name: version(name) for name in ("torch", "transformers")}
    gate.finish(figures=figures, tokens=answers if task.greedy else [], versions=versions)


if __name__ == "__main__":
    main()
