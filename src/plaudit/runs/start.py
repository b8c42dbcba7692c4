"""Start a run: check its settings, open its folder, train, and print its last lines.

settings, Python objects -> checks -> folder -> `Job` on an executor -> `Run`
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from plaudit.executors.opening import Executors
from plaudit.loop.checkpoint import Store
from plaudit.loop.progress import Hook, checked
from plaudit.loop.stopping import stop_signals, stopped_at_once, stops_for_caller
from plaudit.monitor.console import Reporter
from plaudit.monitor.folders import address_of_run
from plaudit.rewards.remote import check_servers
from plaudit.runs import records
from plaudit.runs.assemble import Job
from plaudit.runs.passed import PassedObjects, PassedReward, Recipe, is_quiet
from plaudit.runs.records import Run, find_resume, named, open_folder, save_start
from plaudit.runs.replay import job_of
from plaudit.runtime.coroutines import finished
from plaudit.runtime.memory import keep_freed_memory
from plaudit.runtime.settings import PLANNED
from plaudit.runtime.token import check_cluster
from plaudit.runtime.usual import usual_torch
from plaudit.settings.checks import check
from plaudit.settings.recipes import completed
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.rooms import optional
from plaudit.types import Role


def run(
    settings: Recipe,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    validation: Any = None,
    rewards: Sequence[PassedReward] = (),
    reporter: Reporter | None = None,
    hooks: Iterable[Hook] = (),
) -> Run:
    """Train a run and return access to its results. Raises SettingsError before anything starts. Ctrl-C ends the run,
    saved, with a KeyboardInterrupt, and SIGTERM with a SystemExit of its status. Afterwards the process keeps the run's
    number of torch threads, its seed, and its handling of memory (`runtime/memory.py`).

    - `settings`: those of `load_settings`, or a recipe as a mapping or file.
    - `model`, `tokenizer`: objects of transformers, or names as in `model.path`. The object itself is not trained: the
      run's checkpoint is the trained model.
    - `data`, `validation`: dicts of columns, in a list, a generator or any other iterable, a `pandas.DataFrame`, a
      `datasets.Dataset` or `IterableDataset`, or a source's name. `data` may also be a dict or a `DatasetDict` of the
      splits train and validation. An iterable is read once, to its end, before the run starts.
    - `rewards`: functions of a completion or, as TRL calls them, of a batch (docs/rewards.md), which run in this
      process; names of rules such as "gsm8k"; dicts such as {"kind": "judge", "path": FOLDER}; or pairs of one of these
      and its weight. They are added to the rewards of the settings.
    - `hooks` are called, and awaited if they are async, after every step. The figures that they return are recorded
      with it.

    Objects are stored in OUTPUT/.passed. `resume` continues with the same objects and refuses others.
    """
    hooks, say = checked(hooks), (reporter or Reporter(quiet=is_quiet(settings))).say
    with PassedObjects(model, tokenizer, data, validation, rewards).placed(settings, say) as placed:
        return _begun(placed, reporter, hooks)


def _begun(settings: Settings, reporter: Reporter | None, hooks: Iterable[Hook]) -> Run:
    settings = named(completed(settings))
    check(settings)
    if settings.runtime.placement in PLANNED:
        raise SettingsError(
            f"runtime.placement={settings.runtime.placement} is chosen from a profile of the machine: run `plaudit "
            f"{settings.method} RECIPE`, or give run() what plaudit.preflight.choice.chosen(settings) returns"
        )
    settings, make = job_of(settings)
    reporter = reporter or Reporter(quiet=settings.log.quiet)
    check_cluster(settings.runtime)
    servers = [reward for reward in settings.rewards if reward.asked and settings.samples]
    absent = [f"{one}; the other reward servers are used" for each in servers for one in finished(check_servers(each))]
    copies = records.copies_of(settings)
    with usual_torch(), open_folder(settings) as folder:
        return _run(settings, Store(folder / records.CHECKPOINTS, copies), make, reporter, absent, hooks)


def _run(
    settings: Settings,
    store: Store,
    make: Callable[..., Job],
    reporter: Reporter,
    warnings: Iterable[str],
    hooks: Iterable[Hook],
) -> Run:
    folder = store.folder.parent
    store.sweep()
    store.fetch(settings.resume)
    resume, problems = find_resume(settings, store)
    reporter.log_to(folder / records.LOG)
    none = [f"{folder} has nothing to resume: the run begins at its start"] if settings.resume and not resume else []
    for warning in (*warnings, *none, *(f"{problem}; an older checkpoint is used" for problem in problems)):
        reporter.say(f"warning: {warning}")
    if resume is not None:
        settings = records.resumed(settings, folder, reporter.say)
    keep_freed_memory()
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    torch.manual_seed(settings.seed)
    written = "logs and samples" if settings.samples else "logs"
    reporter.say(f"{settings.method}: {written} in {folder}, checkpoints in {store.place}")
    reporter.say(f"to watch it: {_serving(folder)}\n  then open: {address_of_run(folder)}")
    with stops_for_caller(), reporter.last_words(), _last_page(folder):
        with stopped_at_once():
            job = make(settings, folder, store, resume, reporter)
            if resume is None:
                save_start(folder, settings, job.data.report.json())
        with stop_signals(reporter.say) as stop, Executors(settings, reporter.say) as executors:
            finished(job.train(executors, stop, hooks))
    role = next(iter(job.objective.losses()))
    reporter.say("\n".join(last_block(settings, folder, role, store.model(role))))
    return Run(folder)


def _last_page(folder: Path) -> AbstractContextManager[None]:
    """While active, an error is also shown on the run's page, as its end."""
    page = optional("page")
    return nullcontext() if page is None else page.last_page(folder / records.PAGE)


def last_block(settings: Settings, folder: Path, role: Role, model: Path) -> list[str]:
    """Return the last lines of a run: where its model, page and samples are, and a next command."""
    what = "best checkpoint, by " + settings.evaluate.best if settings.evaluate.best else "newest checkpoint"
    shown = {"curves": records.PAGE} | ({"samples": records.SAMPLES} if settings.samples else {})
    lines = [f"done: {role} in {model} ({what})"]
    lines += [f"  {word + ':':9}{folder / name}" for word, name in shown.items() if (folder / name).exists()]
    lines += [f"  {'page:':9}{_serving(folder)}", f"  {'':9}{address_of_run(folder)}"]
    if role is Role.POLICY:
        return [*lines, f'  {"next:":9}plaudit generate {shlex.quote(str(folder))} --prompt "..."']
    judged = shlex.quote(f"rewards=[{{kind: judge, path: {folder}}}]")
    policy = shlex.quote(f"model.path={settings.model.path or 'MODEL'}")
    return [*lines, f"  {'next:':9}plaudit init grpo {policy} data.train=PROMPTS \\", f"  {'':11}{judged}"]


def _serving(folder: Path) -> str:
    """The command that serves a run's page."""
    return f"plaudit monitor --serve {shlex.quote(str(folder.parent))}"
