"""Errors of the graphs against torch, by layer.

The graphs of an assembly and recorded sequences in; errors by layer out.

Teacher-forced: each block and each attention gets torch's activations there, so that an error shows in the layer that
makes it and in no later one. Free: the embedded tokens go in, and every graph reads the outputs of the one before.
Sequences start at position 0, or after a synthetic cache of any length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep.artifacts.dtypes import has_8_bit_activations
from lockstep.artifacts.reports import BlockErrors, TensorError
from lockstep.errors import CheckError
from lockstep.onnx_tools.judge import NOTHING, Bound, Spread, beside_noise, measure, spread, within, wrong
from lockstep.tolerances import Tolerances
from lockstep.verify.graphs import Graphs, stale_cache
from lockstep.verify.metrics import finite, or_infinity
from lockstep.verify.records import Record
from lockstep.verify.repeats import repeated_rows
from lockstep.verify.walk import Override, StageRun, Tokens, Walk

_PIECE = 4096  # tokens of the vocabulary at a time
_SAMPLE = 256  # tokens of which some repeat
Pairs = Sequence[tuple[Record, Record]]  # torch's activations of sequences, in float32 and in fp16
Embed = Callable[[np.ndarray], np.ndarray]
Pieces = dict[str, list[tuple[np.ndarray, ...]]]  # {output: pieces of rows (expected, actual, in fp16)}


def embedding_error(graphs: Graphs, embed: Embed, noisy: Embed, tolerances: Tolerances) -> TensorError:
    """Return the largest error of the embedding graph. embed, noisy: torch's.

    On the whole vocabulary, and on steps in which tokens of a sample repeat.
    """
    noise = NOTHING
    errors = list[TensorError]()
    size = graphs.assembly.vocab_size
    draw = random.Random(0)
    steps = [np.arange(first, min(first + _PIECE, size), dtype=np.int64) for first in range(0, size, _PIECE)]
    sample = np.array(draw.sample(range(size), min(size, _SAMPLE)), np.int64)
    steps += [sample[rows] for _, rows in repeated_rows(1, len(sample), draw)]
    for token_ids in steps:
        hidden = graphs.run_block(graphs.embedding, {"token_ids": token_ids})["hidden"]
        exact = embed(token_ids)
        errors.append(measure(exact, hidden, Bound(1.0)))  # the bound follows, from the noise of all steps
        noise |= spread(exact, noisy(token_ids))
    worst = max(errors, key=lambda error: or_infinity(error.relative_error))
    bound = within(tolerances, noise)
    noises = bound.noise.largest, bound.noise.rms, bound.largest, finite(bound.rms)
    return TensorError(worst.max_abs_error, worst.relative_error, worst.rms_error, worst.cosine, *noises)


def where(entry: BlockErrors) -> str:
    return f"layer {entry.layer} (block {entry.block}, {entry.variant or 'after the last attention'})"


def layer_errors(
    graphs: Graphs,
    records: Pairs,
    tolerances: Tolerances,
    adapter_ids: np.ndarray | None = None,
    capacity: int = 0,
    usual: Sequence[BlockErrors] = (),
    choices: Override | None = None,
) -> tuple[list[BlockErrors], tuple[int | None, str] | None]:
    """Return the errors of each layer, teacher-forced, and of the exit; and the first overflow of float16.

    Of a layer `hidden` (after it), and for each phase `<phase>.key_out`, `.value_out`, `.attention`; of a mixer with a
    state `<phase>.state_out`, `.attention`. Of the exit `logits`, where sequences start at position 0. The overflow is
    (layer, line), None without one.

    All sequences run packed, as in a step; the last token is decoded too. adapter_ids: the adapter slot of each token,
    with which torch was recorded; none by default. capacity: the least rows of caches. usual: errors of these layers on
    more tokens, whose noise applies here too, as far as no cache changes it. choices: see `TorchChoices`.
    """
    record = records[0][0]
    errors = list[BlockErrors]()
    pieces = Pieces()
    overflow = None
    noises = [_noise_of_tokens(entry, tolerances) for entry in usual] or [{}] * (len(graphs.layers) + 1)
    mixer_layers = [layer.layer for layer in record.layers]
    if mixer_layers != graphs.assembly.layer_numbers[: len(mixer_layers)]:
        raise CheckError(f"expected token mixers in layers {graphs.assembly.layer_numbers}, found {mixer_layers}")
    tokens = [Tokens(exact.token_ids, len(exact.token_ids) - 1, exact, noisy) for exact, noisy in records]
    for run in _runs(Walk(graphs, tokens, adapter_ids, capacity, override=choices)):
        stage = run.stage
        if stage.part == "attention":
            _add(pieces, run, {name: f"{stage.phase}.{name}" for name in run.expected})
            continue
        layer = graphs.num_layers - 1
        variant = None
        if stage.part == "block":  # the hidden state that enters this layer completes the entry of the one before
            _add(pieces, run, dict.fromkeys(run.expected, "hidden"))
            assert stage.layer is not None
            layer = record.layers[stage.layer].layer
            variant = graphs.layers[stage.layer].variant
        if errors:
            errors[-1] = replace(errors[-1], tensors=_measured(pieces, tolerances, noises[len(errors) - 1]))
        errors.append(BlockErrors(stage.graph, {}, layer, variant))
        pieces = Pieces()
        if stage.part == "exit":
            _add(pieces, run, {"logits": "logits"})
        if (line := run.overflow(graphs)) and overflow is None:
            overflow = layer, line
    errors[-1] = replace(errors[-1], tensors=_measured(pieces, tolerances, noises[len(errors) - 1]))
    return errors, overflow


def wrong_layers(errors: Sequence[BlockErrors]) -> Iterator[tuple[BlockErrors, str]]:
    """Yield (its layer's errors, message) of each output over its tolerance."""
    for entry in errors:
        for name, error in entry.tensors.items():
            if line := wrong(name, error):
                yield entry, line


def _runs(walk: Walk) -> Iterator[StageRun]:
    yield from walk.layers()
    if not walk.num_past:
        yield walk.exit()


def _add(pieces: Pieces, run: StageRun, names: Mapping[str, str]) -> None:
    for name, key in names.items():
        rows = (side[name].reshape(len(side[name]), -1) for side in (run.expected, run.outputs, run.noisy))
        pieces.setdefault(key, []).append(tuple(rows))


def _noise_of_tokens(entry: BlockErrors, tolerances: Tolerances) -> dict[str, Spread]:
    """Return {output: noise in fp16} of a layer's first phase, of outputs whose noise no cache changes."""
    noises: dict[str, Spread] = {}
    for key, error in entry.tensors.items():
        output = key.rpartition(".")[2]
        if output in ("hidden", "key_out", "value_out"):
            noises.setdefault(output, Spread(error.noise, error.rms_noise) * (1 / tolerances.rounding))
    return noises


def _measured(pieces: Pieces, tolerances: Tolerances, usual: Mapping[str, Spread]) -> dict[str, TensorError]:
    """Return {"<phase>.<output>": errors}, in the order in which phases were added.

    usual: noise of outputs in more rows.
    """
    errors: dict[str, TensorError] = {}
    # The first phase has all rows. Where the noise is larger there, its bound also applies to phases of fewer rows: in
    # three of them perhaps no activation of 8 bits was rounded to another integer.
    first_noise: dict[str, Spread] = {}
    of_queries = 1.0
    for key, key_pieces in pieces.items():
        exact, actual, noisy = (np.concatenate(side) for side in zip(*key_pieces))
        noise = spread(exact, noisy)
        output = key.rpartition(".")[2]
        if output == "key_out" and output in usual and has_8_bit_activations(tolerances.precision) and noise.rms > 0:
            of_queries = max(1.0, usual[output].rms / noise.rms)  # rounded as keys are: of the same activations
        if output == "attention" and of_queries > 1 and noise.rms > 0:
            # Not beyond the keys' own: where no activation was rounded otherwise, the factor alone has no limit.
            noise *= max(1.0, min(of_queries, usual["key_out"].rms / noise.rms))
        first_noise.setdefault(output, noise | usual.get(output, NOTHING))
        bound = beside_noise(tolerances, noise | first_noise[output], len(exact))
        errors[key] = measure(exact, actual, bound)
    return errors


def forward(graphs: Graphs, hidden: np.ndarray, position_ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
    """Return the logits [len(logit_rows), vocab_size] of one whole sequence, free. hidden: its embedded tokens."""

    def attend(index: int, env: Mapping[str, np.ndarray]) -> np.ndarray:
        name = graphs.layers[index].variant
        if (mixer := graphs.assembly.state_mixers.get(name)) is not None:
            state = np.zeros((1, *mixer.state), np.float32)
            feeds = {**{key: env[key] for key in mixer.inputs}, "past_state": state}
            return graphs.run_mixer(name, "prefill", feeds)["attention"]
        past = stale_cache([graphs.no_past(name)], [0], graphs.dtype)
        return graphs.run_mixer(name, "prefill", {**env, **past})["attention"]

    env = {"hidden": hidden, "position_ids": position_ids, "logit_rows": logit_rows}
    return graphs.run_layers(graphs.layers, env, attend)
