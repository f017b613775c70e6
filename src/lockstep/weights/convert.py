"""Convert a checkpoint to one precision: manifest in, weights manifest out.

Needs no torch.

Where all floats have that precision already nothing is copied: the manifest points into the checkpoint. Else all
tensors are cast and streamed into one `weights.safetensors` next to the manifest, with the same bytes each time. In
quantised precisions the tensors that the assembly names are integers or e4m3 numbers with scales there
(`artifacts.quantized`), unless graphs can read the checkpoint's own: the manifest points to these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import COMPUTE_NAMES, FLOAT_DTYPES, PRECISION_DTYPES, QUANTIZATIONS, ROW, base_precision
from lockstep.artifacts.files import recorded_folder, remove_leftovers
from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.artifacts.weights import WeightsManifest
from lockstep.checkpoint.tensors import name_in_checkpoint
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import remember
from lockstep.manifests.own_files import replacing, stale_files
from lockstep.weights.source import PIECE_BYTES, Source, open_source
from lockstep.weights.writer import write_cast

WEIGHTS = "weights.safetensors"


def convert(checkpoint_json: Path, precision: str, out_json: Path, assembly_json: Path | None = None) -> Path:
    """Write the weights manifest `out_json` of `precision`, and return it.

    precision: fp32, fp16, bf16 or a quantised one. assembly_json: of the same model and precision. It names the tensors
    to quantise, and in 16 bits those that stay float32: without it none does.

    Floats are rounded to nearest, ties to even (fp64 to bf16 by way of fp32, as in torch); integers and booleans keep
    their type.

    Raises InputError when a file has changed since `resolve`, for NaN, infinity and numbers too large for the
    precision, and when the disk has no room.
    """
    if precision not in COMPUTE_NAMES:
        raise InputError(
            f"expected a precision of {', '.join(COMPUTE_NAMES)}, found {precision!r}; correct it in the config"
        )
    out = Path(out_json)
    source = open_source(Path(checkpoint_json))
    _check_place(source, out)
    assembly = None
    if assembly_json is not None:
        assembly = Assembly.load(assembly_json)
        if assembly.precision != precision:
            raise InputError(
                f"{assembly_json}: expected an assembly of {precision}, found {assembly.precision}; export again"
            )
    dtypes = dict.fromkeys(source.floats(), PRECISION_DTYPES[base_precision(precision)])
    quantized = None
    if precision in QUANTIZATIONS:
        quantized = _quantized_tensors(source, precision, assembly, assembly_json)
        source = source.with_transposed(quantized.transposed)
    elif assembly is not None:
        float32 = {name_in_checkpoint(name, source.tensors) for name in assembly.float32_tensors()}
        dtypes |= dict.fromkeys(float32 & dtypes.keys(), "F32")
    for path in (out, out.with_name(WEIGHTS)):
        remove_leftovers(path)
    is_as_stored = all(source.tensors[name].dtype == dtype for name, dtype in dtypes.items())
    if quantized is None and not source.packed and is_as_stored:
        # All floats have their dtype already: the manifest points to the checkpoint's files.
        # Before the manifest is replaced: it proves that the file is ours.
        stale = [path for path in stale_files(out, ()) if path.name == WEIGHTS]
        _check_finite(source)
        pointers = _pointers(source, source.tensors, out)
        WeightsManifest.of(precision, pointers.files, pointers.tensors).save(out)
        for path in stale:  # of an earlier checkpoint, in no manifest any more
            path.unlink()
    else:
        # A stack, for `replacing` begins late, when the new file is whole, and ends when the manifest is written.
        with contextlib.ExitStack() as stack:

            def before_replaced() -> None:
                stack.enter_context(replacing(out, (WEIGHTS,)))
                # A kill must not leave the old manifest next to weights that it does not describe.
                out.unlink(missing_ok=True)

            pointers = _pointers(source, source.unchanged_parts(quantized), out)
            file, tensors = write_cast(source, dtypes, out.with_name(WEIGHTS), before_replaced, quantized)
            remember(out.with_name(WEIGHTS), file.sha256)
            manifest = WeightsManifest.of(precision, (file, *pointers.files), {**tensors, **pointers.tensors})
            if quantized is not None:
                manifest = replace(manifest, group_size=quantized.group_size, transposed=quantized.transposed)
            manifest.save(out)
    return out


def _check_place(source: Source, out: Path) -> None:
    """Raise InputError where the weights file would replace a file of the checkpoint or of something else."""
    path = out.with_name(WEIGHTS)
    if any(os.path.realpath(source.folder / name) == os.path.realpath(path) for name in source.files()):
        raise InputError(f"{path}: expected to write weights here, found the checkpoint's own; choose another folder")
    stale_files(out, (WEIGHTS,))


def _quantized_tensors(
    source: Source, precision: str, assembly: Assembly | None, assembly_json: Path | None
) -> QuantizedTensors:
    if assembly is None or assembly_json is None:
        raise InputError(f"precision {precision}: expected an assembly, which names the quantised weights, found none")
    quantization = assembly.quantization
    assert quantization is not None  # in this precision
    names = {name: name_in_checkpoint(name, source.tensors) for name in quantization.bits}
    bits = {names[name]: width for name, width in quantization.bits.items()}
    transposed = tuple(names[name] for name in quantization.transposed)
    size = quantization.group_size
    for name in bits:
        place = source.tensors.get(name)
        if place is None:
            raise InputError(
                f"{source.folder}: expected tensor {name!r}, found none of this name; does config.json belong to these"
                " weights?"
            )
        if size == ROW:
            fits = len(place.shape) == 2
        else:
            in_features = -1  # the axis
            if name in transposed:
                in_features = 0
            elif quantization.mxfp4:
                in_features = 1
            fits = len(place.shape) in (2, 3) and place.shape[in_features] % size == 0
        if not fits or place.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"{source.words(name)}: expected floats [out_features, in_features] with in_features a multiple of the "
                f"group size {size or 1}; choose another group_size or precision"
            )
    quantized = replace(quantization, bits=bits, transposed=transposed)
    if source.packing is not None and source.packing.stays:
        _check_packed(source, quantized, assembly_json)
    return quantized


def _check_packed(source: Source, expected: QuantizedTensors, assembly_json: Path) -> None:
    """Check that graphs read the integers of weights that are quantised already. Raises InputError if not."""
    assert source.packing is not None  # of a source with packed weights
    stored = source.manifest.quantization
    for name, bits in expected.bits.items():
        stored_bits = stored.bits.get(name) if stored else None
        if stored is None or stored_bits != bits or _extra_parts(stored) != _extra_parts(expected):
            raise InputError(
                f"{assembly_json}: expected {name!r} as the checkpoint has it quantised, found {bits} bits in the "
                f"graphs, {stored_bits or 'none'} in {source.folder}; export again"
            )
        if (source.packing.group_size or expected.group_size) % expected.group_size:
            raise InputError(
                f"{assembly_json}: expected a group size that divides {source.packing.group_size}, that of the "
                f"checkpoint, found {expected.group_size}; export again"
            )


def _extra_parts(quantized: QuantizedTensors) -> tuple[bool, bool, bool]:
    return quantized.zero_points, quantized.ordered, quantized.mxfp4


def _check_finite(source: Source) -> None:
    buffer = np.empty(PIECE_BYTES, np.uint8)
    for name, place in source.tensors.items():
        if place.dtype in FLOAT_DTYPES:
            for _ in source.finite_pieces(name, buffer):  # which raises
                pass


@dataclass(frozen=True)
class _Pointers:
    """Tensors of the checkpoint and the files that hold them, by their paths in the manifest."""

    files: tuple[StoredFile, ...]
    tensors: Mapping[str, TensorPlace]


def _pointers(source: Source, tensors: Mapping[str, TensorPlace], out: Path) -> _Pointers:
    used = {place.file for place in tensors.values()}
    folder = recorded_folder(source.manifest.folder, source.folder, out)
    paths = {name: str(PurePosixPath(folder, name)) for name in sorted(used)}
    recorded = {file.path: file for file in source.manifest.files}
    files = tuple(replace(recorded[name], path=path) for name, path in paths.items())
    return _Pointers(files, {name: replace(place, file=paths[place.file]) for name, place in tensors.items()})
