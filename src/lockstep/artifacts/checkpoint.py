"""The manifest of a checkpoint: files, config.json and the places of tensors.

`checkpoint.json` and `architecture.json` in and out; the latter is of the same checkpoint without its weights. Types
and ranges are checked, but those of config.json: `artifacts.model_config` looks at it when the manifest is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.digest_cache import Expected, check_files
from lockstep.artifacts.files import write_json
from lockstep.artifacts.manifests import LARGEST, NAME, read_checked
from lockstep.artifacts.places import FILES, StoredFile, TensorPlace, place_schema
from lockstep.artifacts.quantized import QUANTIZED, QuantizedTensors
from lockstep.artifacts.schema import integer, items, mapping, record, text

_MAX_TENSORS = 1_000_000
_TEXT = text(r"(?s:.*)", "a text")
_SCHEMA = record(
    {
        "source": _TEXT,
        "folder": _TEXT,
        "files": FILES,
        "model_type": _TEXT,
        "num_hidden_layers": integer(0, LARGEST),
        "config": record({}),
        "tensors": mapping(place_schema(NAME), _TEXT),
        "unindexed": items(record({"file": NAME, "tensor": _TEXT}), most=_MAX_TENSORS),
    },
    {"commit": NAME, "quantization": QUANTIZED},
)


@dataclass(frozen=True)
class CheckpointManifest:
    """A checkpoint.

    source: the config's text for it. folder: of its files, relative to the manifest or absolute. config: config.json.
    tensors: by name, each in a file of `folder`. unindexed: (file, tensor) of what a shard holds but the index does not
    name. commit: of the repository that it was fetched from; None for others. quantization: what is quantised already,
    and how; None where nothing is.
    """

    source: str
    folder: str
    files: tuple[StoredFile, ...]
    model_type: str
    num_hidden_layers: int
    config: dict[str, Any]
    tensors: Mapping[str, TensorPlace] = field(default_factory=dict)
    unindexed: tuple[tuple[str, str], ...] = ()
    commit: str | None = None
    quantization: QuantizedTensors | None = None

    @classmethod
    def load(cls, path: str | os.PathLike) -> CheckpointManifest:
        """Read a checkpoint's manifest. Raises InputError for a file that is none."""
        value = read_checked(path, formats.CHECKPOINT, _SCHEMA)
        quantized = value.get("quantization")
        return cls(
            source=value["source"],
            folder=value["folder"],
            files=tuple(map(StoredFile.from_json, value["files"])),
            model_type=value["model_type"],
            num_hidden_layers=value["num_hidden_layers"],
            config=value["config"],
            tensors={name: TensorPlace.from_json(entry["file"], entry) for name, entry in value["tensors"].items()},
            unindexed=tuple((entry["file"], entry["tensor"]) for entry in value["unindexed"]),
            commit=value.get("commit"),
            quantization=QuantizedTensors.from_json(quantized) if quantized else None,
        )

    def save(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of checkpoint.json, without its seal."""
        return {
            "format": formats.CHECKPOINT,
            "source": self.source,
            "folder": self.folder,
            "files": [file.to_json() for file in self.files],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_hidden_layers,
            "config": self.config,
            "tensors": {name: place.to_json() for name, place in self.tensors.items()},
            "unindexed": [{"file": file, "tensor": name} for file, name in self.unindexed],
            **({"commit": self.commit} if self.commit else {}),
            **({"quantization": self.quantization.to_json()} if self.quantization else {}),
        }

    def folder_of(self, path: str | os.PathLike) -> Path:
        """Return the checkpoint's folder. path: of this manifest."""
        return Path(path).parent / self.folder

    def check(self, folder: Path) -> None:
        """Raise InputError naming the first file in `folder` that has changed.

        The files must be those that this manifest was made of.
        """
        check_files(
            [Expected(folder / file.path, file.sha256, file.size) for file in self.files],
            "resolve the checkpoint again",
        )
