"""`plaudit export`: a model to share, with a card that says where it comes from.

run, checkpoint or model -> folder with adapters merged | folder with the adapters alone | GGUF file

The card is README.md in the folder, or NAME.md beside NAME.gguf.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.interchange.card import Card, card_of
from plaudit.interchange.reading import write_folder
from plaudit.interchange.writing import TYPES, write_gguf
from plaudit.models.files import INDEX, read_json, read_tensors, weight_files, write_json, write_tensors
from plaudit.models.folders import local_folder, rounding
from plaudit.support.paths import at_home, is_here

ADAPTER = "adapter"
BESIDE = (".json", ".jinja", ".model", ".txt")
"""Endings of the files that are copied with a model's weights."""
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: the model's file or folder, and its card."""

    path: Path
    card: Card

    def summary(self) -> str:
        card = self.path / "README.md" if self.path.is_dir() else self.path.with_suffix(".md")
        return "\n".join(
            [f"written: {self.path}", f"card: {card}", *(f"  unknown: {one}" for one in self.card.unknown)]
        )


def export(
    model: str,
    target: str | Path | None = None,
    *,
    gguf: str | None = None,
    adapter: bool = False,
    dtype: str = "bfloat16",
    license: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model for others. `target` defaults to `export` beside a run's checkpoints.

    model: a run's folder (its best or newest policy), a checkpoint's or another model's folder, or a hub id.
    gguf: write a GGUF file of this type (one of `TYPES`).
    adapter: write the LoRA adapters alone.
    Otherwise write a folder that transformers and vLLM load, adapters merged, with weights of `dtype`.
    Raises ValueError for contradicting options, a target that exists, a model without adapters; GGUFError for a model
    that GGUF cannot express.
    """
    if gguf is not None and adapter:
        raise ValueError("--gguf and --adapter contradict each other: keep one")
    if gguf is not None and gguf not in TYPES:
        raise ValueError(f"--gguf {gguf}: take {', '.join(TYPES)}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: take {', '.join(DTYPES)}")
    folder = local_folder(model)
    path = _target(model, target, gguf)
    _refuse_taken(path, overwrite)
    if path.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"{path} holds the model that is exported: name another with --output")
    card = card_of(model, folder, license=license)
    path.parent.mkdir(parents=True, exist_ok=True)
    if gguf is not None:
        write_gguf(folder, path, type=gguf, license=card.license)
        path.with_suffix(".md").write_text(card.text(file=path.name), encoding="utf-8")
        return Exported(path=path, card=card)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as part:
        made = Path(part) / path.name
        _save_adapter(model, folder, made, card) if adapter else _save_merged(folder, made, dtype)
        (made / "README.md").write_text(card.text(adapter=adapter), encoding="utf-8")
        if path.exists():
            shutil.rmtree(path)
        made.rename(path)
    return Exported(path=path, card=card)


def _target(model: str, target: str | Path | None, gguf: str | None) -> Path:
    if target is not None:
        path = at_home(target)
        if gguf is not None and path.suffix != ".gguf":
            raise ValueError(f"--output {path}: the name of a GGUF file ends in .gguf")
        return path
    if not (at_home(model) / "checkpoints").is_dir():
        raise ValueError(f"{model} is no run's folder: say where to write with --output")
    name = at_home(model).absolute().name
    return at_home(model) / ("export" if gguf is None else f"{name}-{gguf}.gguf")


def _refuse_taken(path: Path, overwrite: bool) -> None:
    """Raise ValueError if a path exists and must stay. A folder that is no model is never overwritten."""
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: name another, or use --overwrite")
    if path.is_dir() and not any(path.glob("*config.json")):
        raise ValueError(f"{path} is a folder without a model, which --overwrite would delete: name another")


def _save_merged(folder: Path, made: Path, dtype: str) -> None:
    """Copy a model's folder, with weights of another type. Norms' weights change type too, as transformers does it."""
    import torch

    made.mkdir()
    for path in sorted(folder.iterdir()):
        if path.suffix in BESIDE and path.name not in ("manifest.json", INDEX):
            shutil.copyfile(path, made / path.name)
    kind = getattr(torch, dtype)
    write_tensors(((name, tensor.to(kind)) for name, tensor in read_tensors(weight_files(folder))), made)
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)
    write_json(made / "config.json", {**config, "dtype": dtype})


def _save_adapter(model: str, folder: Path, made: Path, card: Card) -> None:
    if not (folder / ADAPTER).is_dir():
        raise ValueError(f"{model} has no adapters: it was trained without model.lora. Leave out --adapter")
    shutil.copytree(folder / ADAPTER, made)
    path = made / "adapter_config.json"
    keys: dict[str, Any] = read_json(path)
    if card.base is not None and not is_here(card.base):
        write_json(path, {**keys, "base_model_name_or_path": card.base})


def folder_from_gguf(source: str, target: str, *, overwrite: bool = False) -> str:
    """Write the model of a GGUF file as a folder in Hugging Face's form; return a line about it to print. Raises
    GGUFError, or ValueError if the target exists."""
    path = at_home(target)
    _refuse_taken(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as part:
        write_folder(at_home(source), Path(part) / path.name)
        if path.exists():
            shutil.rmtree(path)
        (Path(part) / path.name).rename(path)
    return "\n".join([f"written: {path}", *rounding(path)])
