"""Write a Hugging Face folder as a GGUF file, for llama.cpp, Ollama and LM Studio.

    folder -> config.json and tokenizer.json as metadata -> weights, one after the other -> FILE.gguf

Left out: tokenizers whose way to split texts has no name among `SPLITTINGS`, and SentencePiece, whose scores a folder
does not hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.interchange import gguf as form
from plaudit.interchange.gguf import GGUFError
from plaudit.interchange.reading import splitter
from plaudit.models.described import end_ids, folder_config
from plaudit.models.families import read_config, write_config
from plaudit.models.files import read_tensors, weight_files
from plaudit.models.keys import UnsupportedError
from plaudit.support.paths import written_whole

TYPES = ("f32", "f16", "bf16", "q8_0")
"""Types of a file's matrices. Norms and biases are always float32, as llama.cpp writes them."""


def write_gguf(folder: Path, file: Path, *, type: str = "bf16", license: str | None = None) -> None:
    """Write the model of a folder as a GGUF file. Raises GGUFError for a model or tokenizer that has no exact form."""
    gguf = form.library()
    config = _config(folder)
    architecture = config["model_type"]
    about = _tokenizer(folder, config)
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as part:
        writer = gguf.GGUFWriter(part, architecture, use_temp_file=True)
        writer.add_type("model")
        writer.add_name(file.stem)
        if license is not None:
            writer.add_license(license)
        file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
        writer.add_file_type(gguf.LlamaFileType[file_types[type]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, ours in form.KEYS.items():
            add = writer.add_float32 if isinstance(config[ours], float) else writer.add_uint32
            add(f"{architecture}.{key}", config[ours])
        for key in form.HEAD_DIM:
            writer.add_uint32(f"{architecture}.{key}", config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
        for key, value in about.items():
            writer.add_key_value(f"tokenizer.{key}", value, *_typed(gguf, key, value))
        _add_weights(gguf, writer, folder, config, type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _config(folder: Path) -> dict[str, Any]:
    """Return the model's keys in one form, with Mistral's as Llama's. Raises GGUFError for other families."""
    try:
        decoder = read_config(folder_config(folder))
        config = write_config(decoder, head="lm")
    except UnsupportedError as error:
        raise GGUFError(f"{folder} cannot be written as a GGUF file: {error}") from error
    if config["model_type"] == "mistral" and decoder.window is None:
        config["model_type"] = "llama"
    if config["model_type"] not in form.ARCHITECTURES or decoder.window is not None or decoder.activation != "silu":
        raise GGUFError(
            f"{folder} has model_type={config['model_type']!r}; GGUF files are written of "
            f"{', '.join(form.ARCHITECTURES)} and mistral, with full attention and SiLU. "
            "llama.cpp's convert_hf_to_gguf.py knows more."
        )
    return config


def _typed(gguf: Any, key: str, value: Any) -> tuple[Any, ...]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return kinds.ARRAY, kinds.INT32 if key == "ggml.token_type" else kinds.STRING
    return (kinds.BOOL if isinstance(value, bool) else kinds.UINT32 if isinstance(value, int) else kinds.STRING,)


def _tokenizer(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer, without "tokenizer." before its keys."""
    from plaudit.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    own = _splitting(stored)
    ways = {name: _splitting(json.loads(splitter(way, {}, []).to_str())) for name, way in form.SPLITTINGS.items()}
    pre = next((name for name, way in ways.items() if way == own), None)
    if pre is None:
        raise GGUFError(
            f"{folder} has a tokenizer whose way to split texts has no name in GGUF that is known here (known: "
            f"{', '.join(form.SPLITTINGS)}). llama.cpp's convert_hf_to_gguf.py knows those of published models."
        )
    kinds = {
        number: form.CONTROL if one.special else form.USER_DEFINED
        for number, one in tokenizer.added_tokens_decoder.items()
    }
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    size = config["vocab_size"]
    if beyond := [token for number, token in names.items() if number >= size]:
        raise GGUFError(f"{folder} has the token {beyond[0]!r}, for which its vocab_size={size} has no row.")
    about: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": [names.get(number, f"[PAD{number}]") for number in range(size)],
        "ggml.token_type": [
            kinds.get(number, form.NORMAL if number in names else form.UNUSED) for number in range(size)
        ],
        "ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]],
        "ggml.add_bos_token": tokenizer("").input_ids == [tokenizer.bos_token_id],
        "ggml.add_eos_token": False,
    }
    special = folder_config(folder)
    ends = [tokenizer.eos_token_id, *(end for end in end_ids(str(folder)) if end != tokenizer.eos_token_id)]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": ends[0],
        "unknown": tokenizer.unk_token_id,
        "padding": special.get("pad_token_id"),
    }
    about |= {f"ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    if len(ends) > 1:
        about["ggml.eot_token_id"] = ends[1]
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"default": template} if template else {}
    return about | {f"chat_template{'' if name == 'default' else f'.{name}'}": text for name, text in named.items()}


def _splitting(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that decide how a text is split, besides vocabulary and merges."""
    model = stored["model"]
    steps = stored["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    plain = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    kinds = {
        "type": model["type"],
        "bytes": bool(model.get("byte_fallback")),
        "whole": bool(model.get("ignore_merges")),
    }
    return {"normalizer": stored["normalizer"], "steps": plain, **kinds}


def _add_weights(gguf: Any, writer: Any, folder: Path, config: dict[str, Any], type: str) -> None:
    import torch

    names = form.tensor_names(config["model_type"], config["num_hidden_layers"])
    scaling = config.get("rope_scaling")
    if scaling is not None:
        writer.add_tensor("rope_freqs.weight", form.stretches(scaling, config["rope_theta"], config["head_dim"]))
    for name, tensor in read_tensors(weight_files(folder)):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if name not in names:
            raise GGUFError(
                f"{folder} has the tensor {name}, which has no name in a GGUF file of {config['model_type']}."
            )
        numbers = tensor.to(torch.float32).numpy()
        if (heads := form.turned(name, config)) is not None:
            numbers = form.paired(numbers, heads)
        kind = "F32" if numbers.ndim == 1 else type.upper()
        kind = (
            "F16"
            if kind == "Q8_0" and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]
            else kind
        )
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(names[name], gguf.quantize(np.ascontiguousarray(numbers), raw), raw_dtype=raw)
