"""Stages of a small model, called in the test's process: a test names the model and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, sha256_file, write_bytes
from lockstep.artifacts.places import FileEntry
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.runtime import Model, ModelOptions
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import Tolerances
from lockstep.weights import convert


def write_assembly(files: Mapping[str, bytes], assembly: Assembly, source: Path, out: Path) -> Path:
    """Write graphs, the tokenizer of a checkpoint's folder, and assembly.json, as `export` does after its checks."""
    files = {**files, "tokenizer.json": (source / "tokenizer.json").read_bytes()}
    for name, data in files.items():
        write_bytes(out.with_name(name), data)
    tokenizer = FileEntry("tokenizer.json", sha256_file(out.with_name("tokenizer.json")))
    eos_token_id = read_json(source / "config.json")["eos_token_id"]
    replace(assembly, tokenizer=tokenizer, eos_token_ids=(eos_token_id,)).save(out)
    return out


def make_engines(source: Path, results: Results, name: str, precision: str, **options: Any) -> None:
    """Take a checkpoint's folder through resolve, export, convert and a build for ONNX Runtime. options: of export."""
    from lockstep.export.run import export  # loads torch

    checkpoint = resolve(str(source), source, results.checkpoint(name))
    architecture = resolve_architecture(str(source), source, results.architecture(name))
    assembly = export(architecture, precision, results.assembly(name, precision), **options)
    convert(checkpoint, precision, results.weights(name, precision), assembly)
    build(assembly, "onnxruntime", results.engines(name, precision, "onnxruntime"))


def open_model(results: Results, name: str, precision: str, layers: int | str = "all", **options: Any) -> Model:
    """Open the engines of ONNX Runtime. options: of `ModelOptions`."""
    engines = results.engines(name, precision, "onnxruntime")
    files = engines, results.assembly(name, precision), results.weights(name, precision)
    return Model.open(*files, layers, ModelOptions(**options))


def run_validate(
    results: Results, target: Target, tolerances: Tolerances, max_seq_len: int, folder: Path, /, **changes: Any
) -> dict[str, Any]:
    """Return the report of the graphs' check, which is left in `folder`. changes: other arguments of `validate.run`."""
    from lockstep.verify import validate  # loads torch

    arguments = {
        "assembly_json": results.assembly(target.model, target.precision),
        "weights_json": results.weights(target.model, target.precision),
        "checkpoint_json": results.checkpoint(target.model), "layers": target.layers, "tolerance": tolerances,
        "max_seq_len": max_seq_len, "out": folder / "validate.json",
    }  # fmt: skip
    return read_json(validate.run(**{**arguments, **changes}))


def run_golden(
    results: Results, target: Target, tolerances: Tolerances, limits: Limits, folder: Path, /, **changes: Any
) -> dict[str, Any]:
    """Return the report of the golden check, which is left in `folder`. changes: other arguments of `check_engines`."""
    from lockstep.verify.golden.check import check_engines  # loads torch

    arguments = {
        "assembly_json": results.assembly(target.model, target.precision),
        "weights_json": results.weights(target.model, target.precision),
        "engines_json": results.engines(target.model, target.precision, target.backend),
        "reference_json": results.reference_of(target.model, target.precision, target.layers), "target": target,
        "tolerance": tolerances, "limits": limits, "out": folder / "golden.json", "speed_out": folder / "speed.json",
    }  # fmt: skip
    return read_json(check_engines(**{**arguments, **changes}))
