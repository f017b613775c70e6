"""Run an assembly's graphs in ONNX Runtime, in memory: the runtime in its plainest form.

In: the bytes of the graphs, the assembly, tensors by checkpoint name. Out: logits of every token of a step. A step
takes any mix of requests; each request with several tokens runs the prefill graph of every token mixer, those with one
token share a decode.
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
    """A request's share of a step; tokens: int64, those that follow its cached ones."""

    request: int
    tokens: np.ndarray


class ReferenceRunner(GraphRunner):
    """Runs requests of up to `capacity` tokens, in fp32; unused cache rows hold noise, which masks must hide."""

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
        self.signatures = {name: graph.signature for name, graph in assembly.engine_graphs()}
        self.sessions = {}
        for name, graph in assembly.engine_graphs():
            self.sessions[name] = open_session(files[graph.file], threads=1)
        self.lengths = np.zeros(num_requests, np.int64)
        self.shift = np.zeros(num_requests, np.int64)  # of each request: new position minus number of cached tokens
        noise = np.random.default_rng(0)
        self.caches = []
        for index, layer in enumerate(assembly.layers):
            if layer.variant in assembly.state_mixers:
                self.caches.append([np.zeros((num_requests, *state), np.float32) for state in self.states_of(index)])
                continue
            variant = assembly.variants[layer.variant]
            shape = (num_requests, variant.num_kv_heads, capacity)
            dims = (variant.head_dim, variant.value_head_dim)
            self.caches.append([10 * noise.standard_normal((*shape, dim), np.float32) for dim in dims])

    def with_caches(
        self, caches: Sequence[list[np.ndarray]], lengths: Sequence[int], shift: np.ndarray
    ) -> ReferenceRunner:
        """Return a runner of the same graphs whose requests have these caches.

        caches: for each layer [key, value] stores of [num_requests, num_kv_heads, capacity, dim], of which `lengths`
        tokens are filled, or [state] of [num_requests, *state]. shift: what positions of new tokens add to that.
        """
        other = copy.copy(self)
        other.caches = list(caches)
        other.lengths = np.array(lengths, np.int64)
        other.shift = np.array(shift, np.int64)
        return other

    def states_of(self, layer: int) -> list[tuple[int, ...]]:
        """Return the sizes of a request's states in a layer; empty where it has keys and values."""
        mixer = self.assembly.state_mixers.get(self.assembly.layers[layer].variant)
        return [] if mixer is None else [mixer.state]

    def step(self, parts: Sequence[PackedRequest]) -> list[np.ndarray]:
        """Advance the requests by a step; return the logits of each part's tokens, [len(tokens), vocab_size]."""
        cache_rows = [self.lengths[part.request] + np.arange(len(part.tokens)) for part in parts]
        positions = [rows + self.shift[part.request] for part, rows in zip(parts, cache_rows, strict=True)]
        token_ids = np.concatenate([part.tokens for part in parts])
        env: dict[str, np.ndarray] = {
            "token_ids": token_ids,
            "position_ids": np.concatenate(positions),
            "cache_rows": np.concatenate(cache_rows),
            "logit_rows": np.arange(len(token_ids)),
        }
        layers = self.assembly.layers
        env |= self.run_block(self.assembly.embedding, env)

        def attend(index: int, env: Arrays) -> np.ndarray:
            return self._mix(layers[index].variant, self.caches[index], parts, env)

        logits = self.run_layers(layers, env, attend)
        for part in parts:
            self.lengths[part.request] += len(part.tokens)
        return np.split(logits, np.cumsum([len(part.tokens) for part in parts])[:-1])

    def run_graph(self, name: str, inputs: Arrays, weights: Arrays) -> dict[str, np.ndarray]:
        signature = self.signatures[name]
        feeds = {io.name: inputs[io.name] for io in signature.inputs} | dict(weights)
        outputs = [io.name for io in signature.outputs]
        return dict(zip(outputs, self.sessions[name].run(outputs, feeds), strict=True))

    def slot_array(self, tensors: Sequence[str], slot: IO) -> np.ndarray:
        return slot_array(self.tensors, tensors, slot.sizes)

    def _mix(self, variant: str, cache: list[np.ndarray], parts: Sequence[PackedRequest], env: Arrays) -> np.ndarray:
        """Run a layer's token mixer on a step, update its cache, and return `attention` [num_tokens, width]."""
        ends = np.cumsum([len(part.tokens) for part in parts])
        calls: list[tuple[str, list[int], np.ndarray]] = []  # phase, requests, rows of the step
        decoding = []
        for part, end in zip(parts, ends, strict=True):
            if len(part.tokens) > 1:
                calls.append(("prefill", [part.request], np.arange(end - len(part.tokens), end)))
            else:
                decoding.append((part.request, end - 1))
        if decoding:
            calls.append(("decode", [request for request, _ in decoding], np.array([row for _, row in decoding])))
        result: np.ndarray | None = None  # its width is the first mixer's
        for phase, requests, rows in calls:
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
            outputs = self.run_mixer(variant, phase, feeds)
            if result is None:
                result = np.empty((ends[-1], outputs["attention"].shape[1]), np.float32)
            result[rows] = outputs["attention"]
            if mixer is not None:
                cache[0][requests] = outputs["state_out"]
                continue
            owners = np.broadcast_to(requests, len(rows))  # of each new cache row: those of a prefill are one request's
            for store, new in zip(cache, (outputs["key_out"], outputs["value_out"]), strict=True):
                store[owners, :, env["cache_rows"][rows]] = new
        assert result is not None  # a step has parts
        return result
