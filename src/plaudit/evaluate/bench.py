"""Load each model once, read data with the tokenizer of its reader, and show progress. The files of the figures, such
as kl.py, define what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.load import LOADERS
from plaudit.environments.agents import Agents, player_of, world_of
from plaudit.environments.base import World
from plaudit.evaluate.generation import Figures, pass_figures, reward_figures
from plaudit.evaluate.judge import Judge
from plaudit.evaluate.kl import kl_figures
from plaudit.evaluate.measures import Measures
from plaudit.evaluate.perplexity import perplexity
from plaudit.evaluate.policy import Answers, Policy, scored
from plaudit.evaluate.preference import implied_margins, judge_margins, margin_figures
from plaudit.evaluate.settings import MeasureSettings
from plaudit.evaluate.statistics import Interval
from plaudit.monitor.console import Reporter, clock
from plaudit.rewards.rules import check_reference
from plaudit.rollout.engine import Sampler
from plaudit.rollout.rollouter import Play
from plaudit.types import Prompt, Row


class Bench(Measures):
    """Models, data and rewards of one evaluation; each is loaded at its first use."""

    def __init__(self, settings: MeasureSettings, reporter: Reporter):
        super().__init__(settings, reporter.say, as_chat=settings.data.as_chat)
        self.settings, self.reporter = settings, reporter
        self.reports: dict[str, dict[str, Any]] = {}
        """Data report of each data set that was read."""
        self._policies: dict[str, Policy] = {}

    def policy(self, path: str) -> Policy:
        """Return the policy of a checkpoint, which is loaded at its first use."""
        if path not in self._policies:
            self._policies[path] = Policy.load(path, device=self.device)
        return self._policies[path]

    # data

    def prompts(self, reader: Policy) -> list[Prompt]:
        prompts = self._read("prompts", reader)
        self.check_columns(prompts)
        return prompts

    def _rows(self, kind: str, reader: Policy | Judge) -> list[Row]:
        """Read token rows. For preferences, chosen and rejected rows alternate."""
        return [row for item in self._read(kind, reader) for row in item]

    def _read(self, kind: str, reader: Policy | Judge) -> list[Any]:
        settings = replace(
            self.settings.data,
            train=vars(self.settings)[kind],
            limit=self.settings.limit,
            shuffle=False,
        )
        refers, seed, ends = check_reference(self.settings.rewards), self.settings.seed, reader.model.special.eos
        data = LOADERS[kind](settings, reader.tokenizer, seed, ends, refers, self.tools if kind == "prompts" else ())
        for source in data.report.sources:
            whole = source.read == source.kept and not source.pairs_dropped and not source.turns_dropped
            if source.noted or not whole or source.truncated_prompts or source.truncated_completions:
                self.reporter.say(data.report.table(measured=True))
                break
        self.reports[kind] = data.report.json()
        return list(data.items)

    # episodes

    @cached_property
    def world(self) -> World | Agents | None:
        return world_of(self.settings.environment)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the environment's tools, which prompts show."""
        return list(self.world.shown) if self.world else []

    def player(self, policy: Policy) -> Callable[[Sampler], Play] | None:
        """Return what makes the player of an engine's episodes; None without an environment."""
        if (world := self.world) is None:
            return None
        chats = Chats(policy.tokenizer, self.settings.data, policy.model.special.eos, self.tools)
        return lambda engine: player_of(engine, chats, world).play

    # measuring

    def scored_answers(self, policy: Policy, judge: str | None, *, name: str, beside: Answers | None = None) -> Answers:
        """Return the policy's answers with their scores, and show a progress bar. `beside`: the other policy's answers.
        Raises ValueError if the two tokenizers left out different prompts."""
        sampling, prompts = self.settings.sampling, self.prompts(policy)
        if beside is not None and [one.id for one in prompts] != [group[0].prompt.id for group in beside]:
            why = f"{name} leaves out other prompts than the first policy"
            raise ValueError(f"{why}: set data.overlong=truncate or error")
        rewards = self.rewards(judge, policy.tokenizer)
        total = len(prompts) * sampling.samples
        with self.reporter.track(f"answers of {name}", total) as tracker:
            answers = policy.answers(
                prompts,
                sampling,
                seed=self.settings.seed,
                advance=tracker.advance,
                play=self.player(policy),
                longest=self.settings.environment.max_tokens if self.world else 0,
            )
            self.reporter.say(f"{name}: {total} answers in {clock(tracker.elapsed)}")
        return scored(answers, rewards) if rewards else answers

    def reward_figures(self, answers: Answers) -> Figures:
        """Return means of all rewards, and pass@k of the rewards that are not judges."""
        settings = self.settings
        names = [*self.functions, *(name for name, entry in self.learned if entry.kind != "judge")]
        passing = pass_figures(answers, names, settings.pass_at, least=settings.pass_score)
        return reward_figures(answers) | passing

    def perplexity(self, policy: Policy, *, name: str) -> dict[str, Interval]:
        rows = self._rows("demonstrations", policy)
        with self.reporter.track(f"perplexity of {name}", len(rows)) as tracker:
            return perplexity(policy, rows, token_budget=self.settings.score_tokens, advance=tracker.advance)

    def kl(self, policy: Policy, reference: Policy, answers: Answers) -> dict[str, Interval]:
        with self.reporter.track("KL", 2 * sum(len(group) for group in answers)) as tracker:
            return kl_figures(
                policy,
                reference,
                answers,
                temperature=self.settings.sampling.temperature,
                token_budget=self.settings.score_tokens,
                advance=tracker.advance,
            )

    def judge_accuracy(self, judge: Judge) -> dict[str, Interval]:
        rows = self._rows("preferences", judge)
        return margin_figures(judge_margins(judge, rows), [row.group for row in rows[::2]])

    def implied_accuracy(self, policy: Policy, reference: Policy) -> dict[str, Interval]:
        rows = self._rows("preferences", policy)
        margins = implied_margins(policy, reference, rows, token_budget=self.settings.score_tokens)
        return margin_figures(margins, [row.group for row in rows[::2]])
