"""`builds`: time, size and sameness of engine sets that are built where no GPU is needed.

In: names of shapes (`shapes/*.json`), a precision, a backend. Out: seconds of each build, bytes and digest of the set.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lockstep
from benchmarks import options
from benchmarks.measure import deliver, read_json, spread, surroundings
from benchmarks.shapes import SHAPES
from lockstep import CheckError

OPTIONS = (
    options.SHAPES, options.choice("--backend", "tensorrt_rtx", "cuda", help="Which builds without a GPU."),
    options.PRECISION, options.rounds(), options.WRITE,
)  # fmt: skip
LIMITS = {"max_batch_size": 16, "max_num_tokens": 2048, "max_seq_len": 4096}


def main(shapes: Sequence[str], backend: str, precision: str, rounds: int, write: Path | None) -> None:
    """Build engine sets for a model's shape, without a GPU.

    Measures seconds and bytes, and that two builds are the same bytes.
    """
    deliver(run(shapes, precision, backend, rounds), write)


def run(shapes: Sequence[str], precision: str, backend: str, rounds: int = 3) -> dict[str, Any]:
    """Build the engine set of each shape `rounds` times.

    Raises CheckError when two are other bytes.
    """
    measured = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            graphs = Path(folder) / "graphs"
            lockstep.export_config(json.loads((SHAPES / f"{shape}.json").read_text()), precision, graphs)
            samples = [_build(graphs, Path(folder) / str(number), backend) for number in range(rounds)]
        if len({sample["digest"] for sample in samples}) != 1:
            raise CheckError(f"{shape}: expected the same bytes of each build, found different ones")
        measured[shape] = {**samples[0], "seconds": spread([sample["seconds"] for sample in samples], 2)}
    return {
        "benchmark": "builds",
        "backend": backend,
        "precision": precision,
        "rounds": rounds,
        "limits": LIMITS,
        "shapes": measured,
        **surroundings("onnx"),
    }


def _build(graphs: Path, folder: Path, backend: str) -> dict[str, Any]:
    began = time.perf_counter()
    made = lockstep.build_engines(graphs / "assembly.json", backend, folder / "engines.json", LIMITS)
    seconds = time.perf_counter() - began
    manifest = read_json(made)
    files = [folder / entry["file"] for entry in manifest["engines"].values()]
    return {
        "seconds": seconds,
        "version": manifest["backend_version"],
        "engines": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "digest": manifest["digest"],
    }
