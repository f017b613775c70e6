"""The times of a step's parts on the device: an executor that has run a step in, microseconds by name out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep import InputError

if TYPE_CHECKING:  # they load CUDA's libraries
    from lockstep_gpu import cuda
    from lockstep_gpu.executor import GpuExecutor
    from lockstep_gpu.ranks.rank import PassCalls
    from lockstep_gpu.runner import StepRunner

ROUNDS = 20  # of each timing


def breakdown(executor: GpuExecutor, batch: int) -> dict[str, float]:
    """Return the microseconds of a decode step of rows 0 to `batch`-1, by their part.

    Each kind of call is repeated alone in a graph; "gaps": the rest of the step. Afterwards the rows have the tokens
    that they had. Raises InputError where a row has no room: repeated calls append tokens to its cache.
    """
    from lockstep_gpu.plan import bucket

    lengths = executor.lengths[:batch]
    count = bucket(batch, executor.num_slots)
    end = int(lengths.max()) + 2 + 2 * (ROUNDS + 1)  # two steps before there is a graph; "next token"; whole steps
    if end > executor.max_seq_len:
        raise InputError(
            f"breakdown: expected room for {end - lengths.max()} more tokens in each row, at "
            f"most {executor.max_seq_len} (max_seq_len), found a row of {lengths.max()}"
        )
    executor.drop_step()
    runner = executor.runner
    runner.reserve(dict.fromkeys(range(batch), end), executor.lengths)
    calls = runner.decode_pass(count, runner.choice(0, range(batch)), runner.drawn(range(batch)))
    for rank in runner.on_each_device():
        rank.state.decode(range(batch), [0] * batch, lengths.tolist(), rank.stream)
    while calls[0].graph is None:
        runner.launch(calls)
    try:
        times = microseconds_by_name(runner, calls)
        step_time = microseconds(runner, [rank_calls.graph for rank_calls in calls if rank_calls.graph])
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
    step = executor.last_step
    if step is None or len(step.plan.chunks) != 1 or step.plan.decoding:
        raise InputError("breakdown: expected a step with one prompt just before, found none")
    executor.drop_step()
    try:
        return microseconds_by_name(executor.runner, step.passes[0].calls)
    finally:
        for rank in executor.ranks:
            rank.state.invalidate_tokens()
        executor.reset(step.plan.chunks[0].slot)


def microseconds_by_name(runner: StepRunner, calls: Sequence[PassCalls]) -> dict[str, float]:
    """Return {call: microseconds} of each rank; ranks run at the same time."""
    return {name: round(microseconds(runner, _alone(runner, calls, name)), 1) for name in dict(calls[0].calls)}


def microseconds(runner: StepRunner, graphs: Sequence[cuda.Graph]) -> float:
    """Return the microseconds of one launch of each rank's graph, on the first device."""
    from lockstep_gpu import cuda

    _launch(runner, graphs)
    first = cuda.Event()
    last = cuda.Event()
    first.record(runner.ranks[0].stream)
    for _ in range(ROUNDS):
        _launch(runner, graphs)
    last.record(runner.ranks[0].stream)
    last.wait()
    return last.milliseconds_since(first) * 1e3 / ROUNDS


def _alone(runner: StepRunner, calls: Sequence[PassCalls], name: str) -> list[cuda.Graph]:
    """Return a graph for each rank, of its calls of this name alone."""
    graphs = []
    for rank, rank_calls in zip(runner.on_each_device(), calls):
        with rank.stream.capture() as graph:
            for of, call in rank_calls.calls:
                if of == name:
                    call()
        graphs.append(graph)
    return graphs


def _launch(runner: StepRunner, graphs: Sequence[cuda.Graph]) -> None:
    for rank, graph in zip(runner.on_each_device(), graphs):
        graph.launch(rank.stream)
