"""Does a server answer as it should? Each prompt alone, whole and streamed, then all at once.

What `end_to_end_test.py` of TensorRT-LLM's Triton backend did for its ensemble.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import CheckError
from lockstep.load.http import Client, NoAnswer
from lockstep.load.measure import Plan
from lockstep.load.records import COMPLETED, Prompt, Record
from lockstep.load.run import run
from lockstep.load.wire import PATHS, body, read_whole

_REASONS = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True)
class Functional:
    """prompts: how many were asked; different: numbers of those whose text was another one among all the others."""

    prompts: int
    different: tuple[int, ...]


async def check(client: Client, plan: Plan, model: str, exact: bool = False) -> Functional:
    """Ask each prompt alone, whole and streamed, which must give one text, then all at once.

    exact: a text that is another one among all the others is an error too. Greedy decoding may differ there on servers
    whose kernels depend on the batch.

    Raises CheckError with the first answer that is not as it should be.
    """
    alone = []
    for number, prompt in enumerate(plan.prompts):
        text, tokens = await _whole(client, plan, model, number, prompt)
        (record,) = (await run(client, PATHS[plan.endpoint], plan.alone(number, model), None, plan.timeout)).records
        _check_streamed(client, record, prompt)
        if record.text != text or record.output_tokens != tokens:
            raise CheckError(
                f"{client.url}: prompt {number}: expected the text of the whole answer when it is streamed, "
                f"{text[:60]!r} of {tokens} tokens, found {record.text[:60]!r} of {record.output_tokens}"
            )
        alone.append(text)
    together = [one for number in range(len(plan.prompts)) for one in plan.alone(number, model)]
    records = (await run(client, PATHS[plan.endpoint], together, plan.concurrency, plan.timeout)).records
    for record, prompt in zip(records, plan.prompts):
        _check_streamed(client, record, prompt)
    different = _different(alone, records)
    if exact and different:
        raise CheckError(
            f"{client.url}: prompt {different[0]}: expected {alone[different[0]][:60]!r} beside the others, as alone, "
            f"found {records[different[0]].text[:60]!r}"
        )
    return Functional(len(plan.prompts), different)


def _different(alone: Sequence[str], records: Sequence[Record]) -> tuple[int, ...]:
    return tuple(record.number for record, text in zip(records, alone) if record.text != text)


async def _whole(client: Client, plan: Plan, model: str, number: int, prompt: Prompt) -> tuple[str, int]:
    """Text and number of tokens of an answer that is not streamed."""
    request = client.request("POST", PATHS[plan.endpoint], body(prompt, plan.endpoint, model, plan.extra, stream=False))
    try:
        async with client.connection() as connection:
            answer = await asyncio.wait_for(connection.ask(request, None), plan.timeout)
        text, reason, usage = read_whole(answer)
    except asyncio.TimeoutError:
        raise CheckError(f"{client.url}: prompt {number}: expected an answer within {plan.timeout:g} s") from None
    except (NoAnswer, ValueError) as error:
        raise CheckError(f"{client.url}: prompt {number}: expected an answer, found: {error}") from None
    _check_usage(client, number, prompt, reason, usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return text, usage["completion_tokens"]


def _check_streamed(client: Client, record: Record, prompt: Prompt) -> None:
    if record.status != COMPLETED:
        raise CheckError(f"{client.url}: prompt {record.number}: expected an answer, found: {record.error}")
    _check_usage(client, record.number, prompt, record.finish_reason, record.input_tokens, record.output_tokens)


def _check_usage(
    client: Client, number: int, prompt: Prompt, reason: str | None, inputs: int | None, outputs: int | None
) -> None:
    where = f"{client.url}: prompt {number}"
    if reason not in _REASONS:
        raise CheckError(f"{where}: expected a finish_reason of {', '.join(_REASONS)}, found {reason!r}")
    if outputs is None or not 1 <= outputs <= prompt.max_tokens:
        raise CheckError(f"{where}: expected usage of 1 to {prompt.max_tokens} completion tokens, found {outputs}")
    content = prompt.content
    if isinstance(content, list) and isinstance(content[0], int) and inputs != len(content):
        raise CheckError(f"{where}: expected usage of {len(content)} prompt tokens, found {inputs}")
