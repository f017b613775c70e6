"""Do the graphs compute what torch computes? An assembly and recorded sequences in, errors by layer out.

Teacher-forced: each block and each attention gets what torch had there, so that an error shows in the layer that makes it and in no
later one. Free: the embedded tokens go in, and every graph takes what the one before gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.checks import Difference, difference
from lockstep.validate.graphs import Assembly
from lockstep.validate.torch_trace import LayerRecord, Record

_STALE = 300.0  # in cache rows beyond past_lengths: what a mask must hide, yet finite and within fp16's range
_SPARE = 3  # such rows


@dataclass
class LayerErrors:
    """Errors of one layer by tensor: `hidden` (what leaves the layer), then for each phase `<phase>.key_out`, `.value_out`, `.attention`."""

    layer: int
    block: str
    kind: str
    tensors: dict[str, Difference] = field(default_factory=dict)


def embedding_error(assembly: Assembly, records: Sequence[Record]) -> Difference:
    """The embedding graph on all tokens."""
    token_ids = np.concatenate([record.token_ids for record in records])
    found = assembly.run_block(assembly.embedding, {"token_ids": token_ids})["hidden"]
    return difference(np.concatenate([record.embedded for record in records]), found)


def layer_errors(assembly: Assembly, records: Sequence[Record]) -> tuple[list[LayerErrors], Difference]:
    """Errors of each layer, teacher-forced, and of the logits behind the last one. All sequences run packed, as in a step."""
    packed = lambda arrays: np.concatenate(arrays).astype(assembly.dtype)
    spans = _spans(records)
    env: dict[str, np.ndarray] = {
        "hidden": packed([record.embedded for record in records]),
        "position_ids": np.concatenate([record.position_ids for record in records]),
    }
    errors = []
    for index, layer in enumerate(assembly.layers):
        part = layer["block"]
        outputs = assembly.run_block(part, env)
        env |= outputs
        if index and assembly.carries(part) == ["hidden"]:
            # One value crosses to the next block: the hidden state that enters this layer and left the one before.
            expected = np.concatenate([record.layers[index].hidden for record in records])
            errors[-1].tensors["hidden"] = difference(expected, env["hidden"])
            env["hidden"] = expected.astype(assembly.dtype)
        entry = LayerErrors(index, part["class"], layer["kind"])
        entry.tensors |= _kind_errors(assembly, layer["kind"], env, [record.layers[index] for record in records], spans)
        errors.append(entry)
        env["attention"] = packed([record.layers[index].attention for record in records])
    env["logit_rows"] = np.arange(len(env["position_ids"]))
    logits = assembly.run_block(assembly.exit, env)["logits"]
    return errors, difference(np.concatenate([record.logits for record in records]), logits)


def _kind_errors(
    assembly: Assembly, kind: str, env: Mapping[str, np.ndarray], layers: Sequence[LayerRecord], spans: Sequence[slice]
) -> dict[str, Difference]:
    """A layer's attention three ways: whole prompts, prompts whose second half comes behind a cache, and last tokens as one decode step."""
    found: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {"prefill": [], "chunked": [], "decode": []}

    def add(phase: str, outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        found[phase] += [(name, expected[name], outputs[name]) for name in ("key_out", "value_out", "attention")]

    for layer, span in zip(layers, spans):
        count = span.stop - span.start
        for phase, start in (("prefill", 0), ("chunked", count // 2)):
            if phase == "chunked" and not start:
                continue  # one token cannot be halved
            rows = slice(span.start + start, span.stop)
            past = _past(assembly, [layer], [start])
            add(phase, assembly.run_kind(kind, "prefill", {**_rows(env, rows), **past}), _expected(layer, slice(start, count)))
    last = np.array([span.stop - 1 for span in spans])
    lengths = [span.stop - span.start - 1 for span in spans]
    outputs = assembly.run_kind(kind, "decode", {**_rows(env, last), **_past(assembly, layers, lengths)})
    for row, (layer, length) in enumerate(zip(layers, lengths)):
        add("decode", {name: array[row : row + 1] for name, array in outputs.items()}, _expected(layer, slice(length, length + 1)))
    errors = {}
    for phase, triples in found.items():
        for name in ("key_out", "value_out", "attention"):
            pairs = [(expected.ravel(), array.ravel()) for other, expected, array in triples if other == name]
            errors[f"{phase}.{name}"] = difference(*(np.concatenate(side) for side in zip(*pairs)))
    return errors


def _past(assembly: Assembly, layers: Sequence[LayerRecord], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """A cache with torch's keys and values of each request's first tokens, and stale numbers behind them."""
    capacity = max(lengths) + _SPARE
    caches = {}
    for name in ("key", "value"):
        heads, dim = getattr(layers[0], name).shape[1:]
        cache = np.full((len(layers), heads, capacity, dim), _STALE, assembly.dtype)
        for row, (layer, length) in enumerate(zip(layers, lengths)):
            cache[row, :, :length] = getattr(layer, name)[:length].swapaxes(0, 1)
        caches[f"past_{name}"] = cache
    return {**caches, "past_lengths": np.array(lengths, np.int64)}


def _expected(layer: LayerRecord, rows: slice) -> dict[str, np.ndarray]:
    return {"key_out": layer.key[rows], "value_out": layer.value[rows], "attention": layer.attention[rows]}


def _rows(env: Mapping[str, np.ndarray], rows: slice | np.ndarray) -> dict[str, np.ndarray]:
    return {name: env[name][rows] for name in ("query", "key", "value", "position_ids")}


def _spans(records: Sequence[Record]) -> list[slice]:
    ends = np.cumsum([len(record.token_ids) for record in records]).tolist()
    return [slice(end - len(record.token_ids), end) for record, end in zip(records, ends)]


def forward(assembly: Assembly, hidden: np.ndarray, position_ids: np.ndarray, logit_rows: np.ndarray) -> np.ndarray:
    """Logits [len(logit_rows), vocab_size] of one whole sequence, free: `hidden` [num_tokens, hidden_size] through every graph."""
    env = {"hidden": hidden, "position_ids": position_ids, "logit_rows": logit_rows}
    for layer in assembly.layers:
        env |= assembly.run_block(layer["block"], env)
        kind = assembly.manifest["kinds"][layer["kind"]]
        empty = lambda dim: np.zeros((1, kind["num_kv_heads"], 1, kind[dim]), assembly.dtype)
        past = {"past_key": empty("head_dim"), "past_value": empty("value_head_dim"), "past_lengths": np.zeros(1, np.int64)}
        env["attention"] = assembly.run_kind(layer["kind"], "prefill", {**_rows(env, slice(None)), **past})["attention"]
    return assembly.run_block(assembly.exit, env)["logits"]
