"""Engine sets of a checkpoint on a CPU, for the benchmarks that measure them."""

from __future__ import annotations

from pathlib import Path

import lockstep
from lockstep import Results


def make_engines(
    folder: Path, precision: str, work: Path, group_size: int = 32, head_bits: int | None = None
) -> dict[str, Path]:
    """Resolve, export, convert and build the checkpoint below `work`; return the paths of the results."""
    results = Results(work)
    name = folder.name
    checkpoint = results.checkpoint(name)
    weights = results.weights(name, precision)
    assembly = results.assembly(name, precision)
    engines = results.engines(name, precision, "onnxruntime")
    lockstep.resolve_checkpoint(str(folder.resolve()), folder.resolve(), checkpoint)
    lockstep.export_graphs(checkpoint, precision, assembly, group_size=group_size, head_bits=head_bits)
    lockstep.convert_weights(checkpoint, precision, weights, assembly)
    lockstep.build_engines(assembly, "onnxruntime", engines)
    return {"weights": weights, "assembly": assembly, "engines": engines}
