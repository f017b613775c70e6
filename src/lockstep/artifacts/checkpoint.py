"""The manifest of a checkpoint: files, config.json and the places of tensors.

`checkpoint.json` and `architecture.json` in and out; the latter is of the same checkpoint without its weights. Types
and ranges are checked, but those of config.json: `config.model_config` looks at it when the manifest is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import REMEDY, Count, Name
from lockstep.artifacts.document import Document, Mark, length
from lockstep.artifacts.places import StoredFiles, TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors

RESOLVE_AGAIN = "resolve the checkpoint again"  # where a file has changed
_MAX_TENSORS = 1_000_000  # the largest published checkpoints, of many experts, have some hundred thousand


@dataclass(frozen=True)
class UnindexedTensor:
    """A tensor that a shard holds and the index does not name."""

    file: Name
    tensor: str


@dataclass(frozen=True)
class CheckpointManifest(Document):
    """A checkpoint.

    source: the config's text for it. folder: of its files, relative to the manifest or absolute. config: config.json.
    tensors: {name: place in a file of `folder`}. unindexed: tensors that no index names. commit: of the repository that
    it was fetched from; None for others. quantization: the tensors that are quantised in it; None where none is.
    """

    FORMAT: ClassVar[str] = formats.CHECKPOINT
    REMEDY: ClassVar[str] = REMEDY
    source: str
    folder: str
    files: StoredFiles
    model_type: str
    num_hidden_layers: Count
    config: Mapping[str, Any]
    tensors: Annotated[Mapping[str, TensorPlace], Mark.ALWAYS] = field(default_factory=dict)
    unindexed: Annotated[Annotated[tuple[UnindexedTensor, ...], length(_MAX_TENSORS)], Mark.ALWAYS] = ()
    commit: Name | None = None
    quantization: QuantizedTensors | None = None

    def folder_of(self, path: str | os.PathLike) -> Path:
        """Return the checkpoint's folder. path: of this manifest."""
        return Path(path).parent / self.folder
