"""The validate stage: how far the graphs are from torch.

Graphs, weights and the model's config in; a report out. Checks run from cheap to expensive and stop at the first error:
inputs and outputs as declared, ONNX checker, Polygraphy's lint, each layer teacher-forced on short sequences, then
after long synthetic caches up to the limits, then the whole forward through Polygraphy's Comparator.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from polygraphy.backend.base import BaseRunner

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.reports import (
    PASS,
    BlockErrors,
    CacheError,
    GraphChecks,
    Linted,
    LongContext,
    ValidatedGraphs,
    ValidationReport,
)
from lockstep.errors import CheckError, InputError
from lockstep.export.decoder_layers import only_layers
from lockstep.onnx_tools.judge import max_abs_error, wrong
from lockstep.tolerances import Tolerances
from lockstep.verify.boundaries import config_lengths, edges, synthetic_past
from lockstep.verify.graphs import Graph, Graphs
from lockstep.verify.metrics import finish, or_infinity
from lockstep.verify.records import Record
from lockstep.verify.rounded import noisy
from lockstep.verify.validate.beyond import check_adapter_slots, check_magnitudes
from lockstep.verify.validate.parity import embedding_error, forward, layer_errors, where, wrong_layers
from lockstep.verify.validate.polygraphy_checks import FunctionRunner, check_model, compare, lint
from lockstep.verify.validate.torch_choices import TorchChoices
from lockstep.verify.validate.torch_trace import TorchModel
from lockstep.weights import Weights

_CHUNK_TOKENS = 3  # after a long cache: before an edge, at it and after it
_WIDEST = 256  # the widest sliding window for which a sequence is longer: time grows with its square
_TEXT = "The river comes down from the hills, and the town lies where it is wide and slow."


def run(
    assembly_json: Path,
    weights_json: Path,
    checkpoint_json: Path,
    layers: int | str,
    tolerance: Tolerances,
    max_seq_len: int,
    out: Path,
    model: str | None = None,
    threads: int | None = None,
) -> Path:
    """Validate the graphs of an assembly cut after `layers` layers (or "all").

    Writes the report to `out`, which is returned.

    tolerance: of layers' outputs and of logits. max_seq_len: the most tokens of a request. model: its name in the
    report, by default the last part of the checkpoint's source. threads: None takes all cores.

    Raises CheckError, which names the first layer that is off, and then writes the report to `<out>.failed.json`
    instead; InputError for inputs that do not fit together.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = CheckpointManifest.load(checkpoint_json)
    assembly = Assembly.load(assembly_json)
    target = ValidatedGraphs(model or Path(checkpoint.source).name, assembly.precision, layers)
    if assembly.tensor_parallel is not None:  # a sum over ranks rounds each rank's part, and then all: twice as often
        tolerance = replace(tolerance, noise=math.sqrt(2) * tolerance.noise)
    results: dict[str, Any] = {"first_failing_layer": None}
    failure = None
    try:
        graphs = Graphs(Path(assembly_json), assembly, Weights.open(weights_json), layers, threads)
        _Validation(graphs, checkpoint.config, tolerance, results).check(layers, max_seq_len, threads)
    except CheckError as error:
        failure = str(error)
    return finish(out, ValidationReport(result=PASS, target=target, **results), failure)


class _Validation:
    """The checks of graphs. results: entries of the report, filled as far as the checks get, also where one fails."""

    def __init__(self, graphs: Graphs, config: Mapping[str, Any], tolerance: Tolerances, results: dict[str, Any]):
        self._graphs = graphs
        self._config = config
        self._tolerance = tolerance
        self._results = results
        self._choices: TorchChoices | None = None  # followed where the graphs fail without them
        variants = graphs.assembly.variants
        self._windows = {variants[layer.variant].window for layer in graphs.layers if layer.variant in variants} - {0}

    def check(self, layers: int | str, max_seq_len: int, threads: int | None) -> None:
        """Check everything. Raises CheckError for the first thing wrong."""
        graphs = self._graphs
        self._results["unused_tensors"] = tuple(graphs.weights.unused(_bound_tensors(graphs.assembly)))
        self._checker: dict[str, str] = {}
        self._linted: dict[str, Linted] = {}
        self._results["checks"] = GraphChecks(self._checker, self._linted)
        for name, graph in graphs.graphs().items():
            self._check_graph(name, graph)
        self._torch = TorchModel(self._config, graphs.weights, layers)
        records = [self._torch.record(token_ids) for token_ids in self._sequences()]
        try:
            self._check_values(records, max_seq_len, threads)
            return
        except CheckError as error:
            failure = error.with_traceback(None)  # whose frames keep models in memory
        self._choices = TorchChoices.open(graphs, self._tolerance, threads)
        if self._choices is None:
            raise failure
        self._results["first_failing_layer"] = None
        for name in ("long_context", "forward"):
            self._results.pop(name, None)
        self._check_values(records, max_seq_len, threads)

    def _check_values(self, records: list[Record], max_seq_len: int, threads: int | None) -> None:
        """Check what the graphs compute. Raises CheckError for the first that is off."""
        self._check_layers(records)
        check_adapter_slots(self._graphs, self._torch, records, self._tolerance)
        check_magnitudes(self._graphs, self._torch, records[-1], self._choices)
        self._check_long_contexts(records[0], max_seq_len)
        self._check_forward(records, threads)

    def _check_graph(self, name: str, graph: Graph) -> None:
        inputs = [*graph.inputs, *graph.slots]
        check_model(graph.path, graph.model)
        self._checker[name] = PASS
        with graph.plain_file() as file:
            self._linted[name] = lint(graph.path, file, inputs)

    def _sequences(self) -> list[np.ndarray]:
        """Return token sequences: seeded random ids of several lengths, one of them 1, and a real text's.

        One goes beyond each of the sliding windows of at most _WIDEST tokens.
        """
        assembly = self._graphs.assembly
        if assembly.tokenizer is None:
            raise InputError(
                f"{self._graphs.path}: expected a tokenizer, found none; put tokenizer.json into the checkpoint"
            )
        tokenizer = tokenizers.Tokenizer.from_file(str(self._graphs.path.with_name(assembly.tokenizer.file)))
        text = [token for token in tokenizer.encode(_TEXT).ids if token < assembly.vocab_size]
        longest = assembly.max_position_embeddings or 64
        random = np.random.default_rng(0)
        beyond = sorted({window + 3 for window in self._windows if window <= _WIDEST})
        lengths = dict.fromkeys(min(length, longest) for length in (1, 2, 7, 33, *beyond))
        sequences = [random.integers(0, assembly.vocab_size, length) for length in lengths]
        if text:  # else no token of the text is in the model's vocabulary
            sequences.append(np.array(text[:longest], np.int64))
        return sequences

    def _check_layers(self, records: list[Record]) -> None:
        """Check the embedding on the whole vocabulary, and each layer, teacher-forced. Raises CheckError."""
        graphs = self._graphs
        tolerance = self._tolerance
        embedding = embedding_error(graphs, self._torch.embed, self._torch.noisy_embed, tolerance)
        pairs = [(record, self._torch.noisy(record)) for record in records]
        errors, overflow = layer_errors(graphs, pairs, tolerance, choices=self._choices)
        self._results |= {
            "embedding": BlockErrors(graphs.embedding.graph, {"hidden": embedding}),
            "blocks": tuple(errors[:-1]),
            "exit": errors[-1],
        }
        if embedding.max_abs_error is None:
            token_ids = np.concatenate([record.token_ids for record in records])
            if beyond := graphs.overflow(graphs.embedding, {"token_ids": token_ids}, None):
                raise CheckError(beyond)
        if line := wrong("hidden", embedding):
            raise CheckError(f"embedding ({graphs.embedding.graph}): {line}")
        if overflow:
            self._results["first_failing_layer"], beyond = overflow
            raise CheckError(beyond)
        self._check_errors(errors, "")

    def _check_errors(self, errors: list[BlockErrors], context: str) -> None:
        """Raise CheckError for the first tensor that is off by too much, and note its layer."""
        for entry, line in wrong_layers(errors):
            self._results["first_failing_layer"] = entry.layer
            raise CheckError(f"{where(entry)}: {context}{line}")

    def _check_long_contexts(self, short: Record, max_seq_len: int) -> None:
        """Check each kind of layer after long synthetic caches, teacher-forced. Raises CheckError.

        Caches end at the edges of pages, windows, RoPE lengths and of `max_seq_len`. The layers are the first ones that
        have each block class with each attention; `short` has the shapes of their keys and values. Every second cache
        has `max_seq_len` rows, the others have just enough. Layers with a state have no cache.
        """
        if not any(len(layer.keys) for layer in short.layers):
            return
        assembly = self._graphs.assembly
        pairs = [(layer.block.graph, layer.variant) for layer in self._graphs.layers]
        count = 1 + assembly.layer_numbers[max(pairs.index(pair) for pair in pairs)]
        lengths = config_lengths(self._config) | self._windows
        random = np.random.default_rng(0)
        usual = self._results["blocks"]
        caches = list[CacheError]()
        self._results["long_context"] = LongContext(max_seq_len, count, ())
        pasts = sorted({min(edge - 1, max_seq_len - _CHUNK_TOKENS) for edge in edges(max_seq_len, lengths)})
        with only_layers(self._torch.model, range(count)):
            for number, num_past in enumerate(pasts):
                if num_past < 1:
                    continue
                past: list[tuple[np.ndarray, np.ndarray] | None] = []
                for layer in short.layers:
                    if layer.layer < count and len(layer.keys):
                        dims = layer.keys.shape[2], layer.values.shape[2]
                        past.append(synthetic_past(random, num_past, layer.keys.shape[1], dims, lengths))
                    elif layer.layer < count:  # a mixer with a state
                        past.append(None)
                record = self._torch.record(random.integers(0, assembly.vocab_size, _CHUNK_TOKENS), past)
                noise = self._torch.noisy(record, past)
                capacity = number % 2 * max_seq_len
                errors, _ = layer_errors(
                    self._graphs, [(record, noise)], self._tolerance, None, capacity, usual, self._choices
                )
                # The error that is largest relative to its tolerance.
                worst = max(
                    itertools.chain.from_iterable(entry.tensors.values() for entry in errors),
                    key=lambda error: or_infinity(error.relative_error) / error.tolerance,
                )
                caches.append(CacheError(num_past, worst.relative_error, worst.noise, worst.tolerance))
                self._results["long_context"] = LongContext(max_seq_len, count, tuple(caches))
                self._check_errors(errors, f"after {num_past} cached tokens, ")

    def _check_forward(self, records: list[Record], threads: int | None) -> None:
        """Check whole sequences, free, through Polygraphy: the chain of graphs, and the uncut one.

        Sequences end where rounding may decide a choice: a right graph may choose otherwise from there on.
        """
        graphs = self._graphs
        counts = [len(record.token_ids) for record in records]
        if self._choices:
            counts = self._choices.before_ties(counts)
        inputs = self._graphs.forward_inputs()

        def split(feed: Mapping[str, np.ndarray]) -> np.ndarray:
            return forward(graphs, feed["hidden"], feed["position_ids"], feed["logit_rows"])

        feeds = [
            {
                "hidden": record.embedded[:count].astype(graphs.hidden_dtype),
                "position_ids": record.position_ids[:count],
                "logit_rows": record.position_ids[:count],
            }
            for record, count in zip(records, counts)
            if count
        ]
        logits: dict[bytes, np.ndarray] = {}
        noise = 0.0  # the largest error of a logit in this precision
        for feed in feeds:
            hidden = feed["hidden"]
            exact = self._torch.logits(hidden)
            logits[hidden.tobytes()] = exact
            rounded = noisy(exact, functools.partial(self._torch.logits, hidden))
            noise = max(noise, self._tolerance.rounding * max_abs_error(exact, rounded))
        del self._torch  # before all weights are read for the uncut graph
        gc.collect()
        uncut = graphs.uncut(threads)

        def expected(feed: Mapping[str, np.ndarray]) -> np.ndarray:
            return logits[feed["hidden"].tobytes()][feed["logit_rows"]]

        runners: list[BaseRunner] = [FunctionRunner("split", inputs, split)]
        if uncut is not None:
            self._check_graph("batchful", uncut)
            runners.append(FunctionRunner("batchful", inputs, _uncut_logits(graphs, uncut)))
        runners.append(FunctionRunner("torch", inputs, expected))
        bound = self._tolerance.noise * noise
        self._results["forward"] = errors = compare(runners, feeds, bound, noise)
        for runner, error in errors.items():
            if not error.passed:
                raise CheckError(
                    f"whole forward ({runner}): every layer alone is within tolerance, but the logits together "
                    f"differ by {error.max_abs_error}, expected at most {bound:.3g}"
                )


def _uncut_logits(graphs: Graphs, uncut: Graph) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
    # Read when the graph runs first: together they are the whole model.
    weights = functools.cache(functools.partial(graphs.uncut_weights, uncut))
    return lambda feed: uncut.run({io.name: feed[io.name] for io in uncut.inputs}, weights())["logits"]


def _bound_tensors(assembly: Assembly) -> list[str]:
    parts = [assembly.embedding]
    for layer in assembly.layers:
        parts += layer.parts
    tensors: list[str] = []
    for part in parts:
        tensors += itertools.chain.from_iterable(part.slots.values())
    return tensors
