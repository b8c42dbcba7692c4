"""Tensors of a Hugging Face folder: one model.safetensors, or shards and their index.

Never pickle: a pytorch_model.bin is refused with what to do. What the tensors mean is `families.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.support.bounded import content, opened

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError, with the file's name, if it holds none."""
    found = content(path)
    try:
        keys = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Copy or save it again.") from error
    if not isinstance(keys, dict):
        raise ValueError(f"{path} holds a {type(keys).__name__}, not keys and values. Copy or save it again.")
    return keys


def write_json(path: Path, keys: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder. FileNotFoundError or ValueError (pickles, bad index) says what to do."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map, which names the shards. Copy or save it again.")
        names = list(weight_map.values())
        beside = re.compile(r"[^/\\]+\.safetensors")
        strange = [name for name in names if not isinstance(name, str) or not beside.fullmatch(name)]
        if strange or not names:
            fault = f"lists {strange[0]!r}, which is no safetensors file beside it" if strange else "lists no file"
            raise ValueError(f"{index} {fault}. Copy or save the model again.")
        names = sorted(set(names))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise FileNotFoundError(f"{index} lists {', '.join(missing)}, which is not there. Copy the whole folder.")
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds {', '.join(pickled)}, which are pickles and can run code; only safetensors are read. "
            "Convert it where you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)."
        )
    raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX}. Give the folder of a saved model.")


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, one at a time, on the CPU. A tensor is a view of the mapped file: copy it before the file
    changes."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                yield name, file.get_tensor(name)


def write_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, most: int = 4 << 30) -> None:
    """Write named tensors as safetensors: one file, or several of at most `most` bytes with an index. The tensors of
    one file are in memory at a time."""
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    places: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len({*places.values()}) + 1:05}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > most:
            write()
        held[name] = tensor.contiguous()
    write()
    if len(files := {*places.values()}) == 1:
        (folder / files.pop()).rename(folder / WEIGHTS)
    else:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": places})


def tensor_names(files: list[Path]) -> list[str]:
    """List the names of all tensors, from the files' headers; torch is not loaded."""
    names: list[str] = []
    for path in files:
        with _opened(path, framework="np") as file:
            names.extend(file.keys())
    return names


def stored_numbers(files: list[Path]) -> int:
    """Return how many numbers the files hold according to their headers; torch is not loaded."""
    total = 0
    for path in files:
        with _opened(path, framework="np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _opened(path: Path, *, framework: str = "pt") -> Any:
    from safetensors import SafetensorError, safe_open

    opened(path).close()  # refuses a pipe, which would wait for ever
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}). Copy or save it again.") from error
