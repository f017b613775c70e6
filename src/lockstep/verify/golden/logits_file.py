"""The file of logits beside a reference. Needs neither torch nor what runs engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.artifacts.dtypes import numpy_dtype
from lockstep.artifacts.files import sha256_file
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.errors import InputError


def read_logits(path: Path, sha256: str) -> dict[str, np.ndarray]:
    """Return the arrays of the file beside a reference. Raises InputError where it is not the recorded one."""
    if not path.is_file() or sha256_file(path) != sha256:
        found = "other bytes" if path.is_file() else "no file"
        raise InputError(f"{path}: expected the logits of the reference, found {found}; make the reference again")
    data = np.fromfile(path, np.uint8)
    return {
        name: data[record.offset : record.offset + record.length].view(numpy_dtype(record.dtype)).reshape(record.shape)
        for name, record in read_header(path).items()
    }
