"""Faults between the edges: of one size, one token, one magnitude, one pair of sizes.

A kernel is chosen by size, a table has a row too few, a number saturates. Nothing says that this happens at a power of
two. `faults(seed)` draws the places: those of the table come from one seed, tests take others.
"""

from __future__ import annotations

import random
from functools import partial

from faults.blocks import Change
from faults.edit import Edit, Value
from faults.fault import DECODE, EMBEDDING, EXIT, HOST, MIDDLE, PREFILL, Fault, change, replaced
from faults.harm import behind, chunk_of, decode_of, step_of
from faults.models import LIMITS
from lockstep.verify.boundaries import PAGE

_FACTOR = 1.05
_CHUNK = 256  # tokens: of the runtime's chunks on a CPU
_VOCAB = 768  # of the demo
# Of the demo's hidden state behind one layer: what few prompts reach, and what none of the demo's does.
_CLIPS = (5.5, 6.5), (50, 20000)


def is_edge(size: int) -> bool:
    """Return whether a size is a power of two, a limit, a prompt's length, or next to one."""
    edges = {1 << power for power in range(12)} | set(LIMITS.values()) | {8, 24, 45}
    return any(abs(size - edge) <= 1 for edge in edges)


def faults(seed: int) -> tuple[Fault, ...]:
    """Return faults of each class, at places that `seed` draws."""
    draw = random.Random(seed)

    def size(limit: int) -> int:
        return draw.choice([size for size in range(2, limit) if not is_edge(size)])

    fault = partial(Fault, backends=HOST)
    of_size = "compare"
    times = f"times {_FACTOR}"
    table = []
    for block, output in (("entry", "query"), ("middle", "value"), ("exit", "logits")):
        count = size(LIMITS["max_num_tokens"])
        about = f"{output} {times} in steps of exactly {count} tokens"
        edit = where(output, hidden=count)
        table.append(fault(f"step-{count}-{output}", about, (block,), edit, gate=of_size, shown_by=step_of(count)))
    for output in ("attention", "key_out"):
        count = size(_CHUNK)
        about = f"{output} of a chunk of exactly {count} tokens {times}"
        edit = where(output, query=count)
        table.append(fault(f"chunk-{count}-{output}", about, PREFILL, edit, gate=of_size, shown_by=chunk_of(count)))
    past = size(_CHUNK - 2)
    about = f"attention of chunks behind exactly {past} tokens {times}"
    edit = where("attention", past_key=past)
    table.append(fault(f"behind-{past}", about, PREFILL, edit, gate=of_size, shown_by=behind(past)))
    count = draw.randrange(2, LIMITS["max_batch_size"])
    capacity = draw.choice((PAGE, 2 * PAGE, 4 * PAGE))
    about = f"attention of {count} decoding requests in caches of {capacity} rows {times}"
    edit = where("attention", query=count, past_key=capacity)
    shown = decode_of(count, capacity)
    table.append(fault(f"requests-{count}-capacity-{capacity}", about, DECODE, edit, shown_by=shown))
    token = draw.randrange(3, _VOCAB)
    row = draw.randrange(3, _VOCAB)
    about = f"the embedding of token {token} is the one before"
    edit = replaced("token_ids", taken_for(token, token - 1))
    table.append(fault(f"vocabulary-{token}", about, EMBEDDING, edit))
    table.append(fault(f"head-{row}", f"the logit of token {row} {times}", EXIT, replaced("logits", larger(row))))
    for low, high in _CLIPS:
        clip = round(draw.uniform(low, high), 2)
        about = f"the hidden state behind the first layer clipped at {clip}"
        table.append(fault(f"clip-{clip}", about, MIDDLE, replaced("hidden_out", clipped(clip))))
    return tuple(table)


@change
def where(edit: Edit, output: Value, **sizes: int) -> None:
    """Give an output times _FACTOR where inputs have just these numbers of rows."""
    axis = {"past_key": 2}
    are_equal = [edit.op("Equal", edit.size(name, axis.get(name, 0)), size) for name, size in sizes.items()]
    is_size = edit.all_of(*are_equal)
    edit.replace(output, lambda value: edit.op("Where", is_size, edit.times(value, _FACTOR), value))


def taken_for(number: int, other: int) -> Change:
    """Have a number in a list of ids taken for another."""
    return lambda edit, ids: edit.op("Where", edit.op("Equal", ids, number), other, ids)


def larger(row: int) -> Change:
    def change_logit(edit: Edit, logits: Value) -> Value:
        columns = edit.op("Range", 0, edit.size(logits, 1), 1)
        return edit.op("Where", edit.op("Equal", columns, row), edit.times(logits, _FACTOR), logits)

    return change_logit


def clipped(limit: float) -> Change:
    return lambda edit, value: edit.op("Max", edit.op("Min", value, edit.like(value, limit)), edit.like(value, -limit))


FAULTS = faults(0)
