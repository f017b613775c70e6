"""The gate: names, dtypes and shapes must be exactly those declared.

An assembly's graphs and files or arrays in; CheckError or nothing out.

Why by hand: ONNX Runtime reports a wrong name late, and Polygraphy not at all: it matches inputs by position where
names differ, drops what is left over, casts and reshapes what does not fit, skips outputs that only one side has, and
says PASSED.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.signature import IO, Signature, check_names
from lockstep.errors import CheckError
from lockstep.onnx_tools.signature import signature_of


def check_graph(path: Path, sha256: str, signature: Signature) -> onnx.ModelProto:
    """Return the model in the file, once checked.

    Its bytes must have the recorded digest, and it must take and give what is declared. Raises CheckError otherwise.
    """
    if not path.is_file():
        raise CheckError(f"{path}: expected a graph of the assembly, found no file; export again")
    if (found := sha256_file(path)) != sha256:
        raise CheckError(
            f"{path}: sha256: expected {sha256}, found {found}; the file has changed since the export: export again"
        )
    model = onnx.load(path, load_external_data=False)
    signature.check(signature_of(model.graph), str(path), "export again")
    return model


def check_arrays(
    where: str,
    role: str,
    declared: Sequence[IO],
    arrays: Mapping[str, np.ndarray],
    dims: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Check that arrays are what the declared inputs or outputs (`role`) want.

    Every free dimension must have one size wherever it occurs. dims: sizes known already. Returns them with those
    found. Raises CheckError.
    """
    check_names(where, role, [io.name for io in declared], list(arrays))
    sizes = dict(dims or {})
    for io in declared:
        array, shape = arrays[io.name], io.shape
        expected = [
            sizes.setdefault(want, size) if isinstance(want, str) else want for want, size in zip(shape, array.shape)
        ]
        if array.dtype.name != io.dtype or array.ndim != len(shape) or list(array.shape) != expected:
            wanted = [f"{dim}={sizes[dim]}" if isinstance(dim, str) and dim in sizes else dim for dim in shape]
            expected_type, found = IO(io.name, io.dtype, tuple(wanted)), IO(io.name, array.dtype.name, array.shape)
            raise CheckError(f"{where}: {role} {io.name!r}: expected {expected_type.type}, found {found.type}")
    return sizes
