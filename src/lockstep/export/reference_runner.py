"""Run an assembly's graphs in ONNX Runtime, in memory.

It is what the runtime does, in its plainest form.

In: the bytes of the graphs, the assembly, tensors by checkpoint name. Out: logits of every token of a step. A step
takes any mix of requests; one that brings several tokens goes through the prefill graph of each token mixer, those
that bring one through decode together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.signature import IO
from lockstep.onnx_tools.graph_runner import Arrays, GraphRunner
from lockstep.onnx_tools.sessions import open_session
from lockstep.weights import slot_array


@dataclass(frozen=True)
class PackedRequest:
    """A request's share of a step; tokens: int64, behind those that it already brought."""

    request: int
    tokens: np.ndarray


class ReferenceRunner(GraphRunner):
    """Runs requests of up to `capacity` tokens, in fp32; cache rows that no token has filled hold noise."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        assembly: Assembly,
        tensors: Mapping[str, np.ndarray],
        num_requests: int,
        capacity: int,
    ):
        self.assembly = assembly
        self.tensors = tensors
        graphs = dict(assembly.engine_graphs())
        self.inputs = {name: [io.name for io in graph.signature.inputs] for name, graph in graphs.items()}
        self.outputs = {name: [io.name for io in graph.signature.outputs] for name, graph in graphs.items()}
        self.sessions = {name: open_session(files[graph.file], threads=1) for name, graph in graphs.items()}
        self.lengths = np.zeros(num_requests, np.int64)
        self.shift = np.zeros(num_requests, np.int64)  # of each request's positions from its number of cached tokens
        noise = np.random.default_rng(0)
        self.caches = []
        for index, layer in enumerate(assembly.layers):
            if layer.variant in assembly.state_mixers:
                self.caches.append([np.zeros((num_requests, *state), np.float32) for state in self.states_of(index)])
                continue
            variant = assembly.variants[layer.variant]
            shapes = [
                (num_requests, variant.num_kv_heads, capacity, dim)
                for dim in (variant.head_dim, variant.value_head_dim)
            ]
            self.caches.append([10 * noise.standard_normal(shape, np.float32) for shape in shapes])

    def behind(self, caches: Sequence[list[np.ndarray]], lengths: Sequence[int], shift: np.ndarray) -> ReferenceRunner:
        """Return a runner of the same graphs with other requests.

        caches: for each layer [key, value] stores of [num_requests, num_kv_heads, capacity, dim], of which `lengths`
        tokens are filled, or [state] of [num_requests, *state]. New tokens stand `shift` positions further than that.
        """
        other = copy.copy(self)
        other.caches = list(caches)
        other.lengths = np.array(lengths, np.int64)
        other.shift = np.array(shift, np.int64)
        return other

    def states_of(self, layer: int) -> list[tuple[int, ...]]:
        """Return the sizes of a request's state in a layer; none where it has keys and values."""
        mixer = self.assembly.state_mixers.get(self.assembly.layers[layer].variant)
        return [] if mixer is None else [mixer.state]

    def step(self, parts: Sequence[PackedRequest]) -> list[np.ndarray]:
        """Advance the requests by a step; return the logits of each part's tokens, [len(tokens), vocab_size]."""
        parts = [*parts]
        env: dict[str, np.ndarray] = {
            "token_ids": np.concatenate([part.tokens for part in parts]),
            "position_ids": np.concatenate([self._positions(part) + self.shift[part.request] for part in parts]),
        }
        env["cache_rows"] = np.concatenate([self._positions(part) for part in parts])
        env["logit_rows"] = np.arange(len(env["token_ids"]))
        layers = self.assembly.layers
        env |= self.run_block(self.assembly.embedding, env)

        def attend(index: int, env: Arrays) -> np.ndarray:
            return self._mix(layers[index].variant, self.caches[index], parts, env)

        logits = self.run_layers(layers, env, attend)
        for part in parts:
            self.lengths[part.request] += len(part.tokens)
        return np.split(logits, np.cumsum([len(part.tokens) for part in parts])[:-1])

    def _positions(self, part: PackedRequest) -> np.ndarray:
        return self.lengths[part.request] + np.arange(len(part.tokens))

    def run_graph(self, name: str, inputs: Arrays, weights: Arrays) -> dict[str, np.ndarray]:
        feeds = {**{key: inputs[key] for key in self.inputs[name]}, **weights}
        outputs = self.outputs[name]
        return dict(zip(outputs, self.sessions[name].run(outputs, feeds), strict=True))

    def slot_array(self, tensors: Sequence[str], slot: IO) -> np.ndarray:
        return slot_array(self.tensors, tensors, slot.sizes)

    def _mix(self, variant: str, cache: list[np.ndarray], parts: Sequence[PackedRequest], env: Arrays) -> np.ndarray:
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
            mixer = self.assembly.state_mixers.get(variant)
            if mixer is None:
                feeds = {name: env[name][rows] for name in ("query", "key", "value", "position_ids")}
                feeds |= {
                    "past_key": cache[0][requests],
                    "past_value": cache[1][requests],
                    "past_lengths": self.lengths[requests],
                }
            else:
                feeds = {**{name: env[name][rows] for name in mixer.inputs}, "past_state": cache[0][requests]}
            found = self.run_mixer(variant, "prefill" if several else "decode", feeds)
            if result is None:
                result = np.empty((starts[-1], found["attention"].shape[1]), np.float32)
            result[rows] = found["attention"]
            if mixer is not None:
                cache[0][requests] = found["state_out"]
                continue
            for store, new in zip(cache, (found["key_out"], found["value_out"]), strict=True):
                owners = requests * len(rows) if several else requests
                store[owners, :, env["cache_rows"][rows]] = new
        assert result is not None  # a step has parts
        return result
