"""A family's random checkpoint, taken through the stages up to the engines of ONNX Runtime."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from families import FAMILIES, in_eights

from lockstep.backends.builder import build
from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.export.random_model import make
from lockstep.export.run import export
from lockstep.targets import Results
from lockstep.weights import convert
from shared import Shared

NAME = "tiny"


def built_family(shared: Shared, family: str, precision: str = "fp32") -> Path:
    """Return the folder of `checkpoint` and `results`, made once a test run."""
    return shared.folder(f"families/{family}-{precision}", lambda root: build_family(root, family, precision))


def build_family(root: Path, family: str, precision: str, **settings: Any) -> None:
    """Make the files of the folder; the tests on a GPU ask for it in the Python that has torch, and in 16 bits.

    settings: of the checkpoint's config.json.
    """
    config = {**FAMILIES[family].config, **settings}
    (root / "shape.json").write_text(json.dumps(in_eights(config) if precision in ("fp16", "bf16") else config))
    folder = make(root / "shape.json", 0, root / "checkpoint")
    # Some types' own tokenizer classes ask for tokens that the byte tokenizer does not have.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    results = Results(root / "results")
    checkpoint = resolve(str(folder), folder, results.checkpoint(NAME))
    architecture = resolve_architecture(str(folder), folder, results.architecture(NAME))
    assembly = export(architecture, precision, results.assembly(NAME, precision))
    convert(checkpoint, precision, results.weights(NAME, precision), assembly)  # some weights stay float32
    if precision != "bf16":  # which ONNX Runtime has not
        build(results.assembly(NAME, precision), "onnxruntime", results.engines(NAME, precision, "onnxruntime"))


if __name__ == "__main__":
    build_family(Path(sys.argv[1]), *sys.argv[2:])
