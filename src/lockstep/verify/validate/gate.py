"""Check a graph file: its digest and its signature, as the assembly declares them.

An assembly's graph and its file in, the model out; CheckError where names, dtypes or shapes are not those declared.

Why by hand: ONNX Runtime reports a wrong name late, and Polygraphy not at all: it matches inputs by position where
names differ, drops what is left over, casts and reshapes what does not fit, skips outputs that only one side has, and
says PASSED.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.signature import Signature
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
