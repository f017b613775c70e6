"""RoPE tables: an attention variant's RoPE, read out of its graph as numbers.

In: the RoPE graph of an attention variant (onnx_tools/rope.py) in ONNX Runtime, on the host. Out: for each position and
element of a head the weight of the element itself and that of its partner. All kinds of RoPE come to that: partial,
interleaved, scaled, or none at all. The kernels that apply the tables are paged_decode.py and rope_kernel.py.

The tables are read with unit vectors. When the engines are built, they are first compared with the graph on random
numbers at all positions; a graph that computes something else is refused. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError
from lockstep.step.executable import HostExecutable

_PROBES = 12  # positions at which all elements are looked at
_NUMBERS = 1 << 17  # of queries and keys that get RoPE at a time: few enough to stay in the processor's cache


@dataclass(frozen=True)
class RopeTables:
    """RoPE as numbers, the same for all heads of queries and keys.

    The result is `x[j] * own[position, j] + x[partner[j]] * other[position, j]`. own, other [positions, head_dim]
    float32; partner [head_dim] int32, an element's own number where it has no partner.
    """

    own: np.ndarray
    other: np.ndarray
    partner: np.ndarray


def read_rope_tables(executable: HostExecutable, positions: int, where: str) -> RopeTables:
    """Return the RoPE tables of a RoPE graph at positions 0 to positions-1.

    executable: the graph in ONNX Runtime. Whether the tables are all that the graph computes is for `check_rope_tables`
    to say. Raises CheckError, beginning with `where`, for elements that are not made of pairs.
    """
    graph = _RopeGraph(executable, where)
    partner = _partners(graph, positions)
    numbers = np.arange(graph.dim)
    first = numbers <= partner  # one element of each pair
    own, other = (np.empty((positions, graph.dim), np.float32) for _ in range(2))
    for piece in _pieces(positions, graph.most):
        found = graph.apply_to_rows(np.stack([first, ~first]), piece)
        own[piece], other[piece] = np.where(first, found, found[::-1])
    other[:, partner == numbers] = 0
    return RopeTables(own, other, partner.astype(np.int32))


def check_rope_tables(executable: HostExecutable, positions: int, where: str) -> None:
    """Raise CheckError where a RoPE graph and its RoPE tables give different results.

    Both are applied to random numbers at positions 0 to positions-1. Three numbers may be rounded on the graph's side
    alone: the weight, where the graph has it more exactly than it can be read, the product and the sum. Each is then
    off by half a unit in the last place, or half the smallest subnormal number. float32, in which the tables are
    applied, adds its own.
    """
    graph = _RopeGraph(executable, where)
    tables = read_rope_tables(executable, positions, where)
    random = np.random.default_rng(0)
    kind = np.finfo(graph.dtype)
    # in fp16 it would be 0
    last = 1.5 * kind.eps + 4 * np.finfo(np.float32).eps
    tiny = float(kind.smallest_subnormal) / 2
    given = [
        random.standard_normal((min(positions, graph.most) + 1, heads, graph.dim), np.float32).astype(graph.dtype)
        for heads in graph.heads
    ]
    for piece in _pieces(positions, graph.most):
        at = np.append(piece, positions - 1)  # beside the last one, which must not matter
        query, key = (numbers[: len(at)] for numbers in given)
        for numbers, found in zip((query, key), graph.apply(query, key, at)):
            x = numbers.astype(np.float32)
            y = x[:, :, tables.partner]
            one = x * tables.own[at, None]
            two = y * tables.other[at, None]
            allowed = last * (np.abs(one) + np.abs(two)) + tiny * (np.abs(x) + np.abs(y) + 3)
            right = (np.abs(one + two - found) <= allowed).all(axis=(1, 2))
            if not right.all():
                graph.refuse(f"other numbers at position {at[right.argmin()]}")


def _pieces(positions: int, most: int) -> Iterator[np.ndarray]:
    """Yield all positions, the first pieces small: RoPE may depend on the largest position of a step."""
    low = 0
    while low < positions:
        high = min(positions, low + most, max(1, 2 * low))
        yield np.arange(low, high)
        low = high


def _partners(graph: _RopeGraph, positions: int) -> np.ndarray:
    """Return for each element its partner, the element itself where it has none."""
    numbers = np.arange(graph.dim)
    probes = np.unique(np.linspace(0, positions - 1, _PROBES).astype(np.int64))
    made = (graph.apply_to_rows(np.eye(graph.dim), probes) != 0).any(axis=1)  # [of, into]
    made[numbers, numbers] = False
    counts = made.sum(axis=0)
    if (counts > 1).any():
        graph.refuse(f"element {counts.argmax()} made of {counts.max()} others")
    partner = np.where(counts, made.argmax(axis=0), numbers)
    if (partner[partner] != numbers).any():
        element = (partner[partner] != numbers).argmax()
        graph.refuse(f"element {element} made of {partner[element]}, which is made of {partner[partner[element]]}")
    return partner


class _RopeGraph:
    """A RoPE graph on host arrays: query [n, num_heads, head_dim], key [n, num_kv_heads, head_dim]."""

    def __init__(self, executable: HostExecutable, where: str):
        self._executable = executable
        self._where = where
        self._types = {name: value.dtype for name, value in executable.inputs.items()}
        out = [executable.outputs[name] for name in ("query_out", "key_out")]
        self.heads = tuple(int(value.shape[1]) for value in out)
        self.dim = int(out[0].shape[2])
        self.dtype = out[0].dtype
        self.most = max(1, _NUMBERS // (sum(self.heads) * self.dim))
        unknown = sorted(set(self._types) - {"query", "key", "position_ids"})
        if unknown:
            self.refuse(f"one that depends on {', '.join(unknown)}")

    def refuse(self, found: str) -> None:
        raise CheckError(
            f"{self._where}: expected RoPE that mixes pairs of elements, in all heads alike, by "
            f"their position alone, "
            f"found {found}; build with attention: traced"
        )

    def apply_to_rows(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Apply RoPE to rows [count, head_dim] at positions [n] -> [count, n, head_dim] float32."""
        heads = self.heads[0]
        found = []
        for low in range(0, len(rows), heads):
            some = rows[low : low + heads]
            query, key = (np.zeros((len(positions), count, self.dim), self.dtype) for count in self.heads)
            query[:, : len(some)] = some
            found.append(self.apply(query, key, positions)[0][:, : len(some)].swapaxes(0, 1))
        return np.concatenate(found).astype(np.float32)

    def apply(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        width = int(self._executable.inputs["query"].shape[1]) // query.shape[1]
        heads = np.pad(query, [(0, 0), (0, 0), (0, width - self.dim)])  # behind them sinks, which get no RoPE
        given = {"query": heads.reshape(len(query), -1), "key": key.reshape(len(key), -1), "position_ids": positions}
        inputs = {name: given[name].astype(dtype, copy=False) for name, dtype in self._types.items()}
        outputs = {"query_out": np.empty(query.shape, self.dtype), "key_out": np.empty(key.shape, self.dtype)}
        self._executable.prepare(inputs, outputs)()
        return outputs["query_out"], outputs["key_out"]
