"""ONNX's checker and Polygraphy's checks on the assembly's graphs.

In: graphs of an assembly, torch's model. Out: entries of the report; CheckError for a failure. Polygraphy's lint is a
command line tool without a function: its class is run in this process. It needs onnx_graphsurgeon.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon  # noqa: F401  lint needs it, and without it would offer to install it
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, SimpleCompareFunc
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import OnnxrtSessionArgs
from polygraphy.tools.check.subtool.lint import Lint

from lockstep.artifacts.reports import ForwardError, Linted
from lockstep.artifacts.signature import IO, concrete_shape
from lockstep.errors import CheckError
from lockstep.onnx_tools.sessions import open_session
from lockstep.verify.metrics import finite, largest

# Sizes that lint runs a graph with; it fills inputs with random numbers.
_LINT_SIZES = {"num_tokens": 3, "num_requests": 2, "past_capacity": 4}


def check_model(path: Path, model: onnx.ModelProto) -> None:
    """Run the ONNX checker with shape inference over every node. Raises CheckError."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckError(f"{path}: the ONNX checker refuses this graph: {_one_line(error)}") from error


def lint(path: Path, file: Path, inputs: Sequence[IO]) -> Linted:
    """Run Polygraphy's lint on `file`, the graph `path` as it is computed.

    ONNX checker, then every node in ONNX Runtime. Returns the number of nodes and its warnings.

    Raises CheckError for a node that fails, and for an input or a node that does not affect an output: lint only warns
    of those, but an input without effect is how a dropped mask or a forgotten weight shows.
    """
    shapes = []
    for io in inputs:
        shapes.append(f"{io.name}:[{','.join(map(str, concrete_shape(io.shape, _LINT_SIZES)))}]")
    # Numbers that are valid indices too: every tensor that is indexed has two rows or more.
    ranges = [f"{io.name}:[0,1]" for io in inputs]
    tool = Lint()
    parser = tool.setup_parser()
    tool.arg_groups[OnnxrtSessionArgs] = _Sessions(file)
    args = parser.parse_args([str(file), "--silent", "--input-shapes", *shapes, "--val-range", *ranges])
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        try:
            tool.parse(args)
            status = tool.run(args)
        except PolygraphyException as error:
            raise CheckError(f"{path}: Polygraphy lint: {_one_line(error)}") from error
    entries = tool.report.lint_entries
    # Entries of onnx_graphsurgeon are inputs and nodes without effect.
    serious = [entry for entry in entries if entry["level"] == "exception" or entry["source"] == "onnx_graphsurgeon"]
    if status and not serious:
        serious = [{"message": "failed without a message"}]
    if serious:
        message = _one_line(serious[0]["message"])
        for node in serious[0].get("nodes", [])[:1]:
            message = f"node {node}: {message}"
        raise CheckError(f"{path}: Polygraphy lint: {message}")
    return Linted(
        len(tool.report.summary["passing"]), tuple(sorted({_one_line(entry["message"]) for entry in entries}))
    )


class _Sessions(OnnxrtSessionArgs):
    """Gives lint our sessions: its own cannot be opened in a process with one thread pool."""

    def __init__(self, path: Path):
        super().__init__()
        self._path = path

    def add_parser_args_impl(self) -> None:
        pass

    def parse_impl(self, args: Any) -> None:
        pass

    def load_onnxrt_session(self, model: Any = None) -> Any:
        if callable(model):  # Polygraphy passes a loader, a model, or nothing
            model = model()
        return open_session(model or self._path, threads=1)


class FunctionRunner(BaseRunner):
    """A Polygraphy runner of a function from the declared inputs to `logits`."""

    def __init__(self, name: str, inputs: Sequence[IO], function: Callable[[Mapping[str, np.ndarray]], np.ndarray]):
        super().__init__(name=name)
        self._inputs = inputs
        self._function = function

    def get_input_metadata_impl(self) -> TensorMetadata:
        types = TensorMetadata()
        for io in self._inputs:
            sizes = [dim if isinstance(dim, int) else None for dim in io.shape]  # None: a dynamic dimension
            types.add(io.name, io.numpy_dtype, tuple(sizes))
        return types

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
        start = time.perf_counter()
        outputs = OrderedDict(logits=self._function(feed_dict))
        self.inference_time = time.perf_counter() - start
        return outputs


def compare(
    runners: Sequence[BaseRunner], feeds: Sequence[Mapping[str, np.ndarray]], tolerance: float, noise: float = 0.0
) -> dict[str, ForwardError]:
    """Run all runners on all feeds with Polygraphy's Comparator.

    Each is compared with the last, by largest absolute error; names and shapes have been checked.
    Returns {runner: its error}; `passed` is Polygraphy's verdict, false for NaN. noise: of the precision, for reports.
    Raises CheckError for a runner that fails.
    """
    against = len(runners) - 1
    function = SimpleCompareFunc(atol=tolerance, rtol=0.0, check_error_stat="max")
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            results = Comparator.run(list(runners), data_loader=[OrderedDict(feed) for feed in feeds])
            pairs = [(index, against) for index in range(against)]
            (errors,) = Comparator.compare_accuracy(results, comparisons=pairs, compare_func=[function])
    except PolygraphyException as error:
        raise CheckError(f"Comparator: {_one_line(error)}") from error
    errors_by_output: dict[str, ForwardError] = {}
    for pair, compared in errors.items():
        outcomes = list(itertools.chain.from_iterable(outputs.values() for outputs in compared))
        worst = largest([finite(result.max_absdiff) for result in outcomes])
        passed = bool(outcomes) and all(map(bool, outcomes)) and worst is not None
        errors_by_output[pair[0]] = ForwardError(worst, noise, tolerance, passed)
    return errors_by_output


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
