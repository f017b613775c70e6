"""The measurement of a server under load: a report, and the records of each run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.load.arrivals import cancellations, schedule
from lockstep.load.endpoints import TRITON, Endpoint, opened, request
from lockstep.load.figures import figures
from lockstep.load.http import Client, NoAnswer
from lockstep.load.records import COMPLETED, Planned, Prompt, Record
from lockstep.load.report import LoadReport, Run
from lockstep.load.run import run
from lockstep.load.wire import said


@dataclass(frozen=True)
class LoadSpec:
    """The load that a server is measured under.

    workload: what a report calls the prompts; rates: requests per second, one run each, infinity for all at once;
    extra: fields of each request's body; cancel: the share of requests that are cancelled, at most `cancel_within`
    seconds after they were sent; goodput: of `figures.goals`; warmup: requests before each measurement.
    """

    prompts: Sequence[Prompt]
    workload: Mapping[str, Any]
    endpoint: str = "completions"
    rates: tuple[float, ...] = (math.inf,)
    arrivals: str = "exponential"
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    cancel: float = 0.0
    cancel_within: float = 1.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    concurrency: int | None = None
    timeout: float = 600
    warmup: int = 1

    @property
    def is_trace(self) -> bool:
        """Return whether the prompts bring their arrival times."""
        return any(prompt.arrival is not None for prompt in self.prompts)

    def settings(self) -> dict[str, Any]:
        """Return what two reports must share to be compared."""
        goodput = {name: 1000 * limit for name, limit in self.goodput.items()}
        return {
            "workload": dict(self.workload), "requests": len(self.prompts), "endpoint": self.endpoint,
            "arrivals": "trace" if self.is_trace else self.arrivals, "seed": self.seed, "extra": dict(self.extra),
            "cancel": self.cancel, "cancel_within_s": self.cancel_within, "goodput_ms": goodput,
            "concurrency": self.concurrency, "warmup": self.warmup,
        }  # fmt: skip

    def requests(self, rate: float, model: str) -> list[Planned]:
        """Return the requests of a run at `rate` requests per second. Raises InputError."""
        number = len(self.prompts)
        if self.is_trace:
            due = [(prompt.arrival or 0.0) for prompt in self.prompts]
        else:
            due = schedule(number, rate, self.arrivals, self.seed).tolist()
        cancels = cancellations(number, self.cancel, self.cancel_within, self.seed)
        made = [request(self.endpoint, prompt, model, self.extra) for prompt in self.prompts]
        return [
            Planned(at, when, body, path, stop) for at, (when, (path, body), stop) in enumerate(zip(due, made, cancels))
        ]

    def alone(self, number: int, model: str, stream: bool = True) -> Planned:
        """Return one prompt's request, to be sent at once."""
        path, body = request(self.endpoint, self.prompts[number], model, self.extra, stream)
        return Planned(number, 0.0, body, path, stream=stream)


async def measure(
    client: Client, spec: LoadSpec, model: str | None, tell: Callable[[str], None]
) -> tuple[LoadReport, dict[float | None, list[Record]]]:
    """Measure `model` (None: the first) at each rate; tell: gets progress. Raises InputError, CheckError."""
    model = await model_of(client, spec, model)
    runs = []
    found = {}
    async with opened(client, spec.endpoint) as endpoint:
        for rate in spec.rates:
            planned = spec.requests(rate, model)
            await _warm_up(client, endpoint, spec, planned)
            tell(f"{len(planned)} requests, {'all at once' if math.isinf(rate) else f'{rate:g}/s'}")
            observed = await run(endpoint, planned, spec.concurrency, spec.timeout)
            shown = None if spec.is_trace or math.isinf(rate) else rate
            lag = float(np.percentile(observed.lags, 99)) if observed.lags else None
            runs.append(Run(shown, {**figures(observed.records, spec.goodput), "client_lag_p99_s": lag}))
            found[shown] = observed.records
    return LoadReport(client.url, model, spec.settings(), tuple(runs)), found


async def model_of(client: Client, spec: LoadSpec, model: str | None) -> str:
    """Return the model to ask: the named one, the server's first, or "" in Triton."""
    return model or ("" if spec.endpoint in TRITON else await served_model(client))


async def served_model(client: Client) -> str:
    """Return the first model that the server names."""
    where = f"{client.url}/v1/models"
    try:
        answer = await client.get("/v1/models")
        value: Any = json.loads(bytes(answer.body)) if answer.status == 200 else None
    except NoAnswer as error:
        raise InputError(
            f"{client.url}: expected a server, found {error}; start one with `lockstep serve`, or correct the URL"
        ) from None
    except ValueError:
        raise InputError(f"{where}: expected a list of models as JSON, found something else; correct the URL") from None
    if answer.status != 200:
        raise InputError(
            f"{where}: expected a list of models, found HTTP {answer.status}: {said(bytes(answer.body))}; "
            f"correct the URL or the API key"
        )
    try:
        return str(value["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise InputError(f"{where}: expected a list of models, found none; name one with --model") from None


async def _warm_up(client: Client, endpoint: Endpoint, spec: LoadSpec, planned: Sequence[Planned]) -> None:
    """Send the first requests of a run once, together: connections are open, and first times are over."""
    chosen = [Planned(one.number, 0.0, one.body, one.path) for one in planned[: spec.warmup]]
    observed = await run(endpoint, chosen, spec.concurrency, spec.timeout)
    for record in observed.records:
        if record.status != COMPLETED:
            raise CheckError(
                f"{client.url}: expected the warm-up's request {record.number} to be completed, found {record.error}"
            )
