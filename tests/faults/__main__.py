"""`make faults`: planted faults, sent through all gates of a backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.__main__ import command
from benchmarks.measure import deliver, write_json

from faults import page, run
from faults.models import MODELS
from lockstep.errors import guard

OPTIONS = (
    options.choice("--backend", "onnxruntime", "openvino", "tensorrt"),
    options.Option("--only", "A fault of records/faults.md; may be given several times.  [default: all]", many=True),
    options.Option(
        "--model", "Faults of this model alone; may be given several times.", name="models", many=True,
        choices=tuple(MODELS),
    ),
    options.Option("--precision", "", run.PRECISIONS, name="precisions", many=True, choices=run.PRECISIONS),
    options.number("--jobs", 1, "Faults tried at a time."),
    options.BUILD_OPTIONS,
    options.Option(
        "--loosen", "So many times the default tolerances for the gates: how much room they have.", 1.0, float, least=1
    ),
    options.path("--work", "Scratch folder.  [default: the system's]", exists=True),
    options.path(
        "--checkpoint", "A checkpoint of Llama's kind in place of the demo's, as `make real` leaves one; takes the "
        "demo's faults.", exists=True,
    ),
    options.WRITE,
)  # fmt: skip


def main(
    backend: str, only: Sequence[str], models: Sequence[str], checkpoint: Path | None,
    build_options: dict[str, Any], write: Path | None, **settings: Any,
) -> None:  # fmt: skip
    """Send planted faults through all gates. Exit code 1 where a harmful one passes them all."""

    def keep(record: dict[str, Any]) -> None:
        if write is not None:
            write_json(write / "bench" / f"{record['benchmark']}.json", record)

    with guard():
        chosen = run.choose(backend, only, ("demo",) if checkpoint else models)
        record = run.run(chosen, backend, progress=keep, options=build_options, checkpoint=checkpoint, **settings)
        deliver(record, write)
        if write is not None:
            print(page.write(write))
        run.check(record)


faults = command("faults", sys.modules[__name__])

if __name__ == "__main__":
    faults(prog_name="make faults")
