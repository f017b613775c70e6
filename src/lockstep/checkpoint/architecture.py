"""What of a checkpoint the graphs are made from: all but the values of its weights. A folder in, a digest or file names out."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint.resolve import SIDE_FILES
from lockstep.checkpoint.source_files import present
from lockstep.checkpoint.tensors import INDEX, find_tensors
from lockstep.files import sha256_file, sha256_json


def architecture_digest(folder: Path) -> str:
    """Hex sha256 over config, tokenizer and each tensor's name, dtype and shape: equal for a fine-tune of the same shapes.

    Reads headers only. Raises InputError for a checkpoint whose headers or index are damaged or absent.
    """
    tensors = {name: [record.dtype, list(record.shape)] for name, (_, record) in find_tensors(folder).tensors.items()}
    sides = {name: sha256_file(folder / name) for name in SIDE_FILES if present(folder / name)}
    return sha256_json({"files": sides, "tensors": tensors})


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of the checkpoint in `folder`, sorted. Raises InputError as `architecture_digest` does."""
    names = [*SIDE_FILES, INDEX, *find_tensors(folder).files]
    return sorted(folder / name for name in set(names) if present(folder / name))
