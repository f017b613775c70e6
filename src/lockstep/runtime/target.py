"""A target of a finished run, opened by its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.artifacts.assembly import Assembly
from lockstep.errors import InputError
from lockstep.runtime.model import Model, ModelOptions
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Results, Target


def open_model(target: str, results: str | os.PathLike = "results", **limits: Any) -> Model:
    """Open the model of a target of a finished run, with its adapters.

    target: such as `demo-llama/fp16/all/onnxruntime`; the backend may be left out where there are engines of one alone.
    results: the results tree. limits: of `Model.open` (`max_batch_size`, `max_seq_len`, `max_num_tokens`, `threads`,
    `low_memory`, `kv_bytes`, `chunk_size`).

    Raises InputError for a name that is no target's, and what `Model.open` raises.
    """
    tree = Results(Path(results))
    names = _parse(target, tree)
    model = names.model
    precision = names.precision
    engines = tree.engines(model, precision, names.backend)
    assembly = tree.assembly(model, precision)
    if Assembly.load(assembly).adapters is not None:
        limits = {"adapters_json": tree.adapters(model), **limits}
    return Model.open(engines, assembly, tree.weights(model, precision), names.layers, ModelOptions(**limits))


def open_tokenizer(target: str, results: str | os.PathLike = "results") -> Tokenizer:
    """Open the tokenizer of a target, such as demo-llama/fp16. Raises InputError for a name of none."""
    tree = Results(Path(results))
    names = _parse(target, tree)
    return Tokenizer.open(tree.assembly(names.model, names.precision))


def _parse(text: str, results: Results) -> Target:
    """Parse a target; without a backend, take the only one that `results` has engines of."""
    full_name = text
    built_note = ""
    if text.count("/") == 2:
        model, precision, _ = text.split("/")
        engines = results.engines(model, precision, "any")
        built = sorted(path.parent.name for path in engines.parents[1].glob(f"*/{engines.name}"))
        full_name = "/".join([text, *built])
        built_note = f", with engines of {' and '.join(built) or 'no backend'}"
    try:
        return Target.parse(full_name)
    except ValueError:
        raise InputError(
            "target: expected model/precision/layers/backend, such as demo-llama/fp16/all/onnxruntime, found "
            f"{text!r}{built_note}"
        ) from None
