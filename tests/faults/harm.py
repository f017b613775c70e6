"""What users of an engine set would see of a fault.

Requests of many kinds within the limits go through the runtime, along given tokens. Needs no torch.

In: a model, opened. Out: for each scenario the logits of its steps. What moves one of them by more than the tolerance
is harm, whatever the gates say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep import Advance, Model

_AROUND = (1, 16, 32, 64, 128, 200, 300)  # lengths: of pages, of the cache's capacity, of windows


class Requests:
    """Advances of slots along their sequences, each token once."""

    def __init__(self, model: Model, sequences: Sequence[np.ndarray]):
        self.model = model
        self.sequences = sequences
        self.slots = range(model.max_batch_size)
        self.most = min(model.max_seq_len, model.max_num_tokens or model.max_seq_len)
        self._held = dict.fromkeys(self.slots, 0)
        self._of = {slot: slot % len(sequences) for slot in self.slots}

    def step(self, *advances: tuple[int, int]) -> np.ndarray:
        """Advance (slot, tokens) of each; the logits."""
        taken_advances = []
        for slot, count in advances:
            start = self._held[slot]
            taken_advances.append(Advance(slot, self.sequences[self._of[slot]][start : start + count], start))
            self._held[slot] = start + count
        return self.model.step(taken_advances)

    def decode(self, slots: Sequence[int], steps: int = 1) -> Iterator[np.ndarray]:
        """Advance each slot by a token, in each of some steps."""
        for _ in range(steps):
            yield self.step(*[(slot, 1) for slot in slots])

    def new(self, slot: int, sequence: int) -> None:
        """Begin a request with another sequence at the slot's next advance."""
        self._held[slot], self._of[slot] = 0, sequence % len(self.sequences)

    def room(self, slot: int) -> int:
        """Return how many tokens a slot's request may still advance by."""
        return self.model.max_seq_len - self._held[slot]


Scenario = Callable[[Requests], Iterator[np.ndarray]]


def run(model: Model, scenarios: Mapping[str, Scenario] | None = None) -> dict[str, np.ndarray]:
    """{scenario: logits [rows, vocab_size] of all its steps, one behind another}.

    scenarios: by default all that stand here. Each token of the vocabulary comes in some request.
    """
    random = np.random.default_rng(0)
    length = model.max_seq_len
    count = -(-model.vocab_size // length) + model.max_batch_size
    tokens = np.concatenate(
        [random.permutation(model.vocab_size) for _ in range(-(-count * length // model.vocab_size))]
    )
    sequences = [tokens[i * length : (i + 1) * length] for i in range(count)]
    logits = {}
    for name, scenario in (SCENARIOS if scenarios is None else scenarios).items():
        for slot in range(model.max_batch_size):
            model.release(slot)
        logits[name] = np.concatenate(list(scenario(Requests(model, sequences))))
    return logits


def alone(requests: Requests) -> Iterator[np.ndarray]:
    """Decode a short prompt to the longest length."""
    yield requests.step((0, 5))
    yield from requests.decode([0], requests.room(0))


def from_nothing(requests: Requests) -> Iterator[np.ndarray]:
    """Decode a prompt of one token in another slot."""
    yield from requests.decode([2], 12)


def pieces(requests: Requests) -> Iterator[np.ndarray]:
    """Bring prompts of many lengths, each in one piece and two tokens after it, with every token of the vocabulary."""
    max_length = requests.most
    lengths = set()
    for length in (*_AROUND, max_length - 1):
        lengths |= {length - 1, length, length + 1}
    for number, length in enumerate(length for length in sorted(lengths) if 1 <= length <= max_length):
        requests.new(1, number)
        yield requests.step((1, length))
        yield from requests.decode([1], min(2, requests.room(1)))
    for number in range(len(requests.sequences)):
        requests.new(0, number)
        yield requests.step((0, max_length))


def chunks(requests: Requests, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Bring a prompt of the longest length in chunks of these sizes, again and again."""
    number = 0
    while requests.room(1):
        yield requests.step((1, min(sizes[number % len(sizes)], requests.room(1))))
        number += 1


def batch(requests: Requests) -> Iterator[np.ndarray]:
    """Bring prompts of different lengths together, and decode them together until none has room."""
    yield requests.step(*[(slot, 3 + 31 * slot) for slot in requests.slots])
    while slots := [slot for slot in requests.slots if requests.room(slot)]:
        yield from requests.decode(slots)


def together(requests: Requests, count: int) -> Iterator[np.ndarray]:
    """That many requests decode together, of one length and of several."""
    slots = requests.slots[:count]
    yield requests.step(*[(slot, 20 + 7 * slot) for slot in slots])
    yield from requests.decode(slots, 12)


def mixed(requests: Requests) -> Iterator[np.ndarray]:
    """Decode rows at both ends while those between bring chunks. The list is in no order."""
    last = requests.slots[-1]
    yield requests.step((last, 9), (0, 40))
    for size in (30, 2, 64, 1, 17, 50):
        between = [(slot, min(size, requests.room(slot))) for slot in range(last - 1, 0, -1)]
        yield requests.step((last, 1), *[(slot, count) for slot, count in between if count], (0, 1))
    yield from requests.decode([last, 0], 6)
    yield from requests.decode(requests.slots[::-1])


def full(requests: Requests) -> Iterator[np.ndarray]:
    """Bring as many tokens in a step as the limits take, then decode one a request."""
    slots = requests.slots
    model = requests.model
    room = model.max_num_tokens or model.max_seq_len * len(slots)
    length = min(room // len(slots), model.max_seq_len - 1)
    yield requests.step(*[(slot, length) for slot in slots])
    yield from requests.decode(slots)


def again(requests: Requests) -> Iterator[np.ndarray]:
    """Slots are taken again by shorter requests while others go on."""
    slots = requests.slots
    yield requests.step(*[(slot, 70) for slot in slots])
    for number, slot in enumerate(slots):
        requests.new(slot, number + 3)
        yield requests.step((slot, 6 + number), *[(other, 1) for other in slots if other != slot])
        yield from requests.decode(slots)


SCENARIOS: Mapping[str, Scenario] = {
    "alone": alone, "from nothing": from_nothing, "pieces": pieces,
    "chunks": partial(chunks, sizes=(50, 1, 37, 100, 5, 64)), "even chunks": partial(chunks, sizes=(16,)),
    "batch": batch, "two": partial(together, count=2), "three": partial(together, count=3), "mixed": mixed,
    "full": full, "again": again,
}  # fmt: skip


def adapters(requests: Requests) -> Iterator[np.ndarray]:
    """Fill all adapter slots, and bring requests with each of them together with requests with none."""
    model = requests.model
    loaded = requests.model.adapters.loaded
    real = sorted(loaded)
    names = [f"{real[slot % len(real)]} as {slot}" for slot in range(model.adapters.residency.num_places)]
    for slot, name in enumerate(names):
        adapter = loaded[real[slot % len(real)]]
        model.adapters.add(replace(adapter, name=name, scale=adapter.scale * (1 + slot / 2)))  # each another one
    for number, name in enumerate(names):
        following = names[(number + 1) % len(names)]
        for slot, adapter in enumerate((name, None, following, None) if number % 2 else (None, name, None, following)):
            model.release(slot)
            requests.new(slot, number)
            model.set_adapter(slot, adapter)
        yield requests.step(*[(slot, 5 + slot) for slot in range(4)])
        yield from requests.decode(range(4), 3)
    for slot in range(4):
        model.release(slot)
    for name in names:
        model.adapters.remove(name)


ADAPTED: Mapping[str, Scenario] = {"adapters": adapters}


# What reaches a fault of one size


def step_of(count: int) -> Scenario:
    """Bring `count` tokens in one step, of as few requests as hold them, and decode them."""

    def scenario(requests: Requests) -> Iterator[np.ndarray]:
        max_length = requests.model.max_seq_len - 2
        slots = range(-(-count // max_length))
        yield requests.step(*[(slot, min(max_length, count - slot * max_length)) for slot in slots])
        yield from requests.decode(slots, 2)

    return scenario


def chunk_of(count: int) -> Scenario:
    """Bring a chunk of `count` tokens from nothing, and behind some."""
    return partial(chunks_behind, sizes=((0, count), (40, count)))


def behind(past: int) -> Scenario:
    """Bring chunks of several sizes behind `past` tokens."""
    return partial(chunks_behind, sizes=((past, 2), (past, 9), (past, 50)))


def chunks_behind(requests: Requests, sizes: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
    for number, (past, count) in enumerate(sizes):
        requests.new(0, number)
        if past:
            yield requests.step((0, past))
        yield requests.step((0, min(count, requests.room(0))))
        yield from requests.decode([0], min(1, requests.room(0)))


def decode_of(count: int, capacity: int) -> Scenario:
    """Decode `count` requests in caches of `capacity` rows."""

    def scenario(requests: Requests) -> Iterator[np.ndarray]:
        yield requests.step(*[(slot, capacity // 2 + 1 + 5 * slot) for slot in range(count)])
        yield from requests.decode(range(count), 6)

    return scenario


def largest_difference(right: Mapping[str, np.ndarray], spoilt: Mapping[str, np.ndarray]) -> tuple[float | None, str]:
    """Return (largest difference of a logit, scenario). None where a logit is NaN or infinite."""
    worst = 0.0
    where = next(iter(right))
    for name, expected in right.items():
        if not np.isfinite(spoilt[name]).all():
            return None, name
        difference = float(np.abs(spoilt[name].astype(np.float64) - expected).max())
        if difference > worst:
            worst = difference
            where = name
    return worst, where
