"""Make the checkpoint of a source that lies here and is no checkpoint folder yet.

In: a source of the config, and the file that it names: a GGUF file, or the config.json of random weights. Out: a folder
`checkpoint/` and beside it `source.json`, as for a model from the hub.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.artifacts.fetched import GgufDigest, folder_of, write_fetched
from lockstep.artifacts.files import sha256_file
from lockstep.checkpoint.fetched_files import clear
from lockstep.config.sources import GgufSource, RandomSource, parse_source
from lockstep.export import gguf_model, random_model


def make_checkpoint(source: str, path: str | os.PathLike, out: str | os.PathLike) -> Path:
    """Make the checkpoint of a GGUF or random source, whose file is `path`, beside its manifest `out`."""
    path = Path(path)
    out = Path(out)
    kind = parse_source(source)
    out.unlink(missing_ok=True)  # it would vouch for files that are being replaced
    folder = folder_of(out)
    clear(folder)
    if isinstance(kind, RandomSource):
        more: dict[str, Any] = {"seed": kind.seed}
        random_model.make(path, kind.seed, folder)
    else:
        assert isinstance(kind, GgufSource)  # others are fetched, or lie there
        more = {"gguf_file": GgufDigest(sha256_file(path), path.stat().st_size)}
        gguf_model.make(path, folder)
    files = sorted(file.name for file in folder.iterdir())
    return write_fetched(out, source, {name: sha256_file(folder / name) for name in files}, **more)
