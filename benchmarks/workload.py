"""Make what every contender starts from: demo data, tokenizer, and the weights of policy and judge.

    plan -> data.jsonl files, fresh/ (random weights), policy/ (after a short SFT), judge/ (policy's trunk, fresh head)

Run by Assent's own environment. The files hold exactly the rows that a run draws, in the order in which it draws them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from plan import MODELS, READY, Plan, read_rows

from assent import load_settings, run
from assent.data.demo import DemoSize, make_demo
from assent.data.write import write_rows
from assent.models.load import fresh_model, load_model, load_tokenizer, save_model


def main() -> None:
    plan = Plan.read(sys.argv[1])
    make_data(plan)
    tokenizer = load_tokenizer(str(plan.path("tokenizer")))
    fresh = fresh_model(MODELS[plan.model], seed=0, vocab_size=len(tokenizer))
    save_model(fresh, plan.path("fresh"), tokenizer=tokenizer)
    settings = {
        "name": "warm-start",
        "output": plan.folder,
        "threads": plan.threads,
        "model": {"path": str(plan.path("fresh"))},
        "data": {"train": str(plan.path("warm_start.jsonl"))},
        "optimizer": {"learning_rate": plan.learning_rate, "warmup": 0.1},
        "train": {"steps": plan.warm_start_steps, "batch_size": plan.rows},
    }
    policy = run(load_settings(settings, method="sft")).checkpoint("policy")
    plan.path("policy").symlink_to(policy.resolve())
    judge = load_model(str(policy), head="scalar", seed=0)
    save_model(judge, plan.path("judge"), tokenizer=tokenizer)
    plan.path(READY).write_text(plan.sizes())


def make_data(plan: Plan) -> None:
    """One file a line of the benchmark, none longer than what is drawn from it."""
    sft, pairs = plan.total_steps("sft") * plan.rows, max(plan.total_steps(x) for x in ("reward", "dpo")) * plan.rows
    prompts = max(plan.total_steps("grpo") * plan.rows // plan.samples, plan.total_steps("ppo") * plan.rows)
    size = DemoSize(
        sft=max(sft, plan.warm_start_steps * plan.rows),
        sft_validation=1,
        pairs=pairs * 2,
        pairs_validation=1,
        prompts=prompts,
        prompts_test=plan.prompts,
        vocabulary=plan.vocabulary,
    )
    demo = make_demo(plan.path("demo"), seed=0, size=size)
    demo.tokenizer.rename(plan.path("tokenizer"))
    demonstrations = read_rows(demo.sft)
    write_rows(plan.path("warm_start.jsonl"), demonstrations)
    write_rows(plan.path("sft.jsonl"), demonstrations[:sft])
    preferences = list(one_a_prompt(read_rows(demo.preferences)))
    for line in ("reward", "dpo"):
        write_rows(plan.path(f"{line}.jsonl"), preferences[: plan.total_steps(line) * plan.rows // 2])
    asked = read_rows(demo.prompts)
    write_rows(plan.path("grpo.jsonl"), asked[: plan.total_steps("grpo") * plan.rows // plan.samples])
    write_rows(plan.path("ppo.jsonl"), asked[: plan.total_steps("ppo") * plan.rows])
    write_rows(plan.path("generation.jsonl"), read_rows(demo.prompts_test))


def one_a_prompt(pairs: Iterable[dict[str, str]]) -> Iterable[dict[str, str]]:
    """The first pair of each prompt: a batch is counted in prompts by one system and in pairs by the other."""
    seen = set()
    for pair in pairs:
        if pair["prompt"] not in seen:
            seen.add(pair["prompt"])
            yield pair


if __name__ == "__main__":
    main()
