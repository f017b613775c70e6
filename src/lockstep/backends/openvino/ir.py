"""An engine file: a graph in OpenVINO's intermediate representation (IR).

In: an ONNX graph, whose weights are inputs. Out: a ZIP archive of `model.xml` and `model.bin`, the two files of an IR.
The second holds the graph's own constants, such as shapes and RoPE frequencies: some hundred bytes. The same graph
gives the same bytes on every machine.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from lockstep.backends.openvino.library import CORE, VERSION, one_line, openvino, replace
from lockstep.backends.openvino.quantized import compress
from lockstep.errors import CheckError

XML = "model.xml"
BIN = "model.bin"
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that an archive can hold
_opset = openvino.opset13


def convert(graph: onnx.ModelProto, where: str) -> Any:
    """Return the graph as a model of OpenVINO. Raises CheckError if OpenVINO rejects it."""
    from lockstep.backends.openvino.passes import rewrite  # the toolkit is needed only where engines are built

    try:
        graph, weights = rewrite(graph, where)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckError(f"{where}: expected a valid graph for OpenVINO {VERSION}, found {one_line(error)}") from error
    try:
        model = CORE.read_model(graph.SerializeToString())
    except RuntimeError as error:
        raise CheckError(f"{where}: OpenVINO {VERSION} cannot build this graph: {one_line(error)}") from error
    _name_outputs(model, [value.name for value in graph.graph.output])
    _join_transposes(model)  # before `compress`: it looks for weights that are inputs
    compress(model, weights)
    return model


def to_bytes(model: Any, folder: Path) -> bytes:
    """Return the engine's bytes; renames the model's nodes. folder: for files that are deleted afterwards."""
    for number, node in enumerate(model.get_ordered_ops()):  # OpenVINO's names count the nodes of the whole process
        node.set_friendly_name(f"{node.get_type_name()}_{number}")
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ir.", suffix=".tmp") as folder_of_files:
        paths = [Path(folder_of_files) / name for name in (XML, BIN)]
        openvino.serialize(model, *map(str, paths))
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
            for path in paths:
                file.writestr(zipfile.ZipInfo(path.name, _DATE), path.read_bytes())
    return archive.getvalue()


def from_file(path: Path) -> Any:
    """Return the model of an engine file. Raises CheckError where it is none."""
    try:
        with zipfile.ZipFile(path) as file:
            return CORE.read_model(file.read(XML), file.read(BIN))
    except (zipfile.BadZipFile, KeyError, RuntimeError) as error:
        raise CheckError(
            f"{path}: expected an engine of OpenVINO {VERSION}, found none ({one_line(error)}); build the engines again"
        ) from error


def _name_outputs(model: Any, names: Sequence[str]) -> None:
    """Give each output its name alone: a value may have several names, be several outputs, or be an input."""
    for output, name in zip(model.outputs, names, strict=True):
        result = output.get_node()
        source = result.input_value(0)
        if source.get_node().get_type_name() == "Parameter" or set(names) & source.get_names() != {name}:
            source = _opset.convert(source, source.get_element_type()).output(0)
            result.input(0).replace_source_output(source)
        source.set_names({name})


def _join_transposes(model: Any) -> None:
    """Let products read weights in their layout; otherwise OpenVINO copies each, transposed."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_b"]:
            continue
        factor = node.input_value(1).get_node()
        if factor.get_type_name() == "Transpose" and factor.input_value(0).get_node().get_type_name() == "Parameter":
            replace(node.output(0), _opset.matmul(node.input_value(0), factor.input_value(0), False, True).output(0))
