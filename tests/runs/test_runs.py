"""Whole runs from Python: typed settings in, a run with metrics, checkpoints and samples out."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny import GPT2

from plaudit import Settings, SettingsError, load_settings, run
from plaudit.algorithms import ALGORITHMS, GRPO
from plaudit.data.settings import DataSettings
from plaudit.data.template import AS_CHAT
from plaudit.loop.progress import Moment
from plaudit.loop.settings import TrainSettings
from plaudit.models.config import HeadKind
from plaudit.models.load import fresh_model, load_model, load_tokenizer, save_model
from plaudit.models.settings import ModelSettings
from plaudit.monitor.settings import LogSettings
from plaudit.rewards.settings import RewardSettings
from plaudit.rollout.settings import RolloutSettings
from plaudit.runs.pipeline import merged
from plaudit.runs.start import last_block
from plaudit.runtime.worker import WorkerLost
from plaudit.tasks.demo import DemoSize, make_demo
from plaudit.types import Role, Stats

pytestmark = pytest.mark.slow

NO_SUCH_DEVICE = "device=cuda:99"
QUIET = LogSettings(quiet=True)


def test_a_run_from_typed_settings_in_few_lines(demo: Any, tmp_path: Path) -> None:
    settings = Settings(
        method="grpo",
        output=str(tmp_path),
        model=ModelSettings(config=GPT2, tokenizer=str(demo.tokenizer)),
        data=DataSettings(train=str(demo.prompts)),
        algorithm=GRPO(samples=2),
        rewards=[RewardSettings(kind="function", function="plaudit.tasks.demo:gold_reward")],
        rollout=RolloutSettings(prompts_per_step=2, max_tokens=8),
        train=TrainSettings(steps=2),
        log=QUIET,
    )
    result = run(settings)
    assert [record["step"] for record in result.metrics] == [1, 2]
    assert result.metrics[0]["reward/gold_reward"] == pytest.approx(-1, abs=0.5)
    assert (result.checkpoint("policy") / "model.safetensors").exists()
    assert result.checkpoint() == result.model
    assert {"prompt", "completion", "reward", "parts", "advantage", "versions"} <= set(result.samples[0])
    assert settings.name is None  # the given settings are not changed


def test_a_run_inside_a_running_event_loop(make_recipe: Any, tmp_path: Path) -> None:
    """As in a notebook."""

    async def cell() -> Any:
        return run(load_settings(make_recipe("ppo", tmp_path, train={"steps": 1})))

    assert len(asyncio.run(cell()).metrics) == 1


@pytest.mark.parametrize("method", ["sft", "grpo"])
@pytest.mark.parametrize("state", ["no_grad", "inference_mode", "autocast", "float64", "meta"])
def test_a_run_is_the_same_whatever_torch_was_told_before(
    method: str, state: str, make_recipe: Any, tmp_path: Path
) -> None:
    """By another cell of a notebook: some ended the run with an error of torch's, one trained another model."""
    contexts: dict[str, Any] = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu"),
        "meta": torch.device("meta"),
    }

    def weights(name: str) -> bytes:
        settings = load_settings(make_recipe(method, tmp_path, name=name, train={"steps": 2}))
        return (run(settings).model / "model.safetensors").read_bytes()

    usual = weights("usual")
    torch.set_default_dtype(torch.float64 if state == "float64" else torch.float32)
    try:
        with contexts.get(state, nullcontext()):
            assert weights("other") == usual
            assert torch.get_default_dtype() == (torch.float64 if state == "float64" else torch.float32)
            assert torch.is_grad_enabled() == (state not in ("no_grad", "inference_mode"))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="not Linux")
def test_a_run_that_failed_holds_no_file(make_recipe: Any, tmp_path: Path) -> None:
    """Its error may be kept for long, by a notebook for one, and with it all that the run was."""

    async def fails(moment: Moment) -> Stats:
        if moment.progress.step == 2:
            raise ArithmeticError("two")
        return {}

    recipe = make_recipe("grpo", tmp_path, rollout={"record": True})
    with pytest.raises(ArithmeticError) as kept:
        run(load_settings(recipe), hooks=[fails])
    held = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert [path for path in held if path.is_relative_to(tmp_path.resolve())] == []
    del kept


def test_a_reward_that_is_edited_during_a_run_stays_what_it_was_where_a_rank_is_lost(
    make_recipe: Any, tmp_path: Path
) -> None:
    """The second half of the run would have had another reward than the first, or ended with a half-written file."""
    file = tmp_path / "edited_reward.py"
    file.write_text("def reward(prompt, completion): return 1.0\n")
    lost = [WorkerLost("training rank 0", "its process ended")]

    async def loses(moment: Moment) -> None:
        if moment.progress.step == 2 and lost:
            file.write_text("def reward(prompt, completion): return 2.0\n")
            raise lost.pop()

    rewards = [{"kind": "function", "function": f"{file}:reward"}]
    done = run(load_settings(make_recipe("rloo", tmp_path, rewards=rewards, save={"every": 1})), hooks=[loses])
    assert [record["reward/mean"] for record in done.metrics] == [1.0] * 4


@pytest.mark.parametrize("method", ALGORITHMS)
def test_the_folder_of_a_run(method: str, make_recipe: Any, tmp_path: Path) -> None:
    done = run(load_settings(make_recipe(method, tmp_path, train={"steps": 2})))
    online = ALGORITHMS[method]().data == "prompts"
    names = {path.name for path in done.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        "settings.yaml",
        "data.json",
        "metrics.jsonl",
        "events.jsonl",
        "log.txt",
        "page.html",
        "checkpoints",
    } | ({"samples.jsonl", "samples.index.jsonl"} if online else set())
    roles = {"state", *map(str, ALGORITHMS[method]().losses())}
    assert {path.name for path in (done.folder / "checkpoints").iterdir()} == roles
    for role in roles:
        (folder,) = (done.folder / "checkpoints" / role).iterdir()
        assert folder.name == "epoch1epochstep2globalstep2"
    for record in done.metrics:
        assert {"step", "epoch", "time", "tokens", "tokens_per_second", "skipped", "time/step"} <= set(record)
        assert all(value is not None for value in record.values())  # null stands for what is not finite
    assert json.loads((done.folder / "data.json").read_text())
    assert "step 2/2" in (done.folder / "log.txt").read_text()


def test_hooks_of_ones_own_see_every_step_with_its_validation_and_add_figures(make_recipe: Any, tmp_path: Path) -> None:
    seen: list[Moment] = []

    async def doubled(moment: Moment) -> Stats:
        seen.append(moment)
        return {"loss/doubled": 2 * moment.stats["loss/policy"]}

    async def after(moment: Moment) -> Stats:
        return {"loss/quadrupled": 2 * moment.stats["loss/doubled"]}

    recipe = make_recipe("sft", tmp_path, data={"validation": "20%"}, evaluate={"every": 2, "limit": 3})
    done = run(load_settings(recipe), hooks=(hook for hook in (doubled, after)))
    assert "validation measures the first 3 (evaluate.limit)" in (done.folder / "log.txt").read_text()
    assert [moment.progress.step for moment in seen] == [1, 2, 3, 4]
    assert ["validation/loss" in moment.stats for moment in seen] == [False, True, False, True]
    assert [moment.last for moment in seen] == [False, False, False, True]
    for record in done.metrics:
        assert record["loss/doubled"] == 2 * record["loss/policy"]
        assert record["loss/quadrupled"] == 4 * record["loss/policy"]


async def tells_tensors(moment: Moment) -> Any:
    return {"mine": torch.tensor(1.5), "other": np.float32(0.5)}


async def tells_nothing(moment: Moment) -> None:
    return None


def test_hooks_may_tell_any_numbers_and_nothing(make_recipe: Any, tmp_path: Path) -> None:
    done = run(load_settings(make_recipe("sft", tmp_path)), hooks=[tells_nothing, tells_tensors, tells_nothing])
    assert {(record["mine"], record["other"]) for record in done.metrics} == {(1.5, 0.5)}


async def tells_words(moment: Moment) -> Any:
    return {"mine": "text"}


@pytest.mark.parametrize(
    ("hooks", "message", "steps"),
    [
        (tells_nothing, r"\[tells_nothing\]", 0),
        ([3], "3 is not a hook", 0),
        ([tells_words], r"tells_words.*'mine'.*'text'", 1),
    ],
)
def test_what_is_no_hook_is_named(hooks: Any, message: str, steps: int, make_recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        run(load_settings(make_recipe("sft", tmp_path)), hooks=hooks)
    assert (tmp_path / "run").exists() == bool(steps)


def test_checkpoints_load_in_transformers(make_recipe: Any, judge: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from plaudit.batch import Batch
    from plaudit.learn.scorer import Scorer
    from plaudit.models.load import load_model
    from plaudit.types import Role, Row

    done = run(load_settings(make_recipe("ppo", tmp_path, train={"steps": 1})))
    assert AutoModelForCausalLM.from_pretrained(done.checkpoint("policy")).config.n_embd == 32
    assert AutoModelForSequenceClassification.from_pretrained(done.checkpoint("critic")).config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(judge)
    theirs = AutoModelForSequenceClassification.from_pretrained(judge)
    tokens = tokenizer("The acting was fine .")["input_ids"]
    with torch.no_grad():
        expected = float(theirs(input_ids=torch.tensor([tokens])).logits)
    row = Row(tokens=tuple(tokens), trainable=(False,) * len(tokens))
    (output,) = Scorer(load_model(str(judge), head="scalar"), Role.JUDGE).outputs(Batch.of([row]))
    assert output.scores is not None
    assert float(output.scores) == pytest.approx(expected, abs=1e-4)


def test_save_and_evaluate_by_epochs(make_recipe: Any, tmp_path: Path) -> None:
    done = run(
        load_settings(
            make_recipe(
                "sft",
                tmp_path,
                train={"steps": None, "epochs": 3, "batch_size": 8},
                data={"validation": "15%"},
                save={"every": "1 epoch", "keep": 0},
                evaluate={"every": "2 epochs"},
            )
        )
    )
    assert [record["epoch"] for record in done.metrics] == [
        1,
        1,
        1,
        2,
        2,
        2,
        3,
        3,
        3,
    ]  # 20 rows are left, in steps of 8
    evaluated = [record["step"] for record in done.metrics if "validation/loss" in record]
    assert evaluated == [6, 9]
    names = {path.name for path in (done.folder / "checkpoints/state").iterdir()}
    assert names == {"epoch1epochstep3globalstep3", "epoch2epochstep3globalstep6", "epoch3epochstep3globalstep9"}


def test_an_online_epoch_asks_every_prompt(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("rloo", tmp_path, train={"steps": None, "epochs": 1})
    settings = load_settings(recipe, ["rollout.prompts_per_step=7"])
    done = run(settings)
    asked = json.loads((done.folder / "data.json").read_text())["sources"][0]["kept"]
    assert asked % 7  # else nothing is told
    assert len(done.metrics) == asked // 7 + 1


def test_what_is_done_between_steps_counts_among_the_seconds_to_the_next_save(make_recipe: Any, tmp_path: Path) -> None:
    async def evaluate(moment: Moment) -> Stats:
        await asyncio.sleep(0.4)
        return {}

    done = run(load_settings(make_recipe("sft", tmp_path, save={"every": "0.4 seconds", "keep": 0})), hooks=[evaluate])
    names = [path.name for path in (done.folder / "checkpoints/state").iterdir()]
    assert {int(name.rpartition("step")[2]) for name in names} >= {2, 3, 4}


def test_rows_that_do_not_fit_the_model_are_refused(make_recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokens together, .* 128"):
        run(load_settings(make_recipe("ppo", tmp_path, rollout={"max_tokens": 128})))


NEOX = {"model_type": "gpt_neox", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Of a family that runs through transformers."""


@pytest.mark.parametrize(
    ("role", "keys"), [("reference", GPT2), ("judge", GPT2), ("judge", NEOX)], ids=["reference", "judge", "other judge"]
)
def test_answers_that_do_not_fit_the_reference_or_the_judge_are_refused(
    role: str, keys: dict[str, Any], demo: Any, make_recipe: Any, tmp_path: Path
) -> None:
    """The judge's end token, which an answer cut by its length gets, needs a position too."""
    tokenizer = load_tokenizer(str(demo.tokenizer))

    def short(positions: int) -> str:
        limit = "n_positions" if keys is GPT2 else "max_position_embeddings"
        size, head = keys | {limit: positions}, "scalar" if role == "judge" else "lm"
        model = fresh_model(size, head=head, vocab_size=len(tokenizer))
        save_model(model, tmp_path / str(positions), tokenizer=tokenizer)
        return str(tmp_path / str(positions))

    prompts = [tokenizer(row["prompt"])["input_ids"] for row in map(json.loads, demo.prompts.read_text().splitlines())]
    longest = max(map(len, prompts)) + 10

    def settings(path: str) -> Settings:
        more: dict[str, Any] = {"reference": {"path": path}}
        if role == "judge":
            more = {"rewards": [{"kind": "judge", "path": path}]}
        return load_settings(make_recipe("rloo", tmp_path, train={"steps": 1}, overwrite=True, **more))

    least = longest + (role == "judge")
    said = rf"take {longest} .*the {role}.* {longest - 1}\b"
    with pytest.raises(SettingsError, match=said):
        run(settings(short(least - 1)))
    assert len(run(settings(short(least))).metrics) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_language_model_is_no_judge(
    workers: int, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = run(load_settings(make_recipe("sft", tmp_path, name="sft", train={"steps": 1}))).folder
    monkeypatch.setattr("plaudit.executors.opening.Executors.open", None)  # nothing costly starts
    more: dict[str, Any] = {"runtime": {"kind": "ray"}} if workers else {}
    rewards = [{"kind": "judge", "path": str(policy), "workers": workers}]
    with pytest.raises(ValueError, match=r"sft .*plaudit reward"):
        run(load_settings(make_recipe("rloo", tmp_path, rewards=rewards, **more)))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models by head whose tokenizer was trained on other texts."""
    folder = tmp_path_factory.mktemp("foreign")
    other = make_demo(folder / "demo", seed=1, size=DemoSize(sft=9, pairs=2, prompts=2, vocabulary=300))
    tokenizer = load_tokenizer(str(other.tokenizer))
    heads: tuple[HeadKind, ...] = ("lm", "scalar")
    for head in heads:
        save_model(fresh_model(GPT2, head=head, vocab_size=450), folder / head, tokenizer=tokenizer)
    return {head: str(folder / head) for head in heads}


@pytest.mark.parametrize(("setting", "method", "head"), [("reference", "rloo", "lm"), ("critic", "ppo", "scalar")])
def test_models_to_which_the_ids_are_other_texts_are_refused(
    setting: str, method: str, head: str, foreign: dict[str, str], make_recipe: Any, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=rf"^{setting}\.path=.*another tokenizer"):
        run(load_settings(make_recipe(method, tmp_path, **{setting: {"path": foreign[head]}})))


def test_a_critic_does_not_start_from_a_judge_of_other_tokens(
    foreign: dict[str, str], judge: Path, make_recipe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"a": foreign["scalar"], "b": str(judge)}
    rewards = [{"kind": "judge", "path": path, "name": name} for name, path in paths.items()]
    slow = {"learning_rate": 1e-12}
    done = run(load_settings(make_recipe("ppo", tmp_path, train={"steps": 1}, critic=slow) | {"rewards": rewards}))
    assert "does not start from the judge" in caplog.text
    critic, own = load_model(str(done.checkpoint("critic")), head="scalar"), load_model(str(judge), head="scalar")
    torch.testing.assert_close(critic.state_dict(), own.state_dict(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_family_that_transformers_computes(method: str, make_recipe: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "gpt_neox", "max_position_embeddings": 128, **sizes}
    recipe = make_recipe(method, tmp_path, train={"steps": 2}) | {"log": {"quiet": True}}
    recipe["model"]["config"] = config
    done = run(load_settings(recipe))
    assert [record["step"] for record in done.metrics] == [1, 2]
    assert done.metrics[-1]["gradient_norm/policy"] > 0
    assert done.metrics[0].get("kl/sampler", 0.0) == pytest.approx(0.0, abs=1e-6)


def test_going_back_to_an_older_checkpoint_keeps_what_is_made_from_there(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, save={"every": 1, "keep": 3})
    done = run(load_settings(recipe))
    older = sorted(path.name for path in (done.folder / "checkpoints/state").iterdir())[0]
    assert older.endswith("globalstep2")
    resumed = run(load_settings(recipe, [f"resume={older}", "save.keep=1", "train.steps=3"]))
    assert [record["step"] for record in resumed.metrics] == [1, 2, 3]
    assert resumed.model.name.endswith("globalstep3")


def test_what_is_refused_to_go_on_leaves_the_settings_of_the_run(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, train={"steps": 1})
    done = run(load_settings(recipe))
    before = (done.folder / "settings.yaml").read_text()
    with pytest.raises(ValueError, match=NO_SUCH_DEVICE):
        run(load_settings(recipe, ["resume=latest", "device=cuda:99"]))
    assert (done.folder / "settings.yaml").read_text() == before
    run(load_settings(done.folder / "settings.yaml", ["resume=latest", "train.steps=2"]))
    assert "steps: 2" in (done.folder / "settings.yaml").read_text()


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file, with when it was written and what it holds."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


OTHER: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": ("sft", {"method": "dpo"}, "method: sft there, dpo here"),
    "model": ("sft", {"model": {"path": "JUDGE", "config": {}}}, "model.path: None there, JUDGE here"),
    "model's shape": ("sft", {"model": {"config": {"n_layer": 1}}}, "model.config.n_layer: 2 there, 1 here"),
    "tokenizer": ("sft", {"model": {"tokenizer": "COPY"}}, "model.tokenizer: TOKENIZER there, COPY here"),
    "adapters": ("sft", {"model": {"lora": {"rank": 2}}}, "model.lora.rank: 0 there, 2 here"),
    "critic's adapters": ("ppo", {"critic": {"lora_rank": 2}}, "critic.lora_rank: 0 there, 2 here"),
    "critic": ("ppo", {"critic": {"path": "JUDGE"}}, "critic.path: None there, JUDGE here"),
    "reference": ("dpo", {"reference": {"path": "JUDGE"}}, "reference.path: None there, JUDGE here"),
    "chat template": ("sft", {"data": {"chat_template": "default"}}, "data.chat_template: None there, default here"),
    "precision": ("sft", {"learn": {"precision": "bfloat16"}}, "learn.precision: float32 there, bfloat16 here"),
    "seed": ("sft", {"seed": 1}, "seed: 0 there, 1 here"),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_run_than_the_one_there_is_refused_before_anything_is_touched(
    what: str, make_recipe: Any, demo: Any, judge: Path, tmp_path: Path
) -> None:
    method, more, said = OTHER[what]
    copy = shutil.copytree(demo.tokenizer, tmp_path / "copy")
    places = {"JUDGE": str(judge), "COPY": str(copy), "TOKENIZER": str(demo.tokenizer)}
    recipe = make_recipe(method, tmp_path, train={"steps": 1})
    folder = run(load_settings(recipe)).folder
    before = content(folder)
    told = json.loads(re.sub("JUDGE|COPY", lambda found: places[found[0]], json.dumps(more)))
    other = merged(recipe, told) | {"resume": "latest"}
    other["model"] = {key: value for key, value in other["model"].items() if key != "config" or what != "model"}
    if what == "method":
        other["data"]["train"] = str(demo.preferences)
    with pytest.raises(SettingsError) as error:
        run(load_settings(other))
    said = re.sub("JUDGE|COPY|TOKENIZER", lambda found: places[found[0]], said)
    (line,) = [line for line in str(error.value).splitlines() if said in line]
    assert line.startswith(f"  - {said} (")
    assert f"model.path={folder} to start from" in str(error.value)
    assert content(folder) == before


def test_one_model_by_another_way_to_write_its_path_is_no_other(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(load_settings(make_recipe("sft", tmp_path / "first", train={"steps": 1}))).model
    recipe = make_recipe("sft", tmp_path, train={"steps": 1})
    recipe["model"] = {"path": str(made)}
    run(load_settings(recipe))
    (tmp_path / "link").symlink_to(made)
    monkeypatch.chdir(tmp_path)
    recipe["model"] = {"path": "link"}
    done = run(load_settings(recipe, ["resume=latest", "train.steps=2"]))
    assert "warning" not in (done.folder / "log.txt").read_text()


def test_a_resume_of_nothing_says_that_the_run_begins_at_its_start(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, train={"steps": 1})
    done = run(load_settings(recipe, ["resume=latest"]))
    said = "has nothing to resume: the run begins at its start"
    assert said in (done.folder / "log.txt").read_text()
    again = run(load_settings(recipe, ["resume=latest", "train.steps=2"]))
    assert (again.folder / "log.txt").read_text().count(said) == 1


def test_a_run_goes_on_with_the_threads_that_it_was_given(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, save={"every": 2})
    threads = []
    for given, overrides in ((2, ["train.steps=2"]), (None, ["resume=latest"]), (1, ["resume=latest"])):
        done = run(load_settings(recipe | {"threads": given}, overrides))
        threads.append((load_settings(done.folder / "settings.yaml").threads, torch.get_num_threads()))
    assert threads == [(2, 2), (2, 2), (1, 1)]


def test_a_checkpoint_keeps_the_template_that_its_chats_were_rendered_with(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, train={"steps": 1}, data={"as_chat": True, "chat_template": "default"})
    done = run(load_settings(recipe))
    saved = load_tokenizer(str(done.model))
    assert saved.init_kwargs[AS_CHAT] is True
    after = recipe | {"name": "after", "model": {"path": str(done.folder)}}
    after["data"] = {key: value for key, value in after["data"].items() if key not in ("as_chat", "chat_template")}
    report = json.loads((run(load_settings(after)).folder / "data.json").read_text())
    assert report["sources"][0]["example"][0][0].startswith("<|user|>\n"), "the next run asks as this one did"
    turns = [{"role": "user", "content": "q"}]
    assert (
        saved.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == "<|user|>\nq\n<|assistant|>\n"
    )


def test_settings_that_an_older_run_did_not_have_are_their_defaults(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("ppo", tmp_path, rollout={"record": True}, train={"steps": 2})
    done = run(load_settings(recipe))
    path = done.folder / "settings.yaml"
    older = yaml.safe_load(path.read_text())
    assert older["algorithm"].pop("whiten_advantages") is True
    assert older["algorithm"]["recompute_old"] is None
    older["algorithm"]["recompute_old"] = False  # as it was written once
    path.write_text(yaml.safe_dump(older))
    replays = ["rollout.record=false", f"rollout.replay={done.folder}", "name=again"]
    with pytest.raises(SettingsError) as error:
        run(load_settings(recipe, [*replays, "algorithm.whiten_advantages=false", "algorithm.recompute_old=true"]))
    assert "algorithm.whiten_advantages: True there, False here" in str(error.value)
    assert "algorithm.recompute_old: False there, True here" in str(error.value)
    assert len(run(load_settings(recipe, replays)).metrics) == 2
    run(load_settings(recipe, ["resume=latest", "train.steps=3"]))
    assert "warning" not in (done.folder / "log.txt").read_text()


def test_other_data_on_resume_is_warned_of(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, train={"steps": 1})
    done = run(load_settings(recipe))
    run(load_settings(recipe, ["resume=latest", "train.steps=2"]))
    assert "warning" not in (done.folder / "log.txt").read_text()
    told, limited = "warning: the data has changed", ["resume=latest", "data.limit=5"]
    with pytest.raises(ValueError, match=NO_SUCH_DEVICE):
        run(load_settings(recipe, [*limited, "device=cuda:99"]))
    for times in (2, 2):  # told of by the start that was refused, and by that which went on, from where it is known
        run(load_settings(recipe, [*limited, "train.steps=3"]))
        assert (done.folder / "log.txt").read_text().count(told) == times


def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path, save={"every": 1})
    done = run(load_settings(recipe))
    weights = done.checkpoint("policy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run(load_settings(recipe, ["resume=latest"]))
    log = (done.folder / "log.txt").read_text()
    assert f"warning: {weights.parent} is damaged: model.safetensors changed since it was saved" in log
    assert "resumed epoch1epochstep3globalstep3: step 3 of 4" in log
    assert done.checkpoint("policy") == weights.parent


def test_the_last_block_names_what_there_is_and_what_may_come_next(make_recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").touch()
    settings = load_settings(make_recipe("sft", tmp_path))
    address = f"http://127.0.0.1:8010/#run={tmp_path.name}"
    first, *rest = last_block(settings, tmp_path, Role.POLICY, Path("m"))
    assert first == "done: policy in m (newest checkpoint)"
    assert [line.split(maxsplit=1) for line in rest] == [
        ["curves:", f"{tmp_path}/page.html"],
        ["page:", f"plaudit monitor --serve {tmp_path.parent}"],
        [address],
        ["next:", f'plaudit generate {tmp_path} --prompt "..."'],
    ]
    (tmp_path / "samples.jsonl").touch()
    data = {"validation": "20%"}
    best = make_recipe("grpo", tmp_path, evaluate={"best": "reward/mean", "every": 1}, data=data)
    lines = last_block(load_settings(best), tmp_path, Role.POLICY, Path("m"))
    assert "(best checkpoint, by reward/mean)" in lines[0]
    assert lines[2].split() == ["samples:", f"{tmp_path}/samples.jsonl"]
    judge = load_settings(make_recipe("reward", tmp_path))
    *_, command, more = last_block(judge, tmp_path, Role.JUDGE, Path("m"))
    assert command.endswith("plaudit init grpo model.path=MODEL data.train=PROMPTS \\")
    assert more.strip() == f"'rewards=[{{kind: judge, path: {tmp_path}}}]'"
