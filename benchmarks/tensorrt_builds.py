"""TensorRT's builder, for `benchmarks.gpu`: cold, from the record of tactics, and without fused regions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import BATCHES, build_seconds, built, decode, prefill, prefill_parts, ready
from benchmarks.measure import read_json
from lockstep import Assembly
from lockstep.backends.builder import COSTS
from lockstep.backends.tensorrt.compat import TENSORRT
from lockstep.backends.tensorrt.layers import ChosenLayer, differences
from lockstep.backends.tensorrt.tactics import CACHE, RECORD


def builds(
    assembly_json: Path, engines: Path, options: Mapping[str, Any], python: str | None
) -> Iterator[dict[str, Any]]:
    """Build cold, and again from the record, each in a new process.

    The cold build records tactics; the other is in another folder. Also returns what got other tactics there.
    """
    options, again = {**options, "tactics": "record"}, engines.parent.with_name("again") / engines.name
    made = built(assembly_json, engines, "tensorrt", options, python)
    made["costs"] = read_json(engines.with_name(COSTS))["engines"]
    yield made
    shutil.rmtree(again.parent, ignore_errors=True)
    again.parent.mkdir()
    for name in (CACHE, RECORD):
        shutil.copy(engines.with_name(name), again.with_name(name))
    cached = build_seconds(assembly_json, again, "tensorrt", options, python)
    recorded, found = (read_json(folder / RECORD)["engines"] for folder in (engines.parent, again.parent))
    layers = lambda of: [ChosenLayer.from_json(layer) for layer in of["layers"]]
    other = [line for name in recorded for line in differences(layers(recorded[name]), layers(found[name]), name)]
    yield {**made, "cached_seconds": cached, "other_tactics": other}


def has_regions(engines: Path) -> bool:
    """Return whether blocks were to be built as one fused region each."""
    return bool(read_json(engines)["options"]["one_region"] and TENSORRT.has("one_region"))


def as_they_are(
    assembly_json: Path,
    engines: Path,
    weights: Path,
    options: Mapping[str, Any],
    python: str | None,
    assembly: Assembly,
) -> dict[str, Any]:
    """Measure the same engines built without `one_region`.

    They are built cold, in a new process. Of all blocks in the steps that are measured the microseconds are taken.
    """
    options = {**options, "one_region": False, "tactics": "free"}
    seconds = built(assembly_json, engines, "tensorrt", options, python)["cold_seconds"]
    model = ready(engines, assembly_json, weights)
    blocks = {str(batch): decode(model, batch, 1)["microseconds"]["block"] for batch in BATCHES}
    blocks["prompt"] = prefill_parts(model, prefill(model, 1, assembly), assembly)["microseconds"]["block"]
    return {
        "cold_seconds": seconds,
        "optimization_level": read_json(engines)["options"]["optimization_level"],
        "microseconds_of_blocks": blocks,
    }
