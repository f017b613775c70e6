"""The times of a step's parts on the device: an executor that has run a step in, microseconds by name out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep import InputError

if TYPE_CHECKING:  # they load CUDA's libraries
    from lockstep_gpu import cuda
    from lockstep_gpu.executor import GpuExecutor
    from lockstep_gpu.ranks.group import RankGroup
    from lockstep_gpu.ranks.rank import StepCalls

ROUNDS = 20  # of each timing


def breakdown(executor: GpuExecutor, batch: int) -> dict[str, float]:
    """Return the microseconds of a decode step of rows 0 to `batch`-1, by their part.

    Each kind of call is repeated alone in a graph; "gaps": the rest of the step. Afterwards the rows have the tokens
    that they had. Raises InputError where a row has no room: repeated calls append tokens to its cache.
    """
    from lockstep_gpu.executor import bucket

    lengths = executor.lengths[:batch]
    count = bucket(batch, executor.num_slots)
    end = int(lengths.max()) + 2 + 2 * (ROUNDS + 1)  # two steps before there is a graph; "next token"; whole steps
    if end > executor.max_seq_len:
        raise InputError(
            f"breakdown: expected room for {end - lengths.max()} more tokens in each row, at "
            f"most {executor.max_seq_len} (max_seq_len), found a row of {lengths.max()}"
        )
    executor._last_prompt = executor._in_flight = None
    executor.group.reserve(dict.fromkeys(range(batch), end), executor.lengths)
    steps = executor.decode_calls(count, executor._adapted(range(batch)), executor._drawn(range(batch)))
    for rank in executor.group.on_each_device():
        rank.state.decode(range(batch), [0] * batch, lengths.tolist(), rank.stream)
    while steps[0].graph is None:
        executor.group.launch(steps)
    try:
        times = microseconds_by_name(executor.group, steps)
        step_time = microseconds(executor.group, [step.graph for step in steps if step.graph])
    finally:
        for rank in executor.ranks:
            rank.state.invalidate_tokens()
    times["gaps"] = round(step_time - sum(times.values()), 1)
    times["step"] = round(step_time, 1)
    return times


def breakdown_prefill(executor: GpuExecutor) -> dict[str, float]:
    """Return {part: microseconds} of the prompt of the last step, whose slot is reset: repeated calls spoil its cache.

    Raises InputError if that step had not exactly one prompt.
    """
    if executor._last_prompt is None:
        raise InputError("breakdown: expected a step with one prompt just before, found none")
    steps, slots = executor._last_prompt
    executor._last_prompt = executor._in_flight = None
    try:
        return microseconds_by_name(executor.group, steps)
    finally:
        for rank in executor.ranks:
            rank.state.invalidate_tokens()
        for slot in slots:
            executor.reset(slot)


def microseconds_by_name(group: RankGroup, steps: Sequence[StepCalls]) -> dict[str, float]:
    """Return {call: microseconds} of each rank; ranks run at the same time."""
    return {name: round(microseconds(group, _alone(group, steps, name)), 1) for name in dict(steps[0].calls)}


def microseconds(group: RankGroup, graphs: Sequence[cuda.Graph]) -> float:
    """Return the microseconds of one launch of each rank's graph, on the first device."""
    from lockstep_gpu import cuda

    _launch(group, graphs)
    first = cuda.Event()
    last = cuda.Event()
    first.record(group.ranks[0].stream)
    for _ in range(ROUNDS):
        _launch(group, graphs)
    last.record(group.ranks[0].stream)
    last.wait()
    return last.milliseconds_since(first) * 1e3 / ROUNDS


def _alone(group: RankGroup, steps: Sequence[StepCalls], name: str) -> list[cuda.Graph]:
    """Return a graph for each rank, of its calls of this name alone."""
    graphs = []
    for rank, step in zip(group.on_each_device(), steps):
        with rank.stream.capture() as graph:
            for of, call in step.calls:
                if of == name:
                    call()
        graphs.append(graph)
    return graphs


def _launch(group: RankGroup, graphs: Sequence[cuda.Graph]) -> None:
    for rank, graph in zip(group.on_each_device(), graphs):
        graph.launch(rank.stream)
