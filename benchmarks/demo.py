"""`demo`: the time that `make demo` takes once everything is installed.

A full run of the workflow, and a run that has nothing to do.

In: the repository. Out: wall seconds of Snakemake on `config/config.yaml` in a new folder, then on the finished one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.measure import deliver, spread, surroundings
from lockstep import CheckError

OPTIONS = (options.Option("--cores", "As Snakemake's --cores.", "all"), options.rounds(), options.WRITE)
REPOSITORY = Path(__file__).resolve().parents[1]


def main(cores: str, rounds: int, write: Path | None) -> None:
    """Time the demo workflow: a full run in a new folder, and one with nothing to do."""
    deliver(run(cores, rounds), write)


def run(cores: str = "all", rounds: int = 5) -> dict[str, Any]:
    """Time `rounds` full runs, and after each a run with nothing to do."""
    full, idle, targets = [], [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            full.append(_snakemake(cores, folder))
            idle.append(_snakemake(cores, folder))
            targets = len(json.loads((Path(folder) / "results" / "summary.json").read_text())["targets"])
    return {
        "benchmark": "demo", "cores": cores, "rounds": rounds, "targets": targets,
        "full_run_seconds": spread(full, 1), "nothing_to_do_seconds": spread(idle, 2),
        **surroundings("snakemake", "onnxruntime", "torch", "transformers"),
    }  # fmt: skip


def _snakemake(cores: str, folder: str) -> float:
    command = [sys.executable, "-m", "snakemake", "--cores", cores, "--directory", folder]
    command += ["--snakefile", str(REPOSITORY / "Snakefile")]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise CheckError(f"the demo workflow ended with exit code {done.returncode}: {last}")
    return time.perf_counter() - began
