"""Convert a checkpoint to one precision: manifest in, weights manifest out.

Needs no torch.

Where all floats have that precision already nothing is copied: the manifest points into the checkpoint. Else all
tensors go, cast and one piece at a time, into one `weights.safetensors` beside the manifest, the same bytes each time.
In quantised precisions the tensors that the assembly names are integers or e4m3 numbers with scales there
(`artifacts.quantized`), but for those that the checkpoint has as they are bound: the manifest points to these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import COMPUTE_NAMES, FLOAT_DTYPES, PRECISION_DTYPES, QUANTIZATIONS, ROW, base_precision
from lockstep.artifacts.files import remove_leftovers
from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.artifacts.weights import WeightsManifest
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import remember
from lockstep.manifests.own_files import replacing, stale_files
from lockstep.weights.source import PIECE_BYTES, Source, open_source
from lockstep.weights.writer import write_cast

WEIGHTS = "weights.safetensors"


def convert(checkpoint_json: Path, precision: str, out_json: Path, assembly_json: Path | None = None) -> Path:
    """Write the weights manifest `out_json` of `precision`, and return it.

    precision: fp32, fp16, bf16 or a quantised one. assembly_json: of the same model and precision; it says which
    tensors are quantised, and is needed only then.

    Floats are rounded to nearest, ties to even (fp64 to bf16 by way of fp32, as in torch); integers and booleans keep
    their type.

    Raises InputError when a file has changed since `resolve`, at NaN, infinity and numbers too large for the precision,
    and when the disk has no room.
    """
    if precision not in COMPUTE_NAMES:
        raise InputError(
            f"expected a precision of {', '.join(COMPUTE_NAMES)}, found {precision!r}; correct it in the config"
        )
    out = Path(out_json)
    dtype = PRECISION_DTYPES[base_precision(precision)]
    source = open_source(Path(checkpoint_json))
    _check_place(source, out)
    quantized = _quantized(source, precision, assembly_json) if precision in QUANTIZATIONS else None
    if quantized is not None:
        source = source.with_transposed(quantized.transposed)
    for path in (out, out.with_name(WEIGHTS)):
        remove_leftovers(path)
    if quantized is None and not source.packed and source.float_dtypes() <= {dtype}:
        stale = [path for path in stale_files(out, ()) if path.name == WEIGHTS]
        _check_finite(source)
        pointed = _pointed(source, source.tensors, out)
        WeightsManifest.of(precision, pointed.files, pointed.tensors).save(out)
        for path in stale:  # of an earlier checkpoint; nothing names it any more
            path.unlink()
    else:
        with contextlib.ExitStack() as stack:

            def before_replaced() -> None:
                stack.enter_context(replacing(out, (WEIGHTS,)))
                out.unlink(missing_ok=True)  # a kill must not leave it beside weights that it does not describe

            kept = _pointed(source, source.kept(quantized), out)
            file, tensors = write_cast(source, dtype, out.with_name(WEIGHTS), before_replaced, quantized)
            remember(out.with_name(WEIGHTS), file.sha256)
            manifest = WeightsManifest.of(precision, (file, *kept.files), {**tensors, **kept.tensors})
            if quantized is not None:
                manifest = replace(manifest, group_size=quantized.group_size, transposed=quantized.transposed)
            manifest.save(out)
    return out


def _check_place(source: Source, out: Path) -> None:
    """Raise InputError where weights beside `out` would replace a file of the checkpoint or of someone else."""
    path = out.with_name(WEIGHTS)
    if any(os.path.realpath(source.folder / name) == os.path.realpath(path) for name in source.files()):
        raise InputError(f"{path}: expected to write weights here, found the checkpoint's own; choose another folder")
    stale_files(out, (WEIGHTS,))


def _quantized(source: Source, precision: str, assembly_json: Path | None) -> QuantizedTensors:
    """Return which tensors of `source` are quantised, by their names there."""
    if assembly_json is None:
        raise InputError(f"precision {precision}: expected an assembly, which says what is quantised, found none")
    found = Assembly.load(assembly_json)
    if found.precision != precision or found.quantization is None:
        raise InputError(f"{assembly_json}: expected an assembly of {precision}, found {found.precision}; export again")
    # Checkpoints of a bare decoder leave out the first part of the name ("transformer.").
    names = {name: name if name in source.tensors else name.partition(".")[2] for name in found.quantization.bits}
    bits = {names[name]: width for name, width in found.quantization.bits.items()}
    transposed = tuple(names[name] for name in found.quantization.transposed)
    for name in bits:
        place = source.tensors.get(name)
        if place is None:
            raise InputError(
                f"{source.folder}: expected tensor {name!r}, found none of this name; does config.json belong to these"
                " weights?"
            )
        size = found.quantization.group_size
        inner = 1 if found.quantization.mxfp4 else -1
        inner = 0 if name in transposed else inner
        fits = len(place.shape) == 2 if size == ROW else len(place.shape) in (2, 3) and not place.shape[inner] % size
        if not fits or place.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"{source.words(name)}: expected floats [out_features, in_features] with in_features a multiple of the "
                f"group size {size or 1}; choose another group_size or precision"
            )
    made = replace(found.quantization, bits=bits, transposed=transposed)
    if source.packing is not None and source.packing.stays:
        _check_packed(source, made, assembly_json)
    return made


def _check_packed(source: Source, wanted: QuantizedTensors, assembly_json: Path) -> None:
    """Check that graphs take the integers of weights that are quantised already.

    Raises InputError where they do not.
    """
    assert source.packing is not None  # of a source with packed weights
    own = source.manifest.quantization
    for name, bits in wanted.bits.items():
        found = own.bits.get(name) if own else None
        if own is None or found != bits or _form(own) != _form(wanted):
            raise InputError(
                f"{assembly_json}: expected {name!r} as the checkpoint has it quantised, found {bits} bits in the "
                f"graphs, {found or 'none'} in {source.folder}; export again"
            )
        if (source.packing.group_size or wanted.group_size) % wanted.group_size:
            raise InputError(
                f"{assembly_json}: expected a group size that divides {source.packing.group_size}, that of the "
                f"checkpoint, found {wanted.group_size}; export again"
            )


def _form(quantized: QuantizedTensors) -> tuple[bool, bool, bool]:
    return quantized.zero_points, quantized.ordered, quantized.mxfp4


def _check_finite(source: Source) -> None:
    """Read all floats of a checkpoint. Raises InputError where one is not finite."""
    buffer = np.empty(PIECE_BYTES, np.uint8)
    for name, place in source.tensors.items():
        if place.dtype in FLOAT_DTYPES:
            for _ in source.finite_pieces(name, buffer):
                pass


@dataclass(frozen=True)
class _Pointed:
    """Tensors of the checkpoint, and its files that hold them, by the paths that the manifest has."""

    files: tuple[StoredFile, ...]
    tensors: Mapping[str, TensorPlace]


def _pointed(source: Source, tensors: Mapping[str, TensorPlace], out: Path) -> _Pointed:
    used = {place.file for place in tensors.values()}
    paths = {name: _recorded_path(source, name, out) for name in sorted(used)}
    recorded = {file.path: file for file in source.manifest.files}
    files = tuple(replace(recorded[name], path=path) for name, path in paths.items())
    return _Pointed(files, {name: replace(place, file=paths[place.file]) for name, place in tensors.items()})


def _recorded_path(source: Source, name: str, out: Path) -> str:
    if os.path.isabs(source.manifest.folder):
        return str(source.folder / name)
    # Of real paths, because `..` after a linked folder leads to the parent of what the link points to.
    return Path(os.path.relpath(os.path.realpath(source.folder), os.path.realpath(out.parent)), name).as_posix()
