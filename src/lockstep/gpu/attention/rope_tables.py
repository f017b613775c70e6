"""RoPE tables: an attention variant's RoPE as numbers, read out of its graph.

In: the RoPE graph of an attention variant (onnx_tools/rope.py) in ONNX Runtime, on the host. Out: for each position and
element of a head, the weight of the element itself and the weight of its partner. This covers all kinds of RoPE:
partial, interleaved, scaled, or none. The kernels in paged_decode.py and rope_kernel.py apply the tables.

The tables are read with unit vectors. A build compares them with the graph on random inputs at all positions, and
rejects a graph that computes something else. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError
from lockstep.step.executable import HostExecutable

_PROBES = 12  # positions at which all pairs of elements are probed
BATCH_ELEMENTS = 1 << 17  # of queries and keys per run of the graph: they stay in the CPU's cache


@dataclass(frozen=True)
class RopeTables:
    """RoPE as numbers, the same for all heads of queries and keys.

    RoPE of x is `x[j] * own[position, j] + x[partner[j]] * other[position, j]`.

    Attributes:
        own, other: [positions, head_dim] float32.
        partner: [head_dim] int32; an element without a partner has its own index.
    """

    own: np.ndarray
    other: np.ndarray
    partner: np.ndarray


def read_rope_tables(executable: HostExecutable, positions: int, where: str) -> RopeTables:
    """Return the RoPE tables of a RoPE graph at positions 0 to positions-1.

    executable: the graph in ONNX Runtime. Raises CheckError, prefixed with `where`, if an element depends on more than
    one other. Only `check_rope_tables` tells whether the tables are all that the graph computes.
    """
    graph = _RopeGraph(executable, where)
    partner = _partners(graph, positions)
    elements = np.arange(graph.dim)
    is_first = elements <= partner  # of its pair
    own = np.empty((positions, graph.dim), np.float32)
    other = np.empty((positions, graph.dim), np.float32)
    for batch in _position_batches(positions, graph.batch_size):
        # In the first row all first elements are 1, in the second all second elements: the results are the weights.
        weights = graph.apply_to_rows(np.stack([is_first, ~is_first]), batch)
        own[batch] = np.where(is_first, weights[0], weights[1])
        other[batch] = np.where(is_first, weights[1], weights[0])
    other[:, partner == elements] = 0
    return RopeTables(own, other, partner.astype(np.int32))


def check_rope_tables(executable: HostExecutable, positions: int, where: str) -> None:
    """Raise CheckError if a RoPE graph and its RoPE tables give different results.

    Both are applied to random inputs at positions 0 to positions-1. The graph may round three numbers that the tables
    don't: the weight, the product and the sum. Each rounding is off by half a unit in the last place, or by half the
    smallest subnormal. Applying the tables in float32 adds the error of float32.
    """
    graph = _RopeGraph(executable, where)
    tables = read_rope_tables(executable, positions, where)
    random = np.random.default_rng(0)
    limits = np.finfo(graph.dtype)
    relative_bound = 1.5 * limits.eps + 4 * np.finfo(np.float32).eps
    absolute_bound = float(limits.smallest_subnormal) / 2  # a Python float: half of it is 0 in fp16
    rows = min(positions, graph.batch_size) + 1
    queries, keys = (
        random.standard_normal((rows, heads, graph.dim), np.float32).astype(graph.dtype) for heads in graph.heads
    )
    for batch in _position_batches(positions, graph.batch_size):
        # Append the last position to each batch: the results of the others must not depend on it.
        at = np.append(batch, positions - 1)
        query = queries[: len(at)]
        key = keys[: len(at)]
        for source, actual in zip((query, key), graph.apply(query, key, at)):
            x = source.astype(np.float32)
            y = x[:, :, tables.partner]
            own_term = x * tables.own[at, None]
            other_term = y * tables.other[at, None]
            bound = relative_bound * (np.abs(own_term) + np.abs(other_term))
            bound += absolute_bound * (np.abs(x) + np.abs(y) + 3)
            matches = (np.abs(own_term + other_term - actual) <= bound).all(axis=(1, 2))
            if not matches.all():
                graph.reject(f"other numbers at position {at[matches.argmin()]}")


def _position_batches(positions: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yield all positions, in batches that start small: RoPE may depend on the largest position of a step."""
    start = 0
    while start < positions:
        end = min(positions, start + batch_size, max(1, 2 * start))
        yield np.arange(start, end)
        start = end


def _partners(graph: _RopeGraph, positions: int) -> np.ndarray:
    """Return the index of each element's partner; an element without one has its own index."""
    elements = np.arange(graph.dim)
    probes = np.unique(np.linspace(0, positions - 1, _PROBES).astype(np.int64))
    depends = (graph.apply_to_rows(np.eye(graph.dim), probes) != 0).any(axis=1)  # [input element, output element]
    depends[elements, elements] = False
    counts = depends.sum(axis=0)
    if (counts > 1).any():
        graph.reject(f"element {counts.argmax()} made of {counts.max()} others")
    partner = np.where(counts, depends.argmax(axis=0), elements)
    if (partner[partner] != elements).any():
        element = (partner[partner] != elements).argmax()
        graph.reject(f"element {element} made of {partner[element]}, which is made of {partner[partner[element]]}")
    return partner


class _RopeGraph:
    """A RoPE graph on host arrays: query [n, num_heads, head_dim], key [n, num_kv_heads, head_dim]."""

    def __init__(self, executable: HostExecutable, where: str):
        self._executable = executable
        self._where = where
        self._types = {name: value.dtype for name, value in executable.inputs.items()}
        query_out = executable.outputs["query_out"]
        key_out = executable.outputs["key_out"]
        self.heads = int(query_out.shape[1]), int(key_out.shape[1])
        self.dim = int(query_out.shape[2])
        self.dtype = query_out.dtype
        self.batch_size = max(1, BATCH_ELEMENTS // (sum(self.heads) * self.dim))  # positions
        unknown = sorted(set(self._types) - {"query", "key", "position_ids"})
        if unknown:
            self.reject(f"one that depends on {', '.join(unknown)}")

    def reject(self, actual: str) -> None:
        raise CheckError(
            f"{self._where}: expected RoPE that mixes pairs of elements, in all heads alike, by their position alone, "
            f"found {actual}; build with attention: traced"
        )

    def apply_to_rows(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Apply RoPE to rows [count, head_dim] at positions [n] -> [count, n, head_dim] float32."""
        heads, kv_heads = self.heads
        results = []
        for start in range(0, len(rows), heads):
            batch = rows[start : start + heads]
            query = np.zeros((len(positions), heads, self.dim), self.dtype)
            key = np.zeros((len(positions), kv_heads, self.dim), self.dtype)
            query[:, : len(batch)] = batch
            query_out, _ = self.apply(query, key, positions)
            results.append(query_out[:, : len(batch)].swapaxes(0, 1))
        return np.concatenate(results).astype(np.float32)

    def apply(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        query_dim = int(self._executable.inputs["query"].shape[1]) // query.shape[1]
        padded = np.pad(query, [(0, 0), (0, 0), (0, query_dim - self.dim)])  # sinks follow a head, without RoPE
        arrays = {"query": padded.reshape(len(query), -1), "key": key.reshape(len(key), -1), "position_ids": positions}
        inputs = {name: arrays[name].astype(dtype, copy=False) for name, dtype in self._types.items()}
        outputs = {"query_out": np.empty(query.shape, self.dtype), "key_out": np.empty(key.shape, self.dtype)}
        self._executable.prepare(inputs, outputs)()
        return outputs["query_out"], outputs["key_out"]
