"""Read a rotary encoding out of its graph, as numbers that kernels apply (decode_kernel.py, rotate_kernel.py).

In: the rotary graph of a kind (engine/rotary.py) in ONNX Runtime, on the host. Out: for each position and element of a
head the weight of the element itself and of one partner, which is what rotary encodings come to, partial, interleaved,
scaled or none at all. They are read with unit vectors. Before, when the engines are built, they are held against the
graph on random numbers at all positions; a graph that does something else is refused. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError
from lockstep.step.executable import HostExecutable

_PROBES = 12  # positions at which all elements are looked at
_NUMBERS = 1 << 17  # of queries and keys that are turned at a time: few enough to stay in the processor's cache


@dataclass(frozen=True)
class Tables:
    """A rotary encoding: `x[j] * own[position, j] + x[partner[j]] * other[position, j]`, the same for all heads of
    queries and keys.

    own, other [positions, head_dim] float32; partner [head_dim] int32, an element's own number where it has none.
    """

    own: np.ndarray
    other: np.ndarray
    partner: np.ndarray


def read_rotation(executable: HostExecutable, positions: int, where: str) -> Tables:
    """The encoding of a rotary graph (an executable of ONNX Runtime) at positions 0 to positions-1, if it is one: see
    `check_rotation`.

    Raises CheckError, beginning with `where`, for elements that are not made of pairs.
    """
    graph = _Graph(executable, where)
    partner = _partners(graph, positions)
    numbers = np.arange(graph.dim)
    first = numbers <= partner  # one element of each pair
    own, other = (np.empty((positions, graph.dim), np.float32) for _ in range(2))
    for piece in _pieces(positions, graph.most):
        found = graph.turned(np.stack([first, ~first]), piece)
        own[piece], other[piece] = np.where(first, found, found[::-1])
    other[:, partner == numbers] = 0
    return Tables(own, other, partner.astype(np.int32))


def check_rotation(executable: HostExecutable, positions: int, where: str) -> None:
    """Turn random numbers at positions 0 to positions-1 by the graph and by what is read out of it. Raises CheckError
    where they differ.

    Three numbers may be rounded on the graph's side alone: the weight, where the graph has it more exactly than it can
    be read, the product and the sum. Each is then off by half a unit in the last place, or of the smallest number there
    is. float32, in which the tables are applied, adds its own.
    """
    graph, tables = _Graph(executable, where), read_rotation(executable, positions, where)
    random, kind = np.random.default_rng(0), np.finfo(graph.dtype)
    # in fp16 it would be 0
    last, tiny = 1.5 * kind.eps + 4 * np.finfo(np.float32).eps, float(kind.smallest_subnormal) / 2
    given = [
        random.standard_normal((min(positions, graph.most) + 1, heads, graph.dim), np.float32).astype(graph.dtype)
        for heads in graph.heads
    ]
    for piece in _pieces(positions, graph.most):
        at = np.append(piece, positions - 1)  # beside the last one, which must not matter
        query, key = (numbers[: len(at)] for numbers in given)
        for turned, found in zip((query, key), graph.rotate(query, key, at)):
            x = turned.astype(np.float32)
            y = x[:, :, tables.partner]
            one, two = x * tables.own[at, None], y * tables.other[at, None]
            allowed = last * (np.abs(one) + np.abs(two)) + tiny * (np.abs(x) + np.abs(y) + 3)
            right = (np.abs(one + two - found) <= allowed).all(axis=(1, 2))
            if not right.all():
                graph.refuse(f"other numbers at position {at[right.argmin()]}")


def _pieces(positions: int, most: int) -> Iterator[np.ndarray]:
    """All positions in order, at most `most` at a time; the first pieces are small, so that an encoding which depends
    on the largest position of a step is not always read as of a long one."""
    low = 0
    while low < positions:
        high = min(positions, low + most, max(1, 2 * low))
        yield np.arange(low, high)
        low = high


def _partners(graph: _Graph, positions: int) -> np.ndarray:
    """For each element the other one that it is made of, itself where there is none."""
    numbers = np.arange(graph.dim)
    probes = np.unique(np.linspace(0, positions - 1, _PROBES).astype(np.int64))
    made = (graph.turned(np.eye(graph.dim), probes) != 0).any(axis=1)  # [of, into]
    made[numbers, numbers] = False
    counts = made.sum(axis=0)
    if (counts > 1).any():
        graph.refuse(f"element {counts.argmax()} made of {counts.max()} others")
    partner = np.where(counts, made.argmax(axis=0), numbers)
    if (partner[partner] != numbers).any():
        element = (partner[partner] != numbers).argmax()
        graph.refuse(f"element {element} made of {partner[element]}, which is made of {partner[partner[element]]}")
    return partner


class _Graph:
    """A rotary graph on host arrays: query [n, num_heads, head_dim], key [n, num_kv_heads, head_dim], position_ids
    [n]."""

    def __init__(self, executable: HostExecutable, where: str):
        self._executable, self._where = executable, where
        self._types = {name: value.dtype for name, value in executable.inputs.items()}
        out = [executable.outputs[name] for name in ("query_out", "key_out")]
        self.heads, self.dim, self.dtype = (
            tuple(int(value.shape[1]) for value in out),
            int(out[0].shape[2]),
            out[0].dtype,
        )
        self.most = max(1, _NUMBERS // (sum(self.heads) * self.dim))
        unknown = sorted(set(self._types) - {"query", "key", "position_ids"})
        if unknown:
            self.refuse(f"one that depends on {', '.join(unknown)}")

    def refuse(self, found: str) -> None:
        raise CheckError(
            f"{self._where}: expected a rotary encoding that mixes pairs of elements, in all heads alike, by "
            f"their position alone, "
            f"found {found}; build with attention: traced"
        )

    def turned(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Each of rows [count, head_dim] turned to each position [n], in the heads of the query; [count, n, head_dim]
        float32."""
        heads, found = self.heads[0], []
        for low in range(0, len(rows), heads):
            some = rows[low : low + heads]
            query, key = (np.zeros((len(positions), count, self.dim), self.dtype) for count in self.heads)
            query[:, : len(some)] = some
            found.append(self.rotate(query, key, positions)[0][:, : len(some)].swapaxes(0, 1))
        return np.concatenate(found).astype(np.float32)

    def rotate(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        given = {"query": query.reshape(len(query), -1), "key": key.reshape(len(key), -1), "position_ids": positions}
        inputs = {name: given[name].astype(dtype, copy=False) for name, dtype in self._types.items()}
        outputs = {"query_out": np.empty(query.shape, self.dtype), "key_out": np.empty(key.shape, self.dtype)}
        self._executable.prepare(inputs, outputs)()
        return outputs["query_out"], outputs["key_out"]
