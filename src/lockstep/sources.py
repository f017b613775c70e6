"""From a model's `source` in the config to the folder of its checkpoint, and the few facts the config is checked against."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]
RESERVED_PREFIXES = ("hf:", "random:")  # a hub id and random weights: not folders, and not supported yet
_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
_POSITION_KEYS = ("max_position_embeddings", "n_positions")


def source_folders() -> tuple[Path, ...]:
    """Where a relative source is looked up, in this order: the working directory, then the repository."""
    return (Path.cwd(), REPOSITORY)


def resolve_source(source: str, folders: Sequence[str | os.PathLike] | None = None) -> Path:
    """The absolute path of the checkpoint folder that `source` names; it holds a `config.json`.

    A relative source is looked up in `folders` (default: `source_folders()`), and the first that exists is taken.
    Raises InputError naming every place looked at.
    """
    if source.startswith(RESERVED_PREFIXES):
        raise InputError(f"expected a folder (only folders are supported yet); found {source!r}")
    bases = source_folders() if folders is None else [Path(folder).absolute() for folder in folders]
    # dict.fromkeys: started in the repository, both places are one; an absolute source ignores the base.
    places = list(dict.fromkeys(Path(os.path.normpath(base / source)) for base in bases))
    for place in places:  # os.path, not Path: false, not an error, for a name that no file can have
        if os.path.isdir(place):
            if not os.path.isfile(place / "config.json"):
                raise InputError(f"expected a checkpoint folder with a config.json; found none in {place}")
            return place
    looked = " and ".join(map(str, places))
    files = [place for place in places if os.path.exists(place)]
    if files:
        raise InputError(f"expected a folder; found a file at {files[0]}: give the folder that holds it")
    raise InputError(f"expected a checkpoint folder; found none at {looked}")


@dataclass(frozen=True)
class CheckpointShape:
    """What the config is held against: the model's depth, and how many positions it knows (None: it does not say)."""

    num_hidden_layers: int
    max_position_embeddings: int | None


def read_shape(folder: Path) -> CheckpointShape:
    """Read `config.json` of a checkpoint folder. Raises InputError when it is not JSON or does not give the depth."""
    path = folder / "config.json"
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected JSON in {path}; found {error}") from None
    except OSError as error:
        raise InputError(f"expected a readable file at {path}; found {error.strerror}") from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object in {path}; found {type(value).__name__}")
    depth = _count(value, _DEPTH_KEYS, path)
    if depth is None:
        raise InputError(f"expected num_hidden_layers in {path}; found none")
    return CheckpointShape(depth, _count(value, _POSITION_KEYS, path))


def _count(value: dict, keys: tuple[str, ...], path: Path) -> int | None:
    key = next((key for key in keys if value.get(key) is not None), None)
    if key is None:
        return None
    found = value[key]
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"expected a positive integer as {key} in {path}; found {found!r}")
    return found
