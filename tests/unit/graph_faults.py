"""Faults of an attention graph: what each function returns changes a GraphProto in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.artifacts.files import read_json, sha256_file, write_json

Change = Callable[[onnx.GraphProto], None]


def change_file(file: Path, change: Change) -> str:
    """Change the graph in a file; return the file's digest."""
    model = onnx.load(file)
    change(model.graph)
    onnx.save(model, file)
    return sha256_file(file)


def plant_in_engine(engines: Path, name: str, change: Change) -> None:
    """Change an engine of ONNX Runtime, which is a graph, and make its digest right."""
    manifest = read_json(engines)
    entry = manifest["engines"][name]
    entry["sha256"] = change_file(engines.parent / entry["file"], change)
    write_json(engines, manifest)


def replace_constant(matches: Callable[[np.ndarray], bool], new: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor)
            if matches(array):
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(new(array), array.dtype), tensor.name))

    return change


def is_window(size: int) -> Callable[[np.ndarray], bool]:
    return lambda array: array.dtype == np.int64 and array.shape == () and array == size


def mask_dropped(graph: onnx.GraphProto) -> None:
    """Let the last Where give the scores, masked or not; the first one of prefill makes positions."""
    where = [node for node in graph.node if node.op_type == "Where"][-1]
    where.input[2] = where.input[1]


def rename(op_type: str, new: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == op_type:
                node.op_type = new

    return change


def change_input(name: str, op_type: str, number: int) -> Change:
    """Let an input of integers go through an operator with a number first."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.input[:] = ["changed" if item == name else item for item in node.input]
        graph.initializer.append(numpy_helper.from_array(np.array(number), "number"))
        graph.node.insert(0, helper.make_node(op_type, [name, "number"], ["changed"], name="planted"))

    return change
