"""Export a model again, in memory, to have graphs to compare with.

A model's config in, graphs in memory out. Needs torch and transformers; reads no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.dtypes import base_precision
from lockstep.errors import LockstepError
from lockstep.export.lora import linear_layers, module_of, with_adapters
from lockstep.export.quantize import quantize
from lockstep.export.run import assemble
from lockstep.export.tracer import meta_model
from lockstep.verify.graphs import Graphs
from lockstep.weights import Weights


def export_again(
    config: Mapping[str, Any],
    weights: Weights,
    layers: int | str,
    threads: int | None = None,
    adapters: LoraSlots | None = None,
    residual: str | None = None,
) -> Graphs | str:
    """Return the graphs that an export gives now, with the target's weights, or why there are none."""
    config = dict(config)
    try:
        base = base_precision(weights.precision)
        meta = meta_model(config, base)
        files, assembly = assemble(meta, config, base, residual=residual)
        if adapters is not None:
            modules = {module_of(slot) for slots in adapters.classes.values() for slot in slots}
            room = {"max_adapters": adapters.max_adapters, "max_lora_rank": adapters.max_lora_rank}
            files, assembly = with_adapters(files, assembly, {**room, "targets": modules}, linear_layers(meta))
        if weights.group_size is not None:
            files, assembly = quantize(files, assembly, weights.precision, weights.group_size, weights.quantization)
        with tempfile.TemporaryDirectory() as folder:  # read when they are opened
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            return Graphs(Path(folder, "assembly.json"), assembly, weights, layers, threads)
    except LockstepError as error:
        return " ".join(str(error).split())
