"""Read a GGUF file as a Hugging Face folder, which everything else reads as any other model.

    FILE.gguf -> config.json, safetensors, tokenizer, chat template, GGUF.json -> a folder in the cache (`folder_of`)

Numbers are kept: 16- and 32-bit weights as they are, quantised ones as the float32 numbers that they stand for. What is
not known to be exact is refused: other architectures, keys, tensors and ways to split a text.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.interchange import gguf as form
from plaudit.interchange.gguf import GGUFError
from plaudit.models.files import write_json, write_tensors
from plaudit.models.folders import GGUF_NOTES
from plaudit.support.paths import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

WRITTEN = 1
"""Version of the conversion; raise it when files are read differently, so that cached folders are made again."""
PLAIN = ("F32", "F16", "BF16")


def folder_of(file: Path) -> Path:
    """Return the folder in the cache with the model of a GGUF file; write it if there is none. Raises GGUFError."""
    there = file.resolve()
    stat = there.stat()
    key = hashlib.sha256(repr((str(there), stat.st_size, stat.st_mtime_ns, WRITTEN)).encode()).hexdigest()[:24]
    cached = cache_folder() / "gguf" / key
    if not cached.is_dir():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".writing-") as part:
            write_folder(file, Path(part) / "model")
            try:
                (Path(part) / "model").rename(cached)
            except OSError:
                if not cached.is_dir():  # another process has written it meanwhile
                    raise
    return cached


def write_folder(file: Path, folder: Path) -> dict[str, Any]:
    """Write the model of a GGUF file as a Hugging Face folder; return the content of GGUF.json. Raises GGUFError."""
    library = form.library()
    try:
        reader = library.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise GGUFError(f"{file} is not a whole GGUF file ({error}). Copy or download it again.") from error
    values = {key: field.contents() for key, field in reader.fields.items()}
    config = read_config(file, values, {one.name: tuple(map(int, one.shape)) for one in reader.tensors}, reader)
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(file, values, config, folder)
    _save_weights(file, reader.tensors, config, folder)
    write_json(folder / "config.json", config)
    ends = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    several = list(dict.fromkeys(end for end in ends if end is not None))
    special = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    write_json(folder / "generation_config.json", {**special, "eos_token_id": several})
    types = Counter(one.tensor_type.name for one in reader.tensors)
    notes = {
        "file": file.name,
        "types": dict(types.most_common()),
        "quantised": [name for name, _ in types.most_common() if name not in PLAIN],
        "name": values.get("general.name"),
        "license": values.get("general.license"),
    }
    write_json(folder / GGUF_NOTES, notes)
    return notes


def read_config(file: Path, values: dict[str, Any], shapes: dict[str, tuple[int, ...]], reader: Any) -> dict[str, Any]:
    """Return config.json's content from a file's metadata. Raises GGUFError for what it does not express exactly."""
    architecture = str(values.get("general.architecture"))
    if architecture not in form.ARCHITECTURES:
        known = ", ".join(form.ARCHITECTURES)
        raise GGUFError(f"{file} has general.architecture={architecture!r}; read are {known}. Take its safetensors.")
    own = {key[len(architecture) + 1 :]: value for key, value in values.items() if key.startswith(f"{architecture}.")}
    config: dict[str, Any] = {"model_type": architecture}
    for key, ours in form.KEYS.items():
        if (value := own.pop(key, None)) is not None:
            config[ours] = decimal(value) if isinstance(value, float) else value
    if missing := [key for key, ours in form.KEYS.items() if ours not in config and key != "attention.head_count_kv"]:
        raise GGUFError(f"{file} lacks {architecture}.{missing[0]}. Copy or download it again.")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    sizes = {key: own.pop(key) for key in form.HEAD_DIM if key in own}
    config["head_dim"] = next(iter(sizes.values()), config["hidden_size"] // config["num_attention_heads"])
    if len({*sizes.values(), config["head_dim"]}) > 1:
        raise GGUFError(f"{file} has heads of several sizes ({sizes}), which are not read. Take its safetensors.")
    own.pop("vocab_size", None)
    if left := {key: value for key, value in own.items() if value not in (0, "none")}:
        listed = ", ".join(f"{architecture}.{key}={value!r}" for key, value in sorted(left.items()))
        raise GGUFError(f"{file} has {listed}, which is not read. Take the model's safetensors.")
    if "token_embd.weight" not in shapes:
        raise GGUFError(f"{file} lacks the tensor token_embd.weight. Copy or download it again.")
    config["vocab_size"] = shapes["token_embd.weight"][1]  # GGUF shapes are (columns, rows)
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_output.bias" in shapes
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    if "rope_freqs.weight" in shapes:
        (freqs,) = (one.data for one in reader.tensors if one.name == "rope_freqs.weight")
        config["rope_scaling"] = _scaling(file, freqs, config)
    for name in ("bos", "padding"):
        if (number := values.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config["pad_token_id" if name == "padding" else f"{name}_token_id"] = number
    config["eos_token_id"] = values.get("tokenizer.ggml.eos_token_id")
    return config


def decimal(value: float) -> float:
    """Return the shortest decimal number that is the same in float32: a file's 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _scaling(file: Path, freqs: Any, config: dict[str, Any]) -> dict[str, Any]:
    for factor in form.LLAMA3_STRETCHES:
        scaling = {**form.LLAMA3, "factor": factor}
        if np.allclose(freqs, form.stretches(scaling, config["rope_theta"], config["head_dim"]), rtol=1e-6, atol=0):
            return scaling
    raise GGUFError(f"{file} scales rotary frequencies in a way that is not Llama 3's. Take the model's safetensors.")


def _save_weights(file: Path, stored: Any, config: dict[str, Any], folder: Path) -> None:
    names = {
        theirs: ours for ours, theirs in form.tensor_names(config["model_type"], config["num_hidden_layers"]).items()
    }
    known = {**names, "rope_freqs.weight": ""}
    if strange := [one.name for one in stored if one.name not in known]:
        raise GGUFError(f"{file} has the tensor {strange[0]!r}, which is not read. Take the model's safetensors.")
    wanted = [one for one in stored if known[one.name]]
    write_tensors(((known[one.name], _tensor(file, one, known[one.name], config)) for one in wanted), folder)


def _tensor(file: Path, stored: Any, name: str, config: dict[str, Any]) -> Tensor:
    import torch

    kind = stored.tensor_type.name
    try:
        numbers = stored.data if kind in ("F32", "F16") else form.library().dequantize(stored.data, stored.tensor_type)
    except NotImplementedError as error:
        raise GGUFError(
            f"{file} has weights of the type {kind}, which gguf does not read. Take Q8_0 or F16."
        ) from error
    if (heads := form.turned(name, config)) is not None:
        numbers = form.halved(numbers, heads)
    tensor = torch.from_numpy(np.array(numbers))  # a copy, since a mapped file is read-only
    return tensor.to(torch.bfloat16) if kind == "BF16" else tensor


def _save_tokenizer(file: Path, values: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    about = {
        key.removeprefix("tokenizer.ggml."): value for key, value in values.items() if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = about.get("model"), about.get("tokens") or []
    if not tokens or len(tokens) > config["vocab_size"]:
        raise GGUFError(f"{file} has {len(tokens)} tokens and {config['vocab_size']} embeddings. Copy it again.")
    if kind == "gpt2":
        tokenizer = _byte_level(file, about)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, about)
    else:
        raise GGUFError(f"{file} has tokenizer.ggml.model={kind!r}; read are 'gpt2' and 'llama'. Take its safetensors.")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := about.get(f"{key}_token_id")) is not None:
            settings[f"{role}_token"] = tokens[number]
    templates = dict(_templates(values))
    if len(templates) > 1:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        (settings["chat_template"],) = templates.values()
    write_json(folder / "tokenizer_config.json", settings)


def _templates(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, text in values.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            yield key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default", text


def _byte_level(file: Path, about: dict[str, Any]) -> Any:
    way = form.SPLITTINGS.get(str(about.get("pre")))
    if way is None:
        known = ", ".join(form.SPLITTINGS)
        raise GGUFError(
            f"{file} splits texts by tokenizer.ggml.pre={about.get('pre')!r}; known are {known}. Take the model's "
            "safetensors and tokenizer."
        )
    vocabulary = {
        token: number for number, token in enumerate(about["tokens"]) if about["token_type"][number] != form.UNUSED
    }
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in about.get("merges", ()))]
    return _completed(splitter(way, vocabulary, merges), about, begins=way.begins)


def splitter(way: form.Splitting, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Return a byte-level BPE tokenizer that splits words as `way` says, without added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=way.whole))
    if way.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if way.digits else []
    if way.words is not None:
        steps.append(pre_tokenizers.Split(Regex(way.words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=way.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: Path, about: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_base import generate_merges

    tokens, prefix = about["tokens"], about.get("add_space_prefix", True)
    vocabulary = {token: number for number, token in enumerate(tokens) if about["token_type"][number] != form.UNUSED}
    plain = [number for number, kind in enumerate(about["token_type"]) if kind in (form.NORMAL, form.USER_DEFINED)]
    scores = {tokens[number]: about["scores"][number] for number in plain}
    if len(vocabulary) != len({*tokens}):
        raise GGUFError(f"{file} names a token twice. Take the model's safetensors.")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=generate_merges({token: vocabulary[token] for token in scores}, scores),
            unk_token=tokens[about.get("unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    last = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return _completed(tokenizer, about, begins=True)


def _completed(tokenizer: Any, about: dict[str, Any], *, begins: bool) -> Any:
    """Return the tokenizer with added tokens (never split in a text), and the tokens put before and after a text."""
    from tokenizers import AddedToken, processors

    tokens = about["tokens"]
    for wanted, special in ((form.CONTROL, True), (form.USER_DEFINED, False)):
        added = [token for token, kind in zip(tokens, about["token_type"], strict=True) if kind == wanted]
        entries = [AddedToken(token, normalized=False, special=special) for token in added]
        tokenizer.add_special_tokens(entries) if special else tokenizer.add_tokens(entries)
    first = about.get("bos_token_id") if about.get("add_bos_token", begins) else None
    last = about.get("eos_token_id") if about.get("add_eos_token", False) else None
    if first is not None or last is not None:
        around = [[] if one is None else [tokens[one]] for one in (first, last)]
        single = [*around[0], "$A", *around[1]]
        pair = [*single, *(f"{piece}:1" for piece in (*around[0], "$B", *around[1]))]
        used = [(tokens[one], one) for one in (first, last) if one is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return tokenizer
