"""Whether steps of all sizes give a request the same bits: with these engines, on this device, by its libraries.

In: an open model without requests. Out: which numbers of rows agree with a request alone. Two prompts take turns as
rows: of a prefill step, of a decode step, and of a step of both. It takes fractions of a second on a GPU, whose kernels
are chosen by the number of rows; on a CPU it ends after its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.model import Model
from lockstep.step.advance import Advance

SECONDS = 1.9  # no size begins that would likely end later
_PROMPT = 9  # tokens: a prompt of all rows is in few steps
_GROWTH = 2  # estimated time of a size divided by that of the one before


@dataclass(frozen=True)
class StepSizes:
    """The numbers of rows that were compared.

    Attributes:
        equal: Rows of steps that have the bits of a request alone.
        differing: Rows of the first step that has not, or 0.
        untried: Rows of steps for which there was no time, or no room in the KV cache.
    """

    equal: tuple[int, ...]
    differing: int
    untried: tuple[int, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.equal)) or "none"
        line = f"steps of {rows} rows: the bits of a request alone, in all logits"
        if self.differing:
            line += f"; steps of {self.differing} rows have others"
        if self.untried:
            line += f"; not tried: {', '.join(map(str, self.untried))}"
        return f"{line} ({self.seconds:.2f} s)"


def compare_step_sizes(model: Model, seconds: float = SECONDS) -> StepSizes:
    """Compare steps of 1 to `max_batch_size` rows, in powers of two, until one differs or the time is over."""
    began = time.perf_counter()
    sizes = [1 << power for power in range(model.max_batch_size.bit_length()) if 1 << power < model.max_batch_size]
    sizes.append(model.max_batch_size)
    num_decoded = 2 * len(sizes)  # tokens of a slot after its prompt
    length = min(_PROMPT, model.max_seq_len - num_decoded - 1, model.max_num_tokens or _PROMPT)
    if length < 1:
        return StepSizes((), 0, tuple(sizes), 0.0)
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.vocab_size, (2, length))
    alone = [_Alone(model, prompt, num_decoded) for prompt in prompts]
    slots = list[_Slot]()
    equal = []
    differing = 0
    last = 0.0
    for size in sizes:
        size_began = time.perf_counter()
        if size_began + _GROWTH * last - began > seconds:
            break
        slots += [_Slot(alone[number % 2]) for number in range(len(slots), size)]
        try:
            agrees = all(list(_agree(model, slots)))
        except InputError:  # the KV cache is too small for this many requests
            break
        if not agrees:
            differing = size
            break
        equal.append(size)
        last = time.perf_counter() - size_began
    for number in range(len(slots)):
        model.release(number)
    untried = tuple(size for size in sizes if size not in equal and size != differing)
    return StepSizes(tuple(equal), differing, untried, round(time.perf_counter() - began, 3))


class _Alone:
    """A prompt, and the bits of its logits alone: after the prompt, and after each of the tokens that follow."""

    def __init__(self, model: Model, prompt: np.ndarray, num_decoded: int):
        self.prompt = prompt
        self.bits = list[np.ndarray]()
        slot = _Slot(self)
        for _ in range(num_decoded + 1):
            (logits,) = model.step([slot.advance(0)])
            self.bits.append(logits.view(np.uint32))
        model.release(0)


@dataclass
class _Slot:
    """A request slot, and how many of the steps that its prompt has alone it has taken."""

    alone: _Alone
    num_steps: int = 0

    def advance(self, number: int) -> Advance:
        """Return the next step of the slot of that number."""
        self.num_steps += 1
        prompt = self.alone.prompt
        if self.num_steps == 1:
            return Advance(number, prompt, 0)
        return Advance(number, prompt[:1], len(prompt) + self.num_steps - 2)


def _agree(model: Model, slots: list[_Slot]) -> Iterator[bool]:
    """Yield whether each row of steps agrees: of the new slots' prompts, a decode step of all, and a step of both.

    Neighbours have different prompts, so that a row that got another's result is seen.
    """
    length = len(slots[0].alone.prompt)
    limit = model.max_num_tokens or len(slots) * length
    new = [number for number, slot in enumerate(slots) if not slot.num_steps]
    for first in range(0, len(new), limit // length):  # as many prompts as a step has room for
        yield from _step(model, slots, new[first : first + limit // length])
    yield from _step(model, slots, range(len(slots)))
    if 1 < len(slots) <= limit - length + 1:  # the last slot begins its prompt again while the others decode
        slots[-1].num_steps = 0
        yield from _step(model, slots, range(len(slots)))


def _step(model: Model, slots: list[_Slot], numbers: Sequence[int]) -> Iterator[bool]:
    logits = model.step([slots[number].advance(number) for number in numbers])
    return _same(logits, [slots[number].alone.bits[slots[number].num_steps - 1] for number in numbers])


def _same(logits: np.ndarray, expected: list[np.ndarray]) -> Iterator[bool]:
    for row, bits in zip(logits, expected, strict=True):
        yield bool(np.array_equal(np.ascontiguousarray(row).view(np.uint32), bits))
