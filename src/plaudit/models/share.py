"""A rank's share of a decoder's parameters: read from files or drawn at random, and read as boxes of stored tensors.

    Share (Layout, place, own tensors) <- read_weights, draw_weights;  Share -> stored -> boxes, adapters merged

    Share -> begin_weights, at rank 0; then write_weights, at every rank -> a folder that transformers loads

A model that is whole is a share of a mesh of one. Values do not depend on the mesh: each rank draws all random numbers
of a fresh model, a bucket at a time, and keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plaudit.models.boxes import BUCKET_BYTES, Filled, Stored, create, laid_out, read_box, stored_in, write_boxes
from plaudit.models.families import family_of
from plaudit.models.files import INDEX, write_json
from plaudit.models.fresh import generator
from plaudit.models.layout import Box, Layout, Piece, Slice
from plaudit.models.moves import overlap
from plaudit.models.parts import Shape, stored_name

BLOCK = 16
"""Torch draws normal numbers in blocks of this size, so that pieces of whole blocks are those of one long draw."""


@dataclass(frozen=True)
class Share:
    """The part of each parameter that a rank holds, in the shape of `Layout.shape`."""

    layout: Layout
    rank: int
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    """Precision in which the model computes and is stored; trained shards may be kept in float32."""

    def slices(self) -> Iterator[tuple[Slice, Tensor]]:
        """Yield each slice with a view of its values in this rank's tensors, oriented as our parameter."""
        for one in self.layout.slices(self.rank):
            yield one, self._view(one)

    def of(self, ours: str) -> list[tuple[Slice, Tensor]]:
        """Return the slices of one parameter with views of their values; [] if this rank's stage lacks it."""
        place = self.layout.mesh.place(self.rank)
        held = self.layout.of(ours, place) if place.stage in self.layout.stages(ours) else ()
        return [(one, self._view(one)) for one in held]

    def boxes(self, boxes: Iterable[tuple[str, Box]]) -> Iterator[Tensor]:
        """Yield a view of each box, oriented as stored. A box must lie within one slice of this rank's."""
        held: dict[str, list[tuple[Slice, Tensor]]] = {}
        for one, values in self.slices():
            held.setdefault(one.name, []).append((one, values.t() if one.transposed else values))
        for name, box in boxes:
            around, values = next(pair for pair in held[name] if overlap(pair[0].box, box) == box)
            at = [start - first for (start, _), (first, _) in zip(box, around.box, strict=True)]
            yield narrowed(values, at, [stop - start for start, stop in box])

    def _view(self, one: Slice) -> Tensor:
        return narrowed(self.tensors[one.ours].detach(), one.at, one.sizes)

    def pieces(self, name: str) -> list[Piece]:
        """Return the blocks that make up this rank's part of a parameter or adapter."""
        return self.layout.pieces(name, self.layout.mesh.place(self.rank))

    def put(self, name: str, whole: Tensor) -> None:
        """Copy this rank's part of a whole parameter or adapter into its own tensor, if it has one."""
        for piece in self.pieces(name) if name in self.tensors else ():
            mine = narrowed(self.tensors[name].detach(), piece.at, piece.sizes)
            mine.copy_(narrowed(whole, piece.start, piece.sizes))


def narrowed(tensor: Tensor, at: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the view of a block that begins at `at` and has these sizes."""
    for dimension, (start, size) in enumerate(zip(at, sizes, strict=True)):
        tensor = tensor.narrow(dimension, start, size)
    return tensor


def read_weights(share: Share, *, files: Sequence[Path], dtype: torch.dtype, seed: int) -> None:
    """Read this rank's boxes, rounded to `dtype`. Raises ValueError with the names of tensors that are missing,
    unexpected or of another shape. A scalar head that the files lack is drawn from `seed`."""
    layout = share.layout
    family, folder = family_of(layout.config.family), files[0].parent
    lm_head, scalar_head = f"{family.lm_head}.weight", f"{family.scalar_head}.weight"
    there = stored_in(files)
    if layout.head == "lm" and scalar_head in there:
        raise ValueError(f"{folder} is a reward or value model ({scalar_head}) and has no LM head: give its policy")
    found = {name: (key, there[key]) for key in there if (name := stored_name(family, key, layout.parts)) is not None}
    fresh = layout.head == "scalar" and scalar_head not in found
    missing = layout.stored.keys() - found.keys() - ({scalar_head} if fresh else set())
    unexpected = [key for name, (key, _) in found.items() if name not in {*layout.stored, lm_head}]
    if missing or unexpected:
        raise ValueError(_mismatch(folder, sorted(missing), sorted(unexpected)))
    for name, (key, stored) in found.items():
        if name in layout.stored and stored.shape != layout.stored[name]:
            raise ValueError(
                f"Tensor {key} has shape {stored.shape}, but config.json says {layout.stored[name]}. "
                "The weights and the config belong to different models."
            )
    for one, target in share.slices():
        if one.name in found:
            for rows, piece in pieces(found[one.name][1], one, target):
                rows.copy_(piece.to(dtype))
    if lm_head in found and lm_head not in layout.stored and layout.head == "lm":
        _check_tied(share, found[lm_head][1], lm_head, dtype)
    if fresh:
        draw_head(share, dtype=dtype, seed=seed)


def pieces(stored: Stored, one: Slice, held: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of a slice, as a view, and the same rows from the file; both are oriented as stored."""
    mine = held.t() if one.transposed else held
    for first, piece in read_box(stored, one.box):
        yield mine[first : first + len(piece)], piece


def _check_tied(share: Share, copy: Stored, name: str, dtype: torch.dtype) -> None:
    """Raise ValueError if a stored LM head differs from the embedding to which it is tied."""
    for one, held in share.of("embedding.weight"):
        same = copy.shape == share.layout.stored[one.name] and all(
            torch.equal(piece.to(dtype).to(rows), rows) for rows, piece in pieces(copy, one, held)
        )
        if not same:
            raise ValueError(
                f"{copy.path.parent} has tie_word_embeddings=true, but {name} differs from the token embedding. "
                "Set tie_word_embeddings to false in config.json if the head was trained apart."
            )


def _mismatch(folder: Path, missing: list[str], unexpected: list[str]) -> str:
    def some(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    parts = [f"lacks {some(missing)}"] * bool(missing) + [f"has the unknown {some(unexpected)}"] * bool(unexpected)
    return (
        f"The weights of {folder} do not fit its config.json: the checkpoint {' and '.join(parts)}. "
        "Check that both come from the same model."
    )


def draw_weights(share: Share, *, dtype: torch.dtype, seed: int) -> None:
    """Draw fresh weights: normal with deviation init_std, times 1/sqrt(2 layers) for projections back into the residual
    stream, as in GPT-2; norms are 1, biases 0; a scalar head is drawn as in `draw_head`."""
    source, config = generator(seed), share.layout.config
    for name, shape in share.layout.parameters.items():
        if name.endswith("bias"):
            _set(share, name, 0.0)
        elif "norm" in name:
            _set(share, name, 1.0)
        elif name != "head.weight" or share.layout.head == "lm":
            back = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = config.init_std / (math.sqrt(2 * config.layers) if back else 1.0)
            _draw(share, name, shape, std, dtype, source)
    if share.layout.head == "scalar":
        draw_head(share, dtype=dtype, seed=seed)


def draw_head(share: Share, *, dtype: torch.dtype, seed: int) -> None:
    """Draw a fresh scalar head: normal with variance 1/(width + 1) (Stiennon et al. 2020, appendix)."""
    shape = share.layout.parameters["head.weight"]
    _draw(share, "head.weight", shape, 1.0 / math.sqrt(shape[1] + 1), dtype, generator(seed))


def _set(share: Share, name: str, value: float) -> None:
    for _, target in share.of(name):
        target.fill_(value)


def _draw(share: Share, name: str, shape: Shape, std: float, dtype: torch.dtype, source: torch.Generator) -> None:
    """Draw a whole parameter on the CPU, some rows at a time, and copy this rank's part into its tensor."""
    held = share.of(name)
    rows, columns = shape
    step = max(BLOCK, BUCKET_BYTES // (columns * dtype.itemsize) // BLOCK * BLOCK)
    begin = 0
    while begin < rows:
        end = begin + step
        end = rows if (rows - end) * columns < BLOCK else end  # drawing fewer numbers at a time would give other values
        drawn = torch.empty(end - begin, columns, dtype=dtype).normal_(0.0, std, generator=source)
        for one, target in held:
            low, high = max(begin, one.start[0]), min(end, one.start[0] + one.sizes[0])
            if low < high:
                mine = drawn[low - begin : high - begin].narrow(1, one.start[1], one.sizes[1])
                target[low - one.start[0] : high - one.start[0]].copy_(mine)
        begin = end


def begin_weights(share: Share, folder: Path, *, most: float) -> None:
    """Create the files of the whole model, of at most `most` bytes each (a larger tensor has its own), and their index;
    remove older weight files first. One process must call this before any process writes boxes."""
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    places, headers = _files(share, folder, most)
    create(places, headers)
    if len(headers) > 1:
        sizes = (math.prod(shape) * share.dtype.itemsize for shape in share.layout.stored.values())
        names = {name: place.path.name for name, place in places.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": names})


def write_weights(share: Share, folder: Path, *, most: float, adapters: Mapping[str, Tensor] | None = None) -> None:
    """Write this rank's boxes into the files that `begin_weights` created, with `adapters` merged."""
    write_boxes(filled(share, folder, most=most, adapters=adapters))


def filled(
    share: Share, folder: Path, *, most: float, adapters: Mapping[str, Tensor] | None = None
) -> Iterator[Filled]:
    """Yield this rank's boxes of the files that `begin_weights` creates, except copies of another rank's boxes.
    `adapters`, whole and by their parameters' names, are merged into them."""
    places, _ = _files(share, folder, most)
    for one, held in share.slices():
        if one.first:
            values = merged(share.layout, one, held, adapters or {})
            yield places[one.name], one.box, values.t() if one.transposed else values


def _files(share: Share, folder: Path, most: float) -> tuple[dict[str, Stored], dict[Path, bytes]]:
    return laid_out(folder, {name: (share.dtype, shape) for name, shape in share.layout.stored.items()}, most=most)


@torch.no_grad()
def merged(layout: Layout, one: Slice, held: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """Return a slice's values with adapters merged, W + (alpha / rank) B A, as a new tensor oriented as our parameter;
    return `held` itself if its parameter has no adapter or none is given."""
    if one.ours not in layout.adapted or not adapters:
        return held
    weight = held.clone()
    first, left = one.start
    module, scaling = one.ours.removesuffix(".weight"), layout.lora.alpha / layout.lora.rank
    for name, part in layout.adapted[one.ours].items():
        start, size = part.start, part.size or layout.parameters[one.ours][0]
        low, high = max(first, start), min(first + len(weight), start + size)
        if low < high:
            a, b = (adapters[f"{module}.{half}.{name}"].to(weight) for half in ("lora_a", "lora_b"))
            rows = weight[low - first : high - first]
            rows.addmm_(b[low - start : high - start], a.narrow(1, left, weight.shape[1]), alpha=scaling)
    return weight
