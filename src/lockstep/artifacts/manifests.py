"""The checks of manifests: a path and a schema in, the document or InputError out.

Types and ranges are checked. Nothing behind it checks a type again: what a bundle from elsewhere says chooses files,
sizes of buffers and what is bound to what. Each document has a module of its own.
"""

from __future__ import annotations

import os
from typing import Any

from lockstep.artifacts.dtypes import COMPUTE_NAMES, PRECISION_NAMES
from lockstep.artifacts.files import read_json
from lockstep.artifacts.schema import Check, check, integer, items, one_of, record, text

REMEDY = "the file is damaged, or not one that a stage wrote: make it again, or take another bundle"

LARGEST = 2**31 - 1  # a dimension; TensorRT counts in 32 bits
SIZE = integer(1, LARGEST)
DIGEST = text("[0-9a-f]{64}", "a sha256 in hexadecimal digits")
NAME = text(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,1000}", "a name")
FILE = text(r"(?!\.)[^/\\:\x00-\x1f\x7f\ud800-\udfff]{1,255}", "the name of a file beside it")
PRECISION = one_of(*COMPUTE_NAMES)
_WEIGHT = one_of(*PRECISION_NAMES.values(), "uint8")
SLOTS = items(record({"name": NAME, "dtype": _WEIGHT, "shape": items(SIZE, most=8)}), 10_000)
TENSORS = items(NAME, 10_000, least=1)


def read_checked(path: str | os.PathLike, format: str, schema: Check) -> dict[str, Any]:
    """Read a manifest of `format`.

    Raises InputError where its content is not of `schema`.
    """
    value = read_json(path, format)
    check(value, schema, path, REMEDY)
    return value
