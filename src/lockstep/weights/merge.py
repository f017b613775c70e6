"""Merge an adapter into its checkpoint.

In: the manifests of both. Out: a checkpoint folder in Hugging Face format.

Each weight W that the adapter has becomes W + scale * B A, accumulated in float64 in the order of the ranks (the same
bytes on every machine) and rounded once to the dtype that W is stored in; all other tensors and files do not change.
Tensors are streamed, a few megabytes at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from lockstep.artifacts.dtypes import numpy_dtype
from lockstep.checkpoint.tensors import name_in_checkpoint
from lockstep.errors import InputError
from lockstep.weights.adapters import LoadedAdapter, open_adapters
from lockstep.weights.source import PIECE_BYTES, Source, open_source
from lockstep.weights.writer import Stored, layout, write_stream

MODEL = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def merge(checkpoint_json: Path, adapters_json: Path, name: str, out: Path, transposed: Collection[str] = ()) -> Path:
    """Write the checkpoint with one adapter merged into it.

    name: of the adapter. out: the folder to write, which is returned. transposed: names of the model's linear layers
    whose weights are [in_features, out_features], such as GPT-2's (`export.lora.transposed_layers`); square shapes do
    not tell.

    Raises InputError where `out` exists, no adapter has this name, a file has changed since it was resolved, a number
    becomes too large for its dtype, and when the disk has no room; `out` is then not created.
    """
    source = open_source(Path(checkpoint_json))
    adapters = open_adapters(adapters_json)
    out = Path(out)
    if name not in adapters:
        raise InputError(f"merge: expected one of {', '.join(adapters) or 'no adapter'}; found {name!r}")
    if source.packed:
        raise InputError(
            f"{source.folder}: expected weights in floating point to merge an adapter into, found quantised ones; "
            "merge it into the checkpoint that they were made of, or use the adapter as it is"
        )
    if os.path.lexists(out):
        raise InputError(f"{out}: expected a new folder to write to, found something there; choose another place")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        _write(source, adapters[name], temporary / MODEL, transposed)
        weights = {*source.files(), _INDEX}
        for file in source.manifest.files:
            if file.path not in weights:
                shutil.copyfile(source.folder / file.path, temporary / file.path)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write(source: Source, adapter: LoadedAdapter, path: Path, transposed: Collection[str]) -> None:
    modules = {name_in_checkpoint(f"{module}.weight", source.tensors): module for module in adapter.modules}
    stored = {name: Stored(name, place.dtype, place.shape) for name, place in source.tensors.items()}
    opening, tensors = layout(stored, path.name)

    def contents() -> Iterator[memoryview]:
        buffer = np.empty(PIECE_BYTES, np.uint8)
        yield memoryview(opening)
        for name in tensors:
            if name in modules:
                yield from _merged(source, name, adapter, modules[name], modules[name] in transposed, buffer)
            else:
                yield from (piece.data for piece in source.pieces(name, buffer))

    size = len(opening) + sum(place.length for place in tensors.values())
    write_stream(path, size, contents(), "merged")


def _merged(
    source: Source, name: str, adapter: LoadedAdapter, module: str, transposed: bool, buffer: np.ndarray
) -> Iterator[memoryview]:
    """Yield a weight's bytes with the adapter's product added. Pieces may end anywhere within a row."""
    place = source.tensors[name]
    a, b = (array.astype(np.float64) for array in adapter.modules[module])
    if transposed:
        left_factor = a.T.copy()
        right_factor = b.T
    else:
        left_factor = b
        right_factor = a
    if place.shape != (left_factor.shape[0], right_factor.shape[1]):
        where = f"{source.words(name)}: adapter {adapter.name!r}"
        expected = [left_factor.shape[0], right_factor.shape[1]]
        raise InputError(f"{where}: expected a weight of the product's shape {expected}; check it again")
    left_factor *= adapter.scale_of(module)  # a copy, made by `astype`: the adapter does not change
    columns = place.shape[1]
    start = 0  # of the piece, in numbers
    dtype = numpy_dtype(place.dtype)
    for piece, _ in source.finite_pieces(name, buffer):
        numbers = piece.view(dtype)
        stop = start + numbers.size
        first_row = start // columns
        last_row = -(-stop // columns)
        product = _product(left_factor[first_row:last_row], right_factor).reshape(-1)
        offset = start - first_row * columns
        total = numbers.astype(np.float64) + product[offset : offset + numbers.size]
        with np.errstate(over="ignore"):
            rounded = total.astype(dtype)
        if not np.isfinite(rounded.astype(np.float64)).all():
            raise InputError(
                f"{source.words(name)}: adapter {adapter.name!r}: expected sums that fit {place.dtype}, found "
                f"{float(np.abs(total).max()):g}; merge it into a checkpoint of another dtype"
            )
        start = stop
        yield rounded.view(np.uint8).data


def _product(left_factor: np.ndarray, right_factor: np.ndarray) -> np.ndarray:
    """Return `left @ right`, accumulated over the ranks in their order: a BLAS has another order on each CPU."""
    total = np.zeros((len(left_factor), right_factor.shape[1]))
    term = np.empty_like(total)
    for column, row in zip(left_factor.T, right_factor):
        total += np.multiply(column[:, None], row, out=term)
    return total
