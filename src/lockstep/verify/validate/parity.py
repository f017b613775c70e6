"""Errors of the graphs against torch, by layer.

The graphs of an assembly and recorded sequences in; errors by layer out.

Teacher-forced: each block and each attention gets what torch had there, so that an error shows in the layer that makes
it and in no later one. Free: the embedded tokens go in, and every graph takes what the one before gave. Sequences start
at position 0, or behind a synthetic cache of any length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.errors import CheckError
from lockstep.onnx_tools.metrics import Difference, difference
from lockstep.targets import Tolerances
from lockstep.verify.graphs import Graphs
from lockstep.verify.metrics import off
from lockstep.verify.noise import Spread, block_bound, spread
from lockstep.verify.validate.torch_trace import Record
from lockstep.verify.walk import Tokens, Walk

_PIECE = 4096  # tokens of the vocabulary at a time


@dataclass
class LayerErrors:
    """Errors of one layer by tensor.

    `hidden` (what leaves the layer), then for each phase `<phase>.key_out`, `.value_out`, `.attention`; of a mixer with
    a state `<phase>.state_out`, `.attention`.
    overflow: a line where the block's graph goes beyond float16.
    """

    layer: int
    block: str
    variant: str
    tensors: dict[str, TensorErrors] = field(default_factory=dict)
    overflow: str = ""

    @property
    def where(self) -> str:
        return f"layer {self.layer} (block {self.block}, {self.variant})"


@dataclass(frozen=True)
class TensorErrors:
    """The error of a graph's output beside the noise of fp16 there, both relative to the size of each row."""

    of: Difference
    error: Spread
    noise: Spread

    @classmethod
    def measure(cls, expected: np.ndarray, found: np.ndarray, noisy: np.ndarray) -> TensorErrors:
        return cls(difference(expected, found), spread(expected, found), spread(expected, noisy))

    def wrong(self, name: str, tolerance: Tolerances) -> str | None:
        """Say what is wrong with the tensor; None where its error passes."""
        if name == "logits" and tolerance.logits is not None:
            within = self.of.within(tolerance.logits)
            return None if within else f"{name}: {off(self.of, tolerance.logits)}"
        bound, error = self.bound(name, tolerance), self.error
        if error.within(bound):
            return None
        if self.of.max_abs_error is None:
            return f"{name}: expected finite numbers, found NaN or infinity"
        largest, rms, cosine = f"{error.largest:.3g}", f"{error.rms:.3g}", f"{self.of.cosine:.6f}"
        if error.largest > bound.largest:
            more = f"largest absolute error {self.of.max_abs_error:.3g}, cosine {cosine}"
            return f"{name}: expected an error of at most {bound.largest:.3g}, found {largest} ({more})"
        more = f"largest {largest}, cosine {cosine}"
        return f"{name}: expected an rms error of at most {bound.rms:.3g}, found {rms} ({more})"

    def bound(self, name: str, tolerance: Tolerances) -> Spread:
        """Return the error that passes; that of logits is absolute where the config gives a number."""
        own = replace(tolerance, block=tolerance.logits) if name == "logits" else tolerance
        return block_bound(self.noise, own)


Pairs = Sequence[tuple[Record, Record]]  # what torch computed of a sequence, in float32 and in fp16
Embed = Callable[[np.ndarray], np.ndarray]


def embedding_error(graphs: Graphs, embed: Embed, noisy: Embed) -> TensorErrors:
    """Return the largest error of the embedding graph, on the whole vocabulary. embed, noisy: torch's."""
    pieces = []
    for first in range(0, graphs.assembly.vocab_size, _PIECE):
        token_ids = np.arange(first, min(first + _PIECE, graphs.assembly.vocab_size), dtype=np.int64)
        outputs = graphs.run_block(graphs.embedding, {"token_ids": token_ids})
        pieces.append(TensorErrors.measure(embed(token_ids), outputs["hidden"], noisy(token_ids)))
    worst = max(pieces, key=lambda piece: math.inf if piece.of.max_abs_error is None else piece.error.largest)
    return replace(
        worst, noise=Spread(max(piece.noise.largest for piece in pieces), max(piece.noise.rms for piece in pieces))
    )


def layer_errors(
    graphs: Graphs, records: Pairs, adapter_ids: np.ndarray | None = None
) -> tuple[list[LayerErrors], TensorErrors]:
    """Return the errors of each layer, teacher-forced, and of the logits.

    The logits are those behind the last layer. All sequences run packed, as in a step. adapter_ids: the adapter slot of
    each token, with which torch was recorded; none by default.
    """
    walk = _walk(graphs, records, adapter_ids=adapter_ids)
    errors, last = _errors(walk, records[0][0]), walk.exit()
    errors[-1].overflow = errors[-1].overflow or last.overflow(graphs)
    return errors, TensorErrors.measure(last.expected["logits"], last.outputs["logits"], last.noisy["logits"])


def errors_behind(graphs: Graphs, record: Record, noisy: Record, capacity: int) -> list[LayerErrors]:
    """Return the errors of a record behind a cache of at least `capacity` rows, chunked and decoded."""
    return _errors(_walk(graphs, [(record, noisy)], capacity=capacity), record)


def _walk(graphs: Graphs, pairs: Pairs, **options: Any) -> Walk:
    """Return a walk along recorded sequences, of which the last token is decoded too."""
    mixing = [layer.layer for layer in pairs[0][0].layers]
    if mixing != graphs.assembly.layer_numbers[: len(mixing)]:
        raise CheckError(f"expected token mixers in layers {graphs.assembly.layer_numbers}, found {mixing}")
    return Walk(
        graphs,
        [Tokens(record.token_ids, len(record.token_ids) - 1, record, noisy) for record, noisy in pairs],
        **options,
    )


def _errors(walk: Walk, record: Record) -> list[LayerErrors]:
    errors: list[LayerErrors] = []
    phases = _Phases()
    for run in walk.layers():
        stage = run.stage
        if stage.part == "attention":
            phases.add(stage.phase, run.outputs, run.expected, run.noisy)
            continue
        if errors:
            errors[-1].tensors |= phases.errors()
        if "hidden_out" in run.expected:  # the hidden state that enters this layer and left the one before
            sides = run.expected, run.outputs, run.noisy
            errors[-1].tensors["hidden"] = TensorErrors.measure(*(side["hidden_out"] for side in sides))
        assert stage.layer is not None  # a block's
        variant, layer = walk.graphs.layers[stage.layer].variant, record.layers[stage.layer].layer
        errors.append(LayerErrors(layer, stage.graph, variant, overflow=run.overflow(walk.graphs)))
        phases = _Phases()
    errors[-1].tensors |= phases.errors()
    return errors


class _Phases:
    """What a layer's attention graphs gave, what was expected, and that in fp16, by phase."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], list[tuple[np.ndarray, ...]]] = {}

    def add(
        self,
        phase: str,
        outputs: Mapping[str, np.ndarray],
        expected: Mapping[str, np.ndarray],
        noisy: Mapping[str, np.ndarray],
    ) -> None:
        for name in expected:
            rows = (side[name].reshape(len(expected[name]), -1) for side in (expected, outputs, noisy))
            self._arrays.setdefault((phase, name), []).append(tuple(rows))

    def errors(self) -> dict[str, TensorErrors]:
        """Return {"<phase>.<output>": errors}, in the order in which phases were added.

        The first phase has all rows: where noise is larger there, a phase of some of them is held to that.
        """
        errors: dict[str, TensorErrors] = {}
        usual: dict[str, Spread] = {}
        for (phase, name), arrays in self._arrays.items():
            error = TensorErrors.measure(*(np.concatenate(side) for side in zip(*arrays)))
            noise = usual.setdefault(name, error.noise)
            errors[f"{phase}.{name}"] = replace(error, noise=error.noise | noise)
        return errors


def forward(graphs: Graphs, hidden: np.ndarray, position_ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
    """Return the logits [len(logit_rows), vocab_size] of one whole sequence, free. hidden: its embedded tokens."""

    def attend(index: int, env: Mapping[str, np.ndarray]) -> np.ndarray:
        name = graphs.layers[index].variant
        if (mixer := graphs.assembly.state_mixers.get(name)) is not None:
            state = np.zeros((1, *mixer.state), np.float32)
            feeds = {**{key: env[key] for key in mixer.inputs}, "past_state": state}
            return graphs.run_mixer(name, "prefill", feeds)["attention"]
        variant = graphs.assembly.variants[name]
        past = {
            "past_key": np.zeros((1, variant.num_kv_heads, 1, variant.head_dim), graphs.dtype),
            "past_value": np.zeros((1, variant.num_kv_heads, 1, variant.value_head_dim), graphs.dtype),
            "past_lengths": np.zeros(1, np.int64),
        }
        return graphs.run_mixer(name, "prefill", {**env, **past})["attention"]

    env = {"hidden": hidden, "position_ids": position_ids, "logit_rows": logit_rows}
    return graphs.run_layers(graphs.layers, env, attend)
