"""Have float16 graphs choose as PyTorch does where rounding decides, as between two experts of nearly equal scores.

A stage with its graph's outputs and PyTorch's in; outputs along PyTorch's choices out. ONNX Runtime computes float16
graphs in float16, so a right graph may choose another expert than PyTorch in float32, and its outputs jump. Graphs in
bfloat16 are computed in float32, and choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.onnx_tools.rounded import UNITS
from lockstep.tolerances import Tolerances
from lockstep.verify.arrays import take_rows
from lockstep.verify.graphs import Graphs
from lockstep.verify.routing.block import ChoosingBlock
from lockstep.verify.walk import Arrays, Stage


class TorchChoices:
    """An override of `Walk` with a record."""

    def __init__(self, graphs: Graphs, blocks: Mapping[str, ChoosingBlock], tolerances: Tolerances):
        self._graphs = graphs
        self._blocks = blocks
        self._tie_factor = tolerances.noise * tolerances.rounding / UNITS
        self._tied = list[np.ndarray]()

    @classmethod
    def open(cls, graphs: Graphs, tolerances: Tolerances, threads: int | None) -> TorchChoices | None:
        """Open the blocks with a choice; None without one, and where choices cannot be followed."""
        assembly = graphs.assembly
        if graphs.dtype != np.float16 or assembly.adapters is not None or assembly.tensor_parallel is not None:
            return None
        blocks = {name: ChoosingBlock(graph, threads) for name, graph in graphs.classes.items()}
        choosing = {name: block for name, block in blocks.items() if block.choices}
        return cls(graphs, choosing, tolerances) if choosing else None

    def __call__(self, stage: Stage, outputs: Arrays, expected: Arrays) -> Arrays:
        block = self._blocks.get(stage.graph)
        if block is None or not expected:
            return outputs
        weights = self._graphs.weights_of(stage.graph, stage.slots)
        routed = block.follow(stage.inputs, weights, expected, self._tie_factor)
        self._tied.append(routed.tied)
        rows = np.flatnonzero(routed.tied)
        if not len(rows):
            return outputs
        forces = block.forces(take_rows(routed.chosen, rows), rows, len(routed.tied))
        along = block.forced(stage.inputs, weights, forces)
        replaced = {}
        for name, array in outputs.items():
            replaced[name] = array.copy()
            replaced[name][rows] = along[name][rows]
        return replaced

    def before_ties(self, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens of each sequence come before the first whose choice rounding may decide.

        lengths: of sequences that ran together. All of their tokens where each sequence begins with such a one.
        """
        count = sum(lengths)
        tied = np.zeros(count, bool)
        for rows in self._tied:
            if len(rows) == count:
                tied |= rows
        counts = []
        for rows in np.split(tied, np.cumsum(lengths)[:-1]):
            counts.append(int(np.argmax([*rows, True])))
        return counts if any(counts) else list(lengths)
