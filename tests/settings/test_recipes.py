"""From YAML and overrides to settings: what is unknown, mistyped or broken is refused by its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from told import says

from plaudit import load_pipeline
from plaudit.evaluate.settings import EvaluationSettings
from plaudit.rewards.settings import RewardSettings
from plaudit.runs.pipeline import PipelineSettings, recipes_of, to_come
from plaudit.settings.recipes import load_settings, load_tree, parse_override, read_settings, read_yaml
from plaudit.settings.tree import Settings, SettingsError

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
BASE: dict[str, Any] = {
    "method": "ppo",
    "model": {"path": "some/model"},
    "data": {"train": "some/data"},
    "rewards": [{"kind": "length", "options": {"target": 5}}],
}


def refused(recipe: Any, overrides: list[str] | None = None, method: str | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(recipe, overrides or [], method=method)
    return str(caught.value)


# --- what is taken


def test_overrides_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(BASE | {"train": {"steps": 7, "batch_size": 3}, "algorithm": {"samples": 2}}))
    settings = load_settings(file, ["train.batch_size=5", "algorithm.clip=[0.1,0.2]"])
    assert (settings.train.steps, settings.train.batch_size, settings.train.log_every) == (7, 5, 10)
    assert (settings.algorithm.samples, settings.algorithm.clip) == (2, (0.1, 0.2))
    assert settings.rewards == [RewardSettings(kind="length", options={"target": 5})]


def test_a_folder_under_home_is_one_wherever_a_recipe_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder called ~ is made."""
    monkeypatch.setenv("HOME", "/some/home")
    assert load_settings(BASE | {"output": "~/runs"}).output == "/some/home/runs"
    assert load_settings(BASE | {"output": "~nobody at all/x"}).output == "~nobody at all/x"
    assert load_pipeline({"output": "~/runs", "stages": {"sft": {}}}).output == "/some/home/runs"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.steps=null", lambda s: s.train.steps is None),
        ("optimizer.learning_rate=1e-3", lambda s: s.optimizer.learning_rate == 1e-3),
        ("optimizer.betas=[0.8,0.9]", lambda s: tuple(s.optimizer.betas) == (0.8, 0.9)),
        ("rollout.stop=['a, b',c]", lambda s: s.rollout.stop == ["a, b", "c"]),
        ("rewards.0.options={target: 9}", lambda s: s.rewards[0].options == {"target": 9}),
        ("rewards.0.weight=2", lambda s: s.rewards[0].weight == 2.0),
        ("rewards=[{kind: judge, path: x, name: '1'}]", lambda s: s.rewards == [RewardSettings(path="x", name="1")]),
        ("name='a=b'", lambda s: s.name == "a=b"),
        ("data.train=[a,b]", lambda s: list(s.data.train) == ["a", "b"]),
        ("algorithm.dual_clip=3", lambda s: s.algorithm.dual_clip == 3.0),
        ("~shaping.clip", lambda s: s.shaping.clip is None),
        ("+seed=3", lambda s: s.seed == 3),
    ],
)
def test_the_grammar_of_overrides(override: str, read: Any) -> None:
    assert read(load_settings(BASE, [override]))


def test_a_recipe_may_interpolate_and_leave_sections_empty(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("seed: 3\nname: run${seed}\nmodel: {path: m}\ndata: {train: d}\noptimizer:\n")
    settings = load_settings(file, method="sft")
    assert (settings.name, settings.optimizer.learning_rate) == ("run3", 1e-5)


# --- what is refused


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"modle": {}}, "modle .. mean model"),
        (
            {"learning_rate": 1e-4},
            "learning_rate .. optimizer.learning_rate or critic.learning_rate",
        ),
        ({"train": {"max_prompt_tokens": 1}}, "train.max_prompt_tokens .. mean data.max_prompt_tokens"),
        ({"train": {"dual_clip": 1}}, "train.dual_clip .. mean algorithm.dual_clip"),
        (
            {"critic": {"rank": 1}},
            "critic.rank .. critic.lora_rank or model.lora.rank",
        ),
        ({"optimizer": {"learning_rat": 1}}, "optimizer.learning_rat .. mean optimizer.learning_rate"),
        ({"optimizer": {"esp": 1}}, "optimizer.esp .. mean optimizer.eps"),
        ({"algorithm": {"clips": 1}}, "algorithm.clips .. mean algorithm.clip"),
        ({"rewards": [{"kind": "length"}, {"wieght": 1}]}, "rewards.1.wieght .. mean rewards.1.weight"),
        ({"zzzzzz": 1}, "zzzzzz .. algorithm, critic"),
        ({"train": {"steps": "many"}}, "train.steps: Value 'many'"),
        ({"train": {"steps": 1.5}}, "train.steps"),
        ({"train": 5}, "train"),
        ({"optimizer": {"betas": [0.9]}}, "  - optimizer.betas=[0.9] .. 2 numbers"),
        (
            {"optimizer": {"betas": [0.9, 0.95, 0.99]}},
            "  - optimizer.betas=[0.9, 0.95, 0.99] .. 2 numbers",
        ),
        ({"seed": None}, "seed"),
        ({"rewards": {"kind": "length"}}, "rewards"),
        ({"rewards": [{"kind": "length", "weight": "much"}]}, "rewards: weight: Value 'much'"),
        ({"shaping": {"unfinished": "forget"}}, "shaping.unfinished=forget"),
        ({"algorithm": {"clip": [-1.0, 2.0]}}, "algorithm.clip=[-1.0, 2.0] .. 2 numbers .. at least 0"),
        ({"method": "pppo"}, "'pppo' .. mean ppo"),
        ({"plugins": "mine.py"}, "plugins='mine.py' .. list"),
        ({"plugins": ["absent.py"]}, "plugins: 'absent.py': .. no file"),
    ],
)
def test_a_recipe_is_refused_with_the_key_and_the_nearest_name(recipe: dict[str, Any], told: str) -> None:
    assert says(refused(BASE | recipe), told)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\nimport no_such_package\n", ", line 2: .. 'no_such_package'"),
        ("raise ValueError('names no data')\n", ", line 1: names no data"),
        (
            "from plaudit.algorithms import DPO, register_algorithm\nregister_algorithm('sft', DPO)\n",
            ", line 2: .. 'sft' .. taken by SFT",
        ),
    ],
)
def test_what_a_plugin_raises_is_told_with_its_place(source: str, told: str, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(source)
    assert says(refused(BASE | {"plugins": [str(plugin)]}), f"plugins: '{plugin}'{told}")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.step=1", "train.step .. mean train.steps"),
        ("optimizer.beta=1", "optimizer.beta .. mean optimizer.betas"),
        ("algorithm.sample=1", "algorithm.sample .. mean algorithm.samples"),
        ("rewards.0.knd=x", "rewards.0.knd .. mean rewards.0.kind"),
        ("rewards=[{knd: x}]", "rewards.0.knd .. mean rewards.0.kind"),
        ("rewards.3.kind=length", "rewards.3.kind=length: "),
        ("rewards.first.kind=length", "no setting rewards.first"),
        ("+trian.steps=1", "trian .. mean train"),
        ("~rollout.stopp", "rollout.stopp .. mean rollout.stop"),
        ("train.steps=x", "train.steps=x: "),
        ("train.steps=[1]", "train.steps=[1]: "),
        ("train.steps", "key.sub=value"),
        ("=3", "key.sub=value"),
        ("train.steps=1,2", "sweep"),
        ("name=${absent}", "absent"),
    ],
)
def test_an_override_is_refused_with_what_was_given(override: str, told: str) -> None:
    assert says(refused(BASE, [override]), told)


def test_the_commands_method_and_the_recipes_must_agree() -> None:
    assert "Use `plaudit ppo`" in refused(BASE, method="sft")
    assert load_settings(BASE, ["method=grpo"], method="grpo").method == "grpo"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "line 1"),
        ("a: 1\nb: : 2\n", "line 2"),
        ("- a\n- b\n", "holds a list"),
        ("3", "cannot be read"),
        ("a: ${b}\n", "'b' not found"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_yaml(file)
    assert told in str(caught.value)
    assert str(file) in str(caught.value)


def test_an_absent_or_binary_recipe_is_refused(tmp_path: Path) -> None:
    assert "there is no recipe" in refused(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert "cannot be read as settings" in refused(tmp_path / "binary.yaml")
    assert f"mean {tmp_path}/binary.yaml?" in refused(tmp_path / "binary.yml")
    assert "is a folder, not a recipe" in refused(tmp_path)
    (tmp_path / "settings.yaml").touch()
    assert f"are {tmp_path}/settings.yaml" in refused(tmp_path)


def test_a_recipe_without_a_method_is_refused() -> None:
    """It was read as one of SFT, whatever its other settings said."""
    with pytest.raises(SettingsError, match="no method is given"):
        read_settings({"name": "one", "data": {"train": "rows.jsonl"}}, ())
    assert read_settings({"name": "one"}, ["method=dpo"]).method == "dpo"


def test_rewards_are_given_by_name(tmp_path: Path) -> None:
    """As from Python: a rule, or a function's file and name."""
    (tmp_path / "mine.py").write_text("def mine(completion):\n    return 1.0\n")
    names = ["exact_match", f"{tmp_path}/mine.py:mine"]
    rewards = [RewardSettings(kind="exact_match"), RewardSettings(kind="function", function=names[1])]
    assert read_settings({"method": "grpo", "rewards": names}, ()).rewards == rewards
    assert read_settings({"method": "grpo"}, [f"rewards=[{','.join(names)}]"]).rewards == rewards
    for given_, override in (
        ({"stages": {"grpo": {"rewards": names}}}, ()),
        ({"stages": {"grpo": {}}, "shared": {"rewards": names}}, ()),
        ({"stages": {"grpo": {}}}, [f"grpo.rewards=[{','.join(names)}]"]),
    ):
        ((_, stage),) = recipes_of(load_pipeline(given_, override), tmp_path, made=to_come)
        assert [one["kind"] for one in stage["rewards"]] == ["exact_match", "function"]
    assert load_pipeline({"stages": {"grpo": {}}, "evaluation": {"rewards": names}}).evaluation.rewards == rewards  # type: ignore[union-attr]
    assert load_tree(EvaluationSettings, {"rewards": names}).rewards == rewards
    assert load_tree(EvaluationSettings, {}, [f"rewards=[{','.join(names)}]"]).rewards == rewards


@pytest.mark.parametrize("part", ["stages.sft", "shared", "evaluation"])
@pytest.mark.parametrize("value", ["hello", ["a"], 3])
def test_a_part_of_a_pipeline_that_is_no_mapping_is_refused(part: str, value: Any) -> None:
    recipe = {"stages": {"sft": {}}} | ({"stages": {"sft": value}} if "." in part else {part: value})
    with pytest.raises(SettingsError, match=f"{part}=.* must be a mapping"):
        load_pipeline(recipe)


def test_bad_keys_are_found_behind_null_and_in_free_fields_none_are(tmp_path: Path) -> None:
    given_ = {"evaluation": {"promts": "x"}, "stages": {"sft": {"anything": 1}}}
    with pytest.raises(SettingsError, match=r"evaluation\.promts; .* evaluation.prompts"):
        load_tree(PipelineSettings, given_, free=("shared", "stages"))
    with pytest.raises(SettingsError, match=r"^evaluation\.limit: Value 'many'"):
        load_tree(PipelineSettings, {"evaluation": {"limit": "many"}})
    with pytest.raises(SettingsError, match=r"^evaluation\.limit=many: Value 'many'"):
        load_tree(PipelineSettings, {}, ["evaluation.limit=many"])
    tree = load_tree(PipelineSettings, {"evaluation": {"limit": 5}}, ["evaluation.examples=2"])
    assert tree.evaluation is not None
    assert (tree.evaluation.limit, tree.evaluation.examples) == (5, 2)
    tree = load_tree(PipelineSettings, {"stages": {"sft": {"anything": 1}}}, ["only=[sft]"], free=("stages",))
    assert tree.stages == {"sft": {"anything": 1}}
    assert tree.only == ["sft"]


# --- whatever is given, it is settings or a SettingsError

WORDS = [
    *"train steps rewards 0 kind algorithm model config optimizer betas data name save keep rollout stop".split(),
    "",
    " ",
]
VALUES = [
    *"null [1,2] {a:1} [] {} true -1 1e400 nan 'x' ${a} [{kind:judge}] 1,2 range(3) ppo choice(a) \\ [null]".split()
]
KEYS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join)
OVERRIDES = st.one_of(
    st.builds(
        "{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), KEYS, st.sampled_from(VALUES) | st.text(max_size=8)
    ),
    st.text(max_size=12),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["${a}", "???", "${"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
SECTIONS = st.sampled_from([f.name for f in dataclasses.fields(Settings) if f.name != "plugins"])
FEW = examples(suppress_health_check=list(HealthCheck))


@FEW
@given(st.lists(OVERRIDES, max_size=2))
def test_any_override_is_taken_or_refused_as_settings(overrides: list[str]) -> None:
    try:
        load_settings(BASE, overrides)
    except SettingsError as error:
        assert str(error)


@FEW
@given(st.dictionaries(SECTIONS, TREES, max_size=3))
def test_any_mapping_is_taken_or_refused_as_settings(recipe: dict[str, Any]) -> None:
    try:
        load_settings(BASE | recipe)
    except SettingsError as error:
        assert str(error)


@FEW
@given(st.text(max_size=30))
def test_any_text_is_an_override_or_refused(text: str) -> None:
    try:
        parse_override(text)
    except SettingsError as error:
        assert str(error)


# --- the recipes of this repository


def recipes() -> list[Path]:
    return sorted(path for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("path", recipes(), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_the_recipes_of_this_repository_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their data and models need not be made yet: only what the recipe itself says is checked."""
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    given_ = read_yaml(path)
    if "stages" in given_:
        assert load_pipeline(path).stages
    elif "method" in given_:
        assert load_settings(path).method == given_["method"]
    else:
        pytest.skip("not a recipe of a run or a pipeline")
