"""Make the checkpoint of a local source that is not a checkpoint folder yet.

In: a source of the config, and the file that it names: a GGUF file, or the config.json of random weights. Out: a folder
`checkpoint/` and a `source.json` next to it, as for a model from the hub.
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
    """Make the checkpoint of a GGUF or random source, whose file is `path`, next to its manifest `out`."""
    path = Path(path)
    out = Path(out)
    parsed = parse_source(source)
    out.unlink(missing_ok=True)  # it is a record of files that are being replaced
    folder = folder_of(out)
    clear(folder)
    if isinstance(parsed, RandomSource):
        origin: dict[str, Any] = {"seed": parsed.seed}
        random_model.make(path, parsed.seed, folder)
    else:
        assert isinstance(parsed, GgufSource)  # others are downloaded, or are local already
        origin = {"gguf_file": GgufDigest(sha256_file(path), path.stat().st_size)}
        gguf_model.make(path, folder)
    digests = {file.name: sha256_file(file) for file in sorted(folder.iterdir())}
    return write_fetched(out, source, digests, **origin)
