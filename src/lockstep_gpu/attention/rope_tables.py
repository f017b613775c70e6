"""RoPE tables: an attention variant's RoPE as numbers, read out of its graph.

In: the RoPE graph of an attention variant (onnx_tools/rope.py) in ONNX Runtime, on the host. Out: for each position and
element of a head, the weights of the two elements that it is made of. This covers all kinds of RoPE: partial,
interleaved, scaled, of queries alone (MLA, whose keys get theirs in the block), or none. The kernels in
paged_decode.py and page_kernels.py apply the tables.

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
class HeadTables:
    """RoPE as numbers, the same for all heads of the queries, or of the keys.

    RoPE of x is `x[first[j]] * first_weight[position, j] + x[second[j]] * second_weight[position, j]`.

    Attributes:
        first_weight, second_weight: [positions, head_dim] float32, such as the cosines and the signed sines.
        first, second: [head_dim] int32; equal for an element that depends on one other, with second_weight 0.
    """

    first_weight: np.ndarray
    second_weight: np.ndarray
    first: np.ndarray
    second: np.ndarray


@dataclass(frozen=True)
class RopeTables:
    """The tables of queries and of keys, which are one object where they are the same."""

    query: HeadTables
    key: HeadTables

    @property
    def separate(self) -> bool:
        """Return whether queries and keys have separate tables, or elements move."""
        return self.key is not self.query or (self.query.first != np.arange(len(self.query.first))).any()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the arrays of `kernel_spec.DeviceRopeTables`."""
        query = self.query
        key = self.key
        if not self.separate:
            return query.first_weight, query.second_weight, query.second
        first_weight = np.stack([query.first_weight, key.first_weight], axis=1)
        second_weight = np.stack([query.second_weight, key.second_weight], axis=1)
        return first_weight, second_weight, np.array([[query.first, query.second], [key.first, key.second]])


def read_rope_tables(executable: HostExecutable, positions: int, where: str) -> RopeTables:
    """Return the RoPE tables of a RoPE graph at positions 0 to positions-1.

    executable: the graph in ONNX Runtime. Raises CheckError, prefixed with `where`, if an element depends on more than
    two others. Only `check_rope_tables` tells whether the tables are all that the graph computes.
    """
    graph = _RopeGraph(executable, where)
    probes = np.unique(np.linspace(0, positions - 1, _PROBES).astype(np.int64))
    units = np.eye(graph.dim)
    of_query, of_key = (graph.apply_to_rows(units, probes, part) for part in ("query", "key"))
    query = _read(graph, of_query, positions, "query")
    key = query if np.array_equal(of_query, of_key) else _read(graph, of_key, positions, "key")
    return RopeTables(query, key)


def _read(graph: _RopeGraph, probed: np.ndarray, positions: int, part: str) -> HeadTables:
    """Return the tables of queries or keys.

    probed: the graph's results for each unit vector, [head_dim, probes, head_dim].
    """
    depends = (probed != 0).any(axis=1)  # [input element, output element]
    first, second = _sources(graph, depends)
    elements = np.arange(graph.dim)
    mates = elements.copy()  # the other element of an element's pair
    mates[first] = second
    mates[second] = first
    is_shared = (mates[first] != second) | (mates[second] != first)
    if is_shared.any():
        element = is_shared.argmax()
        graph.reject(f"element {element} made of {first[element]} and {second[element]}, which others mix otherwise")
    is_low = elements <= mates
    first_weight = np.empty((positions, graph.dim), np.float32)
    second_weight = np.empty((positions, graph.dim), np.float32)
    for batch in _position_batches(positions, graph.batch_size):
        # The low elements of all pairs are 1 in the first row, the high ones in the second: results are the weights.
        weights = graph.apply_to_rows(np.stack([is_low, ~is_low]), batch, part)
        first_weight[batch] = np.where(is_low[first], weights[0], weights[1])
        second_weight[batch] = np.where(is_low[first], weights[1], weights[0])
    second_weight[:, first == second] = 0
    return HeadTables(first_weight, second_weight, first.astype(np.int32), second.astype(np.int32))


def _sources(graph: _RopeGraph, depends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements that each depends on, the element itself first, else the lower one first."""
    elements = np.arange(graph.dim)
    counts = depends.sum(axis=0)
    if (counts > 2).any():
        graph.reject(f"element {counts.argmax()} made of {counts.max()} others")
    low = np.where(counts, depends.argmax(axis=0), elements)
    high = np.where(counts, graph.dim - 1 - depends[::-1].argmax(axis=0), elements)
    is_itself = high == elements
    return np.where(is_itself, high, low), np.where(is_itself, low, high)


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
        random.standard_normal((rows, heads, graph.dim), np.float32).astype(graph.dtype)
        for heads in graph.heads.values()
    )
    for batch in _position_batches(positions, graph.batch_size):
        # Append the last position to each batch: the results of the others must not depend on it.
        at = np.append(batch, positions - 1)
        query = queries[: len(at)]
        key = keys[: len(at)]
        actual = graph.apply(query, key, at)
        for part, source, result in (("query", query, actual["query"]), ("key", key, actual["key"])):
            head = tables.query if part == "query" else tables.key
            x = source[:, :, head.first].astype(np.float32)
            y = source[:, :, head.second].astype(np.float32)
            first_term = x * head.first_weight[at, None]
            second_term = y * head.second_weight[at, None]
            bound = relative_bound * (np.abs(first_term) + np.abs(second_term))
            bound += absolute_bound * (np.abs(x) + np.abs(y) + 3)
            matches = (np.abs(first_term + second_term - result) <= bound).all(axis=(1, 2))
            if not matches.all():
                graph.reject(f"other numbers at position {at[matches.argmin()]}")


def _position_batches(positions: int, batch_size: int) -> Iterator[np.ndarray]:
    """Yield all positions, in batches that start small: RoPE may depend on the largest position of a step."""
    start = 0
    while start < positions:
        end = min(positions, start + batch_size, max(1, 2 * start))
        yield np.arange(start, end)
        start = end


class _RopeGraph:
    """A RoPE graph on host arrays: query [n, num_heads, head_dim], key [n, num_kv_heads, head_dim]."""

    def __init__(self, executable: HostExecutable, where: str):
        self._executable = executable
        self._where = where
        self._types = {name: value.dtype for name, value in executable.inputs.items()}
        query_out = executable.outputs["query_out"]
        key_out = executable.outputs["key_out"]
        self.heads = {"query": int(query_out.shape[1]), "key": int(key_out.shape[1])}
        self.dim = int(query_out.shape[2])
        self.dtype = query_out.dtype
        self.batch_size = max(1, BATCH_ELEMENTS // (sum(self.heads.values()) * self.dim))  # positions
        unknown = sorted(set(self._types) - {"query", "key", "position_ids"})
        if unknown:
            self.reject(f"one that depends on {', '.join(unknown)}")

    def reject(self, actual: str) -> None:
        raise CheckError(
            f"{self._where}: expected RoPE that mixes pairs of elements, in all heads alike, by their position alone, "
            f"found {actual}; build with attention: traced"
        )

    def apply_to_rows(self, rows: np.ndarray, positions: np.ndarray, part: str) -> np.ndarray:
        """Apply RoPE to rows [count, head_dim] at positions [n] -> [count, n, head_dim] float32.

        part: of which the rows are heads, the query or the key.
        """
        results = []
        for start in range(0, len(rows), self.heads[part]):
            batch = rows[start : start + self.heads[part]]
            inputs = {
                name: np.zeros((len(positions), heads, self.dim), self.dtype) for name, heads in self.heads.items()
            }
            inputs[part][:, : len(batch)] = batch
            outputs = self.apply(inputs["query"], inputs["key"], positions)
            results.append(outputs[part][:, : len(batch)].swapaxes(0, 1))
        return np.concatenate(results).astype(np.float32)

    def apply(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the query and the key with RoPE."""
        query_dim = int(self._executable.inputs["query"].shape[1]) // query.shape[1]
        padded = np.pad(query, [(0, 0), (0, 0), (0, query_dim - self.dim)])  # sinks follow a head, without RoPE
        arrays = {"query": padded.reshape(len(query), -1), "key": key.reshape(len(key), -1), "position_ids": positions}
        inputs = {name: arrays[name].astype(dtype, copy=False) for name, dtype in self._types.items()}
        outputs = {"query_out": np.empty(query.shape, self.dtype), "key_out": np.empty(key.shape, self.dtype)}
        self._executable.prepare(inputs, outputs)()
        return {"query": outputs["query_out"], "key": outputs["key_out"]}
