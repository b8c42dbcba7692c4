"""The scripts do what their command lines promise: the whole pipeline, single stages, plots, evaluation."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from told import says

from plaudit.importers.distributed import keys, recipe
from plaudit.runs.records import Run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "configs" / "model_config.yaml")
STAGES = ("sft", "reward", "rlhf")
TINY = [
    *("sft.model.config.n_embd=16", "sft.model.config.n_layer=1", "sft.model.config.n_head=2"),
    *("sft.model.config.vocab_size=300", "shared.threads=1", "shared.log.quiet=true"),
    *(f"{stage}.train.{key}" for stage in STAGES for key in ("steps=2", "batch_size=8")),
    *("rlhf.rollout.prompts_per_step=4", "rlhf.rollout.max_tokens=8"),
]
COLOURS = ("red", "green", "blue", "grey", "black", "white", "brown", "pink")


def write_json(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The three files in the formats of the README: JSON lists."""
    folder = tmp_path_factory.mktemp("data")
    asked = [f"Question: What is {colour}?" for colour in COLOURS]
    pairs = [{"prompt": q, "chosen": " Answer: a colour.", "rejected": " No idea"} for q in asked]
    return {
        "sft": write_json(folder / "sft.json", [{"prompt": q, "completion": " Answer: a colour."} for q in asked]),
        "preference": write_json(folder / "preference.json", pairs),
        "prompt": write_json(folder / "prompt.json", [{"prompt": q} for q in asked]),
    }


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def invoke(script: str, *arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(importlib.import_module(script).main, list(arguments))
        expected = result.exception is None or isinstance(result.exception, SystemExit)
        assert expected, f"{result.output}\n{result.exception!r}"
        assert result.exit_code == status, result.output
        return result

    return invoke


def test_whole_pipeline_then_plots_and_every_evaluation(call: Any, data: dict[str, str]) -> None:
    flags = [f"--{name}_data={path}" for name, path in data.items()]
    call("train", "--config", CONFIG, *flags, *TINY)

    for stage, role in (("sft", "policy"), ("reward", "judge"), ("rlhf", "policy")):
        run = Run(Path("outputs/logs") / stage)
        assert [record["step"] for record in run.metrics] == [1, 2]
        assert (run.checkpoint(role) / "config.json").exists()
    settings = yaml.safe_load(Path("outputs/logs/rlhf/settings.yaml").read_text())
    assert settings["model"]["path"].startswith("outputs/logs/sft/")
    assert settings["rewards"][0]["path"].startswith("outputs/logs/reward/")

    drawn = call("monitor", "--log_dir", "./outputs/logs", "--plot_type", "all").output.split()
    assert {Path(path).name for path in drawn} == {
        f"{name}.png" for name in ("loss", "accuracy", "reward", "kl", "entropy")
    }
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in drawn)
    call("monitor", "--log_dir", "./outputs/logs", "--plot_type", "kl")

    shutil.copytree("outputs/logs/rlhf", "outputs/logs/sft/.overwritten")  # as while another run takes its place
    where = ("--config", CONFIG, "--model_dir", "./outputs", "--test_data", data["preference"])
    assert "\npolicy: outputs/logs/rlhf/" in "\n" + call("evaluate", *where, "--eval_type", "all").output
    figures = json.loads(Path("outputs/evaluation/evaluation.json").read_text())["figures"]
    assert {"perplexity", "kl", "reward/judge", "win_rate/judge", "preference/judge/accuracy"} <= set(figures)
    assert len(Path("outputs/evaluation/generations.jsonl").read_text().splitlines()) == len(COLOURS)
    call("evaluate", *where, "--eval_type", "perplexity")
    figures = json.loads(Path("outputs/evaluation/evaluation.json").read_text())["figures"]
    assert "perplexity" in figures
    assert not any(name.startswith(("kl", "win_rate", "preference")) for name in figures)

    prompts = ("--config", CONFIG, "--model_dir", "./outputs", "--test_data", data["prompt"])
    said = call("evaluate", *prompts).output
    assert "preference is not possible: it needs preferences" in said
    assert "perplexity is not possible: it needs demonstrations" in said
    refused = call("evaluate", *prompts, "--eval_type", "preference", status=2).output
    assert "prompt.json#1: the columns prompt are not a known dialect of preferences" in refused


def test_stages_one_by_one_pick_up_what_the_earlier_ones_left(call: Any, data: dict[str, str]) -> None:
    def train(stage: str, source: str, *more: str, status: int = 0) -> str:
        flag = {"sft": "sft", "reward": "preference", "rlhf": "prompt"}[stage]
        command = ("--config", CONFIG, "--stage", stage, f"--{flag}_data", source, *TINY, *more)
        return str(call("train", *command, status=status).output)

    refused = train("reward", data["preference"], status=2)
    assert "stage sft is left out: it has no run in outputs/logs/sft" in refused
    assert "no model" in refused

    train("sft", data["sft"])
    train("reward", data["preference"])
    train("rlhf", data["prompt"])
    settings = yaml.safe_load(Path("outputs/logs/rlhf/settings.yaml").read_text())
    assert settings["model"]["path"] == str(Run(Path("outputs/logs/sft")).checkpoint())
    assert settings["rewards"][0]["path"] == str(Run(Path("outputs/logs/reward")).checkpoint("judge"))

    assert "holds a run already" in train("sft", data["sft"], status=2)
    tokenizer = Path("outputs/logs/tokenizer/tokenizer.json")
    before = tokenizer.read_bytes()
    train("sft", data["preference"], "resume=latest", "sft.train.steps=3", "shared.data.dialect=auto")
    assert tokenizer.read_bytes() == before, "a resumed run must keep the tokenizer it began with"
    assert Run(Path("outputs/logs/sft")).metrics[-1]["step"] == 3


def test_bad_rows_are_skipped_by_the_tokenizer_that_is_trained_too(call: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "Question: What is red?", "completion": " Answer: a colour."}, {"prompt": "Question?"}]
    source = write_json(tmp_path / "sft.json", rows)
    command = ("--config", CONFIG, "--stage", "sft", "--sft_data", source, *TINY)
    assert "sft.json#2: the columns prompt are not a known dialect" in call("train", *command, status=2).output
    call("train", *command, "sft.data.bad_rows=1")
    assert Run(Path("outputs/logs/sft")).metrics[-1]["step"] == 2


def test_stages_may_have_names_of_their_own(call: Any, data: dict[str, str]) -> None:
    """The tokenizer is trained on what each stage's method reads."""
    model = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300}
    train = {"steps": 1, "batch_size": 4}
    stages = {
        "sft": {"model": {"config": model}, "train": train},
        "dpo": {"data": {"train": data["preference"]}, "train": train},
        "last": {
            "method": "rloo",
            "data": {"train": data["prompt"]},
            "rewards": [{"kind": "length", "options": {"target": 3}}],
            "rollout": {"prompts_per_step": 2, "max_tokens": 4},
            "train": {"steps": 1},
        },
    }
    recipe = {"shared": {"threads": 1, "log": {"quiet": True}}, "stages": stages}
    Path("own.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    call("train", "--config", "own.yaml", "--sft_data", data["sft"])
    assert [len(Run(Path("outputs/logs") / stage).metrics) for stage in stages] == [1, 1, 1]


def test_distributed_settings_reach_every_stage_and_overrides_win(call: Any, data: dict[str, str]) -> None:
    Path("dist.yaml").write_text(
        "cluster: {cpus_per_worker: 1, gpus_per_worker: 0}\n"
        "strategy: {micro_tokens: 64}\n"
        "fault_tolerance: {checkpoint_interval: 1, resume: true}\n"
    )
    tiny = [text for text in TINY if "threads" not in text]
    flags = ("--config", CONFIG, "--stage", "sft", "--sft_data", data["sft"], "--dist_config", "dist.yaml")
    call("train", *flags, *tiny)
    settings = yaml.safe_load(Path("outputs/logs/sft/settings.yaml").read_text())
    assert settings["threads"] == 1
    assert settings["device"] == "cpu"
    assert settings["learn"]["micro_tokens"] == 64
    assert settings["save"]["every"] == 1
    assert settings["resume"] == "latest"
    saved = sorted(path.name for path in Path("outputs/logs/sft/checkpoints/policy").iterdir())
    assert [name[-1] for name in saved] == ["1", "2"]

    call("train", *flags, *tiny, "sft.train.steps=3", "sft.save.every=5")
    resumed = yaml.safe_load(Path("outputs/logs/sft/settings.yaml").read_text())
    assert resumed["save"]["every"] == 5
    assert [record["step"] for record in Run(Path("outputs/logs/sft")).metrics] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cluster: {runtime: slurm}", "cluster.runtime=slurm .. local, ray"),
        ("cluster: {num_workers: 4}", "cluster.num_workers=4 .. cluster.runtime=ray"),
        ("cluster: {cpus_per_worker: 0}", "cluster.cpus_per_worker=0 "),
        ("cluster: {gpus_per_worker: 2}", "cluster.gpus_per_worker=2: it must be"),
        ("strategy: {name: zero}", "strategy.name=zero must be"),
        ("strategy: {name: auto}", "strategy.name=auto must be"),
        ("strategy: {micro_tokens: 0}", "strategy.micro_tokens=0 "),
        ("fault_tolerance: {max_failures: 3}", "fault_tolerance.max_failures=3 .. cluster.runtime=ray"),
        ("fault_tolerance: {checkpoint_interval: 0}", "fault_tolerance.checkpoint_interval=0 "),
        ("communication: {backend: mpi}", "communication.backend=mpi must be"),
        ("communication: {backend: nccl}", "communication.backend=nccl .. cluster.runtime=ray"),
        ("cluster: {num_worker: 1}", "cluster.num_worker .. mean cluster.num_workers"),
        ("communications: {}", "communications .. mean communication"),
        ("fault_tolerance: {resume: maybe}", "fault_tolerance.resume=maybe "),
    ],
)
def test_what_the_local_runtime_cannot_do_is_refused(
    call: Any, data: dict[str, str], content: str, message: str
) -> None:
    Path("dist.yaml").write_text(content)
    flags = ("--config", CONFIG, "--stage", "sft", "--sft_data", data["sft"], "--dist_config", "dist.yaml")
    assert says(call("train", *flags, status=2).output, message)
    assert not Path("outputs").exists()


def test_distributed_settings_of_ray_are_the_runtime_section_of_every_stage() -> None:
    given: dict[str, Any] = {
        "cluster": {"runtime": "ray", "num_workers": 2, "num_rollout_workers": 3, "cpus_per_worker": 4},
        "fault_tolerance": {"max_failures": 7, "timeout": 5.0},
        "communication": {"timeout": 60.0},
    }
    found = recipe(given)
    assert found["rollout"] == {"workers": 3}
    given["cluster"]["max_rollout_workers"] = 5
    assert recipe(given)["rollout"] == {"workers": [3, 5]}
    given["cluster"]["max_rollout_workers"] = 2
    with pytest.raises(ValueError, match=r"max_rollout_workers=2\b.*cluster\.num_rollout_workers=3"):
        recipe(given)
    assert found["runtime"] == {
        "kind": "ray",
        "num_training_workers": 2,
        "resources_per_worker": {"CPU": 4},
        "resources_per_rollout_worker": {"CPU": 4},
        "max_failures_per_hour": 7,
        "heartbeat_timeout": 5.0,
        "collective_timeout": 60.0,
    }


def test_shipped_distributed_settings_hold_every_key_and_pass() -> None:
    from plaudit.settings.recipes import read_yaml

    given = read_yaml(ROOT / "configs" / "distributed.yaml")
    assert {f"{section}.{key}" for section, inner in given.items() for key in inner} == {*keys().known}
    expected = {"runtime": {"kind": "local"}, "learn": {"micro_tokens": 8192}, "save": {"every": 50}}
    assert recipe(given) == expected


def test_null_settings_leave_the_recipe_alone() -> None:
    assert recipe({}) == recipe({"cluster": {"num_workers": None}, "strategy": None}) == {}
    assert recipe({"cluster": {"gpus_per_worker": 1}}) == {"device": "cuda"}
    assert recipe({"cluster": {"runtime": "ray"}}) == {"runtime": {"kind": "ray"}}


def test_example_makes_its_data_and_can_be_run_again_with_custom_files(call: Any) -> None:
    small = [text for text in TINY if "rlhf.rollout.max" not in text]
    call("example", "--create_dummy_data", *small)
    written = Path("outputs/data/sft.jsonl").read_bytes()
    assert set(json.loads(written.splitlines()[0])) == {"prompt", "completion"}
    assert Run(Path("outputs/logs/example/rlhf")).metrics[-1]["step"] == 2

    Path("my_model_config.yaml").write_text((ROOT / "configs" / "example.yaml").read_text())
    Path("my_distributed.yaml").write_text((ROOT / "configs" / "distributed.yaml").read_text())
    files = ("--config", "my_model_config.yaml", "--dist_config", "my_distributed.yaml")
    call("example", *files, *small, "sft.train.steps=1")
    assert Path("outputs/data/sft.jsonl").read_bytes() == written
    assert len(Run(Path("outputs/logs/example/sft")).metrics) == 1


SIZES = {"qwen2.5-0.5b": 494_032_768, "llama-3.2-1b": 1_235_814_400, "llama-3-8b": 8_030_261_248}
"""Weights as the models' own pages count them."""


@pytest.fixture
def pretrained() -> Any:
    return importlib.import_module("pretrained")


@pytest.mark.parametrize("model", SIZES)
def test_recipes_of_pretrained_models_say_what_fits(model: str, pretrained: Any) -> None:
    """Every command line of a header can be given, and takes at most nine tenths of the GPU that it is for."""
    config = pretrained.config_of(model)
    assert pretrained.parameters(config) == SIZES[model]
    for method in pretrained.RECIPES[model]:
        commands = pretrained.commands(model, method)
        assert list(commands) == ["one 24 GB GPU", "one 80 GB GPU", "a Ray cluster"]
        cluster = pretrained.settings_of(commands.pop("a Ray cluster"))
        assert (cluster.runtime.kind, cluster.runtime.address) == ("ray", "auto")
        for machine, command in commands.items():
            if not command:
                assert (model, method, machine) == ("llama-3-8b", "ppo", "one 24 GB GPU")
                continue
            taken = sum(pretrained.memory(config, pretrained.settings_of(command)).values())
            assert taken * 2**30 < 0.9e9 * float(machine.split()[1])


def test_memory_by_hand(pretrained: Any) -> None:
    """Llama 3.2 1B by PPO: 2 bytes a weight for policy, critic and judge, 18 for what is trained, 32 KiB a token."""
    settings = pretrained.settings_of(pretrained.commands("llama-3.2-1b", "ppo")["one 24 GB GPU"])
    found = pretrained.memory(pretrained.config_of("llama-3.2-1b"), settings)
    adapters = 16 * 16 * (2048 + 2048 + 2 * (2048 + 512) + 2048 + 2048 + 2 * (2048 + 8192) + 8192 + 2048)
    assert found["judge"] * 2**30 == 2 * SIZES["llama-3.2-1b"]
    assert found["trained"] * 2**30 == pytest.approx(2 * (2 * SIZES["llama-3.2-1b"] + 18 * adapters), rel=1e-3)
    assert found["cache"] * 2**30 == 128 * (512 + 256) * 16 * 2 * 8 * 64 * 2


@pytest.mark.parametrize("model", SIZES)
def test_recipes_of_pretrained_models_run_resume_and_load_in_transformers(
    model: str, pretrained: Any, tmp_path: Path
) -> None:
    """In small; whole, by `python scripts/pretrained.py try`."""
    start, *methods = pretrained.tried(model, tmp_path, tiny=True)
    assert model in start
    for told in methods:
        assert len(re.findall(r"-?\d+\.\d{4}", told)) == 3, "two steps, and one that was resumed"
        assert float(re.search(r"transformers differs by (\S+);", told)[1]) < 1e-4
    assert len(methods) == 3


def test_the_lock_file_has_the_pinned_versions_and_their_hashes() -> None:
    def named(pin: str) -> str:
        return re.sub(r"[-_.]+", "-", pin).lower()

    pins = {named(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace(" \\\n    ", " ")  # an entry a line
    entries = [
        re.fullmatch(r"(\S+==\S+?)(?: ; .*?)?((?: --hash=sha256:[0-9a-f]{64})+)", line) for line in text.splitlines()
    ]
    assert all(entries)
    assert pins <= {named(entry[1]) for entry in entries if entry}


@pytest.mark.parametrize("address", ["", "https://code.example/me/plaudit"])
def test_an_index_shows_links_of_the_readme_that_lead_somewhere(address: str) -> None:
    """Links to files of the checkout become absolute, or plain words where the project has no address."""
    absolute = runpy.run_path(str(ROOT / "setup.py"))["absolute"]
    text = "[a](docs/a.md#b), [c](https://c.example) and [d](#d)"
    kept = f"[a]({address}/blob/main/docs/a.md#b)" if address else "a"
    assert absolute(text, address) == f"{kept}, [c](https://c.example) and [d](#d)"
    readme = absolute((ROOT / "README.md").read_text(), address)
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert all(re.match("https://|#", target) for target in targets)
    files = [target.removeprefix(f"{address}/blob/main/") for target in targets if address and address in target]
    assert len(files) > 40 * bool(address) - 1
    assert all((ROOT / file.partition("#")[0]).exists() for file in files)
