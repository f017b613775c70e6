"""Fine-tunes of the demo: other weights, the same graphs and engines."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.files import sha256_file, write_json
from lockstep.artifacts.weights import WeightsManifest
from lockstep.config.schema import Config
from lockstep.targets import Results
from lockstep.weights import Weights

BASE = "demo-llama"


def add_fine_tune(
    tree: Results, name: str, precision: str = "fp32", seed: int = 1, layers: str = r"\d+", base: str = BASE
) -> None:
    """Add a model to results that have the base.

    layers: the numbers of those with other weights, as a regular expression. Its embedding and head are the base's.
    """
    for path in (tree.assembly(base, precision), tree.engines(base, precision, "onnxruntime")):
        target = Path(str(path.parent).replace(f"/{base}/", f"/{name}/"))
        shutil.copytree(path.parent, target, copy_function=os.link)
    source = tree.weights(base, precision)
    weights = Weights.open(source)
    manifest = WeightsManifest.load(source)
    out = tree.weights(name, precision)
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        shutil.copy(source.parent / file.path, out.parent / Path(file.path).name)
    manifest = manifest.moved(lambda path: Path(path).name)
    random = np.random.default_rng(seed)
    for tensor, place in manifest.tensors.items():
        if re.search(rf"\.layers\.({layers})\.", tensor):
            values = weights[tensor]
            noise = random.standard_normal(values.shape, np.float32)
            changed = (values + values.std() * noise).astype(values.dtype)
            with open(out.parent / place.file, "r+b") as data:
                data.seek(place.offset)
                data.write(changed.tobytes())
    files = [replace(file, sha256=sha256_file(out.parent / file.path)) for file in manifest.files]
    replace(manifest, files=tuple(files)).save(out)


def make_fine_tunes(folder: Path, demo: Results, config: Config, names: list[str], precision: str = "fp32") -> Path:
    """Return results of the demo and of fine-tunes of it, with a config that has them all."""
    shutil.copytree(demo.root, folder, dirs_exist_ok=True, copy_function=os.link)
    tree = Results(folder)
    for seed, name in enumerate(names, start=1):
        add_fine_tune(tree, name, precision, seed)
    models = {**config.models, **dict.fromkeys(names, config.models[BASE])}
    write_json(tree.config(), config.model_copy(update={"models": models}).dump())
    return folder
