"""Rewrite a canonical graph for a backend, and check that it is the same computation.

In: a graph of the assembly and the backend's option `fuse_projections`. Out: the graph to build, its slots, and for
each slot the assembly's slots that it joins. A rewritten graph is compared with the canonical one in ONNX Runtime, on
random numbers, before anything is built from it; bf16 graphs in fp32, since ONNX Runtime has no bf16 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from lockstep.artifacts.adapters import IDS, mask_rank, rows_of
from lockstep.artifacts.signature import IO
from lockstep.errors import CheckError
from lockstep.onnx_tools.adapted_graphs import IdsAsMask, ShrinkInRows
from lockstep.onnx_tools.fuse_projections import FuseProjections
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.onnx_tools.signature import io_of
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.onnx_tools.widened import widened
from lockstep.tolerances import REWRITE

_SIZES = {"num_tokens": 3, "num_requests": 3, "past_capacity": 5}
# Random numbers are drawn once and repeated in larger weights: drawing hundreds of millions takes seconds. A prime, so
# that no two rows of a weight are the same.
_BLOCK = 1_048_583


@dataclass(frozen=True)
class Prepared:
    """A graph in the form that a backend needs.

    model: to build. slots: its weight inputs. parts: {slot: [slots of the assembly, and inputs that adapters are
    written to]}.
    """

    model: onnx.ModelProto
    slots: Sequence[IO]
    parts: dict[str, list[str]]


def prepare(
    model: onnx.ModelProto, slots: Sequence[IO], options: Mapping[str, Any], adapter_rows: bool = False
) -> Prepared | None:
    """Return the form that `options` require; None when that is the graph itself.

    adapter_rows: with adapters' first products as rows of weights, masked (adapted_graphs.py).

    Raises CheckError when the rewritten graph computes something else.
    """
    rewritten = model
    parts = {slot.name: [slot.name] for slot in slots}
    if options.get("fuse_projections"):
        fusion = FuseProjections(parts)
        rewritten = run_passes(rewritten, fusion)
        parts = fusion.parts
    if adapter_rows:  # after fusing: rows of A are added to the fused weights
        shrinking = ShrinkInRows(parts)
        rewritten = run_passes(rewritten, IdsAsMask(), shrinking)
        parts = shrinking.parts
    if rewritten is model:
        return None
    declared = {value.name: value for value in rewritten.graph.input}
    prepared = Prepared(rewritten, tuple(io_of(declared[name]) for name in parts), parts)
    check_same(model, prepared)
    return prepared


def check_same(model: onnx.ModelProto, prepared: Prepared) -> None:
    """Run both graphs on the same random numbers. Raises CheckError for an output that differs."""
    from lockstep.onnx_tools.sessions import compute  # lazy: engines run without it

    canonical = widened(model)
    rewritten = widened(prepared.model)
    feeds = random_inputs(canonical)
    expected = compute(canonical, feeds)
    weights = {slot: slot_rows(feeds, parts, slot) for slot, parts in prepared.parts.items()}
    other_inputs = {value.name: _feed(value, feeds) for value in rewritten.graph.input if value.name not in weights}
    outputs = compute(rewritten, {**other_inputs, **weights})
    dtypes = {array.dtype.name for array in (*feeds.values(), *expected.values()) if array.dtype.kind == "f"}
    bound = Bound(max(REWRITE[dtype] for dtype in dtypes))
    for name, values in expected.items():
        difference = wrong(f"output {name}", measure(values, outputs[name], bound, peak(values)))
        if difference:
            raise CheckError(
                f"graph {model.graph.name}: {difference}: the rewritten graph is not equivalent; please report it"
            )


def mask_of(ids: np.ndarray, columns: int, rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the mask [num_tokens, columns] of adapter ids [num_tokens]."""
    return (ids[:, None] == np.arange(columns) // rank).astype(dtype)


def slot_rows(feeds: Mapping[str, np.ndarray], parts: list[str], slot: str) -> np.ndarray:
    """Return a slot's array: its parts, one after another, with the A among its rows transposed."""
    rows = rows_of(slot)
    arrays = []
    for part in parts:
        array = feeds[part]
        arrays.append(array.T if part in rows else array)
    if len(arrays) == 1:  # may be a scalar, which `concatenate` refuses
        return arrays[0]
    return np.concatenate(arrays)


def _feed(value: onnx.ValueInfoProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    rank = mask_rank(value.name)
    if not rank:
        return feeds[value.name]
    tensor_type = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
    return mask_of(feeds[IDS], tensor_type.shape.dim[1].dim_value, rank, dtype)


def random_inputs(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return seeded values for all inputs, weights too: positions, lengths and ids are valid at `_SIZES`."""
    random = np.random.default_rng(0)
    block = random.standard_normal(_BLOCK, np.float32)
    byte_block = np.frombuffer(block.tobytes()[:_BLOCK], np.uint8)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or _SIZES[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype == np.uint8:  # integers of quantised weights
            feeds[value.name] = np.resize(np.roll(byte_block, random.integers(_BLOCK)), shape)
        elif dtype.kind == "i":
            first = 2 if value.name in ("position_ids", "past_lengths") else 0  # some cached tokens
            numbers = np.arange(first, first + shape[0])
            feeds[value.name] = np.broadcast_to(numbers.reshape(-1, *[1] * (len(shape) - 1)), shape)
        else:
            scale = np.float32(1)
            if len(shape) > 1 and value.name not in ("hidden", "attention"):
                scale = np.float32(1 / max(1, shape[-1]) ** 0.5)  # rows of length about one: fp16 does not overflow
            # another part of the block for each input
            values = np.roll(block, random.integers(_BLOCK))[: math.prod(shape)] * scale
            feeds[value.name] = np.resize(values.astype(dtype), shape)
    return feeds


def decode_inputs(model: onnx.ModelProto, lengths: np.ndarray, capacity: int) -> dict[str, np.ndarray]:
    """Return seeded inputs of a decode graph, N(0, 1), with pasts of `lengths` in caches of `capacity` tokens."""
    random = np.random.default_rng(0)
    sizes = {"num_requests": len(lengths), "past_capacity": capacity}
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype.kind == "i":
            feeds[value.name] = lengths
        else:
            feeds[value.name] = random.standard_normal(shape, np.float32).astype(dtype)
    return feeds
