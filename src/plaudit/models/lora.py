"""LoRA on the native decoder, in peft's file format.

    add_lora -> train -> save_lora -> adapter_config.json, adapter_model.safetensors -> load_lora, or peft

Adapters go by Hugging Face's module names, as in peft. The layer itself is `lowrank.py`. Left out: adapters on
embeddings and LM heads, ranks that differ between layers, biases, DoRA: such a file of peft is refused by name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.models.base import LanguageModel
from plaudit.models.boxes import stored_in
from plaudit.models.decoder import Decoder
from plaudit.models.families import family_of, read_config
from plaudit.models.files import read_json, read_tensors, weight_files, write_json
from plaudit.models.folders import local_folder
from plaudit.models.fresh import generator
from plaudit.models.keys import UnknownKeyError, UnsupportedError
from plaudit.models.layout import Layout
from plaudit.models.lowrank import LoraLinear, adapted_layers
from plaudit.models.parts import Part, parts_of
from plaudit.models.settings import LoraSettings, ModelSettings
from plaudit.models.share import Share, merged, pieces
from plaudit.support.paths import is_here

__all__ = [
    *("add_lora", "adapter_names", "check_lora", "load_lora", "lora_of"),
    *("merge_lora", "merged_copy", "peft_names", "restore_lora", "save_lora", "whole_model"),
]

FOLDER = "adapter"
"""The folder of the adapters in our checkpoints, beside the merged model."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
HALF = ".lora_A.weight"
NATIVE_ONLY = "LoRA is for the families that the native decoder computes, not for {}. Set model.lora.rank=0."
PLAIN = frozenset(
    """
    peft_type peft_version task_type auto_mapping base_model_name_or_path revision inference_mode r lora_alpha
    use_rslora bias lora_dropout init_lora_weights fan_in_fan_out target_modules exclude_modules modules_to_save
    ensure_weight_tying eva_config loftq_config corda_config megatron_core qalora_group_size
    """.split()
)
"""Keys of peft's config that are read, change nothing, or repeat the tensors' names; any other is refused."""
HEADS = frozenset({"score", "classifier"})
"""Modules that peft saves whole for a judge (its head); peft lists both names, though a model has only one."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Accepted init_lora_weights of peft. Others (PiSSA, OLoRA, LoftQ, ...) also change the base weights."""


@dataclass(frozen=True, slots=True)
class Target:
    """A stored projection as rows of one of our layers: the layer, the first row and the number of rows."""

    layer: str
    start: int
    size: int


def add_lora(model: LanguageModel, settings: LoraSettings, *, seed: int = 0) -> Decoder:
    """Add fresh adapters, which change nothing yet, and freeze all other parameters except a scalar head. In place."""
    if not isinstance(model, Decoder):
        raise ValueError(NATIVE_ONLY.format(type(model).__name__))
    if lora_of(model) is not None:
        raise ValueError("The model has adapters already. Merge them first (merge_lora).")
    if settings.rank < 1:
        raise ValueError(f"rank={settings.rank}: adapters have a rank of at least 1. Without LoRA, do not add any.")
    targets = _targets(model)
    chosen = _chosen(model, settings.targets)
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for name, target in targets.items():
        if _leaf(name) in chosen:
            rows.setdefault(target.layer, {})[_leaf(name)] = (target.start, target.size)
    model.requires_grad_(False)
    if model.head_kind == "scalar" and model.stage.last:
        model.head.requires_grad_(True)
    for layer, parts in rows.items():
        base = model.get_submodule(layer)
        assert isinstance(base, nn.Linear), (layer, type(base))
        model.set_submodule(layer, LoraLinear(base, parts, rank=settings.rank, alpha=settings.alpha))
    model.lora = replace(settings, targets=chosen)
    model.fill(partial(_draw, dtype=model.dtype, seed=seed))
    return model


def _draw(share: Share, *, dtype: torch.dtype, seed: int) -> None:
    """Fill fresh adapters as peft does: A is uniform between -1/sqrt(in) and 1/sqrt(in), B is zero."""
    source = generator(seed)
    for name, shape in share.layout.adapters.items():
        bound = 1.0 / math.sqrt(shape[1])
        fresh = torch.empty(shape, dtype=dtype)
        share.put(name, fresh.uniform_(-bound, bound, generator=source) if ".lora_a." in name else fresh.zero_())


def check_lora(settings: ModelSettings) -> None:
    """Raise ValueError if the adapters do not fit the model's configuration; weights are not read.

    If the model is not on disk yet (a hub id, or a run still to come), nothing is checked: `add_lora` does it.
    """
    config: Mapping[str, Any] = settings.config
    if settings.path is not None:
        if not is_here(settings.path):
            return
        file = local_folder(settings.path) / "config.json"
        if not file.exists():
            return
        config = read_json(file)
    try:
        decoder = read_config(config)
    except UnknownKeyError:
        return  # the loader reports it
    except UnsupportedError as reason:
        raise ValueError(NATIVE_ONLY.format(f"this one: {str(reason).rstrip('.')}")) from reason
    with torch.device("meta"):
        _chosen(Decoder(decoder, head="lm"), settings.lora.targets)


def lora_of(model: LanguageModel) -> LoraSettings | None:
    """Return the settings of the model's adapters with all targets named, or None if it has none."""
    return model.lora if isinstance(model, Decoder) else None


def merge_lora(model: LanguageModel) -> None:
    """Merge the adapters into the weights and drop them, in place: a plain decoder that computes the same."""
    for layer, module in list(adapted_layers(model)):
        model.set_submodule(layer, module.merged())
    if isinstance(model, Decoder):
        model.lora = None


def merged_copy(model: LanguageModel) -> LanguageModel:
    """Return a plain decoder with the adapters merged. It shares all parameters but the merged weights."""
    plain = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    merge_lora(plain)
    return plain


def whole_model(model: Decoder) -> Decoder:
    """Return the whole decoder of which `model` is a rank's part, on the meta device, without values."""
    whole = Decoder.empty(model.config, head=model.head_kind, dtype=model.dtype, device=None)
    if model.lora is not None:
        add_lora(whole, model.lora)
    whole.special = model.special
    return whole


def adapter_names(model: LanguageModel) -> list[str]:
    """Return the names of the whole model's adapters, those of all pipeline stages; [] without adapters."""
    return list(_layout(model).adapters) if isinstance(model, Decoder) and model.lora is not None else []


def _layout(model: Decoder) -> Layout:
    return Layout(model.config, model.head_kind, lora=model.lora)


def save_lora(
    model: LanguageModel, folder: Path, *, base: str | None = None, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters (and a scalar head, if any) as peft does. `base`: folder or hub id of the base model.
    `tensors`: whole parameters by our names (the values of `peft_names`), if the model itself holds only parts."""
    from safetensors.torch import save_file

    settings = lora_of(model)
    if settings is None or not isinstance(model, Decoder):
        raise ValueError("The model has no adapters to save. Add them with add_lora, or save it with save_model.")
    scalar, family = model.head_kind == "scalar", family_of(model.config.family)
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": settings.targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": bool(family.transposed),
        "modules_to_save": [family.scalar_head] if scalar else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    own = dict(model.named_parameters()) if tensors is None else tensors
    found = {name: own[ours].detach().contiguous() for name, ours in peft_names(model).items()}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, config)


def load_lora(model: LanguageModel, folder: Path) -> Decoder:
    """Read adapters that `save_lora` or peft wrote, bit for bit, in place; add adapters first if the model has none."""
    if not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
        raise FileNotFoundError(
            f"{folder} lacks {CONFIG} or {WEIGHTS}. Give a folder that save_lora or peft wrote; a run that was started "
            "without model.lora is resumed without it."
        )
    found = dict(read_tensors([folder / WEIGHTS]))
    settings = _read_settings(folder / CONFIG, found)
    present = lora_of(model)
    if isinstance(model, Decoder) and (others := {*settings.targets} - {_leaf(name) for name in _targets(model)}):
        raise ValueError(_misfit(folder, others))
    decoder = add_lora(model, settings) if present is None else model
    assert isinstance(decoder, Decoder) and decoder.lora is not None
    if present is not None and settings != present:
        raise ValueError(f"{folder} holds {settings}, but the model has {present}. Set model.lora to theirs.")
    wanted = peft_names(decoder)
    if found.keys() != wanted.keys():
        raise ValueError(_misfit(folder, found.keys() ^ wanted.keys()))
    layout = _layout(decoder)
    for name, tensor in found.items():
        if tensor.shape != (own := layout.whole(wanted[name])):
            shapes = f"{tuple(tensor.shape)}, the model's {own}"
            raise ValueError(f"{name} of {folder} has shape {shapes}. It belongs to another model.")
    decoder.fill(partial(_put, tensors={wanted[name]: tensor for name, tensor in found.items()}))
    return decoder


def _misfit(folder: Path, names: Iterable[str]) -> str:
    """Return an error message: which keys of peft's config, and which of these names, do not match our adapters."""
    config: Mapping[str, Any] = read_json(folder / CONFIG)
    keys = ("target_modules", "exclude_modules", "modules_to_save")
    options = ", ".join(f"{key}={config[key]!r}" for key in keys if config.get(key))
    modules = sorted({re.sub(r"\.(lora_\w+|base_layer)(\..*)?$", "", name).removeprefix(PREFIX) for name in names})
    return (
        f"{folder / CONFIG} has {options}, which differs from the model's adapters at {', '.join(modules[:3])}"
        f"{' ...' if len(modules) > 3 else ''}. Here every layer has an adapter on each named projection, and nothing "
        "else has one. Merge the adapters with peft, or give the model that they belong to."
    )


def _put(share: Share, *, tensors: Mapping[str, Tensor]) -> None:
    for name, whole in tensors.items():
        share.put(name, whole)


def restore_lora(model: LanguageModel, checkpoint: Path) -> Decoder:
    """Read the adapters of a run's checkpoint. Raises ValueError if they were trained on another base model."""
    decoder = load_lora(model, checkpoint / FOLDER)
    tensors = dict(read_tensors([checkpoint / FOLDER / WEIGHTS]))
    adapters = {ours: tensors[name] for name, ours in peft_names(decoder).items()}
    decoder.fill(partial(_check_base, adapters, checkpoint))
    return decoder


def _check_base(adapters: Mapping[str, Tensor], checkpoint: Path, share: Share) -> None:
    """Raise ValueError if this rank's boxes of the merged model differ from the checkpoint's."""
    there = stored_in(weight_files(checkpoint))
    for one, held in share.slices():
        # Equal bit for bit on one machine; another may round the product B A differently.
        for rows, saved in pieces(there[one.name], one, merged(share.layout, one, held, adapters)):
            if not torch.allclose(rows, saved.to(rows), rtol=1e-4, atol=1e-6):
                raise ValueError(
                    f"{checkpoint} was trained on another model than the given one: {one.name} differs. "
                    "Give model.path the checkpoint that the run started from."
                )


def _read_settings(path: Path, names: Iterable[str]) -> LoraSettings:
    """Read peft's config. Targets come from the tensors' names: peft also takes patterns, or lists every module. rsLoRA
    (https://arxiv.org/abs/2312.03732) scales by lora_alpha / sqrt(r), which is alpha = lora_alpha sqrt(r) here."""
    config: Mapping[str, Any] = read_json(path)
    refused = [f"{key}={value!r}" for key, value in sorted(config.items()) if value and key not in PLAIN]
    plain = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": PLAIN_STARTS}
    refused += [f"{key}={config.get(key)!r}" for key, known in plain.items() if config.get(key) not in known]
    if {*(config.get("modules_to_save") or ())} - HEADS:
        refused.append(f"modules_to_save={config['modules_to_save']!r}")
    if refused:
        raise ValueError(
            f"{path} has {', '.join(refused)}. Only plain LoRA without biases and a judge's head are read; merge "
            "others with peft."
        )
    targets = sorted({_leaf(name.removesuffix(HALF)) for name in names if name.endswith(HALF)})
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return LoraSettings(
        rank=rank, alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha, targets=targets
    )


def _chosen(model: Decoder, targets: Sequence[str]) -> list[str]:
    """Return the named targets, sorted, or all if none is named. Raises ValueError for an unknown one."""
    known = sorted({_leaf(name) for name in _targets(model)})
    chosen = sorted(set(targets)) or known
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise ValueError(
            f"lora.targets names {', '.join(unknown)}, which no projection of {model.config.family} is called. "
            f"There are: {', '.join(known)}."
        )
    return chosen


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _targets(model: Decoder) -> dict[str, Target]:
    """Return every projection except the head, by its stored module's name."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    layers = {name: module for name, module in linear if name != "head"}
    parts = parts_of(model.sizes, model.head_kind, [f"{name}.weight" for name in layers])
    return {name.removesuffix(".weight"): _target(part, layers) for name, part in parts.items()}


def _target(part: Part, layers: Mapping[str, nn.Linear]) -> Target:
    layer = part.ours.removesuffix(".weight")
    return Target(layer, part.start, layers[layer].out_features if part.size is None else part.size)


def peft_names(model: LanguageModel) -> dict[str, str]:
    """Return {peft's name: our name} of the trained parameters (adapters, a scalar head); {} without adapters."""
    stored: dict[str, str] = {}
    if not isinstance(model, Decoder) or model.lora is None:
        return stored
    layout = _layout(model)
    for name, part in layout.parts.items():
        module, leaf = name.removesuffix(".weight"), name.split(".")[-2]
        if leaf in layout.adapted.get(part.ours, {}):
            ours = part.ours.removesuffix(".weight")
            stored[f"{PREFIX}{module}{HALF}"] = f"{ours}.lora_a.{leaf}"
            stored[f"{PREFIX}{module}.lora_B.weight"] = f"{ours}.lora_b.{leaf}"
    if model.head_kind == "scalar":
        stored[f"{PREFIX}{family_of(model.config.family).scalar_head}.weight"] = "head.weight"
    return stored
