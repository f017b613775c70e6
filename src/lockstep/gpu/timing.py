"""The times of a step's parts on the device."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.gpu import cuda
from lockstep.gpu.ranks.group import RankGroup
from lockstep.gpu.ranks.rank import StepCalls

ROUNDS = 20  # of what is timed


def microseconds_by_name(group: RankGroup, steps: Sequence[StepCalls]) -> dict[str, float]:
    """Return the microseconds of each rank's calls by name, all ranks at once."""
    return {name: round(microseconds(group, _alone(group, steps, name)), 1) for name in dict.fromkeys(steps[0].names)}


def microseconds(group: RankGroup, graphs: Sequence[cuda.Graph]) -> float:
    """Return the microseconds of one launch of each rank's graph, on the first device."""
    _launch(group, graphs)
    first, last = cuda.Event(), cuda.Event()
    first.record(group.ranks[0].stream)
    for _ in range(ROUNDS):
        _launch(group, graphs)
    last.record(group.ranks[0].stream)
    last.wait()
    return last.milliseconds_since(first) * 1e3 / ROUNDS


def _alone(group: RankGroup, steps: Sequence[StepCalls], name: str) -> list[cuda.Graph]:
    """Return each rank's calls of this name in a graph of their own."""
    graphs = []
    for rank, step in zip(group.each(), steps):
        with rank.stream.capture() as graph:
            for call, of in zip(step.calls, step.names):
                if of == name:
                    call()
        graphs.append(graph)
    return graphs


def _launch(group: RankGroup, graphs: Sequence[cuda.Graph]) -> None:
    for rank, graph in zip(group.each(), graphs):
        graph.launch(rank.stream)
