"""`export`: time and memory of the export of a model's shape from its config.json alone, and of a build without a GPU.

In: names of shapes (`shapes/*.json`), a precision, a backend. Out: seconds of the export with its imports and of the
build of its engines, wall and CPU seconds of the child process, its peak resident memory (it
starts no other), bytes written. All rounds must write the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.measure import deliver, spread, surroundings
from benchmarks.shapes import SHAPES
from lockstep import CheckError

OPTIONS = (
    options.SHAPES, options.PRECISION, options.rounds(), options.WRITE,
    options.option("--build", "Build engines of this backend too, such as cuda.", metavar="BACKEND"),
)  # fmt: skip
PACKAGES = ("onnx", "onnx-ir", "onnxscript", "torch", "transformers")

LIMITS = {"max_batch_size": 16, "max_num_tokens": 2048, "max_seq_len": 4096}
_TIMES = ("seconds", "build_seconds", "wall_seconds", "cpu_seconds")
_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
from pathlib import Path
from lockstep import build_engines, export_config
folder, measured = Path(sys.argv[3]), {}
measured["files"] = export_config(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], folder)
measured["seconds"] = time.perf_counter() - began
if sys.argv[4]:
    began = time.perf_counter()
    engines, limits = folder / "engines" / "engines.json", json.loads(sys.argv[5])
    made = build_engines(folder / "assembly.json", sys.argv[4], engines, limits)
    measured["build_seconds"] = time.perf_counter() - began
    measured["engines"] = json.loads(made.read_text())["digest"]
print(json.dumps(measured))
"""


def main(shapes: Sequence[str], precision: str, rounds: int, write: Path | None, build: str | None) -> None:
    """Measure the export of a model's shape from its config.json alone, and a build of its engines without a GPU.

    In seconds, peak memory and bytes written.
    """
    deliver(run(shapes, precision, rounds, build), write)


def run(shapes: Sequence[str], precision: str, rounds: int = 5, build: str | None = None) -> dict[str, Any]:
    """Export each shape `rounds` times after one that does not count.

    Raises CheckError when two rounds write other bytes.
    """
    measured = {}
    for shape in shapes:
        config = SHAPES / f"{shape}.json"
        samples = [_export(config, precision, build or "") for _ in range(rounds + 1)][1:]
        if len({json.dumps([sample["files"], sample.get("engines")], sort_keys=True) for sample in samples}) != 1:
            raise CheckError(f"{shape}: expected the same files of each round, found different ones")
        times = {}
        for name in _TIMES:
            if name in samples[0]:
                times[name] = spread([sample[name] for sample in samples], 2)
        measured[shape] = {
            "layers": json.loads(config.read_text())["num_hidden_layers"],
            **times,
            "peak_memory_mb": spread([sample["peak_mb"] for sample in samples], 0),
            "files": len(samples[0]["files"]),
            "bytes_written": sum(entry["size"] for entry in samples[0]["files"].values()),
            "engines": samples[0].get("engines"),
        }
    about = {"benchmark": "export", "precision": precision, "build": build, "limits": LIMITS, "rounds": rounds}
    return {**about, "shapes": measured, **surroundings(*PACKAGES)}


def _export(config: Path, precision: str, build: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-c", _CHILD, str(config), precision, folder, build, json.dumps(LIMITS)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise CheckError(f"{config.stem}: the export ended with exit code {child.returncode}")
    times = {"wall_seconds": wall, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return {**json.loads(output), **times, "peak_mb": usage.ru_maxrss / 1024}
