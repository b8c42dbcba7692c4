"""The command: light to start, exact about what is misspelt, and careful with what is there already."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from told import says

from plaudit import run
from plaudit.algorithms import ALGORITHMS
from plaudit.commands.cli import METHODS, main, plain_errors
from plaudit.data import formats
from plaudit.loop.progress import Moment
from plaudit.runs import records
from plaudit.settings.recipes import load_settings
from plaudit.types import Stats

pytestmark = pytest.mark.slow


def plaudit(*words: str | Path | int) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def recipe(make_recipe: Any, tmp_path: Path) -> Path:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(make_recipe("sft", tmp_path / "runs", train={"steps": 2})))
    return file


def test_help_loads_nothing_heavy(environment: dict[str, str]) -> None:
    script = (
        "import sys; from plaudit.commands.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'sklearn', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for method, text in METHODS.items():
        assert method in done.stdout
        assert text.split(",")[0].rstrip(".") in done.stdout


def test_the_methods_of_the_command_are_those_there_are() -> None:
    from plaudit.algorithms import ALGORITHMS

    assert [name for name in ALGORITHMS if not name.startswith("test")][: len(METHODS)] == list(METHODS)


def test_a_file_with_columns_of_its_own_and_bad_rows_is_converted(tmp_path: Path) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text('{"frage": "q", "antwort": "a"}\nnonsense\n')
    words = ["convert", source, target, "--to", "prompt/completion", "--column", "prompt=frage"]
    done = plaudit(*words, "--column", "completion=antwort", "--bad-rows", 1)
    assert done.exit_code == 0, done.output
    assert "2 rows read, 1 written, 1 bad rows skipped" in done.output
    assert json.loads(target.read_text()) == {"prompt": "q", "completion": "a"}
    assert "--column completion: write OURS=THEIRS" in plaudit(*words, "--column", "completion").output


def test_a_misspelt_command_names_the_nearest(tmp_path: Path) -> None:
    done = plaudit("pp0", "x.yaml")
    assert done.exit_code == 2
    assert "there is no command 'pp0'; did you mean ppo?" in done.output
    (tmp_path / "x.yaml").write_text("method: pp0\n")
    done = plaudit("train", tmp_path / "x.yaml")
    assert done.exit_code == 2
    assert "error: there is no method 'pp0'; did you mean ppo?" in done.output


def test_rows_in_place_of_a_recipe_are_answered_with_init(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    assert says(plaudit("sft", tmp_path / "rows.jsonl").output, "has rows .. no recipe .. init METHOD")
    (tmp_path / "sft.yaml").touch()
    assert f"did you mean {tmp_path}/sft.yaml?" in plaudit("sft", tmp_path / "sft.yml").output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sft", "absent.yaml"], "no recipe absent.yaml"),
        (["sft", "absent.jsonl"], "no recipe absent.jsonl"),
        (["grpo", "--serve", "x.yaml"], "it is one of `plaudit monitor`"),
        (["init", "sft", "absent.jsonl"], "data.train: there is no absent.jsonl"),
        (["sft", "train.stepps=3"], "train.stepps .. mean train.steps"),
        (["pipeline", "absent.yaml"], "does not exist"),
        (["evaluate", "modle=x"], "modle .. mean model"),
        (["settings", "pp0"], "'pp0' .. mean ppo"),
        (["settings", "rank", "--plugin", "absent.py"], "there is no file"),
        (["generate", "absent/model/folder"], "no prompts"),
        (["generate", "./absent", "--prompt", "x"], "no folder ./absent"),
        (["evaluate", "model=x", "prompts=x.jsonl", "device=tpu"], "device=tpu"),
        (["serve-reward", "./absent", "--port", "65536"], "65536 .. range"),
        (["serve-reward", "./absent", "--threads", "-1"], "-1 .. range"),
        (["serve-reward", "./absent", "--port", "0", "--device", "tpu"], "device=tpu"),
    ],
)
def test_what_a_person_can_mend_is_one_line_and_status_2(words: list[str], told: str) -> None:
    done = plaudit(*words)
    assert done.exit_code == 2
    assert says(done.output, told)
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("plaudit gr", "plain,grpo"),
        ("plaudit monitor --s", "plain,--serve"),
        ("plaudit init onl", "plain,online-dpo"),
        ("plaudit grpo conf", "file,conf"),
        ("plaudit generate ru", "file,ru"),
    ],
)
def test_the_shell_completes_commands_options_and_files(line: str, found: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_PLAUDIT_COMPLETE": "bash_complete"}
    done = CliRunner().invoke(main, prog_name="plaudit", env=words)
    assert done.output.strip() == found


def test_settings_prints_a_recipe_that_loads(demo: Any, tmp_path: Path) -> None:
    done = plaudit("settings", "ppo")
    assert done.exit_code == 0
    printed = yaml.safe_load(done.output)
    assert printed["algorithm"]["minibatches"] == 4
    (tmp_path / "ppo.yaml").write_text(done.output)
    words = ["model.path=m", f"data.train={demo.prompts}", "rewards=[{kind: length, options: {target: 3}}]"]
    assert load_settings(tmp_path / "ppo.yaml", words).method == "ppo"


def test_settings_of_a_plugins_method_are_listed_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("plaudit.algorithms.ALGORITHMS", dict(ALGORITHMS))
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from plaudit import PolicyGradient, register_algorithm\n\n"
        "@dataclass(frozen=True)\n"
        "class Listed(PolicyGradient):\n    power: float = 1.5\n\n"
        "register_algorithm('test-listed', Listed)\n"
    )
    done = plaudit("settings", "test-listed", "--plugin", plugin)
    assert done.exit_code == 0, done.output
    printed = yaml.safe_load(done.output)
    assert printed["algorithm"]["power"] == 1.5
    assert (printed["method"], printed["plugins"]) == ("test-listed", [str(plugin)])


def test_a_run_by_command_and_the_protection_of_its_folder(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"
    done = plaudit("sft", recipe, "optimizer.learning_rate=0.002")
    assert done.exit_code == 0, done.output
    metrics = (folder / "metrics.jsonl").read_text()
    assert len(metrics.splitlines()) == 2
    assert yaml.safe_load((folder / "settings.yaml").read_text())["optimizer"]["learning_rate"] == 0.002

    again = plaudit("sft", recipe)
    assert again.exit_code == 2
    assert "holds a run already: set resume=latest, overwrite=true or another name" in again.output
    for words, told in (
        (["resume=latest", "overwrite=true"], "resume and overwrite contradict each other"),
        (["resume=epoch1epochstep9globalstep9"], "resume=epoch1epochstep9globalstep9 must be "),
        (["name=../run", "overwrite=true"], "must be a plain folder name"),
        (["name=.", "overwrite=true"], "must be a plain folder name"),
        (["name=", "overwrite=true"], "must be a plain folder name"),
        (["train.stepps=1", "overwrite=true"], "did you mean train.steps?"),
        (["train.batch_size=0", "overwrite=true"], "train.batch_size=0"),
    ):
        refused = plaudit("sft", recipe, *words)
        assert refused.exit_code == 2, (words, refused.output)
        assert told in refused.output
    assert (folder / "metrics.jsonl").read_text() == metrics  # nothing of that touched the run

    assert plaudit("sft", recipe, "resume=latest").exit_code == 0  # a finished run is left as it is
    assert (folder / "metrics.jsonl").read_text() == metrics
    longer = plaudit("sft", recipe, "resume=latest", "train.steps=3")
    assert longer.exit_code == 0
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert plaudit("sft", recipe, "overwrite=true", "train.steps=1").exit_code == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_run_goes_on_by_its_method_and_says_what_else_is_new(recipe: Path, tmp_path: Path, demo: Any) -> None:
    assert plaudit("sft", recipe, "save.every=1").exit_code == 0
    folder = tmp_path / "runs/run"
    settings = (folder / "settings.yaml").read_text()
    words = ["method=dpo", f"data.train={demo.preferences}", "resume=latest", "train.steps=3"]
    refused = plaudit("dpo", recipe, *words)
    assert refused.exit_code == 2
    assert f"resume=latest cannot continue {folder}" in refused.output
    assert "  - method: sft there, dpo here (" in refused.output
    assert (folder / "settings.yaml").read_text() == settings

    assert plaudit("sft", recipe, "resume=latest", "train.steps=3", "log.page=false", "threads=null").exit_code == 0
    assert "warning" not in (folder / "log.txt").read_text()
    assert plaudit("sft", recipe, "resume=latest", "train.steps=4", "optimizer.eps=1e-7").exit_code == 0
    log = (folder / "log.txt").read_text()
    assert "checkpoint with changed settings:" in log
    assert re.findall(r"  - (.*)", log) == ["optimizer.eps: 1e-08 there, 1e-07 here"]


def test_a_run_without_a_name_is_gone_on_with_without_one(recipe: Path, tmp_path: Path) -> None:
    """The newest of the same settings; what may differ is what a resumed run may be told anew."""

    def folders() -> dict[str, int]:
        return {path.parent.name: len(path.read_text().splitlines()) for path in tmp_path.glob("runs/*/metrics.jsonl")}

    rate = "optimizer.learning_rate=0.002"
    for words in ([], [rate]):
        assert plaudit("sft", recipe, "name=null", *words).exit_code == 0
        assert len(folders()) == 1 + len(words)
        time.sleep(1.0)  # names go by seconds
    first, second = sorted(folders())
    assert yaml.safe_load((tmp_path / "runs" / first / "settings.yaml").read_text())["name"] == first
    more = ["name=null", "resume=latest", "train.steps=3"]
    assert plaudit("sft", recipe, *more, "save.every=1").exit_code == 0
    assert folders() == {first: 3, second: 2}
    assert plaudit("sft", recipe, *more, rate, "threads=1").exit_code == 0
    assert folders() == {first: 3, second: 3}
    assert plaudit("sft", tmp_path / "runs" / first / "settings.yaml", "resume=latest", "train.steps=4").exit_code == 0
    assert folders() == {first: 4, second: 3}

    refused = plaudit("sft", recipe, *more, "seed=5")
    assert refused.exit_code == 2
    assert f"set name={second}" in refused.output
    assert "- seed: 0 there, 5 here" in refused.output
    assert "- optimizer.learning_rate: 0.002 there, 0.003 here" in refused.output
    assert folders() == {first: 4, second: 3}
    (tmp_path / "runs" / second / "settings.yaml").write_text("cut: [o")
    assert "its settings cannot be read" in plaudit("sft", recipe, *more, "seed=5").output
    assert plaudit("sft", recipe, f"output={tmp_path}/elsewhere", *more).exit_code == 0  # none is there: it begins
    assert len(list(tmp_path.glob("elsewhere/sft-*/metrics.jsonl"))) == 1
    lost = plaudit("sft", recipe, f"output={tmp_path}/nowhere", "name=null", "resume=epoch1epochstep1globalstep1")
    assert "has no run of sft" in lost.output
    assert not (tmp_path / "nowhere").exists()


def test_what_goes_on_without_a_name_saved_something_and_has_the_same_batches(recipe: Path, tmp_path: Path) -> None:
    """One that failed before its first checkpoint is newer, and another has other batches."""
    runs = tmp_path / "runs"
    assert plaudit("sft", recipe, "name=null").exit_code == 0
    (first,) = runs.iterdir()
    (runs / "sft-29991231-235959").mkdir()
    (runs / "sft-29991231-235959" / "settings.yaml").write_text((first / "settings.yaml").read_text())
    assert plaudit("sft", recipe, "name=null", "resume=latest", "train.steps=3").exit_code == 0
    assert len((first / "metrics.jsonl").read_text().splitlines()) == 3
    other = plaudit("sft", recipe, "name=null", "resume=latest", "train.batch_size=3")
    assert other.exit_code == 2
    assert "- train.batch_size: 4 there, 3 here" in other.output


def test_a_replay_is_no_run_to_go_on_with_nor_the_run_that_it_replays(make_recipe: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    made = make_recipe("grpo", runs, rollout={"record": True}, save={"every": 1})
    del made["name"]
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(made))

    def steps(folder: Path) -> int:
        return len((folder / "metrics.jsonl").read_text().splitlines())

    assert plaudit("grpo", tmp_path / "grpo.yaml").exit_code == 0
    (first,) = runs.iterdir()
    before = (first / "groups.jsonl").read_bytes(), (first / "settings.yaml").read_bytes()
    replays = ["rollout.record=false", f"rollout.replay={first}"]
    refused = plaudit("grpo", tmp_path / "grpo.yaml", *replays, "resume=epoch1epochstep2globalstep2")
    assert refused.exit_code == 2, refused.output
    assert "no unnamed run" in refused.output
    time.sleep(1.0)  # names go by seconds
    again = plaudit("grpo", tmp_path / "grpo.yaml", *replays)
    assert again.exit_code == 0, again.output
    (second,) = set(runs.iterdir()) - {first}
    assert before == ((first / "groups.jsonl").read_bytes(), (first / "settings.yaml").read_bytes())
    assert plaudit("grpo", tmp_path / "grpo.yaml", "resume=latest", "train.steps=6").exit_code == 0
    assert (steps(first), steps(second)) == (6, 4)


def test_a_run_that_is_still_going_on_is_left_alone(recipe: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    assert plaudit("sft", recipe).exit_code == 0
    before = (tmp_path / "runs/run/settings.yaml").read_bytes()
    hold = "import sys; from pathlib import Path; from plaudit.runs.records import alone\n"
    hold += "with alone(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / "runs/run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for words in (["resume=latest"], ["overwrite=true"]):
            refused = plaudit("sft", recipe, *words)
            assert refused.exit_code == 2
            assert f"is still active (process {other.pid} on " in refused.output
        other.kill()  # and with the process its hold ends
    assert (tmp_path / "runs/run/settings.yaml").read_bytes() == before
    assert plaudit("sft", recipe, "resume=latest", "train.steps=3").exit_code == 0


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def refused(recipe: Path, tmp_path: Path) -> Path:
    """The same run of a model without weights, which only its start finds out."""
    settings = yaml.safe_load(recipe.read_text())
    model = tmp_path / "weightless"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(settings["model"]["config"]))
    settings["model"] |= {"config": {}, "path": str(model)}
    file = tmp_path / "refused.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.parametrize("word", ["data.train=absent.jsonl", "data.max_tokens=64"])
def test_a_start_that_is_refused_removes_nothing(word: str, recipe: Path, refused: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"
    assert plaudit("sft", recipe).exit_code == 0
    before = contents(folder)
    told = plaudit("sft", refused, "overwrite=true", word)
    assert told.exit_code == 2, told.output
    assert contents(folder) == before
    assert plaudit("sft", recipe, "overwrite=true", "train.steps=1").exit_code == 0
    after = contents(folder)
    assert len(after["metrics.jsonl"].splitlines()) == 1
    assert not [name for name in after if "overw" in name]


def test_a_run_is_overwritten_once_the_new_one_has_done_a_step(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"
    assert plaudit("sft", recipe).exit_code == 0
    before, seen = contents(folder), []

    async def failing(moment: Moment) -> Stats:
        seen.append({name.split("/")[0] for name in contents(folder)})
        raise RuntimeError("after the first step")

    settings = load_settings(recipe, ["overwrite=true"])
    with pytest.raises(RuntimeError, match="after the first step"):
        run(settings, hooks=[failing])
    seen[0].discard("events.jsonl")  # a stretch of time may have ended, or not yet
    assert seen == [{"settings.yaml", "data.json", "log.txt"}]
    assert not before.keys() <= contents(folder).keys()


def test_a_start_that_is_killed_leaves_the_run_that_it_was_to_overwrite(
    recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "runs/run"
    assert plaudit("sft", recipe).exit_code == 0
    before = contents(folder)
    hold = "import sys; from plaudit import load_settings; from plaudit.runs.records import open_folder\n"
    hold += "with open_folder(load_settings(sys.argv[1], ['overwrite=true'])) as folder:\n"
    hold += "    (folder / 'log.txt').write_text('a start')\n    print('held', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", hold, str(recipe)]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert "is still active" in plaudit("sft", recipe, "overwrite=true").output
        other.kill()
    assert contents(folder) == {f".overwritten/{name}": content for name, content in before.items()} | {
        "log.txt": b"a start"
    }
    assert "holds a run already" in plaudit("sft", recipe).output
    assert plaudit("sft", recipe, "resume=latest").exit_code == 0
    assert contents(folder)["metrics.jsonl"] == before["metrics.jsonl"]
    assert contents(folder).keys() == before.keys()


def test_moving_a_run_aside_and_back_may_be_cut_off_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renames(most: int) -> None:
        rename, done = Path.rename, []

        def counted(path: Path, target: Path) -> Path:
            if len(done) >= most:
                raise KeyboardInterrupt
            done.append(path)
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", counted)

    for cut in range(9):
        folder = tmp_path / str(cut)
        (folder / "checkpoints").mkdir(parents=True)
        for name in ("settings.yaml", "metrics.jsonl", "checkpoints/model"):
            (folder / name).write_text("older")
        before = contents(folder)
        renames(cut)
        with contextlib.suppress(KeyboardInterrupt):
            records._set_aside(folder)
            (folder / "metrics.jsonl").write_text("new")
            records._put_back(folder)
        monkeypatch.undo()
        records._put_back(folder)
        assert contents(folder) == before, cut
    assert cut >= 8  # three entries there and back, and the folder of them twice


def test_a_language_model_is_not_served_as_a_judge(recipe: Path, tmp_path: Path) -> None:
    assert plaudit("sft", recipe).exit_code == 0
    told = plaudit("serve-reward", tmp_path / "runs/run", "--port", 0)
    assert told.exit_code == 2
    assert "run is not a judge" in told.output


def test_settings_are_written_in_utf8_whatever_the_locale(
    recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = yaml.safe_load(recipe.read_text())
    told["data"]["prompt_template"] = "Fräge: {prompt}"
    recipe.write_text(yaml.safe_dump(told, allow_unicode=True), encoding="utf-8")
    for words in ([], ["resume=latest", "train.steps=3"]):
        command = [sys.executable, "-W", "ignore", "-m", "plaudit.commands.cli", "sft", str(recipe), *words]
        subprocess.run(command, env=environment | ascii_only, check=True, capture_output=True)
    assert "Fräge" in (tmp_path / "runs/run/settings.yaml").read_text(encoding="utf-8")


def test_ctrl_c_ends_the_demo_in_one_line_and_resume_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    size = [f"sft.model.config.{key}" for key in ("n_embd=16", "n_layer=1", "n_head=2")]
    command = ["-W", "ignore", "-m", "plaudit.commands.cli", "demo", "--output", str(tmp_path), "only=[sft]", *size]
    words = [sys.executable, *command, "sft.train.log_every=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([*words, "sft.train.steps=100000"], **pipes) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    stopped = re.fullmatch(r"stopped by SIGINT after step (\d+); resume=latest continues from there\n", told)
    assert stopped, told
    steps = int(stopped[1]) + 1
    done = subprocess.run([*words, "resume=latest", f"sft.train.steps={steps}"], check=True, **pipes)
    assert f"step {steps - 1} of {steps}" in done.stdout


def test_ctrl_c_before_the_first_step_has_its_status_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, plain_errors():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 2, "error: Too many open files: allow more of them (`ulimit -n"),
        (MemoryError(), 4, "error: no memory is left. Allow more"),
        (RuntimeError("can't allocate memory: you tried to allocate 9 bytes.\nmore"), 4, "9 bytes. Allow more"),
        (FloatingPointError("A log-prob is not finite"), 2, "error: A log-prob is not finite"),
    ],
)
def test_limits_of_the_machine_are_a_line(
    error: Exception, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, plain_errors():
        raise error
    assert ended.value.code == code
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "most", "told"), [("NOFILE", 8, "Too many open"), ("AS", 600 << 20, "map|memory")])
def test_a_command_under_a_limit_ends_with_a_line(
    limit: str, most: int, told: str, recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    assert plaudit("sft", recipe).exit_code == 0
    code = (
        f"import resource, sys\nresource.setrlimit(resource.RLIMIT_{limit}, ({most}, {most}))\n"
        "from plaudit.commands.cli import main\nmain(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "generate", str(tmp_path / "runs/run"), "--prompt", "A film"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (2, 4)
    assert "Traceback" not in done.stderr
    assert re.search(f"^error: .*({told})", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize(("option", "value"), [("samples", 0), ("temperature", "nan"), ("temperature", "inf")])
def test_generate_refuses_numbers_that_draw_no_answer(option: str, value: Any, recipe: Path, tmp_path: Path) -> None:
    assert plaudit("sft", recipe).exit_code == 0
    told = plaudit("generate", tmp_path / "runs/run", "--prompt", "A film", f"sampling.{option}={value}")
    assert told.exit_code == 2
    assert f"sampling.{option}={value} must be" in told.output


@pytest.mark.parametrize("full", [False, True], ids=["head", "full"])
def test_a_run_that_nobody_listens_to_goes_on(
    full: bool, recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """`| head -1`, and a standard output that takes nothing at all."""
    command = [sys.executable, "-m", "plaudit.commands.cli", "sft", str(recipe), "log.quiet=false"]
    if full and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full, whose place a full disk could take")
    with Path("/dev/full" if full else os.devnull).open("w") as away:
        out = away if full else subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.PIPE, text=True) as run:
            if run.stdout is not None:
                run.stdout.readline()
                run.stdout.close()
            assert run.stderr is not None
            said = run.stderr.read()
            assert run.wait(timeout=120) == 0, said
    told = (tmp_path / "runs/run/log.txt").read_text()
    assert "this log only" in told
    assert "step 2/2" in told
    assert "Error" not in said


def test_a_full_disk_ends_a_run_in_one_line(recipe: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """A limit on the size of a file takes the disk's place, with room for records and none for a model."""
    first, second = "epoch1epochstep1globalstep1", "epoch1epochstep2globalstep2"
    words = [str(recipe), "log.page=false", "log.quiet=true"]
    assert plaudit("sft", *words, "train.steps=1").exit_code == 0
    limited = "import resource, sys; sys.dont_write_bytecode = True; from plaudit.commands.cli import main\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1)); main()"

    def resumed(limit: int) -> list[str]:
        command = [sys.executable, "-W", "ignore", "-c", limited, str(limit), "sft", *words, "resume=latest"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 7, done.stderr
        return done.stderr.splitlines()

    folder = tmp_path / "runs/run"
    left = "Free space there, or make it writable. "
    left += f"The newest whole checkpoint is {first}: resume=latest continues from there"
    place, before = folder / "checkpoints/state" / second, contents(folder)
    assert f"the run ended: {folder} cannot be written: File too large. {left}" in resumed(2_000)
    assert contents(folder) | {"log.txt": before["log.txt"]} == before, "its settings, longer than that, are whole yet"
    assert resumed(40_000)[-1:] == [f"the run ended: {place} cannot be written: File too large. {left}"]
    assert f"the run ended: {folder} cannot be written: File too large. {left}" in resumed(4)
    assert not list(folder.glob("checkpoints/*/.*"))
    assert plaudit("sft", *words, "resume=latest").exit_code == 0
    assert (folder / "checkpoints/state" / second).exists()


def test_what_no_run_writes_is_one_line_too_where_it_cannot_be_written(
    demo: Any, recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """A full disk at the end, and before any work a place where nothing can be written."""
    assert plaudit("sft", recipe, "train.steps=1").exit_code == 0
    model = tmp_path / "runs/run"
    limited = "import resource, sys; sys.dont_write_bytecode = True; from plaudit.commands.cli import main\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (16, -1)); main()"
    (tmp_path / "file").write_text("")
    evaluated = ("evaluate", f"model={model}", f"prompts={demo.prompts}", "limit=2", "output={}")
    for words, place in (
        (("convert", demo.sft, "{}", "--to", "prompt"), "converted/x.jsonl"),
        (("convert", demo.sft, "{}", "--to", "prompt"), "converted/x.parquet"),
        (("generate", model, "--prompt", "A film", "sampling.max_tokens=2", "output={}"), "generated/x.jsonl"),
        (evaluated, "evaluated"),
        (("monitor", tmp_path / "runs", "--output", "{}"), "plots"),
        (("demo", "--data-only", "{}"), "data"),
    ):
        full = tmp_path / place
        command = [sys.executable, "-W", "ignore", "-c", limited, *(str(word).format(full) for word in words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1] == f"error: {full} cannot be written: File too large"
        assert not list(tmp_path.glob("*/.*.partial"))
        under = plaudit(*(str(word).format(tmp_path / "file" / "x.jsonl") for word in words))
        assert under.exit_code == 2
        assert f"error: {tmp_path}/file/x.jsonl: {tmp_path}/file is not a folder" in under.output
    told = plaudit(*(str(word).format(tmp_path / "file") for word in evaluated)).output
    assert f"{tmp_path}/file: File exists" in told


def test_paths_on_the_command_line_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shells leave `~` as it is. No folder called ~ is made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "metrics.jsonl").write_text('{"step": 1, "loss/policy": 2.0}\n')
    assert plaudit("monitor", "~", "--plot=loss", "output=~/plots").exit_code == 0
    assert (tmp_path / "home" / "plots" / "loss.png").exists()
    assert not (tmp_path / "~").exists()


def test_a_file_system_that_is_read_only_is_told_in_one_line(recipe: Path, tmp_path: Path) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    mount = shutil.which("mount") or pytest.skip("there is no mount here")
    if subprocess.run([mount, "-t", "tmpfs", "none", disk], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount file systems")
    try:
        assert plaudit("sft", recipe).exit_code == 0
        subprocess.run([mount, "-o", "remount,ro", disk], check=True)
        told = plaudit("sft", recipe, "resume=latest")
        plots = plaudit("monitor", disk)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert told.exit_code == 7
    assert told.output.startswith(f"the run ended: {disk}/run/.lock cannot be written: Read-only file system. Free")
    assert "is epoch1epochstep2globalstep2: " in told.output
    assert (plots.exit_code, plots.output) == (2, f"error: {disk}/plots: nothing can be written to {disk}\n")


def test_what_a_refused_start_leaves_is_no_run(recipe: Path, refused: Path, tmp_path: Path) -> None:
    told = plaudit("sft", refused)
    assert told.exit_code == 2, told.output
    assert (tmp_path / "runs/run/settings.yaml").exists()
    done = plaudit("sft", recipe)
    assert done.exit_code == 0, done.output


def test_the_settings_of_a_run_do_not_ask_to_remove_it(recipe: Path, tmp_path: Path) -> None:
    assert plaudit("sft", recipe, "overwrite=true").exit_code == 0
    told = plaudit("sft", tmp_path / "runs/run/settings.yaml")
    assert "holds a run already" in told.output
    assert plaudit("sft", tmp_path / "runs/run/settings.yaml", "resume=latest", "train.steps=3").exit_code == 0


def test_resume_latest_begins_where_there_is_nothing_yet(recipe: Path, tmp_path: Path) -> None:
    done = plaudit("sft", recipe, "resume=latest")
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()) == 2


def test_generate_answers_from_a_checkpoint(recipe: Path, tmp_path: Path) -> None:
    from plaudit import Run

    assert plaudit("sft", recipe).exit_code == 0
    model = Run(tmp_path / "runs/run").model
    out = tmp_path / "answers.jsonl"
    done = plaudit(
        "generate", model, "--prompt", "We saw", "sampling.samples=2", "sampling.max_tokens=4", f"output={out}"
    )
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["We saw"] * 2
    assert all(1 <= len(answer["tokens"]) == len(answer["logprobs"]) <= 4 for answer in answers)
    shown = plaudit("generate", model, "--prompt", "We saw", "sampling.temperature=0", "sampling.max_tokens=3")
    assert shown.output.startswith("We saw |")
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "We saw" + " it" * 600}))
    refused = plaudit("generate", model, f"prompts={prompts}")
    assert "long.jsonl:1 has 602 tokens" in refused.output, "it is not cut without a word"


def test_what_is_set_in_vain_is_told(recipe: Path) -> None:
    done = plaudit("sft", recipe, "log.quiet=false", "rollout.temperature=0.5")
    assert done.exit_code == 0, done.output
    assert "warning: sft does not use rollout.temperature=0.5\n" in done.output


def test_commands_outside_of_runs_take_plugins(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_DIALECTS", formats.dialects())  # what is registered must not outlive the test
    plugin, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    plugin.write_text(
        "from plaudit import register_dialect\n"
        "from plaudit.data.records import Dialect, Sample\n"
        "def read(fields):\n"
        "    return Sample(prompt=fields.text('ask'), answer=' ' + fields.text('reply'))\n"
        "register_dialect(Dialect(name='ask/reply', needs=('ask', 'reply'), read=read))\n"
    )
    rows.write_text(json.dumps({"ask": "We saw", "reply": "it ."}) + "\n")
    made = tmp_path / "made.jsonl"
    done = plaudit("convert", rows, made, "--to", "prompt/completion", "--plugin", plugin)
    assert done.exit_code == 0, done.output
    assert json.loads(made.read_text()) == {"prompt": "We saw", "completion": " it ."}
    assert plaudit("sft", recipe).exit_code == 0
    from plaudit import Run

    model = f"model={Run(tmp_path / 'runs/run').model}"
    measured = plaudit("evaluate", model, f"demonstrations={rows}", f"plugins=[{plugin}]")
    assert measured.exit_code == 0, measured.output
    assert "perplexity" in measured.output
    refused = plaudit("convert", rows, made, "--to", "prompt/completion", "--plugin", tmp_path / "none.py")
    assert refused.exit_code == 2
    assert "none.py" in refused.output


@pytest.fixture
def foreign(make_recipe: Any, demo: Any, tmp_path: Path) -> Path:
    """A file of TRL for a checkpoint that was trained here."""
    start = run(load_settings(make_recipe("sft", tmp_path / "start", train={"steps": 1})))
    file = tmp_path / "trl.yaml"
    given = {
        "model_name_or_path": str(start.model),
        "dataset_name": str(demo.sft),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
        "bf16": False,
        "use_cpu": True,
        "output_dir": str(tmp_path / "runs/theirs"),
        "dataset_num_proc": 4,
    }
    file.write_text(yaml.safe_dump(given))
    return file


def test_a_file_of_trl_is_trained_with_and_shown_as_a_recipe(foreign: Path, tmp_path: Path) -> None:
    done = plaudit("sft", foreign, "threads=1", "train.steps=1")
    assert done.exit_code == 0, done.output
    assert f"{foreign} has settings of TRL. As a recipe of Plaudit:\n# " in done.output
    assert "# ignored: dataset_num_proc (rows are read and tokenised before training)\nmethod: sft\n" in done.output
    assert [step["step"] for step in records.Run(tmp_path / "runs/theirs").metrics] == [1]
    saved = yaml.safe_load((tmp_path / "runs/theirs/settings.yaml").read_text())
    assert (saved["train"]["batch_size"], saved["train"]["steps"], saved["threads"]) == (4, 1, 1)

    printed = plaudit("settings", "sft", "--recipe", foreign)
    assert printed.exit_code == 0, printed.output
    ours = tmp_path / "ours.yaml"
    ours.write_text(printed.output)
    assert load_settings(ours) == load_settings(foreign, method="sft")


def test_a_configuration_of_deepspeed_goes_over_a_recipe_and_under_overrides(recipe: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"gradient_clipping": 0.5, "train_batch_size": 2, "steps_per_print": "auto"}))
    done = plaudit("sft", recipe, "--deepspeed", config, "train.batch_size=3", "log.quiet=false")
    assert done.exit_code == 0, done.output
    assert f"{recipe} has settings of DeepSpeed. As a recipe of Plaudit:\nmethod: sft\n" in done.output
    saved = yaml.safe_load((tmp_path / "runs/run/settings.yaml").read_text())
    assert (saved["optimizer"]["max_gradient_norm"], saved["train"]["batch_size"]) == (0.5, 3)
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}))
    refused = plaudit("settings", "sft", "--recipe", recipe, "--deepspeed", config)
    assert refused.exit_code == 2
    assert "zero_optimization.zero_quantized_weights=true: " in refused.output
