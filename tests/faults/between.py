"""Faults between the edges: of one size, one token, one magnitude, one pair of sizes.

A kernel is chosen by size, a table has a row too few, a number saturates. Nothing says that this happens at a power of
two. `faults(seed)` draws the places: those of the table come from one seed, tests take others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping

from faults.edit import Edit, Value
from faults.fault import DECODE, PREFILL, Fault
from faults.harm import Scenario, behind, chunk_of, decode_of, step_of
from faults.models import LIMITS
from lockstep.verify.boundaries import PAGE

_FACTOR = 1.05
_CHUNK = 256  # tokens: of the runtime's chunks on a CPU
_VOCAB = 768  # of the demo
# Of the demo's hidden state behind one layer: what few prompts reach, and what none of the demo's does.
_CLIPS = (5.5, 6.5), (50, 20000)


def is_edge(size: int) -> bool:
    """Return whether a size is a power of two, a limit, a prompt's length, or beside one."""
    edges = {1 << power for power in range(12)} | set(LIMITS.values()) | {8, 24, 45}
    return any(abs(size - edge) <= 1 for edge in edges)


def faults(seed: int) -> tuple[Fault, ...]:
    """Return faults of each class, at places that `seed` draws."""
    draw = random.Random(seed)
    found = []
    for block, output in (("entry", "query"), ("middle", "value"), ("exit", "logits")):
        count = _size(draw, LIMITS["max_num_tokens"])
        about = f"{output} times {_FACTOR} in steps of exactly {count} tokens"
        edit = _where(output, {"hidden": count})
        found.append(_fault(f"step-{count}-{output}", about, (block,), edit, step_of(count)))
    for output in ("attention", "key_out"):
        count = _size(draw, _CHUNK)
        about = f"{output} of a chunk of exactly {count} tokens times {_FACTOR}"
        edit = _where(output, {"query": count})
        found.append(_fault(f"chunk-{count}-{output}", about, PREFILL, edit, chunk_of(count)))
    past = _size(draw, _CHUNK - 2)
    about = f"attention of chunks behind exactly {past} tokens times {_FACTOR}"
    found.append(_fault(f"behind-{past}", about, PREFILL, _where("attention", {"past_key": past}), behind(past)))
    count, capacity = draw.randrange(2, LIMITS["max_batch_size"]), draw.choice((PAGE, 2 * PAGE, 4 * PAGE))
    about = f"attention of {count} decoding requests in caches of {capacity} rows times {_FACTOR}"
    edit = _where("attention", {"query": count, "past_key": capacity})
    found.append(_fault(f"requests-{count}-capacity-{capacity}", about, DECODE, edit, decode_of(count, capacity)))
    token, row = draw.randrange(3, _VOCAB), draw.randrange(3, _VOCAB)
    about = f"the embedding of token {token} is the one before"
    found.append(_fault(f"vocabulary-{token}", about, ("embedding",), _taken_for(token)))
    found.append(_fault(f"head-{row}", f"the logit of token {row} times {_FACTOR}", ("exit",), _logit(row)))
    for low, high in _CLIPS:
        clip = round(draw.uniform(low, high), 2)
        about = f"the hidden state behind the first layer clipped at {clip}"
        found.append(_fault(f"clip-{clip}", about, ("middle",), _clip("hidden_out", clip)))
    return tuple(found)


def _size(draw: random.Random, most: int) -> int:
    return draw.choice([size for size in range(2, most) if not is_edge(size)])


def _fault(
    name: str, about: str, graphs: tuple[str, ...], edit: Callable[[Edit], None], shown_by: Scenario | None = None
) -> Fault:
    return Fault(name, about, graphs=graphs, edit=edit, backends=("onnxruntime",), shown_by=shown_by)


def _where(output: Value, sizes: Mapping[str, int]) -> Callable[[Edit], None]:
    """Give an output times _FACTOR where inputs have just these numbers of rows."""

    def condition(edit: Edit) -> Value:
        axis = {"past_key": 2}
        found = [
            edit.op("Equal", edit.size(name, axis.get(name, 0)), edit.const(count)) for name, count in sizes.items()
        ]
        return functools.reduce(lambda one, other: edit.op("And", one, other), found)

    return lambda edit: edit.replace(
        output, lambda value: edit.op("Where", condition(edit), edit.times(value, _FACTOR), value)
    )


def _taken_for(token: int) -> Callable[[Edit], None]:
    return lambda edit: edit.replace(
        "token_ids", lambda ids: edit.op("Where", edit.op("Equal", ids, edit.const(token)), edit.const(token - 1), ids)
    )


def _logit(row: int) -> Callable[[Edit], None]:
    def larger(edit: Edit, logits: Value) -> Value:
        columns = edit.op("Range", edit.const(0), edit.size(logits, 1), edit.const(1))
        return edit.op("Where", edit.op("Equal", columns, edit.const(row)), edit.times(logits, _FACTOR), logits)

    return lambda edit: edit.replace("logits", lambda value: larger(edit, value))


def _clip(output: Value, most: float) -> Callable[[Edit], None]:
    def clipped(edit: Edit, value: Value) -> Value:
        return edit.op("Max", edit.op("Min", value, edit.like(value, most)), edit.like(value, -most))

    return lambda edit: edit.replace(output, lambda value: clipped(edit, value))


FAULTS = faults(0)
