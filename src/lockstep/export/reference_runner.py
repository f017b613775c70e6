"""Walk an assembly's graphs in ONNX Runtime, in memory: what the runtime does, in its plainest form.

In: the bytes of the graphs, the assembly, tensors by checkpoint name. Out: logits of every token of a step. A step
takes any mix of requests; one that brings several tokens goes through the prefill graph of each attention variant,
those that bring one through decode together.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts import assembly as documents
from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.tensor_parallel import attention_shards
from lockstep.onnx_tools.run_ranks import run_sharded_attention, run_sharded_block
from lockstep.onnx_tools.sessions import open_session
from lockstep.weights.adapters import LoraArrays, arrays_of, empty_arrays


@dataclass(frozen=True)
class Part:
    """A request's share of a step: `tokens` (int64) of request `request`, behind the tokens that it already brought."""

    request: int
    tokens: np.ndarray


class Walk:
    """`num_requests` requests with room for `capacity` tokens each. fp32 only. What no token has filled holds noise,
    not zeros."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        assembly: Assembly,
        tensors: Mapping[str, np.ndarray],
        num_requests: int,
        capacity: int,
    ):
        self.assembly, self.tensors = assembly, tensors
        graphs = dict(assembly.engine_graphs())
        self.inputs = {name: [io.name for io in graph.signature.inputs] for name, graph in graphs.items()}
        self.outputs = {name: [io.name for io in graph.signature.outputs] for name, graph in graphs.items()}
        self.sessions = {name: open_session(files[graph.file], threads=1) for name, graph in graphs.items()}
        self.lengths = np.zeros(num_requests, np.int64)
        self.adapters = np.full(num_requests, -1, np.int64)  # the place of each request's adapter
        self._lora = {
            id(part): empty_arrays(assembly.adapters, part, np.dtype(np.float32))
            for part in (*(layer.block for layer in assembly.layers), assembly.layers[-1].exit)
        }
        self.shift = np.zeros(num_requests, np.int64)  # of each request's positions from its number of cached tokens
        noise = np.random.default_rng(0)
        self.caches = []
        for layer in assembly.layers:
            variant = assembly.variants[layer.variant]
            shapes = [
                (num_requests, variant.num_kv_heads, capacity, dim)
                for dim in (variant.head_dim, variant.value_head_dim)
            ]
            self.caches.append([10 * noise.standard_normal(shape, np.float32) for shape in shapes])

    def behind(self, caches: Sequence[list[np.ndarray]], lengths: Sequence[int], shift: np.ndarray) -> Walk:
        """The same graphs with other requests: for each layer [key, value] stores of [num_requests, num_kv_heads,
        capacity, dim], of which `lengths` tokens are filled; new tokens stand `shift` positions further than that."""
        other = copy.copy(self)
        other.caches, other.lengths, other.shift = list(caches), np.array(lengths, np.int64), np.array(shift, np.int64)
        return other

    def lora_arrays(self) -> list[LoraArrays]:
        """Where adapters go, of all blocks."""
        layers, slots = self.assembly.layers, self.assembly.adapters
        parts = (*(layer.block for layer in layers), layers[-1].exit)
        return [each for part in parts for each in arrays_of(slots, part, self._lora[id(part)])] if slots else []

    def step(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Advance the requests; gives for each part the logits of all its tokens, [len(tokens), vocab_size] float32."""
        parts = [*parts]
        env: dict[str, np.ndarray] = {
            "token_ids": np.concatenate([part.tokens for part in parts]),
            "position_ids": np.concatenate([self._positions(part) + self.shift[part.request] for part in parts]),
        }
        env["cache_rows"] = np.concatenate([self._positions(part) for part in parts])
        env[IDS] = np.concatenate([np.full(len(part.tokens), self.adapters[part.request]) for part in parts])
        env["logit_rows"] = np.arange(len(env["token_ids"]))
        self._block(self.assembly.embedding, env)
        for layer, cache in zip(self.assembly.layers, self.caches, strict=True):
            self._block(layer.block, env)
            env["attention"] = self._attention(layer.variant, cache, parts, env)
        self._block(self.assembly.layers[-1].exit, env)
        for part in parts:
            self.lengths[part.request] += len(part.tokens)
        return np.split(env["logits"], np.cumsum([len(part.tokens) for part in parts])[:-1])

    def _positions(self, part: Part) -> np.ndarray:
        return self.lengths[part.request] + np.arange(len(part.tokens))

    def _run(self, name: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.outputs[name], self.sessions[name].run(self.outputs[name], dict(feeds)), strict=True))

    def _block(self, part: documents.BoundBlock, env: dict[str, np.ndarray]) -> None:
        signature, ranks = self.assembly.classes[part.graph].signature, self.assembly.tensor_parallel
        known = {**env, **self._lora.get(id(part), {})}
        feeds, slots = {io.name: known[io.name] for io in signature.inputs}, {}
        for slot, names in part.slots.items():
            arrays = [self.tensors[name] for name in names]
            slots[slot] = arrays[0] if len(arrays) == 1 else self._joined(part.graph, slot, arrays)
        if ranks is None or part.graph not in ranks.classes:
            found = self._run(part.graph, feeds | slots)
        else:
            sharded, run = ranks.classes[part.graph], functools.partial(self._run_piece, part.graph, slots)
            found = run_sharded_block(sharded, signature, ranks.degree, feeds, run)
        env.update({name.removesuffix("_out"): value for name, value in found.items()})

    def _run_piece(
        self, block: str, slots: Mapping[str, np.ndarray], piece: str, rank: int, known: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        ranks = self.assembly.tensor_parallel
        assert ranks is not None
        graph = ranks.graphs[piece].signature
        feeds = {io.name: known[io.name] for io in graph.inputs}
        take = ranks.classes[block].take_weight
        return self._run(piece, feeds | {slot.name: take(slot.name, slots[slot.name], rank) for slot in graph.slots})

    def _joined(self, name: str, slot: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """A slot of several tensors takes their bytes one after another."""
        shape = next(io.sizes for io in self.assembly.classes[name].signature.slots if io.name == slot)
        return np.concatenate([array.reshape(-1) for array in arrays]).reshape(shape)

    def _attention(
        self, variant: str, cache: list[np.ndarray], parts: Sequence[Part], env: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        calls = [
            ([part.request], np.arange(first, last))
            for part, first, last in zip(parts, starts, starts[1:])
            if last - first > 1
        ]
        single = [(part.request, first) for part, first, last in zip(parts, starts, starts[1:]) if last - first == 1]
        if single:
            calls.append(([request for request, _ in single], np.array([first for _, first in single])))
        result: np.ndarray | None = None
        for requests, rows in calls:
            several = len(rows) > len(requests)
            feeds = {name: env[name][rows] for name in ("query", "key", "value", "position_ids")}
            feeds |= {
                "past_key": cache[0][requests],
                "past_value": cache[1][requests],
                "past_lengths": self.lengths[requests],
            }
            found = self._attend(variant, "prefill" if several else "decode", feeds)
            if result is None:
                result = np.empty((starts[-1], found["attention"].shape[1]), np.float32)
            result[rows] = found["attention"]
            for store, new in zip(cache, (found["key_out"], found["value_out"]), strict=True):
                owners = requests * len(rows) if several else requests
                store[owners, :, env["cache_rows"][rows]] = new
        assert result is not None  # a step has parts
        return result

    def _attend(self, variant: str, phase: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        name, ranks = f"{variant}.{phase}", self.assembly.tensor_parallel
        feeds = {key: feeds[key] for key in self.inputs[name]}
        if ranks is None:
            return self._run(name, feeds)
        whole = self.assembly.variants[variant]
        shards, signature = attention_shards(whole, ranks.degree), whole.phases()[phase].signature
        return run_sharded_attention(
            ranks, name, signature, shards, feeds, lambda name, _, feeds: self._run(name, feeds)
        )
