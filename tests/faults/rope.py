"""Faults of the rotary encoding (RoPE).

Positions, frequencies, halves, and what of it reaches the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto

from faults.attention import scale_node
from faults.edit import LAST, Edit, Value
from faults.fault import ATTENTION, DECODE, PREFILL, Fault


def positions_cast(edit: Edit) -> NodeProto:
    """Return the node that makes floats of the positions, for the angles."""
    return next(node for node in edit.nodes("Cast") if not edit.is_float(node.input[0]))


def angles(edit: Edit) -> NodeProto:
    """Mul(positions, frequencies)."""
    return edit.reader(positions_cast(edit).output[0], "Mul")


def _positions(change: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        cast = positions_cast(edit)
        edit.replace(cast.input[0], lambda value: change(edit, value), [cast])

    return plant


def _later(edit: Edit, positions: Value) -> Value:
    return edit.op("Add", positions, edit.const(1))


def _at_most(limit: int) -> Callable[[Edit, Value], Value]:
    return lambda edit, positions: edit.op("Min", positions, edit.const(limit))


def _from_the_chunk(edit: Edit, positions: Value) -> Value:
    return edit.op("Sub", positions, edit.op("ReduceMin", positions, edit.ints(0), keepdims=1))


def _one_off_at(position: int) -> Callable[[Edit, Value], Value]:
    def change(edit: Edit, positions: Value) -> Value:
        return edit.op(
            "Where",
            edit.op("Equal", positions, edit.const(position)),
            edit.op("Add", positions, edit.const(1)),
            positions,
        )

    return change


def _frequencies(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        node = angles(edit)
        place, frequencies = edit.constant_of(node)
        edit.set_constant(node, place, change(frequencies))

    return plant


def _theta(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    """frequency i is theta ** (-2 i / head_dim)."""
    return lambda frequencies: frequencies * factor ** (-np.arange(len(frequencies)) / len(frequencies))


def _without(which: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(frequencies: np.ndarray) -> np.ndarray:
        found = frequencies.copy()
        found[which] = 0
        return found

    return change


def _sine_sign(edit: Edit) -> None:
    edit.replace(edit.nodes("Sin")[0].output[0], lambda value: edit.op("Neg", value))


def _halves_swapped(edit: Edit) -> None:
    for node in edit.nodes("Neg"):
        half = edit.reader(node.output[0], "Concat")
        half.input[:] = list(half.input)[::-1]


def _interleaved(edit: Edit) -> None:
    """Take the frequencies of interleaved pairs for pairs of halves."""
    both = edit.reader(angles(edit).output[0], "Concat")
    count = 2 * edit.constant_of(angles(edit))[1].size
    edit.replace(both.output[0], lambda value: edit.op("Gather", value, edit.const(np.arange(count) // 2), axis=1))


def _angles_in_fp16(edit: Edit) -> None:
    edit.replace(angles(edit).output[0], edit.rounded)


def _turned(edit: Edit, value: Value, steps: int) -> Value:
    """[tokens, heads, head_dim] turned by so many positions more."""
    frequencies = edit.constant_of(angles(edit))[1].astype(np.float64)
    angle, half = np.tile(frequencies * steps, 2), len(frequencies)
    first, second = (
        edit.op("Slice", value, edit.ints(low), edit.ints(high), edit.ints(2))
        for low, high in ((0, half), (half, LAST))
    )
    other = edit.op("Concat", edit.op("Neg", second), first, axis=-1)
    return edit.op(
        "Add", edit.times(value, edit.like(value, np.cos(angle))), edit.times(other, edit.like(value, np.sin(angle)))
    )


def _key_later(edit: Edit) -> None:
    edit.replace("key_out", lambda value: _turned(edit, value, 1))


def _query_later(edit: Edit) -> None:
    node = scale_node(edit)
    query = next(name for name in node.input if edit.constant(name) is None)
    edit.replace(query, lambda value: _turned(edit, value, 1), [node])


def _plain_key(edit: Edit) -> Value:
    return edit.op("Reshape", "key", edit.ints(-1, edit.spec["num_kv_heads"], edit.spec["head_dim"]))


def _cached_unturned(edit: Edit) -> None:
    edit.give("key_out", _plain_key(edit))


def _head_unturned(edit: Edit) -> None:
    """Leave the first KV head's keys without rotation."""
    first = edit.const((np.arange(edit.spec["num_kv_heads"]) == 0)[:, None], bool)
    edit.replace("key_out", lambda value: edit.op("Where", first, _plain_key(edit), value))


def _cached_zero(edit: Edit) -> None:
    """Lose the value of a prompt's last token on its way to the cache."""
    is_last = edit.op("Equal", edit.numbers("value_out"), edit.op("Sub", edit.size("value_out"), edit.const(1)))
    edit.give(
        "value_out",
        edit.op("Where", edit.op("Unsqueeze", is_last, edit.ints(1, 2)), edit.like("value_out", 0), "value_out"),
    )


FAULTS = (
    Fault(
        "rope-later",
        "all positions one later, which only differences of positions hide",
        graphs=ATTENTION,
        edit=_positions(_later),
    ),
    Fault("rope-later-decode", "positions one later in decode alone", graphs=DECODE, edit=_positions(_later)),
    Fault("rope-later-prefill", "positions one later in prefill alone", graphs=PREFILL, edit=_positions(_later)),
    Fault("rope-key-later", "keys rotated one position too far", graphs=ATTENTION, edit=_key_later),
    Fault("rope-query-later", "queries rotated one position too far", graphs=ATTENTION, edit=_query_later),
    Fault(
        "rope-query-later-decode", "queries rotated one position too far in decode", graphs=DECODE, edit=_query_later
    ),
    Fault("rope-theta-1.01", "theta 1 % too high", graphs=ATTENTION, edit=_frequencies(_theta(1.01))),
    Fault("rope-theta-0.99", "theta 1 % too low", graphs=ATTENTION, edit=_frequencies(_theta(0.99))),
    Fault("rope-theta-10", "theta ten times too high", graphs=ATTENTION, edit=_frequencies(_theta(10))),
    Fault("rope-last-frequency", "the lowest frequency is zero", graphs=ATTENTION, edit=_frequencies(_without(-1))),
    Fault("rope-first-frequency", "the highest frequency is zero", graphs=ATTENTION, edit=_frequencies(_without(0))),
    Fault("rope-halves", "rotated halves in the other order", graphs=ATTENTION, edit=_halves_swapped),
    Fault("rope-sine", "the sign of the sine", graphs=ATTENTION, edit=_sine_sign),
    Fault("rope-sine-decode", "the sign of the sine in decode alone", graphs=DECODE, edit=_sine_sign),
    Fault("rope-interleaved", "frequencies of interleaved pairs for halves", graphs=ATTENTION, edit=_interleaved),
    Fault("rope-clamp-63", "positions clamped at 63", graphs=ATTENTION, edit=_positions(_at_most(63))),
    Fault("rope-clamp-200", "positions clamped at 200", graphs=ATTENTION, edit=_positions(_at_most(200))),
    Fault(
        "rope-wrap-128",
        "positions wrapped at 128",
        graphs=ATTENTION,
        edit=_positions(lambda edit, value: edit.op("Mod", value, edit.const(128))),
    ),
    Fault("rope-at-150", "position 150 one too far", graphs=ATTENTION, edit=_positions(_one_off_at(150))),
    Fault("rope-chunk", "a chunk's positions begin at 0", graphs=PREFILL, edit=_positions(_from_the_chunk)),
    Fault("rope-fp16", "angles in fp16", graphs=ATTENTION, edit=_angles_in_fp16),
    Fault("rope-head", "the first KV head is not rotated", graphs=ATTENTION, edit=_head_unturned),
    Fault(
        "cache-unrotated", "decode's keys reach the cache before they are rotated", graphs=DECODE, edit=_cached_unturned
    ),
    Fault(
        "cache-value-lost",
        "the value of a piece's last token does not reach the cache",
        graphs=PREFILL,
        edit=_cached_zero,
    ),
)
