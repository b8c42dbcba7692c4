"""Models from and to Hugging Face folders: config.json, safetensors, tokenizer files.

    folder or hub id -> load_model -> LanguageModel -> save_model -> folder that transformers and vLLM load
    config keys alone -> fresh_model

The native decoder takes what it computes exactly; every other causal LM goes through transformers (`fallback.py`). Left
out: pickled weights, quantised weights, code that ships with a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from plaudit.compute.axis import ALONE, Axis
from plaudit.models.base import LanguageModel, SpecialTokens
from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.decoder import Decoder
from plaudit.models.described import end_ids_of, folder_config, not_cut
from plaudit.models.families import read_config
from plaudit.models.files import read_json, stored_numbers, weight_files, write_json
from plaudit.models.folders import local_folder
from plaudit.models.keys import UnknownKeyError, UnsupportedError
from plaudit.models.mesh import WHOLE, Stage
from plaudit.models.share import read_weights
from plaudit.models.tokenizer import load_tokenizer, tokenizer_special

__all__ = ["fresh_model", "load_model", "load_tokenizer", "save_model"]

log = logging.getLogger(__name__)

MOST_PARAMETERS = 10**13
"""Most parameters of a fresh model; more is taken for a mistake."""
FILE_BYTES = 5e9
"""Largest size of a file of weights, unless a tensor is larger."""


def load_model(
    path: str,
    *,
    head: HeadKind = "lm",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    deferred: bool = False,
    axis: Axis = ALONE,
    stage: Stage = WHOLE,
) -> LanguageModel:
    """Load the model of a folder or hub id, with an LM head or a scalar one.

    `head="scalar"` restores the head of a saved judge or critic, and puts a fresh one (from `seed`) on an LM. With
    `deferred`, a native model has no memory and no values yet (`LanguageModel.pending`). On a tensor `axis` or a
    pipeline `stage`, return only this rank's part. Raises MeshError if the model cannot be cut.
    """
    folder = local_folder(path)
    config = folder_config(folder)
    try:
        decoder_config = read_config(config)
    except UnsupportedError as reason:
        if axis.size * stage.count > 1:
            raise not_cut(replace(stage.mesh, tensor=axis.size), str(reason)) from reason
        from plaudit.models.fallback import load_fallback

        fallback = load_fallback(folder, head=head, dtype=dtype, reason=str(reason), seed=seed)
        model: LanguageModel = fallback.to(device)
        config = {**config, "pad_token_id": fallback.pad}
    else:
        placed: dict[str, Any] = {"device": None if deferred else device, "axis": axis, "stage": stage}
        files = weight_files(folder)
        _check_size(decoder_config, 2 * (stored := stored_numbers(files)), f"{folder} holds {stored:,}")
        decoder = Decoder.empty(decoder_config, head=head, dtype=dtype, **placed)
        decoder.fill(partial(read_weights, files=files, dtype=dtype, seed=seed))
        model = decoder
    model.special = _special(config, folder)
    return model


def fresh_model(
    config: Mapping[str, Any],
    *,
    head: HeadKind = "lm",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    vocab_size: int | None = None,
    deferred: bool = False,
    axis: Axis = ALONE,
    stage: Stage = WHOLE,
) -> LanguageModel:
    """Make a model with random weights from Hugging Face config keys; missing keys take transformers' defaults.

    `vocab_size` is the tokenizer's. The model takes it if the keys name none; ValueError if they name a smaller one.
    `deferred`, `axis` and `stage` are as in `load_model`.
    """
    config = dict(config)
    named = config.setdefault("vocab_size", vocab_size) if vocab_size is not None else None
    if vocab_size is not None and isinstance(named, int) and named < vocab_size:
        raise ValueError(
            f"The model's vocab_size={named} is smaller than the tokenizer's {vocab_size}. "
            "Leave vocab_size out of the model's keys, or raise it."
        )
    try:
        decoder_config = read_config(config)
    except UnknownKeyError:
        raise  # a mistake in the settings, which transformers would accept silently
    except UnsupportedError as reason:
        if axis.size * stage.count > 1:
            raise not_cut(replace(stage.mesh, tensor=axis.size), str(reason)) from reason
        from plaudit.models.fallback import fresh_fallback

        fallback = fresh_fallback(config, head=head, reason=str(reason), seed=seed)
        model: LanguageModel = fallback.to(device, dtype)
        config = {**config, "pad_token_id": fallback.pad}
    else:
        placed: dict[str, Any] = {"device": None if deferred else device, "axis": axis, "stage": stage}
        _check_size(decoder_config, MOST_PARAMETERS, "no computer has room for it")
        decoder = Decoder.empty(decoder_config, head=head, dtype=dtype, **placed)
        decoder.initialise(seed)
        model = decoder
    model.special = _special(config, None)
    return model


def _check_size(config: DecoderConfig, most: int, why: str) -> None:
    """Raise ValueError for more than `most` parameters, before memory or tensors' names are made for them."""
    if config.parameters > most:
        raise ValueError(
            f"The configuration describes {config.parameters:,} parameters, and {why}. Correct it, or copy it again."
        )


def save_model(
    model: LanguageModel, folder: Path, *, tokenizer: Any | None = None, max_shard_bytes: float = FILE_BYTES
) -> None:
    """Write `folder` so that AutoModelForCausalLM (or ...ForSequenceClassification, one label) loads it whole."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_weights(folder, max_shard_bytes=max_shard_bytes)
    describe(model, folder, dtype=model.dtype, tokenizer=tokenizer)


def describe(model: LanguageModel, folder: Path, *, dtype: torch.dtype, tokenizer: Any | None) -> None:
    """Write the files beside the weights: config.json, generation_config.json (LM only), the tokenizer if given."""
    special = model.special if tokenizer is None else tokenizer_special(tokenizer, model)
    eos: int | list[int] | None = list(special.eos) if len(special.eos) > 1 else next(iter(special.eos), None)
    ids = {"bos_token_id": special.bos, "eos_token_id": eos, "pad_token_id": special.pad}
    written = {"dtype": str(dtype).removeprefix("torch."), "transformers_version": version("transformers")}
    config = {**model.hf_config(), **ids, **written}
    if model.head_kind == "scalar":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(folder / "config.json", config)
    if model.head_kind == "lm":
        own = {**ids, "transformers_version": version("transformers")}
        write_json(folder / "generation_config.json", {**special.generation, **own})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


OURS = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
"""Keys of generation_config.json that Plaudit writes itself when it saves a checkpoint."""


def _special(config: Mapping[str, Any], folder: Path | None) -> SpecialTokens:
    """Return the special ids of config.json and generation_config.json, and the latter's other keys to keep."""
    path = folder / "generation_config.json" if folder is not None else None
    generation = read_json(path) if path is not None and path.exists() else {}
    several = end_ids_of(config, generation)
    bos, pad = config.get("bos_token_id"), config.get("pad_token_id")
    others = {key: value for key, value in generation.items() if key not in OURS}
    return SpecialTokens(bos=bos, eos=several, pad=pad, generation=others)
