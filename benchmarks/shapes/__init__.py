"""Shapes that come with the benchmarks: `<name>.json` is the config.json of a model, which gets random weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lockstep
from lockstep.artifacts.files import dump_json, read_json, write_json

SHAPES = Path(__file__).parent


def checkpoint(name: str, work: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """Return a checkpoint folder; for a shape one with random weights in `work`, made unless it exists.

    settings: override those of the shape's config.json.
    """
    shape = SHAPES / f"{name}.json"
    if not shape.is_file():
        return Path(name)
    folder = work / name
    if settings:
        folder = work / f"{name}-{hashlib.sha256(dump_json(settings).encode()).hexdigest()[:8]}"
    if not (folder / "config.json").is_file():
        work.mkdir(parents=True, exist_ok=True)
        config = folder.with_suffix(".json")
        write_json(config, {**read_json(shape), **(settings or {})})
        lockstep.make_random_checkpoint(config, 0, folder)
    return folder


def config_of(name: str) -> Path:
    """Return the config.json of a shape; of any other name the file that is called so."""
    shape = SHAPES / f"{name}.json"
    return shape if shape.is_file() else Path(name)
