"""A results tree of the demo in fp16 as a run leaves it, with statements, made in this process from exported
graphs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo_model import CONFIG

from lockstep import weights
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.backends import builder
from lockstep.provenance import run as stage
from lockstep.stages import STAGES
from lockstep.targets import Results

MODEL = "demo-llama"
PRECISION = "fp16"
BACKEND = "onnxruntime"


def run(
    results: Results,
    name: str,
    make: Callable[[], Any] = lambda: None,
    precision: str = PRECISION,
    backend: str = BACKEND,
) -> None:
    """`make`, recorded as the stage `name` of the demo."""
    job = STAGES[name].job(
        CONFIG, results.root, {"model": MODEL, "precision": precision, "layers": 2, "backend": backend}
    )
    stage.run(replace(job, inputs={}) if name == "export" else job, make)  # such a tree has no architecture.json


def recorded(
    demo: Results,
    root: Path,
    options: Mapping[str, Any] | None = None,
    change_graphs: Callable[[Path], None] = lambda folder: None,
    precision: str = PRECISION,
    backend: str = BACKEND,
) -> Results:
    """Checkpoint, weights, graphs and engines in `root`, from those of `demo`; `change_graphs` is given their folder
    before engines are built."""
    results = Results(root)
    graphs = results.assembly(MODEL, precision)
    shutil.copytree(demo.assembly(MODEL, precision).parent, graphs.parent)
    change_graphs(graphs.parent)
    manifest = CheckpointManifest.load(demo.checkpoint(MODEL))
    moved = replace(manifest, folder=os.path.abspath(manifest.folder_of(demo.checkpoint(MODEL))))
    run(results, "resolve", lambda: moved.save(results.checkpoint(MODEL)))
    converted = results.weights(MODEL, precision)
    run(results, "export", precision=precision)
    run(results, "convert", lambda: weights.convert(results.checkpoint(MODEL), precision, converted), precision)
    engines = results.engines(MODEL, precision, backend)
    run(results, "build", lambda: builder.build(graphs, backend, engines, options), precision, backend)
    return results
