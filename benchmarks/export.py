"""`export`: time and memory of the export of a model's shape from its config.json alone.

In: names of shapes (`shapes/*.json`) and a precision. Out: seconds of the export with its imports, wall and CPU
seconds of the whole process, which is one of its own, its peak resident memory (it starts no other), bytes written.
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

OPTIONS = (options.SHAPES, options.PRECISION, options.rounds(), options.WRITE)
PACKAGES = ("onnx", "onnx-ir", "onnxscript", "torch", "transformers")

_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
from pathlib import Path
from lockstep import export_config
files = export_config(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3]))
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "files": files}))
"""


def main(shapes: Sequence[str], precision: str, rounds: int, write: Path | None) -> None:
    """Measure the export of a model's shape from its config.json alone.

    In seconds, peak memory and bytes written.
    """
    deliver(run(shapes, precision, rounds), write)


def run(shapes: Sequence[str], precision: str, rounds: int = 5) -> dict[str, Any]:
    """Export each shape `rounds` times after one that does not count.

    Raises CheckError when two exports differ.
    """
    measured = {}
    for shape in shapes:
        config = SHAPES / f"{shape}.json"
        samples = [_export(config, precision) for _ in range(rounds + 1)][1:]
        if len({json.dumps(sample["files"], sort_keys=True) for sample in samples}) != 1:
            raise CheckError(f"{shape}: expected the same files of each export, found different ones")
        measured[shape] = {
            "layers": json.loads(config.read_text())["num_hidden_layers"],
            "seconds": spread([sample["seconds"] for sample in samples], 2),
            "wall_seconds": spread([sample["wall"] for sample in samples], 2),
            "cpu_seconds": spread([sample["cpu"] for sample in samples], 2),
            "peak_memory_mb": spread([sample["peak_mb"] for sample in samples], 0),
            "files": len(samples[0]["files"]),
            "bytes_written": sum(entry["size"] for entry in samples[0]["files"].values()),
        }
    return {
        "benchmark": "export",
        "precision": precision,
        "rounds": rounds,
        "shapes": measured,
        **surroundings(*PACKAGES),
    }


def _export(config: Path, precision: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(config), precision, folder], stdout=subprocess.PIPE)
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise CheckError(f"{config.stem}: the export ended with exit code {child.returncode}")
    return json.loads(output) | {
        "wall": wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
    }
