"""Convert: a checkpoint's manifest in, the weights manifest of one precision out. Needs no torch.

Where all floats have that precision already nothing is copied: the manifest points into the checkpoint. Else all
tensors go, cast and one piece at a time, into one `weights.safetensors` beside the manifest, the same bytes each time.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from lockstep.artifacts.digest_cache import remember
from lockstep.artifacts.dtypes import FLOAT_DTYPES, PRECISION_DTYPES
from lockstep.artifacts.files import remove_leftovers
from lockstep.artifacts.weights import WeightsManifest
from lockstep.errors import InputError
from lockstep.weights.source import PIECE_BYTES, Source, open_source
from lockstep.weights.writer import write_cast

WEIGHTS = "weights.safetensors"


def convert(checkpoint_json: Path, precision: str, out_json: Path) -> Path:
    """Write the weights manifest `out_json` of `precision` (fp32, fp16 or bf16), and return it.

    Floats are rounded to nearest, ties to even (fp64 to bf16 by way of fp32, as in torch); integers and booleans keep
    their type.
    Raises InputError when a file has changed since `resolve`, at NaN, infinity and numbers too large for the precision,
    and when the disk has no room.
    """
    if precision not in PRECISION_DTYPES:
        raise InputError(
            f"expected a precision of {', '.join(PRECISION_DTYPES)}, found {precision!r}; correct it in the config"
        )
    out, dtype = Path(out_json), PRECISION_DTYPES[precision]
    source = open_source(Path(checkpoint_json))
    for path in (out, out.with_name(WEIGHTS)):
        remove_leftovers(path)
    if source.float_dtypes() <= {dtype}:
        _point_into(source, precision, out).save(out)
        out.with_name(WEIGHTS).unlink(missing_ok=True)  # of an earlier checkpoint; nothing names it any more
    else:
        # Gone before the weights it describes are replaced: a kill in between must not leave it beside others.
        file, tensors = write_cast(
            source, dtype, out.with_name(WEIGHTS), before_rename=lambda: out.unlink(missing_ok=True)
        )
        remember(out.with_name(WEIGHTS), file.sha256)
        WeightsManifest(precision, (file,), tensors).save(out)
    return out


def _point_into(source: Source, precision: str, out: Path) -> WeightsManifest:
    """A manifest that points into the checkpoint, once its numbers are known to be finite."""
    buffer = np.empty(PIECE_BYTES, np.uint8)
    for name, place in source.tensors.items():
        if place.dtype in FLOAT_DTYPES:
            for _ in source.finite_pieces(name, buffer):
                pass
    recorded = {file.path: file for file in source.manifest.files}
    here = WeightsManifest(precision, tuple(recorded[file] for file in source.files()), source.tensors)
    return here.moved(lambda file: _recorded_path(source, file, out))


def _recorded_path(source: Source, name: str, out: Path) -> str:
    if os.path.isabs(source.manifest.folder):
        return str(source.folder / name)
    # Of real paths, because `..` after a linked folder leads to the parent of what the link points to.
    return Path(os.path.relpath(os.path.realpath(source.folder), os.path.realpath(out.parent)), name).as_posix()
