"""vLLM's CPU build as a contender: `contender_vllm.py TASK`, in-process and eager: its fastest for small models.

A log-prob of each sampled token is asked for, as everything that learns from the samples needs it and Plaudit's engine
always gives it. Without prefix caching every prompt would be computed for each of its samples; with it, prompts of an
earlier segment would cost nothing: it is on where prompts have several samples, and emptied between segments.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from gate import Gate
from task import Task, read_rows

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    task = Task.read(sys.argv[1])
    gate = Gate(steps=task.steps, repeats=task.repeats)
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(task.threads)
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
    for _ in range(gate.total):
        engine.reset_prefix_cache()
        answers = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, plans, use_tqdm=False)]
        gate.passed(sum(map(len, answers)))
    figures = {"length": sum(map(len, answers)) / len(answers)}
    versions = {"vllm": version("vllm-cpu"), "torch": version("torch"), "transformers": version("transformers")}
    gate.finish(figures=figures, tokens=answers if task.greedy else [], versions=versions)


if __name__ == "__main__":
    main()
