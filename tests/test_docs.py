"""What the pages print is what the code does: quoted files are run, example rows are read, commands and paths exist."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import importlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from theirs import format_reward
from tiny import GPT2

from plaudit import load_settings, run
from plaudit.algorithms import ALGORITHMS
from plaudit.commands import cli
from plaudit.data import formats
from plaudit.data.formats import sample
from plaudit.data.records import DEMONSTRATION, JUDGEMENT, PREFERENCE, QUESTION
from plaudit.data.settings import DataSettings
from plaudit.environments.base import World
from plaudit.environments.settings import EnvironmentSettings
from plaudit.importers import distributed
from plaudit.models.families import FAMILIES
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.rules import RULES
from plaudit.settings.recipes import defaults
from plaudit.settings.tree import Settings, to_plain
from plaudit.support.fields import check, complaints
from plaudit.tasks.demo import DemoFiles
from plaudit.types import Completion, Finish, Prompt, Score

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DOCS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
METHODS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "methods").glob("*.md"))}
MINE = ("quickstart.md", "extending.md", "data.md", "settings.md", "checkpoints.md", "switching.md")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
QUOTED = re.compile(r"`(examples/extending/[\w.]+)`\n\n```\w+\n(.*?)```", re.DOTALL)
CODE_LINES = 40

SMALL = {
    "sft": ["train.steps=2", "train.batch_size=4"],
    "rank": ["train.steps=2", "rollout.prompts_per_step=2", "rollout.max_tokens=8"],
    "rloo": ["train.steps=2", "rollout.prompts_per_step=2", "rollout.max_tokens=8"],
}


def quoted() -> dict[str, str]:
    return dict(QUOTED.findall(DOCS["extending.md"]))


@pytest.fixture
def workplace(tmp_path: Path, demo: DemoFiles, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it: examples and recipes from the repository, the demo's data under data/demo."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(demo.sft.parent, tmp_path / "data" / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clean_registries() -> Iterator[None]:
    """What plugins register must not outlive the test."""
    registries: list[dict[Any, Any]] = [ALGORITHMS, RULES, FAMILIES, formats._DIALECTS, sys.modules]
    formats.dialects()
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        for key in set(registry) - set(content):
            if registry is not sys.modules or key.startswith("my_"):
                del registry[key]


def test_extending_quotes_its_files_to_the_letter_and_nothing_else() -> None:
    blocks = [text for language, text in BLOCK.findall(DOCS["extending.md"]) if language in ("python", "yaml")]
    found = quoted()
    assert blocks == list(found.values()), "every block must stand under the name of its file"
    assert {Path(path).name for path in found} == {
        path.name for path in (ROOT / "examples" / "extending").iterdir() if path.suffix in (".py", ".yaml")
    }
    for path, text in found.items():
        assert text == (ROOT / path).read_text(encoding="utf-8"), f"{path} differs from what docs/extending.md prints"


def test_environments_and_agents_quote_their_files_to_the_letter() -> None:
    both = DOCS["environments.md"] + DOCS["agents.md"]
    found = re.findall(r"`examples/environments/(\w+)\.py`\n\n```python\n(.*?)```", both, re.DOTALL)
    assert [name for name, _ in found] == ["guess", "calculator", "qwen_renderer", "second_look"]
    for name, text in found:
        assert text == (ROOT / f"examples/environments/{name}.py").read_text(encoding="utf-8"), name


@pytest.mark.parametrize(("guesses", "value", "found"), [([5], 1.0, 1.0), ([3, 6, 5], 5 / 7, 1.0), ([3, 6], 0.0, 0.0)])
def test_a_guess_costs_a_seventh_and_what_is_found_is_a_figure(guesses: list[int], value: float, found: float) -> None:
    async def scored() -> Score:
        path = ROOT / "examples/environments/guess.py"
        game = await World(EnvironmentSettings(function=f"{path}:Guess", options={"highest": 7})).begin()
        await game.reset({"seed": 5})  # its number is 5
        for guess in guesses:
            await game.step({"role": "assistant", "content": f"{guess}, I think"})
        return await game.score()

    score = asyncio.run(scored())
    assert (score.value, score.parts) == (pytest.approx(value), {"found": found})


@pytest.mark.parametrize("name", ["guess", "calculator", "second_look"])
@pytest.mark.usefixtures("workplace")
def test_environments_recipes_play_episodes(name: str, demo: DemoFiles) -> None:
    """As they stand but for the model; with so little trained, its turns end by a letter."""
    if name == "second_look":
        pytest.importorskip("openai")
    recipe = yaml.safe_load((ROOT / f"examples/environments/{name}.yaml").read_text())
    recipe["model"] = {"config": {**GPT2, "n_positions": 1024}, "tokenizer": str(demo.tokenizer)}
    recipe["data"]["chat_template"] = "default"
    overrides = ["output=out", "threads=1", "log.quiet=true", "train.steps=2", "rollout.stop=[e,a]"]
    done = run(load_settings(recipe, [*overrides, "rollout.prompts_per_step=2", "algorithm.samples=2"]))
    assert all(one["messages"] for one in done.samples)
    assert done.metrics[-1]["reward/failed"] == 0.0
    assert "episode/turns" in done.metrics[-1]


@pytest.mark.parametrize("path", [path for path in quoted() if path.endswith(".py")])
def test_each_extension_takes_under_forty_lines_of_code(path: str) -> None:
    lines = [line for line in quoted()[path].splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(lines) < CODE_LINES


def run_recipe(path: str, *more: str) -> Any:
    method = yaml.safe_load(Path(path).read_text())["method"]
    overrides = ["output=out", "name=run", "threads=1", "log.quiet=true", *SMALL[method], *more]
    return run(load_settings(path, overrides))


@pytest.mark.usefixtures("workplace", "clean_registries")
def test_own_algorithm_trains_by_its_own_credit() -> None:
    done = run_recipe("examples/extending/rank.yaml", "algorithm.power=1")
    assert yaml.safe_load((done.folder / "settings.yaml").read_text())["algorithm"]["samples"] == 8
    group = [s for s in done.samples if s["step"] == 1 and s["group"] == done.samples[0]["group"]]
    rewards = [s["reward"] for s in group]
    for one in group:
        won = sum(one["reward"] > other for other in rewards) - sum(one["reward"] < other for other in rewards)
        assert one["advantage"] == pytest.approx(won / (len(group) - 1), abs=1e-5)


@pytest.mark.usefixtures("workplace", "clean_registries")
def test_own_rewards_are_summed_by_weight() -> None:
    done = run_recipe("examples/extending/rewards.yaml")
    counts = set()
    for record in done.samples:
        words, parts = record["completion"].split(), record["parts"]
        counts.add(len(words) < 2)
        assert ("varied" in parts) == (len(words) >= 2)
        varied = len(set(words)) / len(words) if "varied" in parts else 0.0
        assert parts.get("varied", 0.0) == pytest.approx(varied)
        assert parts.get("varied/words", len(words)) == len(words)
        assert record["score"] == pytest.approx(varied + 0.5 * parts["mentions_title"])
    assert counts == {True, False}
    assert {(m["reward/failed"], m["reward/not_applicable"]) for m in done.metrics} == {(0.0, 0.0)}


@pytest.mark.usefixtures("workplace", "clean_registries")
def test_own_data_and_dialect_are_read() -> None:
    done = run_recipe("examples/extending/data.yaml")
    report = json.loads((done.folder / "data.json").read_text())["sources"][0]
    assert report["dialects"] == {"film/verdict": 4}
    assert report["kept"] == 4
    assert done.metrics[-1]["step"] == 2


@pytest.mark.usefixtures("workplace", "clean_registries")
def test_own_family_is_native_and_agrees_with_transformers() -> None:
    from transformers import AutoModelForCausalLM

    from plaudit.models.decoder import Decoder
    from plaudit.models.load import load_model

    done = run_recipe("examples/extending/family.yaml")
    ours = load_model(str(done.model))
    assert isinstance(ours, Decoder)
    theirs = AutoModelForCausalLM.from_pretrained(done.model)
    assert type(theirs).__name__ == "Starcoder2ForCausalLM"
    for model in (ours, theirs):
        torch.manual_seed(1)  # larger weights than a fresh model's, biases included: the same in both
        by_name = dict(ours.hf_tensors()) if model is ours else dict(theirs.named_parameters())
        for name in sorted(by_name):
            if name in dict(ours.hf_tensors()):
                by_name[name].data.add_(0.2 * torch.randn(by_name[name].shape))
    tokens = torch.arange(5, 25)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        found = ours.head(ours(tokens, ours.packed([20])))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("workplace", "clean_registries")
def test_own_hook_adds_its_figures() -> None:
    hook = runpy.run_path("examples/extending/my_hook.py")["Best"]()
    small = ["train.steps=4", "train.batch_size=4", "threads=1", "log.quiet=true", "evaluate.every=2"]
    done = run(load_settings("configs/sft.yaml", small), hooks=[hook])
    losses = [record["validation/loss"] for record in done.metrics if "validation/loss" in record]
    assert len(losses) == 2
    assert [record.get("best/loss") for record in done.metrics] == [None, losses[0], None, min(losses)]


RECIPES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
PIPELINES = ("example.yaml", "model_config.yaml", "distributed.yaml")


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in PIPELINES])
@pytest.mark.usefixtures("workplace")
def test_recipe_of_each_method_runs(name: str, demo: DemoFiles, judge: Path, make_recipe: Any, tmp_path: Path) -> None:
    path = f"configs/{name}"
    assert len(Path(path).read_text().splitlines()) < 30
    given = yaml.safe_load(Path(path).read_text())
    model = "{model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 128}"
    overrides = ["name=run", "threads=1", "log.quiet=true", "train.steps=1", "train.batch_size=4"]
    overrides += ["model.path=null", f"model.config={model}", f"model.tokenizer={demo.tokenizer}"]
    if "rewards" in given:
        overrides += ["rollout.prompts_per_step=2", "rollout.max_tokens=12"]
        overrides += [f"rewards.0.path={judge}"] if given["rewards"][0]["kind"] == "judge" else []
    if "reference" in given:
        overrides += [f"reference.path={make_recipe('distill', tmp_path)['reference']['path']}"]
    if name == "dapo.yaml":
        overrides += ["rewards.2.options.max_tokens=12", "rewards.2.options.cache_tokens=4"]
    done = run(load_settings(path, overrides))
    assert done.metrics[-1]["step"] == 1
    assert {"loss/policy", "loss/judge"} & set(done.metrics[-1]), "the step must have trained something"


@pytest.mark.parametrize("method", ["reward", "dpo"])
@pytest.mark.parametrize("shape", ["hh", "alpaca_farm"])
@pytest.mark.usefixtures("workplace")
def test_recipes_for_pairs_of_a_folder_run(method: str, shape: str, demo: DemoFiles) -> None:
    """On folders of the shapes that the hub's repositories of HH and alpaca_farm have."""
    folder, turn = Path("pairs"), "\n\nHuman: How many is {}?\n\nAssistant: Guess.\n\nHuman: No.\n\nAssistant:"
    folder.mkdir()
    for split, count in (("train", 9), ("test", 4)):
        if shape == "hh":
            pairs = [
                {"chosen": turn.format(n) + f" It is {n}.", "rejected": turn.format(n) + " So."} for n in range(count)
            ]
            with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
                file.writelines(json.dumps(pair) + "\n" for pair in pairs)
        else:
            asked = {"instruction": "Add.", "output_1": "Five.", "output_2": "Four.", "preference": 2}
            rows = [{**asked, "input": f"{n} and 2"} for n in range(count)]
            (folder / f"{split}.json").write_text(json.dumps(rows))
    model = "{model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 512}"
    overrides = [f"model.config={model}", f"model.tokenizer={demo.tokenizer}", "model.path=null", "train.batch_size=4"]
    overrides += ["name=run", "threads=1", "log.quiet=true", "data.train=pairs", "data.validation=pairs"]
    done = run(load_settings(f"configs/hh/{method}.yaml", overrides))
    read = json.loads((done.folder / "data.json").read_text())
    assert done.metrics[-1]["step"] == 3, "9 pairs, 4 a step"
    assert "validation/loss" in done.metrics[-1] and str(read).count("'kept': 9") == 1, read


SERVES = {"D": DEMONSTRATION, "P": PREFERENCE, "Q": QUESTION, "J": JUDGEMENT}
ROW = re.compile(r"^\| `([\w/]+)` \| ([DPQJ ]+) \| `(\{.*\})` \|$", re.MULTILINE)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_figure_of_a_run_is_in_the_glossary(method: str, make_recipe: Any, tmp_path: Path) -> None:
    more: dict[str, Any] = {"data": {"validation": "10%"}, "evaluate": {"every": 1, "limit": 4}}
    more |= {"algorithm": {"kl_in_loss": 0.1}, "rollout": {"max_lag": 1}} if method == "grpo" else {}
    done = run(load_settings(make_recipe(method, tmp_path, **more, train={"steps": 2})))
    found = {name.removeprefix("validation/") for line in done.metrics for name in line}
    for general, name in (
        ("lag/[0-9]+", "lag/N"),
        ("(gradient_norm|learning_rate)/.*", r"\1"),
        ("loss", "loss/policy"),
    ):
        found = {re.sub(f"^{general}$", name, figure) for figure in found}
    known = set(re.findall("`([a-zA-Z/_]+)`", DOCS["glossary.md"].partition("## Figures")[2]))
    assert found - known == {"reward/varied"} & found


@pytest.mark.parametrize(("name", "serves", "row"), ROW.findall(DOCS["data.md"]))
def test_example_row_is_read_as_the_page_says(name: str, serves: str, row: str) -> None:
    parsed = json.loads(row)
    for letter, kind in SERVES.items():
        if letter in serves.split():
            read, dialect = sample(parsed, kind=kind, where="page")
            assert dialect == name
            assert read.prompt or read.messages or name == "text"
            assert bool(read.pairs) == (PREFERENCE in formats.dialects()[name].gives)
        else:
            with pytest.raises(formats.DataError):
                sample(parsed, kind=kind, where="page")


def test_page_lists_every_dialect_and_every_section() -> None:
    assert {name for name, _, _ in ROW.findall(DOCS["data.md"])} == set(formats.dialects())
    cells = re.findall(
        r"^\| (`[^|]*`) \|", DOCS["settings.md"].split("## Recipes")[0].split("environment variables")[0], re.MULTILINE
    )
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in dataclasses.fields(Settings)}
    keys = {*distributed.keys().known}
    before = DOCS["settings.md"].split("## Every setting")[0]
    assert set(re.findall(r"^\| `(\w+\.\w+)` \|", before, re.MULTILINE)) == keys


def test_settings_files_of_the_table_exist() -> None:
    for path in re.findall(r"\| `([\w/]+\.py)` \|", DOCS["settings.md"]):
        assert (ROOT / "src" / "plaudit" / path).exists(), path


def test_yaml_of_the_data_page_is_settings() -> None:
    (text,) = [text for language, text in BLOCK.findall(DOCS["data.md"]) if language == "yaml"]
    check(DataSettings(**yaml.safe_load(text)["data"]))


def test_yaml_of_the_distill_page_is_settings(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/methods/distill.md").read_text(encoding="utf-8")
    (text,) = [text for language, text in BLOCK.findall(page) if language == "yaml"]
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in ("chats", "sums"):
        Path(f"data/{name}.jsonl").touch()
    settings = load_settings(make_recipe("distill", tmp_path) | yaml.safe_load(text))
    assert settings.objective.teachers == {"data/sums.jsonl": "runs/sums"}


@pytest.mark.parametrize("page", MINE)
def test_commands_and_files_that_pages_name_exist(page: str) -> None:
    text = DOCS[page]
    for command in re.findall(r"^    (?:\$ )?plaudit ([\w-]+)", text, re.MULTILINE):
        assert command in cli.main.commands, command
    for path in re.findall(r"(?:configs|examples|scripts)/[\w/]+\.(?:py|yaml)", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        target = (page.parent / link) if link else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{link}#{anchor}"


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"index"}))
def test_page_of_a_method_has_its_defaults_and_a_recipe(method: str) -> None:
    tree = to_plain(defaults(method))
    rows = re.findall(r"^\| `(\w[\w.]*)`(?:, `[\w.]+`)* \| ([^|]+) \|", METHODS[method], re.MULTILINE)
    for key, default in ((key, default) for key, default in rows if "." in key):
        value: Any = tree
        for name in key.split("."):
            value = value[name]
        assert yaml.safe_load(default) == value or float(default) == value, key
    for path in re.findall(r"configs/[\w/]+\.yaml", METHODS[method]):
        assert (ROOT / path).exists(), path
    assert f"    plaudit {method} configs/" in METHODS[method]
    assert f"({method}.md)" in METHODS["index"]


def test_every_setting_of_the_switching_page_exists() -> None:
    """In the right column; a value that stands behind one is taken by it, unless it is a stand-in in capitals."""
    rows = [line.split(" | ") for line in DOCS["switching.md"].splitlines() if line.startswith("| ")]
    named = [one for row in rows for one in re.findall(r"`(\w+(?:\.\w+)+)(?:=[^`]*)?`", row[-1])]
    assert len(named) > 30
    known = set(_dotted(to_plain(Settings())))
    known |= {f"algorithm.{field.name}" for method in ALGORITHMS.values() for field in dataclasses.fields(method)}
    files = {"metrics.jsonl", "reward_model.ground_truth"}
    assert set(named) - known - files == set()
    given = [tuple(pair) for row in rows for pair in re.findall(r"(algorithm\.\w+)=([\w.]+)", row[-1])]
    for key, value in given:
        makers = [m for m in ALGORITHMS.values() if key.partition(".")[2] in {f.name for f in dataclasses.fields(m)}]
        further = {"samples": 2} if key.endswith("group_baseline") else {"loss": "ipo"} if "length" in key else {}
        assert complaints(makers[0](**{key.partition(".")[2]: yaml.safe_load(value)}, **further)) == []


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def quick_starts() -> dict[str, list[str]]:
    """The commands that docs/switching.md puts beside TRL's, by their method."""
    section = DOCS["switching.md"].partition("## Quick starts side by side")[2].partition("\n## ")[0]
    lines = re.sub(r" *\\\n +", " ", section).splitlines()
    found = [shlex.split(line)[1:] for line in lines if line.startswith("    plaudit ")]
    return {method: overrides for method, *overrides in found}


@pytest.mark.usefixtures("clean_registries")
@pytest.mark.parametrize("method", ["sft", "reward", "dpo", "grpo"])
def test_quick_starts_of_the_switching_page_run(
    method: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand but for the hub's models and data and the run's length."""
    monkeypatch.chdir(tmp_path)
    hub = ("model.path=", "data.train=")
    words = [word.replace("ours.py:accuracy_reward", "theirs:format_reward") for word in quick_starts()[method]]
    overrides = [word for word in words if not word.startswith(hub)]
    assert len(overrides) == len(quick_starts()[method]) - 2
    short = ["train.steps=1", *(["rollout.max_tokens=8"] if method == "grpo" else [])]
    done = run(load_settings(make_recipe(method, tmp_path / "runs", rewards=[]), [*overrides, *short]))
    assert [step["step"] for step in done.metrics] == [1]
    if method == "grpo":
        assert {sample["reward"] for sample in done.samples} == {float(len(one["completion"])) for one in done.samples}


def test_rewards_of_the_switching_page_call_those_of_other_systems(tmp_path: Path) -> None:
    (text,) = [text for language, text in BLOCK.findall(DOCS["switching.md"]) if language == "python"]
    (tmp_path / "ours.py").write_text(text)
    ours = runpy.run_path(str(tmp_path / "ours.py"))
    extra = {"level": 2, "data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 0}}
    prompt = Prompt(id="f:1", text="2 + 2 =", tokens=(1,), answer="4", extra=extra)
    completion = Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), text=" 4", finish=Finish.EOS)
    for function, expected in ((format_reward, 4.0), (ours["of_verl"], 1.0)):  # 2 for the level, 2 characters
        (score,) = asyncio.run(FunctionReward(function).score(prompt, [completion]))
        assert score.value == expected, score.reason


@pytest.mark.usefixtures("workplace")
def test_python_of_the_checkpoints_page_loads_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["train.steps=1", "train.batch_size=4", "threads=1", "log.quiet=true"]
    run(load_settings("configs/sft.yaml", short))
    code = "".join(text for language, text in BLOCK.findall(DOCS["checkpoints.md"]) if language == "python")
    exec(compile(code, "docs/checkpoints.md", "exec"), {})
    assert capsys.readouterr().out.startswith("We saw The Paper Tower on Sunday . The acting")


def test_reward_model_scores_alone_as_it_does_in_training(judge: Path, demo: DemoFiles, tmp_path: Path) -> None:
    from plaudit.data.load import load_preferences
    from plaudit.evaluate.judge import Judge

    rows = [json.loads(line) for line in demo.preferences.read_text().splitlines()]
    short = [{key: text[:60] for key, text in row.items()} for row in rows]  # the tiny model has room for 128 tokens
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, short)))
    command = [sys.executable, str(ROOT / "examples" / "score_with_reward_model.py"), str(judge)]
    answers = ["--prompt", "The film", "--answer", " is superb .", "--answer", " is dull . I left ."]
    out = subprocess.run(
        [*command, *answers, "--pairs", str(pairs)], capture_output=True, text=True, check=True
    ).stdout.splitlines()

    loaded = Judge.load(str(judge))
    data = load_preferences(DataSettings(train=str(pairs), max_pairs_per_prompt=9), loaded.tokenizer, 0)
    read = [row for item in data.items for row in item]
    scores = loaded.of_sequences([row.tokens for row in read])
    right = sum(chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True))
    assert out[2] == f"{right} of {len(rows)} pairs ordered as labelled: {right / len(rows):.1%}"

    tokenizer = loaded.tokenizer
    for line, answer in zip(out, (" is superb .", " is dull . I left ."), strict=False):
        tokens = tokenizer("The film")["input_ids"] + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        alone = loaded.of_sequences([tuple(tokens)])
        assert float(line.split()[0]) == pytest.approx(alone[0], abs=1e-4)


README = ROOT / "README.md"


@pytest.mark.skipif(not README.exists(), reason="there is no README.md")
@pytest.mark.usefixtures("clean_registries")
def test_python_of_the_readme_runs(workplace: Path) -> None:
    """Its blocks find a tiny `recipe.yaml`, the recipes of configs/, the examples and data/demo."""
    recipe = yaml.safe_load((workplace / "configs" / "sft.yaml").read_text())
    recipe |= {"train": {"steps": 2, "batch_size": 4}, "threads": 1, "name": "readme"}
    (workplace / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    names: dict[str, Any] = {}
    for language, code in BLOCK.findall(README.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(code, "README.md", "exec"), names)


def test_what_the_makefile_imports_exists() -> None:
    """CI's installations run these lines before any test does."""
    lines = re.findall(r"from (plaudit[\w.]*) import (\w+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert lines
    for module, name in lines:
        assert hasattr(importlib.import_module(module), name), f"Makefile: {module} has no {name}"


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    """A package that has our name there is somebody else's."""
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile"]
    for folder in ("docs", "src", "scripts", "examples", "benchmarks", "configs"):
        pages += (page for page in (ROOT / folder).rglob("*") if page.suffix in (".md", ".py", ".sh", ".yaml", ".html"))
    wrong = re.compile(r"(?:pip3?|uvx?|poetry|pipx|conda) (?:\w+ )*['\"]?plaudit\b")
    assert wrong.search("pip install 'plaudit[ray]'")
    assert wrong.search("uv pip install plaudit")
    assert [str(page) for page in pages if wrong.search(page.read_text(encoding="utf-8"))] == []


def test_the_settings_that_a_resumed_run_keeps_are_those_that_the_page_names() -> None:
    from plaudit.runs.records import KEPT

    (row,) = [line for line in (ROOT / "docs/checkpoints.md").read_text().splitlines() if "must not change" in line]
    assert re.findall("`([^`]+)`", row.split("|")[1]) == list(KEPT)
