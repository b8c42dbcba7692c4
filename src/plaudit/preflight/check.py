"""Find all problems and doubts about a run before it starts, for `plaudit check`.

    recipe -> settings as far as they can be read -> paths, first rows, sizes, machine, servers, cluster -> Preflight

A start stops at its first problem; here the same functions are called, and all problems are collected. Weights and
torch are not loaded, and nothing is written.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from plaudit.data.chat import Chats
from plaudit.data.load import Preview, previewed
from plaudit.data.read import fetched, scan_rows
from plaudit.data.settings import DataSettings, absent
from plaudit.environments.agents import world_of
from plaudit.environments.rehearsal import rehearsed
from plaudit.environments.rendered import forms_of, renderer_of
from plaudit.models.config import DecoderConfig
from plaudit.models.described import end_ids, folder_config
from plaudit.models.families import read_config
from plaudit.models.folders import local_folder, refuse_absent
from plaudit.models.keys import UnsupportedError
from plaudit.models.mesh import Mesh, check_mesh, check_tensor
from plaudit.models.tokenizer import check_tokens, load_tokenizer
from plaudit.preflight import machine, needs
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.rubric import LlmReward
from plaudit.rewards.rules import check_reference, function_reward
from plaudit.rewards.settings import KINDS
from plaudit.runs.intake import FEW, dated, few_steps, longest_of, unlike_judges
from plaudit.runs.pipeline import load_pipeline, placed, recipes_of, to_come
from plaudit.runs.records import folder_taken, open_record, refuse_another
from plaudit.runtime.token import check_cluster
from plaudit.settings.checks import left_over, wrong
from plaudit.settings.recipes import drafted, read_yaml
from plaudit.settings.tree import Settings, SettingsError, unused
from plaudit.support.address import Address, is_address
from plaudit.support.fields import leaves, mistyped
from plaudit.support.paths import at_home, check_writable, is_here
from plaudit.types import Prompt

ROWS = 512
"""Number of first rows of each source that are read."""
PATIENCE = 1.0
"""Seconds that a reward server may take to answer."""
UNKNOWN = re.compile(r"there is no setting ([\w.]+)")
ERRORS = (ValueError, OSError, ImportError, RuntimeError)
"""Errors with messages for users; a check that raises one becomes a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem (the run would not start, or would fail) or doubt about a run."""

    key: str
    """The setting that it is about; "" for none."""
    text: str
    """What was given and what to do."""
    problem: bool


@dataclass(slots=True, kw_only=True)
class Preflight:
    """The findings about one run, and what was read to check it."""

    stage: str = ""
    """Name of the run's stage in a pipeline; "" for a single run."""
    settings: Settings | None = None
    """The run's settings; None if they cannot be read."""
    findings: list[Finding] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)
    episode: list[str] = field(default_factory=list)
    """Lines of the first prompt's episode, with turns that no model wrote."""
    needs: dict[str, float] = field(default_factory=dict)
    """`memory`: bytes of a training rank. `disk`: bytes of checkpoints. `parameters`: number of the policy's."""
    here: list[str] = field(default_factory=list)
    """Lines about what was found: this machine's devices, memory and disk; servers and cluster that answered."""
    tokenizer: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The policy's config.json; empty if it is not on this machine."""
    vocab_size: int | None = None
    """Size of the tokenizer's vocabulary, which a fresh model takes."""

    def wrong(self, texts: Iterable[str], key: str = "", *, problem: bool = True) -> None:
        """Add each new text, or each error that it lists, as a finding. Its default key is a setting named in it."""
        keys = {leaf.key for leaf in leaves(self.settings)} if self.settings is not None else set()
        single = (line for text in texts for line in _single(text))
        for text in single:
            if any(text.removeprefix("data.") == before.text.removeprefix("data.") for before in self.findings):
                continue
            unknown = UNKNOWN.match(text)
            named = (word for word in re.findall(r"[a-z_]+(?:\.\w+)*", text) if word in keys)
            own = unknown[1] if unknown else key or next(named, "")
            self.findings.append(Finding(key=own, text=text, problem=problem))

    def doubt(self, texts: Iterable[str], key: str = "") -> None:
        self.wrong(texts, key, problem=False)

    @contextmanager
    def asking(self, key: str) -> Iterator[None]:
        """If the block raises one of ERRORS, add the error's text as a problem, and suppress the error."""
        try:
            yield
        except ERRORS as error:
            self.wrong([str(error)], key)


def _single(text: str) -> list[str]:
    """Split an error that lists several into a text for each; return [text] for any other."""
    head, *listed = text.split("\n  - ")
    return listed if listed and head.startswith("the settings cannot be used") else [text]


def preflights(
    recipe: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], *, method: str | None
) -> list[Preflight]:
    """Return what is found about a recipe: one preflight, or one for each stage of a pipeline."""
    try:
        tree = {} if recipe is None else dict(recipe) if isinstance(recipe, Mapping) else read_yaml(recipe)
        if "stages" in tree:
            return _of_pipeline(tree, overrides)
    except SettingsError as error:
        return [Preflight(findings=[Finding(key="", text=str(error), problem=True)])]
    return [preflight(tree, overrides, method=method)]


def _of_pipeline(tree: Mapping[str, Any], overrides: Sequence[str]) -> list[Preflight]:
    settings = load_pipeline(tree, overrides)
    folder = Path(settings.output) / settings.name
    found: dict[str, Preflight] = {}
    written = 0.0
    for name, recipe in recipes_of(settings, folder, made=to_come):
        try:
            one = preflight(placed(settings, folder, name, recipe), (), stages=found, written=written)
        except SettingsError as error:
            one = Preflight(findings=[Finding(key="", text=str(error), problem=True)])
        one.stage = name
        written += one.needs.get("disk", 0.0)
        found[name] = one
    return list(found.values())


def preflight(
    recipe: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    method: str | None = None,
    stages: Mapping[str, Preflight] | None = None,
    written: float = 0.0,
) -> Preflight:
    """Check one run and return the findings. `stages`: findings by earlier stage of a pipeline, whose models need not
    exist yet. `written`: bytes that the checkpoints of these stages take."""
    found = Preflight()
    try:
        found.settings, problems = drafted(recipe, overrides, method=method)
    except ERRORS as error:
        found.wrong([str(error)])
        return found
    found.wrong(problems)
    if mistyped(found.settings):
        return found
    found.wrong(problem for problem in wrong(found.settings) if problem not in problems)
    found.doubt(f"{found.settings.method} does not use {problem}" for problem in unused(found.settings))
    found.doubt(left_over(recipe, overrides), "data.validation")
    _models(found, found.settings, stages or {})
    _data(found, found.settings)
    _sizes(found, found.settings, written)
    _places(found, found.settings)
    _others(found, found.settings)
    return found


def _teachers(s: Settings) -> dict[str, str]:
    return {f"algorithm.teachers.{source}": path for source, path in s.objective.teachers.items()}


def _models(found: Preflight, s: Settings, stages: Mapping[str, Preflight]) -> None:
    """Check that the folders of models exist, and read the policy's configuration."""
    named = {"model.path": s.model.path, "reference.path": s.reference.path, "critic.path": s.critic.path}
    named["model.tokenizer"] = s.model.tokenizer
    named |= _teachers(s)
    named |= {f"rewards.{n}.path": one.path or None for n, one in enumerate(s.rewards) if one.kind == "judge"}
    for key, path in named.items():
        if path is not None and not path.startswith("<"):
            with found.asking(key):
                if not _has_folder(path, s.output):
                    found.doubt([f"{key}={path} is not a folder here: the run will fetch it"], key)
    before = next((one for name, one in stages.items() if str(s.model.path).endswith(f" of {name}>")), None)
    if before is not None:
        found.tokenizer, found.config = s.model.tokenizer or before.tokenizer, before.config
        return
    found.config = s.model.config
    with found.asking("model.path"):
        if s.model.path is not None and is_here(s.model.path):
            found.config = folder_config(local_folder(s.model.path))
            if "Classification" in str(found.config.get("architectures")) and "judge" not in s.objective.losses():
                raise SettingsError(f"model.path={s.model.path} is a reward or value model: give its policy")
    tokenizer = s.model.tokenizer or s.model.path
    if tokenizer is not None and is_here(tokenizer):
        found.tokenizer = tokenizer


def _has_folder(path: str, output: str) -> bool:
    """True if a model's folder is here, False for an address or hub id. Raises FileNotFoundError for a path without a
    folder."""
    if is_here(path):
        return local_folder(path).is_dir()
    if is_address(path):
        Address(path)
        return False
    refuse_absent(path, output)
    return False


def _data(found: Preflight, s: Settings) -> None:
    """Read the first rows of every source, and check that the models have room for them."""
    if not found.tokenizer:
        return
    with found.asking("data"):
        paths = {"train": s.data.fed, "validation": s.data.apart}
        missing = [name for value in paths.values() for name in absent(value)]
        far = [name for value in paths.values() for name in value if fetched(name) and name not in missing]
        found.doubt(
            [f"{name} is not a file here: `datasets` will load it; its rows were not checked" for name in far], "data"
        )
        here = {k: [one for one in v if one not in (*far, *missing)] for k, v in paths.items()}
        tokenizer = load_tokenizer(found.tokenizer, tried=False)
        found.vocab_size = len(tokenizer)
        models = {"reference.path": s.reference.path, "critic.path": s.critic.path, **_teachers(s)}
        for key, model in models.items():
            with found.asking(key):
                check_tokens(key, model if model is not None and is_here(model) else None, tokenizer)
        if not any(here.values()):
            return
        path = s.model.path
        ends = end_ids(path) if path is not None and is_here(path) else ()
        whole = DataSettings(train=here["train"], validation=here["validation"])
        sound = [leaf.key for leaf in leaves(s.data) if leaf.complaint() is None and leaf.key not in here]
        looked = replace(whole, **{key: getattr(s.data, key) for key in sound})
        refers, tools, world = check_reference(s.rewards), list[Any](), None
        if s.environment.on:
            with found.asking("environment"):
                world = world_of(s.environment)
                tools = list(world.shown) if world else []
                chats = Chats(tokenizer, looked, ends, tools)
                forms_of(chats, tools, renderer_of(s.environment, chats))
        kind = s.objective.data
        found.previews = list(previewed(looked, kind, tokenizer, ends, rows=ROWS, refers=refers, tools=tools))
        for preview in found.previews:
            _rows(found, s, preview)
        found.wrong(dated(one.report for one in found.previews), "data.chat_template_kwargs")
        if s.samples:
            prompts = [item for one in found.previews for item in one.items]
            _functions(found, s, prompts)
            if world is not None and prompts and prompts[0].messages:
                with found.asking("environment"):
                    found.episode = rehearsed(prompts[0], chats, world)
        _room(found, s, tokenizer)
        read = not any(one.problem for one in found.previews) and len(here["train"]) == len(s.data.fed)
        if read and s.data.stream == 0:
            found.doubt(few_steps(s, _steps(s)), "train.epochs")


def _steps(s: Settings) -> int:
    """Estimate an offline run's steps from its rows, counting no more rows than FEW steps need."""
    share = 1 - s.data.percent / 100
    most = math.ceil((FEW * s.train.batch_size / s.train.epochs + s.data.prompts) / share) + 1
    most = most if s.data.limit is None else min(most, s.data.limit)
    rows = sum(1 for name in s.data.fed for _ in islice(scan_rows(name, split=s.data.split_of(name)), most))
    train_rows = rows * share - s.data.prompts
    return max(1, round(s.train.epochs * math.ceil(train_rows / s.train.batch_size)))


def _rows(found: Preflight, s: Settings, preview: Preview) -> None:
    """Report bad, dropped and truncated rows among the first of a source, and columns that are not read."""
    report, key = preview.report, f"data.{preview.report.role}"
    if preview.problem:
        found.wrong([f"{report.source}: {preview.problem.removeprefix(f'{report.source}: ')}"], key)
        return
    bad = [f"bad row {row}" for row in report.bad_examples]
    if report.bad_rows > s.data.bad_rows:
        more = f"Correct the row, or set data.bad_rows above {s.data.bad_rows}"
        found.wrong([f"{row} {more}" for row in bad], key)
    else:
        found.doubt(bad, key)
    of = f"of the first {report.read} rows of {report.source}"
    for reason, count in (*report.dropped.items(), *report.pairs_dropped.items()):
        found.doubt([f"{count} {of} would be left out: {reason}"], key)
    cut = {"prompts": report.truncated_prompts, "answers": report.truncated_completions}
    found.doubt([f"{count} {what} {of} would be cut to fit" for what, count in cut.items() if count], "data.max_tokens")
    found.doubt([f"{report.source}: {what}: {count} {of}" for what, count in report.noted.items()], key)
    if report.unread:
        found.doubt([f"{report.source}: columns that are not read: {', '.join(report.unread)}"], key)


def _functions(found: Preflight, s: Settings, prompts: Sequence[Prompt]) -> None:
    """Call each reward function for the first prompts, with their references as answers."""
    for number, settings in enumerate(s.rewards if prompts else ()):
        if settings.kind not in {*KINDS} - {"function", "llm"}:
            # a missing function is reported by `wrong`; what functions print is kept out of the report
            with suppress(*ERRORS, TypeError, AttributeError), redirect_stdout(sys.stderr):
                reward = function_reward(replace(settings, deadline=min(settings.deadline, PATIENCE)))
                assert isinstance(reward, FunctionReward | LlmReward)
                problems, doubts = reward.tried(prompts)
                found.wrong(problems, f"rewards.{number}")
                found.doubt(doubts, f"rewards.{number}")


def _room(found: Preflight, s: Settings, tokenizer: Any) -> None:
    """Check that rows and vocabulary fit the models."""
    config = _decoder(found)
    longest = longest_of(s, s.objective, max((one.longest for one in found.previews), default=0))
    key = "data.max_prompt_tokens" if s.objective.online else "data.max_tokens"
    most = longest_of(s, s.objective, s.data.max_prompt_tokens if s.objective.online else s.data.max_tokens)
    if config is not None:
        room = config.max_positions
        found.wrong(unfit := longest.unfit("the model", room), key)
        if not unfit and most.tokens > room:
            text = f"rows may take up to {most.tokens} tokens by these settings, and the model has room for {room}"
            found.doubt([f"{text}: a longer row than the first ones would end the start"], key)
        with found.asking("runtime.mesh"):
            check_mesh(config, Mesh(**s.runtime.axes))
        if s.runtime.rollout_width > 1 and s.rollout.engine == "native":
            with found.asking("runtime.mesh"):
                check_tensor(config, Mesh(tensor=s.runtime.rollout_width))
        if (largest := max(tokenizer.get_vocab().values())) >= config.vocab_size:
            text = f"the tokenizer's ids reach {largest}, the model's vocab_size is {config.vocab_size}"
            found.wrong([f"{text}: give its own tokenizer, or a fresh model of at least that size"], "model.tokenizer")
    if s.samples:
        present = [reward for reward in s.rewards if reward.kind == "judge" and at_home(reward.path).is_dir()]
        with found.asking("rewards"):
            found.wrong(unlike_judges(replace(s, rewards=present), tokenizer, longest), "rewards")


def _decoder(found: Preflight) -> DecoderConfig | None:
    """Return the policy's decoder configuration; None if it is unknown, not supported or invalid."""
    sized = {} if found.vocab_size is None else {"vocab_size": found.vocab_size}
    try:
        return read_config(sized | dict(found.config)) if found.config else None
    except (UnsupportedError, ValueError):  # ValueError is reported with the settings
        return None


def _sizes(found: Preflight, s: Settings, written: float) -> None:
    """Compare the memory and disk that the run takes with what the machine has."""
    config = _decoder(found)
    if config is None:
        return
    parts = needs.memory(config, s)
    found.needs = {"parameters": config.parameters, "memory": sum(parts.values()), "disk": needs.disk(config, s)}
    if s.runtime.address is None:
        found.wrong(machine.about_memory(parts, s), "model")
        found.doubt(machine.tight_memory(parts, s), "learn.micro_tokens")
    found.wrong(machine.about_disk(found.needs["disk"] + written, Path(s.output)), "save.keep")


def _places(found: Preflight, s: Settings) -> None:
    """Check that the run can use its folder, and the run that it replays or resumes."""
    if s.name is not None:
        found.wrong(folder_taken(s), "name")
        with found.asking("resume"):
            refuse_another(s, Path(s.output) / s.name)
    with found.asking("output"):
        check_writable(Path(s.output).absolute())
    with found.asking("rollout.replay"):
        open_record(s)


def _others(found: Preflight, s: Settings) -> None:
    """Check devices and cores of the machine, and whether reward servers and the cluster answer."""
    found.here.append(machine.described(s))
    found.wrong(machine.about_devices(s))
    found.doubt(machine.crowded(s), "threads")
    for number, reward in enumerate(s.rewards if s.samples else ()):
        if servers := len(reward.asked):
            from plaudit.rewards.remote import check_servers

            key = f"rewards.{number}.{'llm.url' if reward.kind == 'llm' else 'urls'}"
            with found.asking(key):
                silent = asyncio.run(check_servers(reward, PATIENCE))
                found.doubt(silent, key)
                found.here.append(f"{servers - len(silent)} of {servers} reward servers answer")
    with found.asking("runtime.address"):
        check_cluster(s.runtime)
        if s.runtime.address is not None:
            found.here.append(f"the cluster at {s.runtime.address} answers")
