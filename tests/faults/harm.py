"""What users of an engine set would see of a fault.

Requests of many kinds within the limits go through the runtime, along given tokens. Needs no torch.

In: a model, opened. Out: for each scenario the logits of its steps. What moves one of them by more than the tolerance
is harm, whatever the gates say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep import Advance, Model

_SEED = 0
_AROUND = (1, 16, 32, 64, 128, 200, 300)  # lengths: of pages, of the cache's capacity, of windows


class _Requests:
    """Advances of slots along their sequences, each token once."""

    def __init__(self, model: Model, sequences: Sequence[np.ndarray]):
        self.model, self.sequences = model, sequences
        self.held = dict.fromkeys(range(model.max_batch_size), 0)
        self.of = {slot: slot % len(sequences) for slot in self.held}

    def step(self, *advances: tuple[int, int]) -> np.ndarray:
        """Advance (slot, tokens) of each; the logits."""
        made = []
        for slot, count in advances:
            start = self.held[slot]
            made.append(Advance(slot, self.sequences[self.of[slot]][start : start + count], start))
            self.held[slot] = start + count
        return self.model.step(made)

    def new(self, slot: int, sequence: int) -> None:
        """Begin a request with another sequence at the slot's next advance."""
        self.held[slot], self.of[slot] = 0, sequence % len(self.sequences)

    def left(self, slot: int) -> int:
        return self.model.max_seq_len - self.held[slot]


Scenario = Callable[[_Requests], Iterator[np.ndarray]]


def run(model: Model, scenarios: Mapping[str, Scenario] | None = None) -> dict[str, np.ndarray]:
    """{scenario: logits [rows, vocab_size] of all its steps, one behind another}.

    scenarios: by default all that stand here.
    """
    random = np.random.default_rng(_SEED)
    # Each token of the vocabulary comes in some request.
    count = -(-model.vocab_size // model.max_seq_len) + model.max_batch_size
    tokens = np.concatenate(
        [random.permutation(model.vocab_size) for _ in range(-(-count * model.max_seq_len // model.vocab_size))]
    )
    sequences = [tokens[i * model.max_seq_len : (i + 1) * model.max_seq_len] for i in range(count)]
    found = {}
    for name, scenario in (SCENARIOS if scenarios is None else scenarios).items():
        for slot in range(model.max_batch_size):
            model.release(slot)
        found[name] = np.concatenate(list(scenario(_Requests(model, sequences))))
    return found


def _alone(requests: _Requests) -> Iterator[np.ndarray]:
    """Decode a short prompt to the longest length."""
    yield requests.step((0, 5))
    while requests.left(0):
        yield requests.step((0, 1))


def _from_nothing(requests: _Requests) -> Iterator[np.ndarray]:
    """Decode a prompt of one token in another slot."""
    for _ in range(12):
        yield requests.step((2, 1))


def _pieces(requests: _Requests) -> Iterator[np.ndarray]:
    """Bring prompts of many lengths, each in one piece, with two tokens behind it.

    Among them every token of the vocabulary.
    """
    most = min(requests.model.max_seq_len, requests.model.max_num_tokens or requests.model.max_seq_len)
    lengths = sorted(
        {length + off for length in (*_AROUND, most - 1) for off in (-1, 0, 1) if 1 <= length + off <= most}
    )
    for number, length in enumerate(lengths):
        requests.new(1, number)
        yield requests.step((1, length))
        for _ in range(min(2, requests.left(1))):
            yield requests.step((1, 1))
    for number in range(len(requests.sequences)):
        requests.new(0, number)
        yield requests.step((0, most))


def _chunks(*sizes: int) -> Scenario:
    def scenario(requests: _Requests) -> Iterator[np.ndarray]:
        number = 0
        while requests.left(1):
            yield requests.step((1, min(sizes[number % len(sizes)], requests.left(1))))
            number += 1

    return scenario


def _batch(requests: _Requests) -> Iterator[np.ndarray]:
    """Bring prompts of different lengths together, and decode them together.

    Until none has room.
    """
    slots = range(requests.model.max_batch_size)
    yield requests.step(*[(slot, 3 + 31 * slot) for slot in slots])
    while rest := [slot for slot in slots if requests.left(slot)]:
        yield requests.step(*[(slot, 1) for slot in rest])


def _together(count: int) -> Scenario:
    """So many requests decode together, of one length and of several."""

    def scenario(requests: _Requests) -> Iterator[np.ndarray]:
        slots = range(min(count, requests.model.max_batch_size))
        yield requests.step(*[(slot, 20 + 7 * slot) for slot in slots])
        for _ in range(12):
            yield requests.step(*[(slot, 1) for slot in slots])

    return scenario


def _mixed(requests: _Requests) -> Iterator[np.ndarray]:
    """Decode rows at both ends while those between bring chunks.

    The list is in no order.
    """
    last = requests.model.max_batch_size - 1
    yield requests.step((last, 9), (0, 40))
    for size in (30, 2, 64, 1, 17, 50):
        between = [(slot, min(size, requests.left(slot))) for slot in range(last - 1, 0, -1)]
        yield requests.step((last, 1), *[(slot, count) for slot, count in between if count], (0, 1))
    for _ in range(6):
        yield requests.step((last, 1), (0, 1))
    yield requests.step(*[(slot, 1) for slot in range(last, -1, -1)])


def _full(requests: _Requests) -> Iterator[np.ndarray]:
    """Bring as many tokens in a step as the limits take, then decode one a request."""
    slots = range(requests.model.max_batch_size)
    room = requests.model.max_num_tokens or requests.model.max_seq_len * len(slots)
    each = min(room // len(slots), requests.model.max_seq_len - 1)
    yield requests.step(*[(slot, each) for slot in slots])
    yield requests.step(*[(slot, 1) for slot in slots])


def _again(requests: _Requests) -> Iterator[np.ndarray]:
    """Slots are taken again by shorter requests while others go on."""
    slots = range(requests.model.max_batch_size)
    yield requests.step(*[(slot, 70) for slot in slots])
    for number, slot in enumerate(slots):
        requests.new(slot, number + 3)
        yield requests.step((slot, 6 + number), *[(other, 1) for other in slots if other != slot])
        yield requests.step(*[(other, 1) for other in slots])


def step_of(count: int) -> Scenario:
    """Bring `count` tokens in one step, of as few requests as hold them, and decode them."""

    def scenario(requests: _Requests) -> Iterator[np.ndarray]:
        most = requests.model.max_seq_len - 2
        slots = range(-(-count // most))
        yield requests.step(*[(slot, min(most, count - slot * most)) for slot in slots])
        for _ in range(2):
            yield requests.step(*[(slot, 1) for slot in slots])

    return scenario


def chunk_of(count: int) -> Scenario:
    """Bring a chunk of `count` tokens from nothing, and behind some."""
    return _chunks_behind((0, count), (40, count))


def behind(past: int) -> Scenario:
    """Bring chunks of several sizes behind `past` tokens."""
    return _chunks_behind((past, 2), (past, 9), (past, 50))


def _chunks_behind(*sizes: tuple[int, int]) -> Scenario:
    def scenario(requests: _Requests) -> Iterator[np.ndarray]:
        for number, (past, count) in enumerate(sizes):
            requests.new(0, number)
            if past:
                yield requests.step((0, past))
            yield requests.step((0, min(count, requests.left(0))))
            if requests.left(0):
                yield requests.step((0, 1))

    return scenario


def decode_of(count: int, capacity: int) -> Scenario:
    """Decode `count` requests in caches of `capacity` rows."""

    def scenario(requests: _Requests) -> Iterator[np.ndarray]:
        slots = range(count)
        yield requests.step(*[(slot, capacity // 2 + 1 + 5 * slot) for slot in slots])
        for _ in range(6):
            yield requests.step(*[(slot, 1) for slot in slots])

    return scenario


SCENARIOS: Mapping[str, Scenario] = {
    "alone": _alone,
    "from nothing": _from_nothing,
    "pieces": _pieces,
    "chunks": _chunks(50, 1, 37, 100, 5, 64),
    "even chunks": _chunks(16),
    "batch": _batch,
    "two": _together(2),
    "three": _together(3),
    "mixed": _mixed,
    "full": _full,
    "again": _again,
}


def _adapters(requests: _Requests) -> Iterator[np.ndarray]:
    """Fill all adapter slots, and bring requests with each of them beside requests with none."""
    model, adapters = requests.model, requests.model.adapters
    real = sorted(adapters.known)
    names = [f"{real[slot % len(real)]} as {slot}" for slot in range(adapters.residency.max_adapters)]
    for slot, name in enumerate(names):
        known = adapters.known[real[slot % len(real)]]
        adapters.add(replace(known, name=name, scale=known.scale * (1 + slot / 2)))  # each another one
    for number, name in enumerate(names):
        following = names[(number + 1) % len(names)]
        given = (name, None, following, None) if number % 2 else (None, name, None, following)
        for slot, adapter in enumerate(given):
            model.release(slot)
            requests.new(slot, number)
            model.set_adapter(slot, adapter)
        yield requests.step(*[(slot, 5 + slot) for slot in range(4)])
        for _ in range(3):
            yield requests.step(*[(slot, 1) for slot in range(4)])
    for slot in range(4):
        model.release(slot)
    for name in names:
        adapters.remove(name)


ADAPTED: Mapping[str, Scenario] = {"adapters": _adapters}


def largest_difference(right: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[float | None, str]:
    """Return (largest difference of a logit, scenario).

    None where a logit is NaN or infinite.
    """
    worst, where = 0.0, next(iter(right))
    for name, expected in right.items():
        if not np.isfinite(found[name]).all():
            return None, name
        difference = float(np.abs(found[name].astype(np.float64) - expected).max())
        if difference > worst:
            worst, where = difference, name
    return worst, where
