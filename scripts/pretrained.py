"""The recipes of the models that people start from: what they take, and two steps of each without a download.

    python scripts/pretrained.py table                     # memory by part on each kind of GPU, computed
    python scripts/pretrained.py try [MODEL ...] [--tiny]  # random weights of the exact configuration, on the CPU

`try` makes a folder as the hub would give it, then goes through the model's recipes in order, each from the run before:
two steps, a third one by `resume=latest`, and what came out is loaded by transformers and compared. The 8B model has
two of its 32 layers there; `--tiny` makes every model small, to see in seconds that the recipes work.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from plaudit import Run, Settings, load_settings, run
from plaudit.data.byte_pairs import train_tokenizer
from plaudit.models.families import read_config
from plaudit.models.load import fresh_model, load_model, load_tokenizer, save_model
from plaudit.preflight import needs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RECIPES = {
    "qwen2.5-0.5b": ("sft", "dpo", "grpo"),
    "llama-3.2-1b": ("sft", "reward", "ppo"),
    "llama-3-8b": ("sft", "reward", "ppo"),
}
LAYERS = {"llama-3-8b": 2}
"""Of models that are tried with fewer than they have."""
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL = (
    "device=cpu output={output} train.steps={steps} save.every=1 data.train={data} data.validation=null "
    "evaluate.every=null log.quiet=true"
)
"""What a recipe is given beside its own settings, so that two steps fit a CPU."""
ONLINE = "rollout.prompts_per_step=2 rollout.max_tokens=8 rollout.slots=8"
OFFLINE = "train.batch_size=2"
GIB = 2**30
PEAKS = {"24 GB": (125e12, 600e9), "80 GB": (312e12, 2039e9)}
"""FLOP/s in bfloat16 and bytes/s that the makers state of an A10 and of an A100 with 80 GB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("table", "try"))
    parser.add_argument("models", nargs="*", help=f"of {', '.join(RECIPES)}; all unless some are named")
    parser.add_argument("--tiny", action="store_true", help="small models of the same kind")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.models) - set(RECIPES)):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(RECIPES)}")
    models = arguments.models or list(RECIPES)
    if arguments.do == "table":
        print(markdown(models))
        return
    if len(models) > 1:  # each in a process of its own: what one has used is not given back before it ends
        size = ["--tiny"] if arguments.tiny else []
        sys.exit(max(subprocess.run([sys.executable, __file__, "try", model, *size]).returncode for model in models))
    with tempfile.TemporaryDirectory() as folder:
        for line in tried(models[0], Path(folder), tiny=arguments.tiny):
            Console().print(line)


# --- what a run takes


def commands(model: str, method: str) -> dict[str, list[str]]:
    """The command lines in a recipe's header by the machine they are for; [] where the header says that it does not
    fit."""
    found: dict[str, list[str]] = {}
    for line in (CONFIGS / model / f"{method}.yaml").read_text().splitlines():
        machine, _, command = line.removeprefix("#").partition(":  ")
        if line.startswith("#   "):
            found[machine.strip()] = shlex.split(command) if command.startswith("plaudit ") else []
    return found


def settings_of(command: list[str]) -> Settings:
    """The settings of `plaudit METHOD RECIPE key=value ...`."""
    return load_settings(CONFIGS.parent / command[2], command[3:], method=command[1])


def config_of(model: str, *, tiny: bool = False) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / model / "config.json").read_text())
    return config | TINY | {"num_hidden_layers": 2, "vocab_size": 512} if tiny else config


def parameters(config: dict[str, Any]) -> int:
    """Weights of the model with its language-model head."""
    return read_config(config).parameters


def memory(config: dict[str, Any], settings: Settings) -> dict[str, float]:
    """GiB on the device by part, computed."""
    return {part: size / GIB for part, size in needs.memory(read_config(config), settings).items()}


def seconds(config: dict[str, Any], settings: Settings, gpu: str) -> float:
    """Of one step on a GPU of PEAKS, computed for rows of the greatest length: products at 40 % of the peak, 6 FLOPs a
    weight and token (4 where weights are frozen) and 2 for each further pass; decoding at half the memory's speed,
    which every step of it reads weights and cache with."""
    flops, bandwidth = PEAKS[gpu]
    weights, learn, rollout = parameters(config), settings.learn, settings.rollout
    work = 4 if settings.model.lora.rank else 6
    work += 2 * learn.activation_checkpointing
    if not settings.samples:
        rows = settings.train.batch_size * (1 if settings.method == "sft" else 2)
        work += 2 * (settings.method == "dpo")
        return rows * settings.data.max_tokens * work * weights / (0.4 * flops)
    rows = rollout.prompts_per_step * settings.algorithm.samples
    tokens = rows * (settings.data.max_prompt_tokens + rollout.max_tokens)
    work += 2 if settings.method == "grpo" else work + 3 * 2  # the prompt's pass; the critic, and reference and judge
    cache = memory(config, settings)["cache"] * GIB
    decoding = rollout.max_tokens * math.ceil(rows / rollout.slots) * (2 * weights + cache / 2) / (0.5 * bandwidth)
    return tokens * work * weights / (0.4 * flops) + decoding


def markdown(models: list[str]) -> str:
    """The table of docs/models.md: GiB and seconds a step of each recipe on each kind of GPU."""
    lines = ["| recipe | GPU | trained | reference, judge | activations | cache | in all, GiB | a step, s |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
    for model in models:
        config = config_of(model)
        for method in RECIPES[model]:
            for machine, command in list(commands(model, method).items())[:2]:
                gpu = machine.removeprefix("one ").removesuffix(" GPU")
                name = f"{model}/{method}"
                if not command:
                    lines.append(f"| {name} | {gpu} | | | | | does not fit | |")
                    continue
                found = memory(config, settings_of(command))
                others = found.get("reference", 0.0) + found.get("judge", 0.0)
                cells = (found["trained"], others, found["activations"], found.get("cache", 0.0), sum(found.values()))
                step = seconds(config, settings_of(command), gpu)
                lines.append(f"| {name} | {gpu} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {step:.0f} |")
    return "\n".join(lines)


# --- two steps of each


def tried(model: str, folder: Path, *, tiny: bool) -> Iterator[Table | str]:
    """Go through a model's recipes; yields what happened, for people."""
    config = config_of(model, tiny=tiny)
    if not tiny:
        config |= {"num_hidden_layers": LAYERS.get(model, config["num_hidden_layers"])}
    began = time.perf_counter()
    start = made(config, folder / "start")
    yield f"{model}: {parameters(config) / 1e6:,.0f} M weights, made in {time.perf_counter() - began:.0f} s"
    for method in RECIPES[model]:
        began = time.perf_counter()
        done = two_steps_and_a_third(model, method, start, folder)
        gap = apart(done.model)
        losses = [metrics.get("loss/policy", metrics.get("loss/judge")) for metrics in done.metrics]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        yield (
            f"  {method}: losses {', '.join(f'{loss:.4f}' for loss in losses)}; transformers differs by {gap:.1e}; "
            f"{time.perf_counter() - began:.0f} s, {peak:.1f} GiB at most until now"
        )


def made(config: dict[str, Any], folder: Path) -> Path:
    """A checkpoint of the configuration with random weights and a small tokenizer."""
    train_tokenizer((row["question"] + row["answer"] for row in QUESTIONS), folder, vocabulary=400)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = CHAT
    save_model(fresh_model(config, dtype=torch.bfloat16), folder, tokenizer=tokenizer)
    return folder


def two_steps_and_a_third(model: str, method: str, start: Path, folder: Path) -> Run:
    """Run a recipe for two steps, then for a third in a run that goes on. Its model is `start`, or the run that the
    recipe names."""
    recipe = CONFIGS / model / f"{method}.yaml"
    rows = folder / f"{method}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (HH if model.startswith("llama") else GSM8K[method])))

    def settings(steps: int, *more: str) -> Settings:
        given = SMALL.format(output=folder / "runs", steps=steps, data=rows).split()
        given += (ONLINE if method in ("grpo", "ppo") else OFFLINE).split()
        return load_settings(recipe, [*given, *named_models(recipe, start, folder), *more])

    run(settings(2))
    return run(settings(3, "resume=latest"))


def named_models(recipe: Path, start: Path, folder: Path) -> list[str]:
    """Overrides that lead a recipe's `model.path` and its judge's to what is there."""
    found = load_settings(recipe)
    path = str(found.model.path)
    overrides = [f"model.path={folder / path if path.startswith('runs/') else start}"]
    if found.rewards and found.rewards[0].kind == "judge":
        overrides.append(f"rewards=[{{kind: judge, path: {folder / found.rewards[0].path}}}]")
    return overrides


@torch.no_grad()
def apart(folder: Path) -> float:
    """How far our answer and transformers' lie apart on a saved model, as a share of the largest number."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    tokens = torch.arange(5, 12)
    scalar = "SequenceClassification" in (folder / "config.json").read_text()
    kind: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    theirs = kind.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0]
    ours = load_model(str(folder), head="scalar" if scalar else "lm")
    mine = ours.head(ours(tokens, ours.packed([len(tokens)])))
    return float((mine[-1:] - theirs if scalar else mine - theirs).abs().max() / theirs.abs().max())


QUESTIONS = [
    {
        "question": f"Ann has {n} eggs and eats {n // 2}. How many are left?",
        "answer": f"{n} - {n // 2} = #### {n - n // 2}",
    }
    for n in range(2, 18)
]
PREFERENCES = [
    {side: [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": said}]
     for side, said in (("chosen", row["answer"]), ("rejected", "I do not know."))}
    for row in QUESTIONS
]  # fmt: skip
GSM8K = {"sft": QUESTIONS, "dpo": PREFERENCES, "grpo": QUESTIONS}
HH = [
    {side: f"\n\nHuman: {row['question']}\n\nAssistant: {said}"
     for side, said in (("chosen", row["answer"]), ("rejected", "I do not know."))}
    for row in QUESTIONS
]  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

if __name__ == "__main__":
    main()
