"""A functional check: each prompt alone, whole and streamed, then all at once.

What `end_to_end_test.py` of TensorRT-LLM's Triton backend did for its ensemble.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import CheckError
from lockstep.load.endpoints import TRITON, Endpoint, opened, request
from lockstep.load.http import Client, NoAnswer
from lockstep.load.measure import LoadSpec
from lockstep.load.records import COMPLETED, Prompt, Record
from lockstep.load.run import run
from lockstep.load.wire import Whole

_REASONS = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True)
class Functional:
    """The result of the check.

    prompts: how many were asked; different: numbers of those whose text was another one among all the others.
    """

    prompts: int
    different: tuple[int, ...]


async def check(client: Client, spec: LoadSpec, model: str, exact: bool = False) -> Functional:
    """Check that each prompt has one text, whole and streamed, then ask all at once.

    exact: a text that is another one among all the others is an error too. Greedy decoding may differ there on servers
    whose kernels depend on the batch.

    Raises CheckError with the first answer that is not as it should be.
    """
    async with opened(client, spec.endpoint) as endpoint:
        alone = []
        for number, prompt in enumerate(spec.prompts):
            whole = await _whole(client, endpoint, spec, model, number, prompt)
            (record,) = (await run(endpoint, spec.alone(number, model), None, spec.timeout)).records
            _check_streamed(client, spec, record, prompt)
            if record.text != whole.text or record.output_tokens != whole.num_tokens:
                raise CheckError(
                    f"{client.url}: prompt {number}: expected the text of the whole answer when it is streamed, "
                    f"{whole.text[:60]!r} of {whole.num_tokens} tokens, found {record.text[:60]!r} of "
                    f"{record.output_tokens}"
                )
            alone.append(whole.text)
        together = [one for number in range(len(spec.prompts)) for one in spec.alone(number, model)]
        records = (await run(endpoint, together, spec.concurrency, spec.timeout)).records
    for record, prompt in zip(records, spec.prompts):
        _check_streamed(client, spec, record, prompt)
    different = _different(alone, records)
    if exact and different:
        raise CheckError(
            f"{client.url}: prompt {different[0]}: expected {alone[different[0]][:60]!r} beside the others, as alone, "
            f"found {records[different[0]].text[:60]!r}"
        )
    return Functional(len(spec.prompts), different)


def _different(alone: Sequence[str], records: Sequence[Record]) -> tuple[int, ...]:
    return tuple(record.number for record, text in zip(records, alone) if record.text != text)


async def _whole(client: Client, endpoint: Endpoint, spec: LoadSpec, model: str, number: int, prompt: Prompt) -> Whole:
    """Return an answer that is not streamed, whose usage is checked."""
    path, body = request(spec.endpoint, prompt, model, spec.extra, stream=False)
    try:
        whole = await endpoint.whole(path, body, spec.timeout)
    except asyncio.TimeoutError:
        raise CheckError(f"{client.url}: prompt {number}: expected an answer within {spec.timeout:g} s") from None
    except (NoAnswer, ValueError) as error:
        raise CheckError(f"{client.url}: prompt {number}: expected an answer, found: {error}") from None
    _check_usage(client, spec, number, prompt, whole.reason, whole.num_prompt_tokens, whole.num_tokens)
    return whole


def _check_streamed(client: Client, spec: LoadSpec, record: Record, prompt: Prompt) -> None:
    if record.status != COMPLETED:
        raise CheckError(f"{client.url}: prompt {record.number}: expected an answer, found: {record.error}")
    _check_usage(client, spec, record.number, prompt, record.finish_reason, record.input_tokens, record.output_tokens)


def _check_usage(
    client: Client,
    spec: LoadSpec,
    number: int,
    prompt: Prompt,
    reason: str | None,
    inputs: int | None,
    outputs: int | None,
) -> None:
    where = f"{client.url}: prompt {number}"
    if outputs is None or not 1 <= outputs <= prompt.max_tokens:
        raise CheckError(f"{where}: expected usage of 1 to {prompt.max_tokens} completion tokens, found {outputs}")
    if spec.endpoint in TRITON:
        return
    if reason not in _REASONS:
        raise CheckError(f"{where}: expected a finish_reason of {', '.join(_REASONS)}, found {reason!r}")
    content = prompt.content
    if isinstance(content, list) and isinstance(content[0], int) and inputs != len(content):
        raise CheckError(f"{where}: expected usage of {len(content)} prompt tokens, found {inputs}")
