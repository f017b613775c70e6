"""The user's files that jobs of a model read: a checkpoint's, a GGUF file, adapters.

A config in; paths, by the words of `files_of` in the rules, out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.fetched import folder_of
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.checkpoint.tokenizer_file import check_there
from lockstep.config.sources import REPOSITORY, kind_of, read_shape
from lockstep.stages.params import hub_adapters
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.config.schema import Config

# The assumed size of a model on the hub while no file of it is there: in a dry run, before it was fetched.
_UNKNOWN_BYTES = 16_000_000_000


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, as jobs name them.

    path: of a GGUF file, or of the config.json of random weights. sides, weights: of a checkpoint folder. header:
    quantised weights of a checkpoint, whose layout decides the graphs. adapters: files of adapters in local folders.
    folders: {adapter: folder} of all. bytes: of the weights as 16 bits, also where they are quantised already.
    """

    kind: str
    path: list[str] = field(default_factory=list)
    tokenizer: list[str] = field(default_factory=list)
    sides: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    bytes: int = _UNKNOWN_BYTES


def model_files(config: Config, model: str, place: Path | None, results: Results) -> ModelFiles:
    """Return the files of a model. place: of `Config.check_sources`.

    Raises InputError for a checkpoint that is damaged or has no tokenizer.
    """
    kind = kind_of(config.models[model].source)
    folders = config.adapter_folders(model, [Path.cwd(), REPOSITORY], results)
    on_the_hub = hub_adapters(config, model)
    local = [folder for name, folder in folders.items() if name not in on_the_hub]
    adapter_files: list[Path] = []
    for folder in local:
        adapter_files += sorted(folder.glob("adapter_*"))
    # Adapters on the hub are fetched by a job, so their files are not inputs.
    common: dict[str, Any] = {
        "kind": kind,
        "adapters": _displayed(adapter_files),
        "folders": dict(zip(folders, _displayed(folders.values()))),
    }
    if kind != "folder":
        folder = folder_of(results.source(model))
        weights = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
        if weights and (folder / "config.json").is_file():
            common["bytes"] = _bytes(folder, weights)
        elif kind == "gguf" and place:
            # Its tensors have at least 4 bits, and a job expands them to 16.
            common["bytes"] = 4 * os.path.getsize(place)
        elif kind == "random" and place:
            common["bytes"] = 2 * (read_shape(place).num_parameters or 0)
        if kind == "hub" or place is None:
            return ModelFiles(**common)
        # A GGUF file holds its own tokenizer.
        tokenizer = place.with_name("tokenizer.json")
        has_tokenizer = kind == "random" and tokenizer.is_file()
        return ModelFiles(path=_displayed([place]), tokenizer=_displayed([tokenizer] * has_tokenizer), **common)
    assert place is not None
    check_there(place)
    weights = weight_files(place, find_tensors(place))
    displayed_weights = _displayed(weights)
    if read_shape(place).packing is not None:
        common["header"] = displayed_weights
    common["bytes"] = _bytes(place, weights)
    return ModelFiles(sides=_displayed(side_files(place)), weights=displayed_weights, **common)


def _bytes(folder: Path, weights: Iterable[Path]) -> int:
    # Memory and time depend on the weights as 16 bits.
    packing = read_shape(folder).packing
    bits = packing.bits if packing else 16
    return sum(map(os.path.getsize, weights)) * 16 // bits


def _displayed(paths: Iterable[Path]) -> list[str]:
    """Return paths, relative where they and the working directory are in this checkout, whose place no record has."""
    if not Path.cwd().is_relative_to(REPOSITORY):
        return [str(path) for path in paths]
    displayed = []
    for path in paths:
        if path.is_relative_to(REPOSITORY):
            displayed.append(os.path.relpath(path))
        else:
            displayed.append(str(path))
    return displayed
