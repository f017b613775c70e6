"""Read a rotary encoding out of its engine, as numbers that one kernel applies.

In: the rotary engine of a kind. Out: for each position and element of a head the weight of the element itself and of one partner, which is what
every rotary encoding in use comes to, partial, interleaved, scaled or none at all; or nothing, where the engine does something else, which then runs
as it is: right, but slower (a dozen small kernels a layer). Read with unit vectors, and held against the engine on random numbers at all positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.engine.tensorrt import cuda
from lockstep.engine.tensorrt.kernels import Kernels, Rotation

_PROBES = 12  # positions at which all elements are looked at
_LAST_BITS = {"float16": 2.0**-9, "bfloat16": 2.0**-6}  # two units in the last place: the engine rounds products, the kernel only their sum


def read_rotation(kind: Any, positions: int, kernels: Kernels) -> Rotation | None:
    """The encoding of a kind (runtime.network.Kind) at positions 0 to positions-1; None where it has another form."""
    engine = _Engine(kind)
    partner = _partners(engine, positions)
    if partner is None:
        return None
    dim = len(partner)
    first = np.arange(dim) <= partner  # one element of each pair
    both = []
    for chosen in (first, ~first):
        whole = np.tile(chosen.astype(np.float32), (positions, 1))
        both.append(engine.run(whole, np.arange(positions))[0])
    own, other = np.where(first, both[0], both[1]), np.where(first, both[1], both[0])
    other = np.where(partner == np.arange(dim), 0, other)
    # What the second run adds to a lone element is nothing, for it reads zeros only.
    if not _same(engine, own, other, partner, positions):
        return None
    return Rotation(_up(own.astype(np.float32)), _up(other.astype(np.float32)), _up(partner.astype(np.int32)))


def _partners(engine: _Engine, positions: int) -> np.ndarray | None:
    """For each element the other one that it is made of, itself where there is none; None where it is made of more."""
    dim = engine.dim
    probes = np.unique(np.linspace(0, positions - 1, _PROBES).astype(np.int64))
    made = np.zeros((dim, dim), bool)  # [of, into]
    for element in range(dim):
        unit = np.zeros((len(probes), dim), np.float32)
        unit[:, element] = 1
        for found in engine.run(unit, probes):
            made[element] |= (found != 0).any(axis=0)
    made[np.arange(dim), np.arange(dim)] = False
    if (made.sum(axis=0) > 1).any():
        return None
    partner = np.where(made.any(axis=0), made.argmax(axis=0), np.arange(dim))
    return partner if np.array_equal(partner[partner], np.arange(dim)) else None


def _same(engine: _Engine, own: np.ndarray, other: np.ndarray, partner: np.ndarray, positions: int) -> bool:
    random = np.random.default_rng(0)
    at = np.arange(positions)
    query = random.standard_normal((positions, engine.heads, engine.dim), np.float32).astype(engine.dtype)
    key = random.standard_normal((positions, engine.kv_heads, engine.dim), np.float32).astype(engine.dtype)
    for given, found in zip((query, key), engine.rotate(query, key, at)):
        given, found = given.astype(np.float32), found.astype(np.float32)
        expected = given * own[:, None] + given[:, :, partner] * other[:, None]
        size = np.abs(given * own[:, None]) + np.abs(given[:, :, partner] * other[:, None])
        if not (np.abs(expected - found) <= _LAST_BITS[engine.dtype.name] * size + 1e-6).all():
            return False
    return True


class _Engine:
    """The rotary engine on host arrays, in pieces of the sizes that it takes."""

    def __init__(self, kind: Any):
        self._engine = kind.engines["rotary"]
        self._program = self._engine.program
        self.heads, self.kv_heads, self.dim = kind.spec["num_heads"], kind.cache.num_kv_heads, kind.cache.head_dim
        self.dtype = self._program.tensors["query"].dtype
        self._largest = max(bounds[2][0] for bounds in self._program.tensors["query"].profiles)

    def run(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """rows [n, dim], given to every head -> [n, dim] of the first query head and of the first key head, float32."""
        query, key = (np.repeat(rows[:, None], count, axis=1).astype(self.dtype) for count in (self.heads, self.kv_heads))
        return tuple(found[:, 0].astype(np.float32) for found in self.rotate(query, key, positions))

    def rotate(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """query [n, num_heads, dim] and key [n, num_kv_heads, dim] rotated."""
        found: tuple[list, list] = ([], [])
        for low in range(0, len(positions), self._largest):
            piece = slice(low, low + self._largest)
            for out, array in zip(found, self._piece(query[piece], key[piece], positions[piece])):
                out.append(array)
        return np.concatenate(found[0]), np.concatenate(found[1])

    def _piece(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tensors, stream = self._program.tensors, self._program.device.stream
        given = {"query": query.reshape(len(query), -1), "key": key.reshape(len(key), -1)}
        if "position_ids" in tensors:
            given["position_ids"] = positions.astype(tensors["position_ids"].dtype)
        inputs = {name: _up(array) for name, array in given.items()}
        outputs = {"query_out": cuda.empty(query.shape, self.dtype), "key_out": cuda.empty(key.shape, self.dtype)}
        self._engine.prepare(inputs, outputs)()
        results = tuple(np.empty(array.shape, self.dtype) for array in outputs.values())
        for host, array in zip(results, outputs.values()):
            stream.download(host, array)
        stream.synchronize()
        return results


def _up(host: np.ndarray) -> cuda.Array:
    host = np.ascontiguousarray(host)
    array, stream = cuda.empty(host.shape, host.dtype), cuda.Stream()
    stream.upload(array, host)
    stream.synchronize()
    return array
