"""An engine and its graph, compared with the weights of one layer.

An engine set and the name of an engine in; the engine's entry in the report, and a line for each error, out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from lockstep.artifacts.assembly import Assembly, BoundBlock, GraphFile
from lockstep.artifacts.reports import ComparedEngine, ComparedRun, SweptSizes
from lockstep.artifacts.signature import IO, concrete_shape
from lockstep.backends.cpu import thread_count
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.graphs import BaseGraph, graph_file
from lockstep.backends.profiles import LIMITS, profiles
from lockstep.errors import CheckError
from lockstep.onnx_tools import judge
from lockstep.onnx_tools.adapted_graphs import WithoutAdapters
from lockstep.onnx_tools.judge import rows_of
from lockstep.onnx_tools.overflow import LARGEST, find_overflow, with_infinities
from lockstep.onnx_tools.signature import signature_of
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.onnx_tools.widened import widened
from lockstep.progress import steps
from lockstep.step.activations import with_activations
from lockstep.step.executable import run_once
from lockstep.targets import Limits
from lockstep.tolerances import DECISIVE_ROWS, ENOUGH, Tolerances
from lockstep.verify.compare import inputs
from lockstep.verify.compare.noisy_run import NoisyRun, bound_of
from lockstep.verify.compare.rows import EarlierRows, Rows
from lockstep.verify.compare.sweep import sweep_of
from lockstep.verify.compare.trial import Arrays, Sweep, Trial
from lockstep.verify.metrics import largest, smallest
from lockstep.verify.noisy_graph import tolerances_of
from lockstep.weights import Tensors, Weights, check_slots, slot_array
from lockstep.weights.ranks import RankWeights


class Pair:
    """An engine and its graph, with the weights of one layer. failures: lines."""

    def __init__(
        self,
        engines: EngineSet,
        weights: Weights,
        folder: Path,
        name: str,
        graph: GraphFile,
        limits: Limits,
        threads: int | None,
        seed: int = 0,
    ):
        self.name = name
        self.file = engines.file(name)
        self._folder = folder
        self._threads = threads
        # On a CPU, CPU time: how many sizes are tried must not depend on what else the machine does. An engine on a GPU
        # takes none, but the graph that it is compared with does, on all cores.
        self._clock = time.monotonic
        self._clock_rate = 1
        if engines.backend.on_host:
            self._clock = time.process_time
            self._clock_rate = thread_count(threads)
        self._seed = int(engines.manifest.engines[name].sha256[:16], 16) + seed
        self._assembly = engines.assembly
        # Those that the engines were built for; `limits` where they take any size.
        options = engines.manifest.options
        self._limits = replace(limits, **{name: options[name] for name in LIMITS if name in options})
        ranks = engines.assembly.tensor_parallel
        variants = (ranks or engines.assembly).variants
        self._variant = variants.get(name.rpartition(".")[0])
        self._model = onnx.load(graph_file(folder, graph))
        block = name
        if isinstance(graph, BaseGraph):
            self._model = run_passes(self._model, WithoutAdapters())
            block = graph.block
        slots = graph.signature.slots
        self._layer, source, tensors = _layer_weights(engines.assembly, weights, block, slots)
        computed = widened(self._model)  # ONNX Runtime has no bf16 on a CPU
        self._compared = inputs.ComparedGraph(computed, self._assembly, self._limits, tensors, self._variant)
        self._signature = signature_of(computed.graph, tensors)
        self._weights = {slot.name: slot_array(source, tensors[slot.name], slot.sizes) for slot in slots}
        self._run_graph = NoisyRun(self._model, self._weights, threads)
        built = engines.tensors(name, tensors)
        bound_source = None
        if built:
            bound_source = source
        self._executable = engines.load(name, threads).bind(bound_source, built)
        run = with_activations(engines.assembly, engines.backend.activations)
        self._is_narrow = engines.assembly.dtype == "float32" and run.dtype == "float16"
        self.failures: list[str] = []

    def compare(self, tolerance: Tolerances, seconds: float) -> ComparedEngine:
        """Return the engine's entry in the report. Only once: the engine is closed afterwards."""
        if not self._weights:
            tolerance = tolerance.of_attention
        tolerance = tolerances_of(self._model, tolerance)
        tried = list[Trial]()
        worst: ComparedRun | None = None
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                runs = [self._run_case(case, tolerance) for case in inputs.cases(self._compared)]
                sweep = self.sweep()
                if not self.failures:
                    tried, worst = self._run_sizes(sweep, tolerance, seconds)
        finally:
            del self._executable  # frees its device memory now, not when the garbage collector runs
        errors = list(itertools.chain.from_iterable(run.outputs.values() for run in [*runs, worst] if run))
        worst_error = max(errors, key=judge.share)
        return ComparedEngine(
            max_abs_error=largest([error.max_abs_error for error in errors]),
            relative_error=worst_error.relative_error,
            cosine=smallest([error.cosine for error in errors]),
            tolerance=worst_error.tolerance,
            passed=not self.failures,
            runs=tuple(runs),
            sizes=SweptSizes(len(sweep.trials), len(tried), worst, *sweep.tried(tried)),
            weights_of_layer=self._layer,
        )

    def sweep(self) -> Sweep:
        """Return the trials of sizes between those of profiles, in the order that the seed draws."""
        largest_number = math.inf
        if self._is_narrow:
            largest_number = LARGEST
        return sweep_of(self._compared, self._seed, self._run_graph, self._prefill, largest_number)

    def run_engine(self, feed: Arrays, profile: int) -> Arrays:
        """Return the engine's outputs, in one optimization profile, as the runtime runs it."""
        sizes: dict[str, int] = {}
        for io in self._signature.inputs:
            sizes.update((str(dim), size) for dim, size in zip(io.shape, feed[io.name].shape))
        like = {io.name: np.empty(concrete_shape(io.shape, sizes), io.numpy_dtype) for io in self._signature.outputs}
        return run_once(self._executable, feed, like, profile)

    def _run_case(self, case: inputs.Case, tolerance: Tolerances) -> ComparedRun:
        feed = inputs.arrays(self._compared, case)
        expected = self._run_graph(feed)
        outputs = self.run_engine(feed, case.profile)
        run, lines = self._judged(case, feed, Rows(expected, outputs), tolerance)
        self.failures += lines
        return run

    def _run_sizes(self, sweep: Sweep, tolerance: Tolerances, seconds: float) -> tuple[list[Trial], ComparedRun | None]:
        """Run the engine at all sizes, until the first is wrong or the time is over.

        Returns the trials that were run, and the worst run. Rows with the same bits as in an earlier trial pass.
        """
        end = self._clock() + seconds * self._clock_rate
        tried = list[Trial]()
        worst = None
        earlier = EarlierRows()
        all_profiles = profiles(self._model, self._limits)
        for trial in steps(sweep.trials, f"compare {self.name}", "sizes"):
            if self._clock() > end:
                break
            feed = sweep.feed(trial)
            shapes = {name: array.shape for name, array in feed.items()}
            # The first profile that takes these shapes, as at run time.
            number = next(number for number, profile in enumerate(all_profiles) if inputs.takes(profile, shapes))
            outputs = self.run_engine(feed, number)
            tried.append(trial)
            # A row whose bits an earlier trial had was judged there. Trials at the end of the precision, or at far
            # positions, are always judged.
            is_row_wise = sweep.is_row_wise and not trial.scaled and not trial.is_far
            if is_row_wise and earlier.has(trial, outputs):
                continue
            run = self._judged_size(sweep, trial, number, feed, outputs, tolerance)
            if self.failures:
                return tried, run
            if worst is None or _largest_share(run) > _largest_share(worst):
                worst = run
            if is_row_wise:
                earlier.keep(trial, outputs)
        return tried, worst

    def _judged_size(
        self, sweep: Sweep, trial: Trial, profile: int, feed: Arrays, outputs: Arrays, tolerance: Tolerances
    ) -> ComparedRun:
        """Judge an engine's outputs of a trial; errors are added to `failures`.

        If only the rms is too large, and of a small number of rows, other rows follow in calls of the same sizes, until
        nine of ten pass or there are enough to decide.
        """
        case = replace(trial.case, profile=profile)
        rows = self._rows(sweep, trial, feed, outputs)
        trials_of_other_rows = sweep.with_other_rows(trial)
        calls = 1
        while True:
            next_trials: list[Trial] = []
            enough = ENOUGH
            if rows.count < DECISIVE_ROWS:
                next_trials = list(itertools.islice(trials_of_other_rows, calls))
            if next_trials:  # strict on few rows, because more may follow
                enough = 1
            run, lines = self._judged(case, feed, rows, tolerance, enough)
            is_rms = all(judge.share(error) <= 1 for error in run.outputs.values())
            if not (next_trials and lines and is_rms):
                self.failures += lines
                return run
            for next_trial in next_trials:
                feed = sweep.feed(next_trial)
                outputs = self.run_engine(feed, profile)
                rows += self._rows(sweep, next_trial, feed, outputs)
            calls += len(next_trials)

    def _rows(self, sweep: Sweep, trial: Trial, feed: Arrays, outputs: Arrays) -> Rows:
        """Return a trial's rows, of which those that go to the end of float16 are infinite where the graph's are."""
        expected = dict(sweep.expected(trial))
        beyond = sweep.beyond(trial)
        is_finite = all(np.isfinite(array).all() for array in outputs.values())
        if beyond is not None and not is_finite and self._assembly.dtype == "float16":
            for name, array in with_infinities(self._model, {**feed, **self._weights}).items():
                is_lost = beyond & ~np.isfinite(rows_of(array)).all(1)
                expected[name] = expected[name].copy()
                expected[name][is_lost] = np.inf
        return Rows(expected, outputs, beyond)

    def _judged(
        self, case: inputs.Case, feed: Arrays, rows: Rows, tolerance: Tolerances, enough: int = ENOUGH
    ) -> tuple[ComparedRun, list[str]]:
        """Return the errors of rows, and a line for each that fails.

        feed: of the last rows. enough: rows whose rms is bounded.
        """
        judged_rows = self._judged_rows(rows, tolerance)
        if judged_rows is not None:
            rows = rows.take(judged_rows)
        expected = rows.expected
        # For each output: the rows of a state are not tokens.
        finite = {name: np.isfinite(rows_of(expected[name])).all(1) for name in rows.outputs}
        may_overflow = np.False_ if rows.beyond is None else rows.beyond
        if not all((array | may_overflow).all() for array in finite.values()):
            raise CheckError(f"{self.file}: {self._not_finite(feed)}")
        errors = {
            name: judge.measure(
                expected[name][finite[name]],
                array[finite[name]],
                bound_of(expected, name, tolerance, finite[name], enough),
            )
            for name, array in rows.outputs.items()
        }
        place = f"{self.file}: engine {self.name}, profile {case.profile} ({case})"
        lines = [judge.wrong(name, error, " of the output's magnitude") for name, error in errors.items()]
        run = ComparedRun(case.profile, case.sizes, errors, tuple(case.past_lengths) or None)
        return run, [f"{place}, {line}" for line in lines if line]

    def _judged_rows(self, rows: Rows, tolerance: Tolerances) -> np.ndarray | None:
        """Return which rows are judged, bool [rows]; None for all.

        Not those with a near-tie between experts; nor, at the end of the precision, those where the engine's float16
        overflows and the graph's float32 does not.
        """
        clear = self._run_graph.clear_rows(rows.expected, tolerance)
        if not self._is_narrow or rows.beyond is None:
            return clear
        finite = np.all([np.isfinite(rows_of(array)).all(1) for array in rows.outputs.values()], axis=0)
        in_range = finite | ~rows.beyond
        if clear is None:
            return in_range
        return clear & in_range

    def _not_finite(self, feed: Arrays) -> str:
        overflow = find_overflow(self._model, {**feed, **self._weights})
        if overflow is None:
            return (
                "expected finite numbers of the graph in ONNX Runtime, found NaN or infinity; are these the model's "
                "weights?"
            )
        return overflow.text(self.name, self._layer, self._assembly.residual)

    def _prefill(self) -> tuple[onnx.ModelProto, Callable[[Arrays], Arrays]]:
        """Return the prefill graph of this attention, the reference of decode too, and its runner."""
        assert self._variant is not None
        model = onnx.load(graph_file(self._folder, self._variant.phases()["prefill"]))
        return widened(model), NoisyRun(model, {}, self._threads)


def _largest_share(run: ComparedRun) -> float:
    return max(map(judge.share, run.outputs.values()))


def _layer_weights(
    assembly: Assembly, weights: Weights, block: str, slots: Sequence[IO]
) -> tuple[int | None, Tensors, Mapping[str, Sequence[str]]]:
    """Return (layer, tensors, {slot: names of tensors}) of a layer that has this block, or this piece of one."""
    if not slots:
        return None, weights, {}
    layer, part = _find_part(assembly, block)
    class_slots = assembly.classes[part.graph].signature.slots
    check_slots(weights, part.slots, class_slots, part.graph)
    if part.graph == block:
        return layer, weights, part.slots
    assert assembly.tensor_parallel is not None  # else no block has pieces
    first_rank = RankWeights(weights, part.slots, class_slots, assembly.tensor_parallel.classes[part.graph], 0)
    return layer, first_rank, {slot.name: [slot.name] for slot in slots}


def _find_part(assembly: Assembly, name: str) -> tuple[int | None, BoundBlock]:
    """Return (layer, part) of a class, or of a class that has this piece; layer None: the embedding."""
    layers = list(enumerate(assembly.layers))
    parts: list[tuple[int | None, BoundBlock]] = [(None, assembly.embedding)]
    parts += [(i, layer.block) for i, layer in layers]
    # Of exits the last: those of earlier layers are only run by a model that is cut there.
    for i, layer in reversed(layers):
        parts += [(i, exit) for exit in layer.exits]
    graphs = {part.graph: {part.graph} for _, part in parts}
    if assembly.tensor_parallel is not None:
        for class_, entry in assembly.tensor_parallel.classes.items():
            graphs[class_] = {piece.graph for piece in entry.pieces}
    return next((layer, part) for layer, part in parts if name in graphs[part.graph])
