"""A shared model computes what the run's model computes, and its card says only what files say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from plaudit import load_settings, run
from plaudit.commands.cli import main
from plaudit.interchange.export import export
from plaudit.models.files import read_json, tensor_names, weight_files, write_json, write_tensors

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def trained(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `second` of a DPO run with adapters, which began from the SFT run `first`, by a relative path."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(load_settings(make_recipe("sft", Path("runs"), name="first", train={"steps": 2})))
        model = {"path": "runs/first", "lora": {"rank": 2}}
        run(load_settings(make_recipe("dpo", Path("runs"), name="second", train={"steps": 2}) | {"model": model}))
    return folder / "runs" / "second"


def newest(run: Path) -> Path:
    (folder,) = (run / "checkpoints" / "policy").iterdir()
    return folder


def test_a_merged_folder_in_16_bits_is_the_model(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = export(str(trained), tmp_path / "out")
    saved, shared = load_file(newest(trained) / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name].to(torch.bfloat16), shared[name]) for name in saved)
    assert saved.keys() == shared.keys()
    model = AutoModelForCausalLM.from_pretrained(made.path)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(made.path)("The acting").input_ids
    assert not (tmp_path / "out" / "manifest.json").exists()  # its digests are of other weights


def test_adapters_alone_are_those_of_the_run(trained: Path, tmp_path: Path) -> None:
    export(str(trained), tmp_path / "out", adapter=True)
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (newest(trained) / "adapter" / name).read_bytes()
    assert ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()["library_name"] == "peft"


def test_the_card_names_every_run_its_data_and_its_figures(trained: Path, tmp_path: Path) -> None:
    text = (export(str(trained), tmp_path / "out", license="mit").path / "README.md").read_text()
    front = ModelCard(text).data.to_dict()
    assert front["license"] == "mit"
    assert front["tags"] == ["plaudit", "sft", "dpo"]
    assert "`mit`. The data" in text  # there is no base model that it could be of
    assert "fresh gpt2 without pretrained weights by sft then dpo" in text
    assert text.index("## Stage 1: sft") < text.index("## Stage 2: dpo")
    for part in ("preferences.jsonl` | train |", "| loss/policy |", "learning_rate: 0.003", "2 steps"):
        assert part in text


def test_an_unknown_licence_is_named_and_not_guessed(trained: Path, tmp_path: Path) -> None:
    made = export(str(trained), tmp_path / "out")
    assert made.card.license is None
    assert "a licence: give it with --license" in made.summary()
    assert "license" not in ModelCard.load(made.path / "README.md").data.to_dict()


def test_the_licence_and_name_of_the_base_come_from_its_own_card(
    trained: Path, tmp_path: Path, make_recipe: Recipe
) -> None:
    base = tmp_path / "base"
    export(str(trained.parent / "first"), base, license="apache-2.0")
    recipe = make_recipe("sft", tmp_path, name="own", train={"steps": 1})
    run(load_settings(recipe | {"model": {"path": str(base)}}))
    made = export(str(tmp_path / "own"), tmp_path / "out")
    assert made.card.license == "apache-2.0"
    assert made.card.unknown == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gguf", "f16"], "model_type='gpt2'"),
        (["--gguf", "f16", "--adapter"], "contradict each other"),
        (["--gguf", "f16", "--output", "folder"], "ends in .gguf"),
        (["--output", "."], "exists already"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(trained.rglob("*"))
    done = CliRunner().invoke(main, ["export", str(trained), *words])
    assert done.exit_code != 0
    assert text in done.output
    assert not list(tmp_path.iterdir())
    assert sorted(trained.rglob("*")) == before


def test_a_run_without_adapters_says_so(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no adapters"):
        export(str(trained.parent / "first"), tmp_path / "out", adapter=True)


def test_the_command_writes_into_the_run_and_only_once(trained: Path) -> None:
    done = CliRunner().invoke(main, ["export", str(trained)])
    assert done.exit_code == 0, done.output
    assert (trained / "export" / "README.md").exists()
    again = CliRunner().invoke(main, ["export", str(trained)])
    assert "--overwrite" in again.output
    assert CliRunner().invoke(main, ["export", str(trained), "--overwrite"]).exit_code == 0


def test_a_folder_without_a_model_is_never_deleted(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="without a model"):
        export(str(trained), tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_last_stage_alone_has_the_figures_of_the_pipeline(trained: Path, tmp_path: Path) -> None:
    import os
    import shutil

    folder = tmp_path / "runs"
    shutil.copytree(trained.parent, folder)
    figures = {"before": {"kl": {"value": 0.5, "low": 0.25, "high": 0.75, "count": 8}}, "settings": {"seed": 0}}
    write_json(folder / "evaluation.json", figures)
    for age, name in ((20, "first"), (10, "second")):
        path = folder / name / "settings.yaml"
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    texts = {name: export(str(folder / name), tmp_path / name).card.text() for name in ("first", "second")}
    assert "| before: kl | 0.5 (0.25 to 0.75) |" in texts["second"]
    assert "Evaluation" not in texts["first"]


def test_weights_are_cut_into_files_of_a_bound(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((10,), float(number)) for number in range(5)}
    write_tensors(tensors.items(), tmp_path, most=90)
    files = weight_files(tmp_path)
    assert len(files) == 3  # of 40 bytes each: two, two and one
    assert sorted(tensor_names(files)) == sorted(tensors)
    assert read_json(tmp_path / "model.safetensors.index.json")["weight_map"]["t4"] == files[-1].name
