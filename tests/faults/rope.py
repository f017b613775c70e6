"""Faults of the rotary encoding (RoPE): positions, frequencies, halves, and what of it reaches the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto

from faults.attention import scale_node
from faults.edit import LAST, Edit, Value
from faults.fault import ATTENTION, DECODE, PREFILL, Fault, change


def positions_cast(edit: Edit) -> NodeProto:
    """Return the node that makes floats of the positions, for the angles."""
    return next(node for node in edit.nodes("Cast") if not edit.is_float(node.input[0]))


def angles(edit: Edit) -> NodeProto:
    """Mul(positions, frequencies)."""
    return edit.reader(positions_cast(edit).output[0], "Mul")


@change
def positions(edit: Edit, other: Callable[[Edit, Value], Value]) -> None:
    cast = positions_cast(edit)
    edit.replace(cast.input[0], lambda value: other(edit, value), [cast])


def later(edit: Edit, value: Value) -> Value:
    return edit.op("Add", value, 1)


def at_most(limit: int) -> Callable[[Edit, Value], Value]:
    return lambda edit, value: edit.op("Min", value, limit)


def modulo(count: int) -> Callable[[Edit, Value], Value]:
    return lambda edit, value: edit.op("Mod", value, count)


def from_the_chunk(edit: Edit, value: Value) -> Value:
    return edit.op("Sub", value, edit.op("ReduceMin", value, edit.ints(0), keepdims=1))


def one_off_at(position: int) -> Callable[[Edit, Value], Value]:
    return lambda edit, value: edit.op("Where", edit.op("Equal", value, position), edit.op("Add", value, 1), value)


@change
def frequencies(edit: Edit, other: Callable[[np.ndarray], np.ndarray]) -> None:
    node = angles(edit)
    place, values = edit.constant_of(node)
    edit.set_constant(node, place, other(values))


def theta(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    """frequency i is theta ** (-2 i / head_dim)."""
    return lambda values: values * factor ** (-np.arange(len(values)) / len(values))


def without(which: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: np.where(np.arange(len(values)) == which % len(values), 0, values)


def sine_sign(edit: Edit) -> None:
    edit.replace(edit.nodes("Sin")[0].output[0], lambda value: edit.op("Neg", value))


def halves_swapped(edit: Edit) -> None:
    for node in edit.nodes("Neg"):
        half = edit.reader(node.output[0], "Concat")
        half.input[:] = list(half.input)[::-1]


def interleaved(edit: Edit) -> None:
    """Take the frequencies of interleaved pairs for pairs of halves."""
    reader = edit.reader(angles(edit).output[0], "Concat")
    count = 2 * edit.constant_of(angles(edit))[1].size
    edit.replace(reader.output[0], lambda value: edit.op("Gather", value, edit.const(np.arange(count) // 2), axis=1))


def angles_in_fp16(edit: Edit) -> None:
    edit.replace(angles(edit).output[0], edit.rounded)


def rotated(edit: Edit, value: Value) -> Value:
    """[tokens, heads, head_dim] rotated by one position more."""
    angle = np.tile(edit.constant_of(angles(edit))[1].astype(np.float64), 2)
    half = len(angle) // 2
    first = edit.op("Slice", value, edit.ints(0), edit.ints(half), edit.ints(2))
    second = edit.op("Slice", value, edit.ints(half), edit.ints(LAST), edit.ints(2))
    other = edit.op("Concat", edit.op("Neg", second), first, axis=-1)
    cosine, sine = (edit.like(value, function(angle)) for function in (np.cos, np.sin))
    return edit.op("Add", edit.times(value, cosine), edit.times(other, sine))


def key_later(edit: Edit) -> None:
    edit.replace("key_out", lambda value: rotated(edit, value))


def query_later(edit: Edit) -> None:
    node = scale_node(edit)
    query = next(name for name in node.input if edit.constant(name) is None)
    edit.replace(query, lambda value: rotated(edit, value), [node])


def plain_key(edit: Edit) -> Value:
    return edit.op("Reshape", "key", edit.ints(-1, edit.spec["num_kv_heads"], edit.spec["head_dim"]))


def cached_unrotated(edit: Edit) -> None:
    edit.give("key_out", plain_key(edit))


def head_unrotated(edit: Edit) -> None:
    """Leave the first KV head's keys without rotation."""
    first = edit.const((np.arange(edit.spec["num_kv_heads"]) == 0)[:, None], bool)
    edit.replace("key_out", lambda value: edit.op("Where", first, plain_key(edit), value))


def last_value_lost(edit: Edit) -> None:
    """Lose the value of a prompt's last token on its way to the cache."""
    is_last = edit.op("Equal", edit.numbers("value_out"), edit.op("Sub", edit.size("value_out"), 1))
    is_last = edit.op("Unsqueeze", is_last, edit.ints(1, 2))
    edit.give("value_out", edit.op("Where", is_last, edit.like("value_out", 0), "value_out"))


# fmt: off
FAULTS = (
    Fault("rope-later", "all positions one later, which only differences of positions hide", ATTENTION,
          positions(later)),
    Fault("rope-later-decode", "positions one later in decode alone", DECODE, positions(later)),
    Fault("rope-later-prefill", "positions one later in prefill alone", PREFILL, positions(later)),
    Fault("rope-key-later", "keys rotated one position too far", ATTENTION, key_later),
    Fault("rope-query-later", "queries rotated one position too far", ATTENTION, query_later),
    Fault("rope-query-later-decode", "queries rotated one position too far in decode", DECODE, query_later),
    Fault("rope-theta-1.01", "theta 1 % too high", ATTENTION, frequencies(theta(1.01))),
    Fault("rope-theta-0.99", "theta 1 % too low", ATTENTION, frequencies(theta(0.99))),
    Fault("rope-theta-10", "theta ten times too high", ATTENTION, frequencies(theta(10))),
    Fault("rope-last-frequency", "the lowest frequency is zero", ATTENTION, frequencies(without(-1))),
    Fault("rope-first-frequency", "the highest frequency is zero", ATTENTION, frequencies(without(0))),
    Fault("rope-halves", "rotated halves in the other order", ATTENTION, halves_swapped),
    Fault("rope-sine", "the sign of the sine", ATTENTION, sine_sign),
    Fault("rope-sine-decode", "the sign of the sine in decode alone", DECODE, sine_sign),
    Fault("rope-interleaved", "frequencies of interleaved pairs for halves", ATTENTION, interleaved),
    Fault("rope-clamp-63", "positions clamped at 63", ATTENTION, positions(at_most(63))),
    Fault("rope-clamp-200", "positions clamped at 200", ATTENTION, positions(at_most(200))),
    Fault("rope-wrap-128", "positions wrapped at 128", ATTENTION, positions(modulo(128))),
    Fault("rope-at-150", "position 150 one too far", ATTENTION, positions(one_off_at(150)), gate="golden"),
    Fault("rope-chunk", "a chunk's positions begin at 0", PREFILL, positions(from_the_chunk)),
    Fault("rope-fp16", "angles in fp16", ATTENTION, angles_in_fp16),
    Fault("rope-head", "the first KV head is not rotated", ATTENTION, head_unrotated),
    Fault("cache-unrotated", "decode's keys reach the cache before they are rotated", DECODE, cached_unrotated),
    Fault("cache-value-lost", "the value of a piece's last token does not reach the cache", PREFILL, last_value_lost),
)
# fmt: on
