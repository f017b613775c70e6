"""Teacher-forced requests through `Model.step`, in mixed batches: expected logits in, errors out.

A request's tokens are fixed, so its logits are known after each number of tokens for which the reference has them,
whatever goes wrong before. Batches are mixed as under load: chunks of prompts, single tokens of other requests, pauses,
slots that are taken and released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.artifacts.reports import PositionError
from lockstep.onnx_tools.judge import Bound, measure, wrong
from lockstep.progress import counted
from lockstep.runtime import Advance, Model
from lockstep.tolerances import ENOUGH
from lockstep.verify.boundaries import PAGE
from lockstep.verify.metrics import describe_error, or_infinity
from lockstep.verify.noise import LogitBounds

_SEED = 0
_LONGEST_CHUNK = 8  # tokens of a short prompt in random chunks
_DRAWN = 64  # positions between the edges: a fault of one in twenty of them is detected with 96 %
_POSITIONS = 64  # in a report
_PAUSE = 0.25  # the part of steps that a request pauses


@dataclass(frozen=True)
class Forced:
    """A request with its whole history.

    tokens: prompt and answer, int64. expected: {number of tokens: logits [vocab_size] float32 after them}. bounds: of
    their errors. ends: ascending numbers of tokens, each the end of a chunk; the request ends with the last.
    kept_logits: filled with the logits after each of `keep` tokens.
    """

    tokens: np.ndarray
    expected: Mapping[int, np.ndarray]
    bounds: LogitBounds
    ends: tuple[int, ...]
    keep: frozenset[int] = frozenset()
    kept_logits: dict[int, np.ndarray] = field(default_factory=dict)

    def decoded(self) -> set[int]:
        """Return the numbers of tokens after a chunk of one token, as in decode."""
        return {end for start, end in zip((0, *self.ends), self.ends) if end - start == 1}


@dataclass
class Errors:
    """The errors of one request's logits.

    worst: the largest absolute error, None where one is NaN or infinite. first: (number of tokens, message) of the
    first error that is too large. rms: of each row's error. positions: {number of tokens: largest error}.
    """

    bounds: LogitBounds
    worst: float | None = 0.0
    first: tuple[int, str] | None = None
    rms: dict[int, float] = field(default_factory=dict)
    positions: dict[int, PositionError] = field(default_factory=dict)

    def add(self, count: int, expected: np.ndarray, actual: np.ndarray) -> None:
        error = measure(expected[None], actual[None], Bound(self.bounds.at(count)), 1.0)
        if self.worst is not None and (error.max_abs_error is None or error.max_abs_error >= self.worst):
            self.worst = error.max_abs_error
        noise = self.bounds.cost_at(count)
        position = PositionError(count, error.max_abs_error, noise, error.tolerance)
        keep_largest(self.positions, {count: position})
        if self.first is None and wrong("logits", error):
            self.first = count, describe_error(error.max_abs_error, error.tolerance)
        if error.rms_error is not None:
            self.rms[count] = error.rms_error

    def wrong(self) -> tuple[int, str] | None:
        """Return (number of tokens, message) of the first error that is too large, or where the median of all is."""
        if self.first or len(self.rms) < ENOUGH:
            return self.first
        median = float(np.median(list(self.rms.values())))
        bound = self.bounds.rms(self.rms)
        if median <= bound:
            return None
        what = f"an rms error of at most {bound:.3g} of the logits of the median of {len(self.rms)} steps"
        return max(self.rms), f"expected {what}, found {median:.3g}"


def keep_largest(largest: dict[int, PositionError], positions: Mapping[int, PositionError]) -> None:
    """Replace the errors in `largest` where those of `positions` are larger."""
    for count, position in positions.items():
        if count not in largest or or_infinity(largest[count].logit_error) < or_infinity(position.logit_error):
            largest[count] = position


def largest_of_neighbours(positions: Mapping[int, PositionError]) -> tuple[PositionError, ...]:
    """Return at most `_POSITIONS` errors, ascending by position, each the largest of a range of positions."""
    ascending = [positions[count] for count in sorted(positions)]
    step = -(-len(ascending) // _POSITIONS) or 1
    neighbours = [ascending[start : start + step] for start in range(0, len(ascending), step)]
    return tuple(max(errors, key=lambda position: or_infinity(position.logit_error)) for errors in neighbours)


@dataclass
class _Running:
    request: Forced
    errors: Errors
    num_cached: int = 0
    ends: deque[int] = field(default_factory=deque)
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # of logits that are not judged yet

    def judge(self, expected: Mapping[int, np.ndarray]) -> None:
        for count, logits in self.rows.items():
            self.errors.add(count, expected[count], logits)
        self.rows.clear()


def random_chunks(prompt: int, total: int, random: np.random.Generator) -> tuple[int, ...]:
    """Return the ends of random chunks of a prompt; each later token up to `total` is a chunk."""
    ends = []
    at = 0
    while at < prompt:
        at = min(at + int(random.integers(1, _LONGEST_CHUNK + 1)), prompt)
        ends.append(at)
    return (*ends, *range(prompt + 1, total + 1))


def chunks_to_edges(edges: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ends of chunks of one token up to each edge, from at most a page before it."""
    for before, edge in zip((0, *edges), edges):
        yield tuple(range(max(before, edge - PAGE, 1), edge + 1))


def drawn_positions(count: int, excluded: Collection[int], digest: str) -> list[int]:
    """Return lengths from 2 to `count` drawn by a digest, ascending, none right after another or an excluded one.

    A new build has another digest, so over many builds all positions are checked.
    """
    positions = sorted(set(range(2, count + 1)).difference(excluded))
    random = np.random.default_rng(int(digest[:16], 16))
    drawn = set(random.permutation(positions)[:_DRAWN].tolist())
    return sorted(position for position in drawn if position - 1 not in drawn and position - 1 not in excluded)


def force(
    model: Model,
    requests: Sequence[Forced],
    max_num_tokens: int,
    pauses: bool = False,
    follow: Callable[[Forced], Mapping[int, np.ndarray]] | None = None,
) -> list[Errors]:
    """Run the requests, and compare their logits wherever they are known.

    As many run together as the model has slots. max_num_tokens: of a step; a chunk that does not fit is split again.
    pauses: let requests pause, and shuffle the others, seeded, so that rows of many lengths are batched. follow:
    returns a request's expected logits once it has run. Returns the errors of each request, in their order.
    """
    random = None
    if pauses:
        random = np.random.default_rng(_SEED)
    results = [Errors(request.bounds) for request in requests]
    waiting = deque(_Running(request, errors, 0, deque(request.ends)) for request, errors in zip(requests, results))
    slots: dict[int, _Running] = {}
    total = sum(request.ends[-1] for request in requests)
    try:
        with counted(total, "logits of given tokens", "tokens") as count_done:
            while waiting or slots:
                for slot in range(model.max_batch_size):
                    if waiting and slot not in slots:
                        slots[slot] = waiting.popleft()
                advances = list(_advances(slots, max_num_tokens, random))
                for advance, logits in zip(advances, model.step(advances)):
                    running = slots[advance.slot]
                    running.num_cached += len(advance.tokens)
                    count_done(len(advance.tokens))
                    if running.num_cached == running.ends[0]:
                        running.ends.popleft()
                    if running.num_cached in running.request.keep:
                        running.request.kept_logits[running.num_cached] = logits.copy()
                    if running.num_cached in running.request.expected:
                        running.rows[running.num_cached] = logits
                        if follow is None:
                            running.judge(running.request.expected)
                    if not running.ends:
                        if follow is not None:
                            running.judge(follow(running.request))
                        model.release(advance.slot)
                        del slots[advance.slot]
    finally:
        for slot in slots:
            model.release(slot)
    return results


def _advances(slots: Mapping[int, _Running], room: int, random: np.random.Generator | None) -> Iterator[Advance]:
    """Yield the next chunks of requests, at least one, of `room` tokens together. random: draws pauses and an order."""
    chosen = [slot for slot in sorted(slots) if random is None or random.random() >= _PAUSE] or [min(slots)]
    if random is not None:
        random.shuffle(chosen)
    for slot in chosen:
        running = slots[slot]
        start = running.num_cached
        count = min(running.ends[0] - start, room)
        if count:
            room -= count
            yield Advance(slot, running.request.tokens[start : start + count], start)
