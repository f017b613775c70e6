"""Shapes that come with the benchmarks: `<name>.json` is the config.json of a model, which gets random weights."""

from __future__ import annotations

from pathlib import Path

import lockstep

SHAPES = Path(__file__).parent


def checkpoint(name: str, work: Path) -> Path:
    """Return a checkpoint folder as it is; of a shape one with random weights, made in `work`."""
    shape = SHAPES / f"{name}.json"
    return lockstep.make_random_checkpoint(shape, 0, work / name) if shape.is_file() else Path(name)


def config_of(name: str) -> Path:
    """Return the config.json of a shape; of any other name the file that is called so."""
    shape = SHAPES / f"{name}.json"
    return shape if shape.is_file() else Path(name)
