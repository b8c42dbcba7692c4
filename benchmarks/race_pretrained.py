"""The race of a pretrained model: the task of `plaudit demo --pretrained`, by Plaudit and by TRL's GRPO with LoRA.

    MODEL, questions -> [two steps of GRPO -> adapters -> right answers to held-out questions]... -> enough are right

Both sides start from the same folder, with the rows and settings of the demo's recipe, but a constant rate. Both sides'
adapters are examined by our engine. Meanwhile the side waits, and its clock stands still. `limit` is for both together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from anatomy import text_of
from contest import ContenderError
from harness import SOURCE, keep, table
from lines import SELF, TRL
from measure import Setting, entry, traced
from race import OVER, Course, Race, held_out
from report import END, put
from task import PRETRAINED, Task, read_rows

RECIPE: dict[str, Any] = yaml.safe_load((Path(SOURCE["PYTHONPATH"]) / "plaudit/commands/pretrained.yaml").read_text())
QUESTIONS = 2000
PARTS = "<!-- parts: written by benchmarks/race.py --profile -->"


@dataclass(frozen=True)
class Pretrained(Race):
    """One seed."""

    began: float = field(default_factory=time.perf_counter)

    def ours(self) -> Course:
        return self.side(SELF)

    def theirs(self) -> Course:
        return self.side(TRL)

    @property
    def setting(self) -> Setting:
        return Setting(self.folder, self.folder, self.options.threads, 0, False, "kept", "default", True)

    def task(self, side: str) -> Task:
        """What a side is to do, in a folder of its own."""
        from plaudit.data.write import write_rows
        from plaudit.tasks.stories import make_stories

        grpo, place = RECIPE["stages"]["grpo"], self.folder / side
        (place / "output").mkdir(parents=True)
        (place / "policy").symlink_to(self.options.model.resolve())
        files = make_stories(place, seed=self.seed, train=QUESTIONS)
        system = {"role": "system", "content": grpo["data"]["system"]}
        for path in (files.prompts, files.prompts_test):
            write_rows(path, [row | {"prompt": [system, *row["prompt"]]} for row in read_rows(path)])
        prompts, samples = self.options.prompts, grpo["algorithm"]["samples"]
        paths = {"weights": str(place), "data": str(files.prompts), "output": str(place / "output")}
        sizes = {"rows": prompts * samples, "samples": samples, "steps": 2, "repeats": QUESTIONS // prompts // 2 - 1}
        sizes |= {"max_new_tokens": grpo["rollout"]["max_tokens"], "lora": grpo["model"]["lora"]["rank"]}
        rate, rewards = float(grpo["optimizer"]["learning_rate"]), grpo["rewards"]
        common = {"method": "grpo", "model": PRETRAINED, "precision": "fp32", "threads": self.options.threads}
        return Task(**common, **paths, **sizes, learning_rate=rate, kl=0.0, rewards=rewards, seed=self.seed, saves=True)

    def side(self, side: str) -> Course:
        """Let a side run until enough answers are right, or the time is over."""
        course, task = Course(), self.task(side)
        start = entry(side, task, self.setting, self.folder / side)
        if isinstance(start, str):
            return Course(failure=start)
        began, spans, tokens, contender = time.perf_counter(), list[float](), list[int](), start()
        try:
            contender.hear("first_step")
            while True:
                said = contender.hear("segment")
                spans.append(time.perf_counter() - began)
                tokens.append(said["tokens"])
                later = slice(len(spans) > 1, None)  # the first segment has the start in it
                course.rate, course.peak_mib = sum(tokens[later]) / sum(spans[later]), said["peak_mib"]
                right = self.right(task)
                print(f"{side}: {2 * len(spans)} steps, {sum(spans):.0f} s, {right:.1%} right", flush=True)
                if course.saw(sum(spans), right, answers=OVER, mark=self.options.mark):
                    break
                if time.perf_counter() - self.began + spans[-1] > self.options.limit:
                    raise ContenderError(f"it did not pass the mark within {self.options.limit:.0f} s of both sides")
                began = time.perf_counter()
                contender.go()
        except ContenderError as error:
            course.failure = str(error)
        finally:
            contender.stop()
        return course

    def right(self, task: Task) -> float:
        """Share of right answers to the held-out questions, with the adapters that a side has saved."""
        from plaudit.models.load import load_model, load_tokenizer, save_model
        from plaudit.models.lora import load_lora, merge_lora

        base, merged, given = str(task.path("policy")), task.path("merged"), RECIPE["evaluation"]
        model = load_lora(load_model(base), Path(task.output) / "adapter")
        merge_lora(model)
        save_model(model, merged, tokenizer=load_tokenizer(base))
        paths = merged, task.path("prompts_test.jsonl"), task.path("evaluation")
        return held_out(*paths, gold=given["gold"], tokens=given["sampling"]["max_tokens"])


def explain(folder: Path, options: Any) -> None:
    """Show the parts of the second step of ours; the first one warms up."""
    race = Pretrained("pretrained", 0, folder, options)
    found = traced(replace(race.task(SELF), steps=1, repeats=1, saves=False), race.setting, folder / SELF)
    keep(folder / "profile.json", found)
    parts = table([*found["parts"]], [[f"{part / found['seconds']:.0%}" for part in found["parts"].values()]])
    print(f"{text_of('a step', found)}\n\n{parts}")
    if options.publish:
        put(PARTS, parts + "\n", END)
