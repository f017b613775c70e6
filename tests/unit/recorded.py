"""A results tree of the demo in fp16 as a run leaves it, with records and provenance, made in this process from
exported graphs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo_model import CONFIG

from lockstep import backends, weights
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.provenance import run as stage
from lockstep.stages import STAGES
from lockstep.targets import Results

MODEL = "demo-llama"
PRECISION = "fp16"
BACKEND = "onnxruntime"


def run(results: Results, name: str, make: Callable[[], Any] = lambda: None) -> None:
    """`make`, recorded as the stage `name` of the demo in fp16."""
    made = STAGES[name].job(
        CONFIG, results.root, {"model": MODEL, "precision": PRECISION, "layers": 2, "backend": BACKEND}
    )
    stage.run(replace(made, inputs={}) if name == "export" else made, make)  # such a tree has no architecture.json


def recorded(
    demo: Results,
    root: Path,
    options: Mapping[str, Any] | None = None,
    change_graphs: Callable[[Path], None] = lambda folder: None,
) -> Results:
    """Checkpoint, weights, graphs and engines in `root`, from those of `demo`; `change_graphs` is given their folder
    before engines are built."""
    results = Results(root)
    shutil.copytree(demo.assembly(MODEL, PRECISION).parent, results.assembly(MODEL, PRECISION).parent)
    change_graphs(results.assembly(MODEL, PRECISION).parent)
    manifest = CheckpointManifest.load(demo.checkpoint(MODEL))
    moved = replace(manifest, folder=os.path.abspath(manifest.folder_of(demo.checkpoint(MODEL))))
    run(results, "resolve", lambda: moved.save(results.checkpoint(MODEL)))
    run(
        results,
        "convert",
        lambda: weights.convert(results.checkpoint(MODEL), PRECISION, results.weights(MODEL, PRECISION)),
    )
    run(results, "export")
    run(
        results,
        "build",
        lambda: backends.build(
            results.assembly(MODEL, PRECISION), BACKEND, results.engines(MODEL, PRECISION, BACKEND), options
        ),
    )
    return results
