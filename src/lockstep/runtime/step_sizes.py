"""Whether steps of all sizes give a request the same bits: with these engines, on this device, by its libraries.

In: an open model without requests. Out: which numbers of rows agree with a request alone. Two prompts take turns as
rows: of a prefill step, of a decode step, and of a step of both. It takes fractions of a second on a GPU, whose kernels
are chosen by the number of rows; on a CPU it ends after its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.model import Model
from lockstep.step.advance import Advance

SECONDS = 1.5  # no size begins that would likely end later
_PROMPT = 9  # tokens: a prompt of all rows is in few steps
_GROWTH = 2.5  # estimated time of a size divided by that of the one before


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
    length = min(_PROMPT, model.max_seq_len - 3, model.max_num_tokens or _PROMPT)
    if length < 1:
        return StepSizes((), 0, tuple(sizes), 0.0)
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.vocab_size, (2, length))
    expected = [_Alone(model, prompt) for prompt in prompts]
    equal = []
    differing = 0
    last = 0.0
    for size in sizes:
        size_began = time.perf_counter()
        if size_began + _GROWTH * last - began > seconds:
            break
        try:
            agrees = all(list(_agree(model, size, expected)))  # all rows, or slots would stay in use
        except InputError:  # the KV cache is too small for this many requests
            for slot in range(size):
                model.release(slot)
            break
        if not agrees:
            differing = size
            break
        equal.append(size)
        last = time.perf_counter() - size_began
    untried = tuple(size for size in sizes if size not in equal and size != differing)
    return StepSizes(tuple(equal), differing, untried, round(time.perf_counter() - began, 3))


class _Alone:
    """A prompt, and the bits of its logits alone: after the prompt, and after each of two tokens that follow."""

    def __init__(self, model: Model, prompt: np.ndarray):
        self.prompt = prompt
        self.bits = list[np.ndarray]()
        for start, tokens in ((0, prompt), (len(prompt), prompt[:1]), (len(prompt) + 1, prompt[:1])):
            (logits,) = model.step([Advance(0, tokens, start)])
            self.bits.append(logits.view(np.uint32))
        model.release(0)


def _agree(model: Model, size: int, expected: list[_Alone]) -> Iterator[bool]:
    """Yield whether each row of steps of a size agrees: in a prefill step, a decode step, and a step of both.

    Neighbours have different prompts, so that a row that got another's result is seen.
    """
    rows = [expected[slot % 2] for slot in range(size)]
    length = len(rows[0].prompt)
    limit = model.max_num_tokens or size * length
    prompts = [Advance(slot, row.prompt, 0) for slot, row in enumerate(rows)]
    for first in range(0, size, limit // length):  # as many prompts as a step has room for
        part = slice(first, first + limit // length)
        yield from _same(model.step(prompts[part]), [row.bits[0] for row in rows[part]])
    decoding = [Advance(slot, row.prompt[:1], length) for slot, row in enumerate(rows)]
    yield from _same(model.step(decoding), [row.bits[1] for row in rows])
    # The last slot begins its prompt again while the others decode.
    last = size - 1
    if last and last + length <= limit:
        mixed = [Advance(slot, row.prompt[:1], length + 1) for slot, row in enumerate(rows[:last])]
        bits = [*(row.bits[2] for row in rows[:last]), rows[last].bits[0]]
        yield from _same(model.step([*mixed, prompts[last]]), bits)
    for slot in range(size):
        model.release(slot)


def _same(logits: np.ndarray, expected: list[np.ndarray]) -> Iterator[bool]:
    for row, bits in zip(logits, expected, strict=True):
        yield bool(np.array_equal(np.ascontiguousarray(row).view(np.uint32), bits))
