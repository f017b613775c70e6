"""Run the engines of a set on the inputs of a stage. A stage in, its outputs out, as NumPy arrays on every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.backends import EngineSet, Program
from lockstep.backends.graphs import base_engine
from lockstep.step.executable import DeviceExecutable, HostExecutable
from lockstep.verify.walk import Arrays, Stage
from lockstep.weights import Weights


class Engines:
    """The engines of a set, called one at a time; weights are bound for one call."""

    def __init__(self, engines: EngineSet, weights: Weights, threads: int | None = None):
        self.set, self._weights, self._threads = engines, weights, threads
        self._programs: dict[str, Program] = {}
        self._names = set(engines.names())
        rows = engines.manifest.options.get("max_batch_size")
        self.max_rows: int | None = rows  # requests that the engines were built for; None: any number

    def name(self, graph: str) -> str:
        """Return the engine that computes a graph for tokens without adapters."""
        base = base_engine(graph)
        return base if base in self._names else graph

    def run(self, stage: Stage, like: Mapping[str, np.ndarray]) -> Arrays | None:
        """Return the stage's outputs, in the shapes and dtypes of `like`; None where there is no such engine."""
        if self.name(stage.graph) not in self._names:
            return None
        if stage.part != "exit" or self.max_rows is None:
            return self._call(stage, stage.inputs, like)
        rows = stage.inputs["logit_rows"]
        pieces = [slice(start, start + self.max_rows) for start in range(0, len(rows), self.max_rows)]
        calls = [
            self._call(
                stage, {**stage.inputs, "logit_rows": rows[piece]}, {name: array[piece] for name, array in like.items()}
            )
            for piece in pieces
        ]
        return {name: np.concatenate([outputs[name] for outputs in calls]) for name in like}

    def _call(self, stage: Stage, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> Arrays:
        name = self.name(stage.graph)
        if name not in self._programs:
            self._programs[name] = self.set.load(name, self._threads)
        executable = self._programs[name].bind(
            self._weights if stage.slots else None, self.set.tensors(name, stage.slots)
        )
        if name != stage.graph and (adapters := self.set.assembly.adapters):
            inputs = {key: array for key, array in inputs.items() if key not in {IDS, *adapters.names(stage.graph)}}
        if isinstance(executable, DeviceExecutable):
            return executable.run_once(inputs, like)
        engine = cast(HostExecutable, executable)
        # of the engine's types: bf16 graphs are computed in fp32 beside it, for ONNX Runtime has no bf16
        arrays = {name: np.ascontiguousarray(array, engine.inputs[name].dtype) for name, array in inputs.items()}
        outputs = {name: np.empty(array.shape, engine.outputs[name].dtype) for name, array in like.items()}
        executable.prepare(arrays, outputs)()
        return {name: array.astype(like[name].dtype, copy=False) for name, array in outputs.items()}
