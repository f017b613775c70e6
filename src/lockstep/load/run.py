"""One run: planned requests in, records out.

Each request is sent when it is due, whatever the server does. All times count from the scheduled send. Where the
server, a limit on the requests in flight or this program itself holds a request back, the wait is in its latency, and
`send_delay` says how much of it that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.load.endpoints import Endpoint
from lockstep.load.http import NoAnswer, clock
from lockstep.load.records import CANCELLED, COMPLETED, FAILED, Planned, Record

_TICK = 0.01  # seconds between two looks at how late this program is
_AHEAD = 0.05  # seconds from the call to the first request: everything is set up then


@dataclass(frozen=True)
class Observed:
    """A run's records, in the requests' order, and by how many seconds this program was late, every 10 ms."""

    records: list[Record]
    lags: list[float]


async def run(
    endpoint: Endpoint, planned: Sequence[Planned], concurrency: int | None = None, timeout: float = 600
) -> Observed:
    """Send `planned`, `concurrency` at a time, `timeout` seconds each; return records, timed from the start."""
    turn = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    was_frozen = gc.get_freeze_count() > 0  # by the program that this runs in
    gc.collect()
    gc.freeze()  # what is there by now is not looked through again while times are taken
    start = clock() + _AHEAD
    tasks: list[asyncio.Task[Record]] = []
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    try:
        for one in sorted(planned, key=lambda one: one.scheduled):
            wait = start + one.scheduled - clock()
            # The loop's turn is given away in any case: a whole burst would else be made before any of it is sent.
            await asyncio.sleep(max(wait, 0))
            tasks.append(asyncio.create_task(_send(endpoint, one, start, turn, timeout)))
        records = await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, watch):
            task.cancel()
        if not was_frozen:
            gc.unfreeze()
    return Observed(sorted(records, key=lambda record: record.number), lags)


async def _watch(lags: list[float]) -> None:
    """Add by how many seconds each sleep of 10 ms was too long: so long did events of sockets wait, too."""
    while True:
        due = clock() + _TICK
        await asyncio.sleep(_TICK)
        lags.append(clock() - due)


async def _send(
    endpoint: Endpoint, one: Planned, start: float, turn: contextlib.AbstractAsyncContextManager, timeout: float
) -> Record:
    record = Record(one.number, one.scheduled)
    limit = timeout if one.cancel_after is None else min(timeout, one.cancel_after)
    async with turn:
        try:
            await endpoint.ask(one, record, start, limit)
        except NoAnswer as error:
            record.error = str(error)
        except asyncio.TimeoutError:  # the connection was closed: the server sees the client go
            if limit == one.cancel_after:
                record.status = CANCELLED
                record.error = None
            else:
                record.status = FAILED
                record.error = f"no end of the answer within {timeout:g} s"
        if record.status != COMPLETED:  # else its last piece has said when
            record.end = clock() - start
    return record
