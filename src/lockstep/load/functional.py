"""A functional check, as `end_to_end_test.py` of TensorRT-LLM: prompts alone, whole, streamed, all at once."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import CheckError
from lockstep.load.endpoints import TRITON, opened
from lockstep.load.http import Client
from lockstep.load.measure import LoadSpec
from lockstep.load.records import COMPLETED, Record
from lockstep.load.run import run

_REASONS = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True)
class Functional:
    """The numbers of prompts, and of those whose text was another one among all the others."""

    prompts: int
    different: tuple[int, ...]


async def check(client: Client, spec: LoadSpec, model: str, exact: bool = False) -> Functional:
    """Check that prompts have one text, whole and streamed; exact: beside others too. Raises CheckError."""
    alone: list[Record] = []
    async with opened(client, spec.endpoint) as endpoint:
        for number in range(len(spec.prompts)):
            for stream in (False, True):
                alone += (await run(endpoint, [spec.alone(number, model, stream)], None, spec.timeout)).records
                _check(client, spec, alone[-1])
            streamed = alone.pop()
            whole = alone[-1]
            if (streamed.text, streamed.output_tokens) != (whole.text, whole.output_tokens):
                raise CheckError(
                    f"{client.url}: prompt {number}: expected the text of the whole answer when it is streamed, "
                    f"{whole.text[:60]!r} of {whole.output_tokens} tokens, found {streamed.text[:60]!r} of "
                    f"{streamed.output_tokens}"
                )
        together = [spec.alone(number, model) for number in range(len(spec.prompts))]
        records = (await run(endpoint, together, spec.concurrency, spec.timeout)).records
    for record in records:
        _check(client, spec, record)
    different = tuple(record.number for record, one in zip(records, alone) if record.text != one.text)
    if exact and different:
        raise CheckError(
            f"{client.url}: prompt {different[0]}: expected {alone[different[0]].text[:60]!r} beside the others, as "
            f"alone, found {records[different[0]].text[:60]!r}"
        )
    return Functional(len(spec.prompts), different)


def _check(client: Client, spec: LoadSpec, record: Record) -> None:
    """Check that an answer came to its end, and what it says of itself."""
    where = f"{client.url}: prompt {record.number}"
    prompt = spec.prompts[record.number]
    outputs = record.output_tokens
    if record.status != COMPLETED:
        raise CheckError(f"{where}: expected an answer, found: {record.error}")
    if outputs is None or not 1 <= outputs <= prompt.max_tokens:
        raise CheckError(f"{where}: expected usage of 1 to {prompt.max_tokens} completion tokens, found {outputs}")
    if spec.endpoint in TRITON:
        return
    if record.finish_reason not in _REASONS:
        raise CheckError(f"{where}: expected a finish_reason of {', '.join(_REASONS)}, found {record.finish_reason!r}")
    content = prompt.content
    if isinstance(content, list) and isinstance(content[0], int) and record.input_tokens != len(content):
        raise CheckError(f"{where}: expected usage of {len(content)} prompt tokens, found {record.input_tokens}")
