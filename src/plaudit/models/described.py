"""Describe a model by its folder, without reading its weights and without torch.

    folder or hub id -> positions, end tokens, parameters; whether it is a judge

Models that the native decoder does not compute are described by transformers (`fallback.py`), which loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit.models.config import SCALAR_HEAD, DecoderConfig
from plaudit.models.families import family_of, read_config
from plaudit.models.files import read_json, tensor_names, weight_files
from plaudit.models.folders import local_folder
from plaudit.models.keys import UnknownKeyError, UnsupportedError
from plaudit.models.mesh import Mesh, MeshError, check_mesh

ANY_SIZE = math.lcm(*range(1, 65))
"""A vocabulary size that every tensor axis up to 64 divides; stands in for an unknown one."""


def folder_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises FileNotFoundError if it has none."""
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no config.json. Give the folder of a model saved in Hugging Face's form."
        )
    return read_json(path)


def check_cut(keys: Mapping[str, Any], mesh: Mesh, check: Callable[[DecoderConfig, Mesh], None] = check_mesh) -> None:
    """Raise MeshError if a mesh cannot cut a model with these keys of config.json. Without vocab_size among them (the
    tokenizer then sets it), the vocabulary is not checked. Unknown keys are left to the loader."""
    try:
        config = read_config({"vocab_size": ANY_SIZE, **keys})
    except UnknownKeyError:
        return  # the loader reports it
    except UnsupportedError as reason:
        raise not_cut(mesh, str(reason)) from reason
    check(config, mesh)


def not_cut(mesh: Mesh, reason: str) -> MeshError:
    return MeshError(
        f"{replace(mesh, data=1, replicas=1)} cuts the families that the native decoder computes, and not this model "
        f"({reason.rstrip('.')}). Leave it out, and take more data-parallel workers with runtime.strategy=fsdp."
    )


def check_scores(path: str) -> None:
    """Raise ValueError if the model's files have no scalar head: a fresh one would score at random."""
    folder = local_folder(path)
    try:
        scalar_head = f"{family_of(read_config(folder_config(folder)).family).scalar_head}.weight"
    except UnsupportedError:
        scalar_head = SCALAR_HEAD
    if scalar_head not in tensor_names(weight_files(folder)):
        raise ValueError(
            f"{path} is not a judge: the model in {folder} has no scalar head ({scalar_head}), so it gives no scores. "
            "Give a checkpoint of `plaudit reward`, such as runs/reward."
        )


def positions(path: str) -> int:
    """Return the largest number of tokens in a model's context, from its configuration."""
    folder = local_folder(path)
    try:
        return read_config(folder_config(folder)).max_positions
    except UnsupportedError:
        from plaudit.models.fallback import folder_positions

        return folder_positions(folder)


def end_ids(path: str) -> tuple[int, ...]:
    """Return the ids of a model's end tokens, from its config.json and generation_config.json; () if none."""
    folder = local_folder(path)
    generation = folder / "generation_config.json"
    return end_ids_of(folder_config(folder), read_json(generation) if generation.exists() else {})


def end_ids_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return generation_config.json's end ids, since some chat models have more there, else config.json's, else ()."""
    eos = generation.get("eos_token_id") or config.get("eos_token_id")
    found = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if strange := [one for one in found if type(one) is not int or not 0 <= one < 1 << 31]:
        raise ValueError(f"The model's eos_token_id is {strange[0]!r}; it must be a token's number, or a list of some.")
    return found
