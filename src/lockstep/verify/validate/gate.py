"""Names, dtypes and shapes must be exactly those declared. An assembly's graph entries and files or arrays in;
CheckError or nothing out.

Why by hand: ONNX Runtime reports a wrong name late, and Polygraphy not at all: it matches inputs by position where
names differ, drops what is left over, casts and reshapes what does not fit, skips outputs that only one side has, and
says PASSED.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError

_FEW = 16
IO = Mapping[str, Any]  # {"name", "dtype", "shape"} of the assembly; a dimension is a number or a name


def check_graph(path: Path, sha256: str, inputs: Sequence[IO], outputs: Sequence[IO]) -> onnx.ModelProto:
    """The model in the file, once its bytes have the recorded digest and its inputs and outputs are those declared."""
    if not path.is_file():
        raise CheckError(f"{path}: expected a graph of the assembly, found no file; export again")
    if (found := sha256_file(path)) != sha256:
        raise CheckError(
            f"{path}: sha256: expected {sha256}, found {found}; the file has changed since the export: export again"
        )
    model = onnx.load(path, load_external_data=False)
    check_signature(str(path), model, inputs, outputs)
    return model


def check_signature(where: str, model: onnx.ModelProto, inputs: Sequence[IO], outputs: Sequence[IO]) -> None:
    """The model's inputs and outputs are those declared: names, dtypes, and shapes with the names of their free
    dimensions."""
    constants = {tensor.name for tensor in model.graph.initializer}
    for role, declared, values in (
        ("input", inputs, [value for value in model.graph.input if value.name not in constants]),
        ("output", outputs, model.graph.output),
    ):
        found = {value.name: _describe(value) for value in values}
        _same_names(where, role, [io["name"] for io in declared], list(found))
        for io in declared:
            expected = (io["dtype"], list(io["shape"]))
            if found[io["name"]] != expected:
                wrong = _text(*found[io["name"]])
                raise CheckError(
                    f"{where}: {role} {io['name']!r}: expected {_text(*expected)}, found {wrong}; export again"
                )


def check_arrays(
    where: str,
    role: str,
    declared: Sequence[IO],
    arrays: Mapping[str, np.ndarray],
    dims: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Arrays are what the declared inputs or outputs (`role`) want, with every free dimension of one size wherever it
    occurs.

    `dims` are sizes known already. Gives them with those found.
    """
    _same_names(where, role, [io["name"] for io in declared], list(arrays))
    sizes = dict(dims or {})
    for io in declared:
        array, shape = arrays[io["name"]], tuple(io["shape"])
        expected = [
            sizes.setdefault(want, size) if isinstance(want, str) else want for want, size in zip(shape, array.shape)
        ]
        if array.dtype.name != io["dtype"] or array.ndim != len(shape) or list(array.shape) != expected:
            wanted = [f"{dim}={sizes[dim]}" if isinstance(dim, str) and dim in sizes else dim for dim in shape]
            found = _text(array.dtype.name, array.shape)
            raise CheckError(f"{where}: {role} {io['name']!r}: expected {_text(io['dtype'], wanted)}, found {found}")
    return sizes


def _same_names(where: str, role: str, declared: Sequence[str], found: Sequence[str]) -> None:
    missing, extra = sorted(set(declared) - set(found)), sorted(set(found) - set(declared))
    if missing or extra:
        parts = [f"{word} {_some(names)}" for word, names in (("no", missing), ("unexpected", extra)) if names]
        raise CheckError(f"{where}: expected the {role}s {_some(declared)}, found {' and '.join(parts)}")


def _some(names: Sequence[str]) -> str:
    """All of a few names; of many the first, and how many there are: the uncut graph has an input for every weight."""
    return ", ".join(names) if len(names) <= _FEW else f"{', '.join(names[:3])} ... ({len(names)} in all)"


def _describe(value: onnx.ValueInfoProto) -> tuple[str, list[int | str]]:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name if tensor.elem_type else "no dtype"
    return dtype, [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]


def _text(dtype: str, shape: Sequence[int | str]) -> str:
    return f"{dtype} [{', '.join(map(str, shape))}]"
