"""`make faults`: planted faults, sent through all gates of the backends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.__main__ import command
from benchmarks.measure import deliver, read_json, write_json

from faults import page, run
from faults.fault import ALL, HOST
from faults.models import MODELS
from lockstep.errors import guard

OPTIONS = (
    options.option(
        "--backend", "onnxruntime and openvino, or another one alone; may be given several times.", HOST,
        name="backends", many=True, choices=(*HOST, "tensorrt"),
    ),
    options.option("--only", "A fault of records/faults.md; may be given several times.  [default: all]", many=True),
    options.option(
        "--model", "Faults of this model alone; may be given several times.", name="models", many=True,
        choices=tuple(MODELS),
    ),
    options.option("--precision", "", ALL, name="precisions", many=True, choices=ALL),
    options.number(
        "--draw", 0, "Plant a fault in this many of its pairs of precision and backend, drawn by its name; 0: in all.",
        minimum=0,
    ),
    options.number("--sample", 0, "Try this many of the plantings, which --seed draws; 0: all.", minimum=0),
    options.number("--seed", 0, "Of --sample.", minimum=0),
    options.number("--jobs", 1, "Faults tried at a time."),
    options.BUILD_OPTIONS,
    options.option(
        "--loosen", "Multiplies the tolerances of the gates, to see how much room they have.", 1.0, float, minimum=1
    ),
    options.path("--work", "Scratch folder.  [default: the system's]", exists=True),
    options.path(
        "--checkpoint", "A checkpoint of Llama's kind, as `make real` leaves one, which takes one of ten of the demo's "
        "faults too.", exists=True,
    ),
    options.path(
        "--write", "Write the record, and its page, into this folder, as `records` has them. Rows that are there stay "
        "until they are tried again; those of the same code are not.",
    ),
)  # fmt: skip


def main(
    backends: Sequence[str], only: Sequence[str], models: Sequence[str], build_options: dict[str, Any],
    write: Path | None, **settings: Any,
) -> None:  # fmt: skip
    """Send planted faults through all gates. Exit code 1 where a harmful one passes them all."""
    path = None if write is None else write / "bench" / f"{run.benchmark(backends)}.json"

    def keep(record: dict[str, Any]) -> None:
        if path is not None:
            write_json(path, record)

    with guard():
        chosen = run.choose(backends, only, models)
        earlier = read_json(path) if path is not None and path.is_file() else None
        record = run.run(chosen, backends, progress=keep, options=build_options, earlier=earlier, **settings)
        deliver(record, write)
        if write is not None:
            print(page.write(write))
        run.check(record)


faults = command("faults", sys.modules[__name__])

if __name__ == "__main__":
    faults(prog_name="make faults")
