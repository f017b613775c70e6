"""A machine that converts a checkpoint with a cache: as a step in this process, or as its own process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoints import write

from lockstep import weights
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.statement import Statement
from lockstep.checkpoint import resolve
from lockstep.errors import LockstepError, guard
from lockstep.provenance import run as stage
from lockstep.provenance.cache import Cache
from lockstep.stages import Job

MB = 1 << 20
RUN = """import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from lockstep.errors import LockstepError, guard
from shared_cache import convert
with guard():
    for folder in sys.argv[4:]: convert(Path(sys.argv[2]), Path(folder), sys.argv[3])
"""


def checkpoint(folder: Path, seed: int = 0, megabytes: float = 0.1) -> Path:
    """A resolved bf16 checkpoint of random numbers, recorded; gives its manifest. In fp32 it has twice as many
    bytes."""
    numbers = np.random.default_rng(seed).standard_normal(int(megabytes * MB / 2), np.float32)
    write(folder / "checkpoint", {"numbers": numbers.astype(ml_dtypes.bfloat16)})
    out = folder / "checkpoint.json"
    return stage.run(
        Job("resolve", {"model": "m"}, {}, {}, out),
        lambda: resolve(str(folder / "checkpoint"), folder / "checkpoint", out),
    )


def convert(manifest: Path, folder: Path, cache: Path | str, precision: str = "fp32", make=None) -> Path:
    """The convert stage into `folder`, as a rule or a command runs it."""
    out = folder / "weights.json"
    step = Job("convert", {"model": "m", "precision": precision}, {"checkpoint": manifest}, {}, out)
    return stage.run(step, make or (lambda: weights.convert(manifest, precision, out)), cache=str(cache))


def never(*_: object) -> Path:
    raise AssertionError("it was made, though the cache has it")


def start(manifest: Path, cache: Path, *folders: Path, before: str = "") -> subprocess.Popen:
    """`convert` into one folder after another, in its own process. before: code that it runs first."""
    folder = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_CACHE"}
    command = [sys.executable, "-c", before + RUN, *map(str, (folder, manifest, cache, *folders))]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def run(manifest: Path, folder: Path, cache: Path) -> tuple[int, str]:
    """Exit code and stderr of a command that is `convert`, in this process."""
    output = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(output):
        try:
            with guard():
                convert(manifest, folder, cache)
        except SystemExit as ended:
            code = ended.code
    return code, output.getvalue()


def verify(cache: Cache) -> list[str]:
    """A line for each blob that is not of its digest, and for each damaged entry; none of a whole cache."""
    lines = []
    for path in files_of(cache.entries):
        try:
            cache.read(path.stem)
        except LockstepError as error:
            lines.append(f"{path}: {error}")
    for path in files_of(cache.blobs):
        if not path.is_file():
            lines.append(f"{path}: no file")
        elif sha256_file(path) != path.name:
            lines.append(f"{path}: sha256")
    return lines


def entries(cache: Cache) -> list[Statement]:
    """Return the entries of a whole cache, by stage."""
    return sorted(map(Statement.load, files_of(cache.entries)), key=lambda entry: entry.key.stage)


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder but temporary ones."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix != ".tmp")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
