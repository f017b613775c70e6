"""The compare stage: how far each engine of a set is from its graph.

An engine set with its assembly and weights in; for each engine its error against the graph in ONNX Runtime out.

The graph is the canonical one of the assembly, run as it is written on a CPU; the engine is what was built. Both run in
Polygraphy's runners on the same inputs, at several sizes of each optimization profile, attention also over caches up to
the longest, with the weights of one layer. A `<variant>.rotary` engine is a graph itself: there is nothing to compare.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import polygraphy
from polygraphy.backend.base import BaseRunner
from polygraphy.comparator import Comparator
from polygraphy.exception import PolygraphyException

from lockstep.artifacts.adapters import rows_of
from lockstep.artifacts.assembly import Assembly, BoundBlock, GraphFile
from lockstep.artifacts.reports import PASS, ComparedEngine, ComparedRun, ComparisonReport, OutputError
from lockstep.artifacts.signature import IO
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.graphs import BaseGraph, RopeGraph, graph_file
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.comparator import BoundRunner, one_line, quiet
from lockstep.onnx_tools.metrics import difference
from lockstep.onnx_tools.overflow import LARGEST, find_overflow
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.signature import signature_of
from lockstep.onnx_tools.without_adapters import without_adapters
from lockstep.targets import Limits
from lockstep.verify.compare import inputs
from lockstep.verify.compare.host_runner import HostRunner
from lockstep.verify.metrics import finish, largest
from lockstep.weights import Tensors, Weights, check_slots, slot_array
from lockstep.weights.ranks import RankWeights

PRECISIONS = (
    "fp32",
    "fp16",
    "w8a16",
    "w4a16",
)  # what ONNX Runtime computes in on a CPU; nor has NumPy, and so Polygraphy, bfloat16
_COMPARISON = "lockstep.backends.*.comparison"


@dataclass(frozen=True)
class Error:
    """The error of one output of an engine; true where it is small enough.

    of.magnitude: rms of what ONNX Runtime gives. of.max_abs_error: largest |found - expected|. of.relative_error:
    largest |found - expected| / max(magnitude, |expected|). All None but the magnitude where the engine gives NaN or
    infinity. peak: the largest magnitude of what is expected.
    """

    of: OutputError
    tolerance: float
    peak: float

    def __bool__(self) -> bool:
        return self.of.relative_error is not None and self.of.relative_error <= self.tolerance

    def __str__(self) -> str:
        if self.of.relative_error is None:
            beyond = f"; the graph gives up to {self.peak:,.0f}, and float16 ends at {LARGEST:.0f}"
            return "expected finite numbers, found NaN or infinity" + (beyond if self.peak > LARGEST else "")
        largest = f"largest absolute error {self.of.max_abs_error:.3g}, cosine {self.of.cosine:.6f}"
        return (
            f"expected an error of at most {self.tolerance:g} of the output's magnitude "
            f"({self.of.magnitude:.3g}), found {self.of.relative_error:.3g} ({largest})"
        )


def run(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    tolerance: float,
    limits: Limits,
    out: Path,
    threads: int | None = None,
) -> Path:
    """Compare the engines of a set with their graphs.

    Writes the report to `out`, which is returned. tolerance: the largest error of an output, relative to its magnitude.
    limits: used where the engines do not say for which they were built.

    Raises CheckError naming engine, sizes, output, error and tolerance for the first engine over it, when all are
    compared, and then writes the report to `<out>.failed.json`; InputError for inputs that do not fit together, or a
    precision that ONNX Runtime lacks.
    """
    engines = EngineSet.open(engines_json, assembly_json)
    weights, assembly = Weights.open(weights_json), engines.assembly
    if assembly.precision not in PRECISIONS:
        raise InputError(
            f"{assembly_json}: precision: expected one of {', '.join(PRECISIONS)}, which ONNX "
            f"Runtime computes in, found {assembly.precision!r}"
        )
    if weights.precision != assembly.precision:
        raise InputError(
            f"{weights_json}: precision: expected {assembly.precision} as in the assembly, "
            f"found {weights.precision}; give the weights of this precision"
        )
    graphs = dict(engines.backend.graphs(assembly, engines.manifest.options))
    compared: dict[str, ComparedEngine] = {}
    failures: list[str] = []
    with _torch_left_out():
        for name in (name for name in engines.names() if not isinstance(graphs[name], RopeGraph)):
            pair = _Pair(engines, weights, Path(assembly_json).parent, name, graphs[name], limits, threads)
            compared[name] = pair.compare(tolerance)
            failures += pair.failures[:1]
    report = ComparisonReport(
        result=PASS,
        backend=engines.backend.name,
        precision=assembly.precision,
        engine_digest=engines.digest(),
        versions={
            engines.backend.name: engines.backend.version(),
            "onnxruntime": onnxruntime.__version__,
            "polygraphy": polygraphy.__version__,
        },
        seed=inputs.SEED,
        tolerance=tolerance,
        engines=compared,
        relative_error=largest([entry.relative_error for entry in compared.values()]),
    )
    more = f" ({len(failures) - 1} more of {len(compared)} engines differ)" if len(failures) > 1 else ""
    return finish(out, report, failures[0] + more if failures else None)


@contextlib.contextmanager
def _torch_left_out() -> Iterator[None]:
    """Let PyTorch look as if it were not installed, unless it is loaded already.

    Polygraphy imports it, which takes most of the time of a comparison, to ask of each array whether it is a tensor.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


class _Pair:
    """An engine and its graph, with the weights of one layer.

    `failures` are lines, in the order in which they were found.
    """

    def __init__(
        self,
        engines: EngineSet,
        weights: Weights,
        folder: Path,
        name: str,
        graph: GraphFile,
        limits: Limits,
        threads: int | None,
    ):
        self.name, self.file = name, engines.file(name)
        self._assembly, self._limits = engines.assembly, inputs.limits_of(engines.manifest.options, limits)
        ranks = engines.assembly.tensor_parallel
        variants = engines.assembly.variants if ranks is None else ranks.variants
        self._variant = variants.get(name.rpartition(".")[0])
        self._model = onnx.load(graph_file(folder, graph))
        block = name
        if isinstance(graph, BaseGraph):
            self._model, block = without_adapters(self._model), graph.block
        slots, layer = graph.signature.slots, None
        tensors: Mapping[str, Sequence[str]] = {}
        source: Tensors = weights
        if slots:
            layer, part = _place(engines.assembly, block)
            whole = engines.assembly.classes[part.graph].signature.slots
            check_slots(weights, part.slots, whole, part.graph)
            tensors = part.slots
            if part.graph != block:  # a piece, with the weights of the first rank
                assert ranks is not None
                source = RankWeights(weights, part.slots, whole, ranks.classes[part.graph], 0)
                tensors = {slot.name: [slot.name] for slot in slots}
        self._layer, self._slots = layer, tensors
        self._signature = signature_of(self._model.graph, tensors)

        def place(slots: Sequence[IO], tensors: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
            """Return what each slot takes, but for rows that adapters are written to."""
            shape = lambda slot: (-1, *slot.sizes[1:]) if rows_of(slot.name) else slot.sizes
            return {slot.name: slot_array(source, tensors[slot.name], shape(slot)) for slot in slots}

        session = open_session(self._model.SerializeToString(), threads)
        self._weights = place(slots, tensors)
        self._graph = BoundRunner("graph", self._signature.inputs, session, self._weights)
        built = engines.tensors(name, tensors)
        if own := _own_runner(engines.backend.name):
            placed = place(engines.slots(name), built)
            self._engine = own(self.file, self._signature.inputs, placed, threads)
        else:
            bound: Any = engines.load(name, threads).bind(source if built else None, built)
            self._engine = lambda profile: HostRunner("engine", self._signature, bound)
        self.failures: list[str] = []

    def compare(self, tolerance: float) -> ComparedEngine:
        """Return the engine's entry in the report."""
        runs: list[ComparedRun] = []
        for case in inputs.cases(self._model, self._assembly, self._limits, self._variant):
            feed = inputs.arrays(self._model, self._slots, case, self._assembly, self._limits, self._variant)
            errors = self._run(case.profile, feed, tolerance)
            outputs = {output: error.of for output, error in errors.items()}
            runs.append(ComparedRun(case.profile, case.sizes, outputs, tuple(case.past_lengths) or None))
            self.failures += [
                f"{self.file}: engine {self.name}, profile {case.profile} ({case}), {output}: {error}"
                for output, error in errors.items()
                if not error
            ]
        found = [error for run in runs for error in run.outputs.values()]
        finite = [error.cosine for error in found if error.cosine is not None]
        return ComparedEngine(
            max_abs_error=largest([error.max_abs_error for error in found]),
            relative_error=largest([error.relative_error for error in found]),
            cosine=min(finite) if len(finite) == len(found) else None,
            tolerance=tolerance,
            passed=not self.failures,
            runs=tuple(runs),
            weights_of_layer=self._layer,
        )

    def _run(self, profile: int, feed: Mapping[str, np.ndarray], tolerance: float) -> Mapping[str, Error]:
        def errors(graph: Mapping[str, np.ndarray], engine: Mapping[str, np.ndarray]) -> OrderedDict[str, Error]:
            shapes = [{name: tuple(values.shape) for name, values in outputs.items()} for outputs in (graph, engine)]
            if shapes[0] != shapes[1]:
                raise CheckError(
                    f"{self.file}: expected the outputs {shapes[0]} as of the graph, found "
                    f"{shapes[1]}; build the engines again"
                )
            if not all(np.isfinite(values).all() for values in graph.values()):
                raise CheckError(f"{self.file}: {self._not_finite(feed)}")
            return OrderedDict((name, _error(graph[name], engine[name], tolerance)) for name in graph.keys())

        try:
            with quiet(), np.errstate(invalid="ignore"):  # Polygraphy's statistics of what is not finite
                results = Comparator.run([self._graph, self._engine(profile)], data_loader=[OrderedDict(feed)])
                (judged,) = Comparator.compare_accuracy(results, comparisons=[(0, 1)], compare_func=errors)
        except PolygraphyException as error:
            raise CheckError(f"{self.file}: Polygraphy cannot compare this engine: {one_line(error)}") from error
        ((found,),) = judged.values()
        return found

    def _not_finite(self, feed: Mapping[str, np.ndarray]) -> str:
        overflow = find_overflow(self._model, {**feed, **self._weights})
        if overflow is None:
            found = "expected finite numbers of the graph in ONNX Runtime, found NaN or infinity"
            return f"{found}; are these the model's weights?"
        return overflow.text(self.name, self._layer, self._assembly.residual)


def _error(expected: np.ndarray, found: np.ndarray, tolerance: float) -> Error:
    """Return the error of an output, in units of the output's rms.

    `difference` tells errors relative to it: then nothing is let through because its numbers are small.
    """
    exact, other = expected.astype(np.float64), found.astype(np.float64)
    magnitude = float(np.sqrt(np.mean(exact * exact)))
    unit, peak = magnitude or 1.0, float(np.abs(exact).max(initial=0))
    scaled = difference(exact / unit, other / unit)
    absolute = None if scaled.max_abs_error is None else scaled.max_abs_error * unit
    return Error(OutputError(magnitude, absolute, scaled.relative_error, scaled.cosine), tolerance, peak)


def _place(assembly: Assembly, name: str) -> tuple[int | None, BoundBlock]:
    """Return (layer, part) of a class, or of a class that has this piece.

    Of the first layer that has it as a block, of the last that has it as the exit; None is the embedding.
    """
    layers = list(enumerate(assembly.layers))
    parts = [
        (None, assembly.embedding),
        *((i, layer.block) for i, layer in layers),
        *((i, layer.exit) for i, layer in reversed(layers)),
    ]
    ranks = assembly.tensor_parallel
    has = {
        class_: [piece.graph for piece in entry.pieces] for class_, entry in (ranks.classes if ranks else {}).items()
    }
    return next((layer, part) for layer, part in parts if name in has.get(part.graph, [part.graph]))


def _own_runner(backend: str) -> Callable[..., Callable[[int], BaseRunner]] | None:
    """Return `open_engine` of the backend's module `comparison`.

    It is given the engine's file, the graph's inputs but the weights, the weights by input, and how many threads, and
    gives what makes a runner for an optimization profile. None for a backend whose engines run on NumPy arrays and at
    any size.
    """
    module = _COMPARISON.replace("*", backend)
    return importlib.import_module(module).open_engine if importlib.util.find_spec(module) else None
