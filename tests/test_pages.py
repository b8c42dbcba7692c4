"""The site has every page, and what pages print can be run: commands are parsed, their settings checked, Python run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit import load_pipeline, load_settings
from plaudit.commands import cli
from plaudit.commands.explain import explained
from plaudit.commands.init import init
from plaudit.data import formats
from plaudit.evaluate.settings import CompareSettings, EvaluationSettings, GenerateSettings, RelabelSettings
from plaudit.preflight.held import models_of
from plaudit.preflight.layout import read_mesh, report
from plaudit.rewards.rules import RULES
from plaudit.rewards.settings import RewardSettings
from plaudit.settings.recipes import load_tree, read_settings
from plaudit.settings.tree import Settings, to_plain
from plaudit.support.fields import SettingsError, check
from plaudit.tasks.demo import DemoFiles

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    (\$ )?(?:\w+=\$\(.*?\) )?(?:\.venv/bin/)?plaudit (.*)$", re.MULTILINE)
CODE = ("python", "yaml", "json")

RUN = {
    ("README.md", "python"): "test_docs.py: test_python_of_the_readme_runs",
    ("CONTRIBUTING.md", "python"): "here: test_python_of_contributing_registers_its_parts",
    ("docs/agents.md", "python"): "test_docs.py: test_environments_recipes_play_episodes",
    ("docs/checkpoints.md", "python"): "test_docs.py: test_python_of_the_checkpoints_page_loads_a_policy",
    ("docs/data.md", "yaml"): "test_docs.py: test_yaml_of_the_data_page_is_settings",
    ("docs/environments.md", "python"): "test_docs.py: test_environments_recipes_play_episodes",
    ("docs/extending.md", "python"): "test_docs.py: the files of examples/extending are trained with",
    ("docs/extending.md", "yaml"): "test_docs.py: the files of examples/extending are trained with",
    ("docs/methods/distill.md", "yaml"): "test_docs.py: test_yaml_of_the_distill_page_is_settings",
    ("docs/plan.md", "python"): "commands/test_plan.py: test_python_places_a_run_too",
    ("docs/quickstart.md", "python"): "test_quickstart.py: test_the_pages_reward_function",
    ("docs/rewards.md", "python"): "rewards/test_remote.py: examples/serving/my_server.py is asked for scores",
    ("docs/rewards.md", "yaml"): "here: test_rewards_of_the_page_are_settings",
    ("docs/switching.md", "python"): "test_docs.py: test_rewards_of_the_switching_page_call_those_of_other_systems",
}
"""Where the blocks of a page are run or loaded."""
NOT_RUN = {
    ("docs/serving.md", "python"): "openai is no dependency; environments/test_chat_server.py sends such requests",
    ("docs/training-api.md", "python"): "tinker is no dependency; training_api/test_real_client.py does as much",
    ("docs/lora.md", "python"): "reads an adapter of a run; models/test_lora.py loads such folders with peft",
    ("docs/rewards.md", "json"): "values are left out (...); rewards/test_protocol.py has whole ones",
}
"""Why the blocks of a page are not."""
PLACES = {"MODEL": "runs/model", "NAME": "name", "FIRST": "127.0.0.1", "FILE": "configs/sft.yaml"}
"""Words in capitals that a reader replaces."""


def commands() -> Iterator[Any]:
    """Every `plaudit ...` of an indented block, with what the page shows as its error, if it begins with `$`."""
    for page, text in PAGES.items():
        whole = re.sub(r" *\\\n +", " ", text)
        for found in COMMAND.finditer(whole):
            after = whole[found.end() + 1 :].partition("\n")[0].strip() if found[1] else ""
            words = shlex.split(found[2], comments=True)
            yield pytest.param(words, after, id=f"{page}: {' '.join(words)}")


def navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from navigation(part)


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(navigation(site["project"]["nav"])) == sorted(
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    )


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_pages_of_the_site_link_only_to_what_it_has(page: str) -> None:
    """A link out of docs/ works in the repository, and leads nowhere on the site."""
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", PAGES[page]):
        target = (ROOT / page).parent / link
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT / "docs"), link


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_run_or_says_why_not(page: str) -> None:
    found = {(page, language) for language, _ in BLOCK.findall(PAGES[page]) if language in CODE}
    assert found <= RUN.keys() | NOT_RUN.keys()
    assert {key for key in RUN.keys() | NOT_RUN.keys() if key[0] == page} <= found
    for language, text in BLOCK.findall(PAGES[page]):
        if language == "python":
            ast.parse(text)
        elif language == "yaml":
            yaml.safe_load(text)


@pytest.fixture
def reader(tmp_path: Path, demo: DemoFiles, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: the repository's recipes and examples, the demo's data, own files, folders of runs."""
    for name, target in (("configs", ROOT / "configs"), ("examples", ROOT / "examples"), ("my", demo.sft.parent)):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/demo").symlink_to(demo.sft.parent)
    for name in ("chats.jsonl", "pairs.jsonl", "answers.jsonl", "gold.jsonl", "data/code.jsonl"):
        (tmp_path / name).write_text("{}")
    foreign = ROOT / "tests/importers/foreign"
    theirs = {"trl.yaml": "sft.yaml", "async_rlhf.yaml": "rloo.yaml", "reward.conf": "reward.conf"}
    for name, file in (theirs | {"ds_config.json": "zero3.json"}).items():
        (tmp_path / name).symlink_to(foreign / file)
    for name in ("sft", "reward", "grpo", "dpo"):  # of the quick start, whose own test writes them by `init`
        (tmp_path / f"{name}.yaml").symlink_to(ROOT / "configs" / f"{name}.yaml")
    (tmp_path / "ours.py").write_text("def accuracy_reward(completions, solution, **kwargs): return [1.0]")
    for name in ("grpo", "sft", "reward", "first"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs/first/settings.yaml").write_text((ROOT / "configs/grpo.yaml").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("words", "error"), list(commands()))
def test_commands_of_pages_are_parsed_and_their_settings_are_right(words: list[str], error: str, reader: Path) -> None:
    for place, stands in PLACES.items():
        words = [re.sub(rf"\b{place}\b", stands, word) for word in words]
    if "rollout.engine=vllm" in words and importlib.util.find_spec("vllm") is None:
        pytest.skip("settings of vLLM are refused where it is not installed")
    if any("kind: reasoning_gym" in word for word in words):
        pytest.importorskip("reasoning_gym", reason="make test-trackers installs it")
    name, *rest = words
    with cli.main.commands[name].make_context(name, rest) as context:
        given = context.params
    recipe, overrides = given.get("recipe"), list(given.get("overrides", ()))
    if recipe is not None and "=" in recipe:  # a recipe is optional
        recipe, overrides = None, [recipe, *overrides]
    if error:
        with pytest.raises(SettingsError) as raised:
            load_settings(recipe, overrides, method=name)
        assert error == f"error: {raised.value}"
    elif name in cli.METHODS or name == "train":
        load_settings(recipe, overrides, method=None if name == "train" else name, deepspeed=given["deepspeed"])
    elif name == "pipeline":
        load_pipeline(recipe, overrides)
    elif name == "evaluate":
        check(cli.measured_by(EvaluationSettings, given["recipe"], given["overrides"]))
    elif name == "generate":
        check(load_tree(GenerateSettings, {"model": given["model"]}, overrides))
    elif name == "init":
        assert init(given["method"], [word for word in overrides if "=runs/" not in word], reader / "new.yaml")
    elif name == "layout":
        mesh = read_mesh(given["mesh"]) if given["mesh"] else None
        assert list(report(models_of(read_settings(recipe, overrides), mesh, given["ranks"]), given["rank"]))
    elif name == "relabel":
        check(load_tree(RelabelSettings, {}, [*overrides, "overwrite=true"]))
    elif name == "compare":
        check(load_tree(CompareSettings, {}, [word for word in given["words"] if "=" in word]))
    elif name == "demo":
        load_settings("configs/ppo.yaml", overrides)
    elif name in ("check", "profile", "plan"):
        (recipe, *overrides) = given["words"]
        load_pipeline(recipe, overrides) if "example" in recipe else load_settings(recipe, overrides)
    elif name == "settings" and given["method"] != "serve-reward":
        assert explained(given["method"], given["keys"], recipe=given["recipe"], plugins=given["plugins"])


def test_commands_are_found() -> None:
    found = list(commands())
    assert len(found) > 70
    assert any(param.values[1] for param in found)


def test_rewards_of_the_page_are_settings() -> None:
    (text,) = [text for language, text in BLOCK.findall(PAGES["docs/rewards.md"]) if language == "yaml"]
    for entry in read_settings({"method": "grpo"} | yaml.safe_load(text), ()).rewards:
        check(entry)


def test_python_of_contributing_registers_its_parts() -> None:
    dialects = dict(formats.dialects())
    blocks = [text for language, text in BLOCK.findall(PAGES["CONTRIBUTING.md"]) if language == "python"]
    try:
        for text in blocks:
            exec(compile(text, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
        assert "ends_politely" in RULES
        assert "headline/body" in formats.dialects()
    finally:
        RULES.pop("ends_politely", None)
        formats._DIALECTS.clear()
        formats._DIALECTS.update(dialects)


def test_make_targets_of_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page, text in PAGES.items():
        for target in re.findall(r"^(?:    )?make ([a-z-]+)", text, re.MULTILINE) + re.findall("`make ([a-z-]+)", text):
            assert target in targets, f"{page}: make {target}"


@pytest.mark.parametrize("file", ["run.md", "run.svg"])
def test_limits_of_a_run_are_the_defaults(file: str) -> None:
    """`setting` (number) in the tables, and the same in the picture."""
    text = re.sub("<[^>]+>", "`", (ROOT / "docs" / file).read_text(encoding="utf-8"))
    tree = to_plain(Settings()) | {"rewards": to_plain(RewardSettings())}
    named = re.findall(r"`((?:rollout|runtime|learn|rewards)\.\w+)`(?:`? ?\(([\d.]+))?", text)
    assert len(named) > 8
    for key, number in named:
        section, name = key.split(".")
        value = tree[section][name]
        assert not number or float(number) == value, key
    limits = dict(named)
    assert float(limits["runtime.collective_timeout"]) == 120
