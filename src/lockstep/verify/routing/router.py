"""Expected logits of a model with routers, given the experts that the engines chose. Needs no torch.

In: inputs and outputs of a request's blocks, recorded while the runtime ran it. Out: whether the engines' choices are
valid, and the logits that follow from them.

Each block with a router is compared with its graph on the same inputs. A choice may differ there where the margin of
its scores is within their noise, and the block's outputs must follow from one of the near-tied choices. Then the graphs
run in float32 with these choices forced, which gives the expected logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import Assembly, BoundBlock
from lockstep.artifacts.dtypes import has_8_bit_activations
from lockstep.onnx_tools import judge
from lockstep.onnx_tools.rounded import UNITS
from lockstep.tolerances import DECISIVE_ROWS, ENOUGH, Tolerances
from lockstep.verify.graphs import Graphs
from lockstep.verify.noisy_graph import beside_graph, row_noise, tolerances_of
from lockstep.verify.routing.block import Arrays, ChoosingBlock, Routed, is_of_tokens
from lockstep.verify.routing.recorder import BlockKey, BlockRows, Recorder
from lockstep.verify.walk import Stage, Tokens, Walk
from lockstep.weights import Weights


@dataclass
class RoutedRequest:
    """A request with the engines' choices of experts.

    tied: number of (layer, token) pairs with a near-tie. first: the first position of a token that the reference may
    route otherwise; None without one. wrong: the error of a block; None without one. chosen: {block: (positions of its
    rows, their choices)}. logits: [num_tokens, vocab_size] float32.
    """

    tied: int = 0
    first: int | None = None
    wrong: str | None = None
    chosen: dict[BlockKey, tuple[np.ndarray, dict[str, np.ndarray]]] = field(default_factory=dict)
    logits: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def is_untied(self, count: int) -> bool:
        """Return whether the choices of the first `count` tokens are the reference's."""
        return self.first is None or count <= self.first


class Router:
    """The graphs of a model with a router."""

    def __init__(self, graphs: Graphs, blocks: Mapping[str, ChoosingBlock], tolerances: Tolerances):
        self._graphs = graphs
        self._blocks = blocks
        self._tolerances = tolerances
        # Numbered by token mixers, as an executor's observer sees them: a layer may have none, or two.
        parts: dict[BlockKey, BoundBlock] = {("block", i): layer.block for i, layer in enumerate(graphs.layers)}
        self._exit: BlockKey = "exit", len(graphs.layers) - 1
        parts[self._exit] = graphs.exit
        self._parts = {key: part for key, part in parts.items() if part.graph in blocks}
        self._logits: dict[tuple, np.ndarray] = {}  # of requests that ran before, {(tokens, choices): logits}

    @classmethod
    def open(
        cls,
        assembly_json: Path,
        weights_json: Path,
        layers: int | str,
        tolerances: Tolerances,
        threads: int | None = None,
    ) -> Router | None:
        """Open the graphs; None where no block has a router."""
        assembly = Assembly.load(assembly_json)
        graphs = Graphs(assembly_json, assembly, Weights.open(weights_json), layers, threads)
        blocks = {name: ChoosingBlock(graph, threads) for name, graph in graphs.classes.items()}
        choosing = {name: block for name, block in blocks.items() if block.choices}
        if not choosing:
            return None
        return cls(graphs, choosing, tolerances)

    def unsupported(self) -> str | None:
        """Say where choices cannot be followed; None where they can."""
        assembly = self._graphs.assembly
        if assembly.tensor_parallel is not None:
            return "over several ranks"
        if assembly.adapters is not None:
            return "in a model that takes adapters"
        return None

    def recorder(self) -> Recorder:
        """Return an observer that records the inputs of `judge`."""
        names_by_block = {}
        for key, part in self._parts.items():
            names_by_block[key] = [io.name for io in self._graphs.graph(part.graph).inputs if is_of_tokens(io)]
        return Recorder(names_by_block)

    def judge(self, recorded: Mapping[BlockKey, BlockRows]) -> RoutedRequest:
        """Find the choices of a request, and the errors of its blocks. The logits are left out."""
        request = RoutedRequest()
        tie_factor = self._tolerances.noise * max(self._tolerances.engine) / UNITS
        for key, part in self._parts.items():
            rows = recorded.get(key)
            if rows is None:
                request.wrong = request.wrong or f"{self._name(key)}: expected its choices in the run, found none"
                continue
            weights = self._graphs.weights_of(part.graph, part.slots)  # of one block at a time
            routed = self._blocks[part.graph].follow(rows.inputs, weights, rows.outputs, tie_factor)
            request.wrong = request.wrong or self._wrong(key, routed, rows.outputs)
            may_differ = routed.may_differ(key[1] + 1 + (key == self._exit))
            if may_differ.any():
                first = int(rows.positions[may_differ].min())
                if request.is_untied(first):
                    request.first = first
            request.tied += int(routed.tied.sum())
            request.chosen[key] = rows.positions, routed.chosen
        return request

    def logits(self, tokens: Tokens, request: RoutedRequest) -> np.ndarray:
        """Return the logits [num_tokens, vocab_size], float32. Blocks without choices in `request` are free."""
        forces: dict[BlockKey, Arrays] = {}
        run: list[Any] = [tokens.ids.tobytes()]
        for key, (positions, chosen) in request.chosen.items():
            forces[key] = self._blocks[self._parts[key].graph].forces(chosen, positions, len(tokens.ids))
            run += [(key, name, force.tobytes()) for name, force in forces[key].items()]
        if tuple(run) not in self._logits:
            self._logits[tuple(run)] = self._forced_logits(tokens, forces)
        return self._logits[tuple(run)]

    def _forced_logits(self, tokens: Tokens, forces: Mapping[BlockKey, Arrays]) -> np.ndarray:
        def exact(stage: Stage, outputs: Arrays, _: Arrays) -> Arrays:
            key = stage.part, stage.layer or 0
            if stage.part == "exit":
                key = self._exit
            if key not in forces:
                return outputs
            weights = self._graphs.weights_of(stage.graph, stage.slots)
            forced = self._blocks[stage.graph].forced(stage.inputs, weights, forces[key])
            return {name: forced[name].astype(array.dtype) for name, array in outputs.items()}

        *_, last = Walk(self._graphs, [tokens], override=exact)
        return last.outputs["logits"].astype(np.float32)

    def _name(self, key: BlockKey) -> str:
        part, mixer = key
        layer = self._graphs.num_layers - 1
        if part == "block":
            layer = self._graphs.assembly.layer_numbers[mixer]
        return f"layer {layer} ({part} {self._parts[key].graph})"

    def _wrong(self, key: BlockKey, routed: Routed, outputs: Arrays) -> str | None:
        """Return the error of a block, given its engine's choices; None without one."""
        tolerances = tolerances_of(self._graphs.graph(self._parts[key].graph).model, self._tolerances)
        enough = ENOUGH
        if has_8_bit_activations(tolerances.precision):  # a prompt has too few rows: `compare` takes others too
            enough = DECISIVE_ROWS
        for name, expected in routed.outputs.items():
            bound = beside_graph(tolerances, row_noise(expected, routed.noisy[name]), enough)
            wrong = judge.wrong(name, judge.measure(expected, outputs[name], bound))
            if wrong is not None:
                return f"{self._name(key)} along the engine's own choices, {wrong}"
        return None
