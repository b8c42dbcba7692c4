"""A run that is asked to stop saves behind the step under way, and goes on later as if it had not been asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_resume import assert_same_run, timeless

from plaudit import Run, load_settings, run
from plaudit.loop.progress import Moment
from plaudit.loop.stopping import stop_signals
from plaudit.support.errors import Stopped

pytestmark = pytest.mark.slow

CALM = "def reward(tokens): return float(len(tokens))\n"
ASKING = """
import os, signal
asked = []
def reward(tokens):
    '''Sends this process a SIGTERM, as a scheduler would, in the middle of the second step of three prompts.'''
    asked.append(1)
    if len(asked) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return float(len(tokens))
"""


def test_sigterm_ends_the_command_with_143_and_the_resumed_run_as_if_undisturbed(
    make_recipe: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    def recipe_of(output: Path, function: str) -> dict[str, Any]:
        (output / "rewards.py").parent.mkdir()
        (output / "rewards.py").write_text(function)
        recipe: dict[str, Any] = make_recipe(
            "ppo",
            output,
            rewards=[{"kind": "function", "function": f"{output}/rewards.py:reward", "name": "length"}],
            data={"validation": "20%"},
            save={"every": 10},
        )
        return recipe

    full = run(load_settings(recipe_of(tmp_path / "full", CALM)))
    recipe = recipe_of(tmp_path / "stopped", ASKING)
    file = tmp_path / "ppo.yaml"
    file.write_text(yaml.safe_dump(recipe))

    command = [sys.executable, "-m", "plaudit.commands.cli", "ppo", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert ended.returncode == 143, ended.stderr
    assert "stopped by SIGTERM after step 2; resume=latest continues from there" in ended.stderr
    stopped = Run(tmp_path / "stopped/run")
    last = (stopped.folder / "log.txt").read_text().splitlines()[-1]
    assert last.endswith("the run ended: stopped by SIGTERM after step 2; resume=latest continues from there")
    # No validation and no samples that the undisturbed run has at its end only.
    assert timeless(stopped.folder / "metrics.jsonl") == timeless(full.folder / "metrics.jsonl")[:2]
    assert stopped.samples == [sample for sample in full.samples if sample["step"] <= 2]
    assert stopped.checkpoint().name.endswith("globalstep2")

    (tmp_path / "stopped/rewards.py").write_text(CALM)
    run(load_settings(file, ["resume=latest"]))
    assert_same_run(stopped.folder, full.folder)


READING = """
import os, signal
def rows():
    os.kill(os.getpid(), signal.{name})
    while True:
        yield dict(prompt="a", completion=" b")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_while_data_is_read_ends_the_run_at_once_with_a_last_word(
    name: str, make_recipe: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    """What had ended it stood nowhere."""
    (tmp_path / "rows.py").write_text(READING.format(name=name))
    recipe = make_recipe("sft", tmp_path, data={"train": f"{tmp_path}/rows.py:rows", "validation": None})
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "plaudit.commands.cli", "sft", str(tmp_path / "sft.yaml")]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, where tests run under nohup
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    finally:
        signal.signal(signal.SIGHUP, before)
    told = f"stopped by {name} before its workers were ready; resume=latest continues from there\n"
    assert (ended.returncode, ended.stderr) == (128 + getattr(signal, name), told)
    assert (tmp_path / "run/log.txt").read_text().endswith(f"the run ended: {told}")


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_sweep_that_catches_exceptions_does_not_swallow_a_stop(
    number: signal.Signals, kind: type[BaseException], make_recipe: Any, tmp_path: Path
) -> None:
    """The hooks are no coroutines, which is taken."""
    swallowed = []

    def sweep() -> None:
        for name in ("first", "second"):
            try:
                run(load_settings(make_recipe("sft", tmp_path, name=name)), hooks=[stop, doubled])
            except Exception as error:  # noqa: BLE001 - as sweeps do
                swallowed.append(error)

    def stop(moment: Moment) -> None:
        if moment.progress.step == 2:
            os.kill(os.getpid(), number)

    def doubled(moment: Moment) -> dict[str, float]:
        return {"doubled": 2.0 * moment.progress.step}

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    try:
        with pytest.raises(kind) as ended:
            sweep()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (swallowed, isinstance(ended.value, Stopped)) == ([], True)
    assert str(ended.value) == f"stopped by {number.name} after step 2; resume=latest continues from there"
    assert ended.value.code == 128 + number
    stopped = Run(tmp_path / "first")
    assert [record["doubled"] for record in stopped.metrics] == [2.0, 4.0]
    assert stopped.checkpoint().name.endswith("globalstep2")
    assert not (tmp_path / "second").exists()


def test_a_hook_that_cannot_take_a_moment_is_refused_before_the_first_step(make_recipe: Any, tmp_path: Path) -> None:
    for hook, told in ((lambda: None, "one argument"), (3, "not a hook")):
        with pytest.raises(TypeError, match=told):
            run(load_settings(make_recipe("sft", tmp_path)), hooks=[hook])
    assert not (tmp_path / "run").exists()


def test_a_second_signal_acts_as_ever() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    said: list[str] = []

    def twice() -> None:
        with stop_signals(said.append) as received:
            os.kill(os.getpid(), signal.SIGINT)
            assert received == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt) as second:
            twice()
        assert said == ["SIGINT: the run ends once its last step is saved; a second one ends it at once"]
        assert "resume=latest continues from there" in second.value.__notes__[0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_terminal_is_a_stop_however_often_it_is_told() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with stop_signals() as received:
            for _ in range(3):
                signal.raise_signal(signal.SIGHUP)
            assert received == [signal.SIGHUP]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with stop_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)
