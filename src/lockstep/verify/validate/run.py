"""The validate stage: how far the graphs are from torch.

Graphs, weights and the model's config in; a report out.

The order is from cheap to dear, so that the first thing wrong is the thing reported: inputs and outputs as declared,
ONNX checker, Polygraphy's lint and inspect, each layer teacher-forced on short sequences, then behind long synthetic
caches up to the length that the limits allow, then the whole forward through Polygraphy's Comparator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from polygraphy.backend.base import BaseRunner

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.dtypes import has_8_bit_activations
from lockstep.artifacts.reports import (
    PASS,
    BlockErrors,
    CacheError,
    GraphChecks,
    LongContext,
    TensorError,
    ValidatedGraphs,
    ValidationReport,
)
from lockstep.errors import CheckError, InputError
from lockstep.export.tracer import only_layers
from lockstep.onnx_tools.comparator import BoundRunner
from lockstep.onnx_tools.metrics import max_abs_error
from lockstep.targets import ROUNDING, Tolerances
from lockstep.verify.boundaries import config_lengths, edges, synthetic_past
from lockstep.verify.graphs import Graph, Graphs
from lockstep.verify.metrics import finish, finite
from lockstep.verify.validate.beyond import check_adapter_slots, check_magnitudes
from lockstep.verify.validate.parity import (
    LayerErrors,
    TensorErrors,
    embedding_error,
    errors_behind,
    forward,
    layer_errors,
)
from lockstep.verify.validate.polygraphy_checks import FunctionRunner, check_model, compare, inspect, lint
from lockstep.verify.validate.torch_trace import Record, TorchModel, sequences
from lockstep.weights import Weights

_NUM_BEHIND = 3  # tokens behind a long cache: at an edge, before it and after it
_TEXT = "The river comes down from the hills, and the town lies where it is wide and slow."


@dataclass
class _Notes:
    """The report so far, which a check that fails writes too."""

    report: ValidationReport

    def note(self, **entries: Any) -> None:
        self.report = replace(self.report, **entries)

    def note_graph(self, name: str, **entries: Any) -> None:
        """Note what a check gave of the graph `name`, under the name of that check."""
        checks = self.report.checks
        assert checks is not None  # it begins with none of any graph
        added = {check: {**getattr(checks, check), name: result} for check, result in entries.items()}
        self.note(checks=replace(checks, **added))


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

    tolerance: which errors pass, of what a layer computes and of logits. max_seq_len: the most tokens of a
    request. model: its name in the report, by default the last part of the checkpoint's source. threads: None takes all
    cores.

    Raises CheckError, which names the first layer that is off, and then writes the report to `<out>.failed.json`
    instead; InputError for inputs that do not fit together.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint, assembly = CheckpointManifest.load(checkpoint_json), Assembly.load(assembly_json)
    target = ValidatedGraphs(model or Path(checkpoint.source).name, assembly.precision, layers)
    if assembly.quantization is not None and not has_8_bit_activations(assembly.precision):
        # such graphs compute in float32, whatever engines do
        tolerance = replace(tolerance, rounding=ROUNDING["fp32"])
    if assembly.tensor_parallel is not None:  # a sum over ranks rounds each rank's part, and then all: twice as often
        tolerance = replace(tolerance, rounding=math.sqrt(2) * tolerance.rounding)
    notes = _Notes(ValidationReport(result=PASS, target=target, first_failing_layer=None))
    try:
        graphs = Graphs(Path(assembly_json), assembly, Weights.open(weights_json), layers, threads)
        notes.note(
            unused_tensors=tuple(graphs.weights.unused(_bound_tensors(assembly))), checks=GraphChecks({}, {}, {})
        )
        for name, graph in graphs.graphs().items():
            _check_graph(name, graph, notes)
        torch_model = TorchModel(checkpoint.config, graphs.weights, layers)
        records = [torch_model.record(token_ids) for token_ids in _sequences(graphs)]
        _check_layers(graphs, torch_model, records, tolerance, notes)
        check_adapter_slots(graphs, torch_model, records, tolerance)
        check_magnitudes(graphs, torch_model, records[-1])
        _check_long_contexts(graphs, torch_model, records[0], checkpoint.config, max_seq_len, tolerance, notes)
        uncut = graphs.uncut(threads)
        if uncut is not None:
            _check_graph("batchful", uncut, notes)
        _check_forward(graphs, uncut, torch_model, records, tolerance, notes)
    except CheckError as error:
        return finish(out, notes.report, str(error))
    return finish(out, notes.report, None)


def _bound_tensors(assembly: Assembly) -> list[str]:
    """Return the tensors that the model's blocks take, at full depth."""
    parts = [assembly.embedding, *(part for layer in assembly.layers for part in layer.parts)]
    return [name for part in parts for names in part.slots.values() for name in names]


def _check_graph(name: str, graph: Graph, notes: _Notes) -> None:
    inputs = [*graph.inputs, *graph.slots]
    check_model(graph.path, graph.model)
    notes.note_graph(name, checker=PASS)
    notes.note_graph(name, inspect=inspect(graph.path, graph.computed, inputs, graph.outputs))
    with graph.plain_file() as file:
        notes.note_graph(name, lint=lint(graph.path, file, inputs))


def _check_layers(
    graphs: Graphs, torch_model: TorchModel, records: list[Record], tolerance: Tolerances, notes: _Notes
) -> None:
    """Check the embedding on the whole vocabulary, and each layer, teacher-forced. Raises CheckError."""
    embedding = embedding_error(graphs, torch_model.embed, torch_model.noisy_embed)
    errors, logits = layer_errors(graphs, [(record, torch_model.noisy(record)) for record in records])
    notes.note(
        embedding=BlockErrors(graphs.embedding.graph, {"hidden": _entry("hidden", embedding, tolerance)}),
        blocks=tuple(_layer_entry(entry, tolerance) for entry in errors),
        exit=BlockErrors(graphs.exit.graph, {"logits": _entry("logits", logits, tolerance)}, graphs.num_layers - 1),
    )
    if embedding.of.max_abs_error is None:
        token_ids = np.concatenate([record.token_ids for record in records])
        if overflow := graphs.overflow(graphs.embedding, {"token_ids": token_ids}, None):
            raise CheckError(overflow)
    if wrong := embedding.wrong("hidden", tolerance):
        raise CheckError(f"embedding ({graphs.embedding.graph}): {wrong}")
    for entry in errors:
        if entry.overflow:
            notes.note(first_failing_layer=entry.layer)
            raise CheckError(entry.overflow)
    _check_errors(errors, tolerance, "", notes)
    if wrong := logits.wrong("logits", tolerance):
        notes.note(first_failing_layer=graphs.num_layers - 1)
        where = f"layer {graphs.num_layers - 1} (block {graphs.exit.graph}, behind the last attention)"
        raise CheckError(f"{where}: {wrong}")


def _check_long_contexts(
    graphs: Graphs,
    torch_model: TorchModel,
    short: Record,
    config: Mapping[str, Any],
    max_seq_len: int,
    tolerance: Tolerances,
    notes: _Notes,
) -> None:
    """Check each kind of layer behind long synthetic caches, teacher-forced.

    These end at the edges of pages, windows, RoPE lengths and of `max_seq_len`. The layers are the first that show each
    block class with each kind; `short` has the shapes of their keys and values. Every second cache has `max_seq_len`
    rows, the others have just enough. Raises CheckError.
    """
    pairs = [(layer.block.graph, layer.variant) for layer in graphs.layers]
    count = 1 + graphs.assembly.layer_numbers[max(pairs.index(pair) for pair in pairs)]
    windows = set(_windows(graphs)) - {0, None}
    lengths = config_lengths(config) | windows
    random = np.random.default_rng(0)
    caches: list[CacheError] = []
    notes.note(long_context=LongContext(max_seq_len, count, ()))
    with only_layers(torch_model.model, range(count)):
        for number, num_past in enumerate(
            sorted({min(edge - 1, max_seq_len - _NUM_BEHIND) for edge in edges(max_seq_len, lengths)})
        ):
            if num_past < 1:
                continue
            past = [
                synthetic_past(
                    random, num_past, layer.keys.shape[1], (layer.keys.shape[2], layer.values.shape[2]), lengths
                )
                if len(layer.keys)
                else None
                for layer in short.layers
                if layer.layer < count
            ]
            record = torch_model.record(random.integers(0, graphs.assembly.vocab_size, _NUM_BEHIND), past)
            noisy = torch_model.noisy(record, past)
            errors = errors_behind(graphs, record, noisy, max_seq_len if number % 2 else 0)
            caches.append(_worst(num_past, errors, tolerance))
            notes.note(long_context=LongContext(max_seq_len, count, tuple(caches)))
            _check_errors(errors, tolerance, f"behind {num_past} cached tokens, ", notes)


def _worst(num_past: int, errors: list[LayerErrors], tolerance: Tolerances) -> CacheError:
    """Return the error that is the largest beside what passes."""
    entries = [_entry(name, error, tolerance) for entry in errors for name, error in entry.tensors.items()]
    worst = max(
        entries, key=lambda entry: math.inf if entry.relative_error is None else entry.relative_error / entry.tolerance
    )
    return CacheError(num_past, worst.relative_error, worst.noise, worst.tolerance)


def _check_errors(errors: list[LayerErrors], tolerance: Tolerances, where: str, notes: _Notes) -> None:
    """Raise CheckError for the first tensor that is off by too much, and note its layer."""
    for entry in errors:
        for name, error in entry.tensors.items():
            if wrong := error.wrong(name, tolerance):
                notes.note(first_failing_layer=entry.layer)
                raise CheckError(f"{entry.where}: {where}{wrong}")


def _sequences(graphs: Graphs) -> list[np.ndarray]:
    vocab_size = graphs.assembly.vocab_size
    if graphs.assembly.tokenizer is None:
        raise InputError(f"{graphs.path}: expected a tokenizer, found none; put tokenizer.json beside the checkpoint")
    tokenizer = tokenizers.Tokenizer.from_file(str(graphs.path.with_name(graphs.assembly.tokenizer.file)))
    prompt = [token for token in tokenizer.encode(_TEXT).ids if token < vocab_size]
    return sequences(vocab_size, graphs.assembly.max_position_embeddings or 64, prompt, _windows(graphs))


def _windows(graphs: Graphs) -> list[int]:
    variants = graphs.assembly.variants
    return [variants[layer.variant].window for layer in graphs.layers if layer.variant in variants]


def _check_forward(
    graphs: Graphs,
    uncut: Graph | None,
    torch_model: TorchModel,
    records: list[Record],
    tolerance: Tolerances,
    notes: _Notes,
) -> None:
    """Check whole sequences, free, through Polygraphy: the chain of graphs, and the uncut one."""
    inputs = graphs.forward_inputs()

    def split(feed: Mapping[str, np.ndarray]) -> np.ndarray:
        return forward(graphs, feed["hidden"], feed["position_ids"], feed["logit_rows"])

    def expected(feed: Mapping[str, np.ndarray]) -> np.ndarray:
        return torch_model.logits(feed["hidden"], feed["position_ids"])[feed["logit_rows"]]

    runners: list[BaseRunner] = [FunctionRunner("split", inputs, split)]
    if uncut is not None:
        assert graphs.assembly.batchful is not None  # it is open
        tensors = graphs.assembly.batchful.tensors
        weights = {slot.name: graphs.slot_array(tensors[slot.name], slot) for slot in uncut.slots}
        runners.append(BoundRunner("batchful", inputs, uncut.session, weights))
    runners.append(FunctionRunner("torch", inputs, expected))
    feeds = [
        {
            "hidden": record.embedded.astype(graphs.hidden_dtype),
            "position_ids": record.position_ids,
            "logit_rows": record.position_ids,
        }
        for record in records
    ]
    noise, bound = _forward_noise(torch_model, feeds, tolerance)
    errors = compare(runners, feeds, bound, noise)
    notes.note(forward=errors)
    for runner, error in errors.items():
        if not error.passed:
            raise CheckError(
                f"whole forward ({runner}): every layer alone is within tolerance, but the logits together "
                f"differ by {error.max_abs_error}, "
                f"expected at most {bound:.3g}"
            )


def _forward_noise(
    torch_model: TorchModel, feeds: Sequence[Mapping[str, np.ndarray]], tolerance: Tolerances
) -> tuple[float, float]:
    """Return what the precision itself costs of a logit of a whole forward, and the error that passes."""
    noise = 0.0
    for feed in feeds:
        given = feed["hidden"], feed["position_ids"]
        right = torch_model.logits(*given)
        noise = max(noise, tolerance.rounding * max_abs_error(right, torch_model.noisy_logits(*given, right)))
    return noise, tolerance.noise * noise if tolerance.logits is None else tolerance.logits


def _layer_entry(errors: LayerErrors, tolerance: Tolerances) -> BlockErrors:
    tensors = {name: _entry(name, error, tolerance) for name, error in errors.tensors.items()}
    return BlockErrors(errors.block, tensors, errors.layer, errors.variant)


def _entry(name: str, errors: TensorErrors, tolerance: Tolerances) -> TensorError:
    bound, noise = errors.bound(name, tolerance), errors.noise * tolerance.rounding
    return TensorError(
        max_abs_error=errors.of.max_abs_error,
        relative_error=finite(errors.error.largest),
        rms_error=finite(errors.error.rms),
        cosine=errors.of.cosine,
        noise=noise.largest,
        rms_noise=noise.rms,
        tolerance=bound.largest,
        rms_tolerance=finite(bound.rms),
    )
