"""Faults between the edges: of one size, one token, one magnitude, one pair of sizes.

A kernel is chosen by size, a table has a row too few, a number saturates. Nothing says that this happens at a power of
two. `faults(seed)` draws the places: those of the table come from one seed, tests take others.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.faults.edit import Edit, Value
from benchmarks.faults.fault import DECODE, PREFILL, Fault
from benchmarks.faults.harm import chunk_of, decode_of, step_of
from benchmarks.faults.models import LIMITS
from lockstep.verify.boundaries import PAGE

_CPU = ("onnxruntime",)
_FACTOR = 1.05
_CHUNK = 256  # tokens: of the runtime's chunks on a CPU
_VOCAB = 768  # of the demo
# Of the demo's hidden state behind one layer: what no prompt of the gates reaches and some token of the vocabulary does.
_CLIPS = (5.5, 6.5)


def is_edge(size: int) -> bool:
    """Return whether a size is a power of two, a profile's or a limit's, or beside one."""
    edges = {1 << power for power in range(12)} | set(LIMITS.values()) | {8, 24, 45}  # and the prompts' lengths
    return any(abs(size - edge) <= 1 for edge in edges)


def faults(seed: int) -> tuple[Fault, ...]:
    """Return one fault of each class, at places that `seed` draws."""
    draw = random.Random(seed)

    def size(most: int) -> int:
        return draw.choice([size for size in range(2, most) if not is_edge(size)])

    most = LIMITS["max_num_tokens"]
    steps = {name: size(most) for name in ("query", "value", "logits")}
    chunks = {name: size(_CHUNK) for name in ("attention", "key_out")}
    token, row = draw.randrange(3, _VOCAB), draw.randrange(3, _VOCAB)
    clip = round(draw.uniform(*_CLIPS), 2)
    requests = draw.randrange(2, LIMITS["max_batch_size"])
    capacity = draw.choice((PAGE, 2 * PAGE, 4 * PAGE))
    behind = draw.choice((2 * PAGE, 4 * PAGE))
    paired = draw.choice([size for size in range(2, behind // 2) if not is_edge(size)])
    return (
        *(
            _fault(
                f"step-{count}-{output}",
                f"{output} times {_FACTOR} in steps of exactly {count} tokens",
                (block,),
                _output_where(output, lambda edit, count=count: edit.op("Equal", _num_tokens(edit), edit.const(count))),
                step_of(count),
            )
            for block, (output, count) in zip(("entry", "middle", "exit"), steps.items())
        ),
        *(
            _fault(
                f"chunk-{count}-{output}",
                f"{output} of a chunk of exactly {count} tokens times {_FACTOR}",
                PREFILL,
                _output_where(
                    output, lambda edit, count=count: edit.op("Equal", edit.size("query"), edit.const(count))
                ),
                chunk_of(count),
            )
            for output, count in chunks.items()
        ),
        _fault(
            f"chunk-{paired}-capacity-{behind}",
            f"attention of chunks of exactly {paired} tokens in caches of {behind} rows times {_FACTOR}",
            PREFILL,
            _output_where("attention", lambda edit: _both(edit, paired, behind)),
            chunk_of(paired, behind),
        ),
        _fault(
            f"requests-{requests}-capacity-{capacity}",
            f"attention of {requests} decoding requests in caches of {capacity} rows times {_FACTOR}",
            DECODE,
            _output_where("attention", lambda edit: _both(edit, requests, capacity)),
            decode_of(requests, capacity),
        ),
        _fault(
            f"vocabulary-{token}",
            f"the embedding of token {token} is the one before",
            ("embedding",),
            _taken_for(token),
        ),
        _fault(f"head-{row}", f"the logit of token {row} times {_FACTOR}", ("exit",), _logit(row)),
        _fault(
            f"clip-{clip}",
            f"the hidden state behind the first layer clipped at {clip}",
            ("middle",),
            _clip("hidden_out", clip),
        ),
    )


def _fault(name: str, about: str, graphs: tuple[str, ...], edit: Callable[[Edit], None], shown_by=None) -> Fault:
    return Fault(name, about, graphs=graphs, edit=edit, backends=_CPU, shown_by=shown_by)


def _num_tokens(edit: Edit) -> Value:
    return edit.size("hidden")


def _both(edit: Edit, rows: int, capacity: int) -> Value:
    right_rows = edit.op("Equal", edit.size("query"), edit.const(rows))
    return edit.op("And", right_rows, edit.op("Equal", edit.size("past_key", 2), edit.const(capacity)))


def _output_where(output: Value, condition: Callable[[Edit], Value]) -> Callable[[Edit], None]:
    """Give an output times _FACTOR where a condition of sizes holds."""
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
    def plant(edit: Edit) -> None:
        edit.replace(
            output, lambda value: edit.op("Max", edit.op("Min", value, edit.like(value, most)), edit.like(value, -most))
        )

    return plant


FAULTS = faults(0)
