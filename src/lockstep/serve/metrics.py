"""Prometheus series with vLLM's names and meanings, under a prefix of choice."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lockstep.serve.stream import FINISH_REASONS, PromptRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
Infos = Mapping[str, Callable[[], tuple[Mapping[str, str], float] | None]]

_GAUGES = {
    "num_requests_running": "Answers that hold a slot.",
    "num_requests_waiting": "Requests that wait for a slot.",
    "kv_cache_usage_perc": "Share of the KV cache's pages that are in use, 0 to 1.",
    "engine_up": "1 while the engine takes requests.",
}
# Of all engine processes that there were.
_COUNTERS = {
    "engine_restarts": "Times that the engine was started again.",
    "num_preemptions": "Requests that were swapped out.",
    "prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
}


class _EngineCounters(Collector):
    """Counters that are read when the metrics are."""

    def __init__(self, model: str, read: Mapping[str, Callable[[], float]], prefix: str):
        self._model = model
        self._read = read
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            family.add_metric([self._model], self._read[name]())
            yield family


class _Drafts(Collector):
    """Counters of speculation, where there is any."""

    def __init__(self, model: str, read: Callable[[], Sequence[int]], prefix: str):
        self._model = model
        self._read = read
        self._prefix = f"{prefix}:spec_decode_num"

    def collect(self) -> Iterator[CounterMetricFamily]:
        if not (found := self._read()):
            return
        drafts, tokens, *accepted = found
        for name, text, value in (
            ("drafts", "Drafts that were verified.", drafts),
            ("draft_tokens", "Tokens of drafts that were verified.", tokens),
            ("accepted_tokens", "Tokens of drafts that were right.", sum(accepted)),
        ):
            family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        text = "Tokens of drafts that were right, by their position in the draft."
        family = CounterMetricFamily(f"{self._prefix}_accepted_tokens_per_pos", text, labels=["model_name", "position"])
        for position, value in enumerate(accepted):
            family.add_metric([self._model, str(position)], value)
        yield family


_INFOS = {
    "cache_config_info": "Tokens of a block of the KV cache, and how many blocks there are.",
    "lora_requests_info": "Adapters whose requests run or wait; the value is the time in seconds since 1970.",
}


class _Infos(Collector):
    """Series whose labels tell something, as schedulers in front of servers read them."""

    def __init__(self, model: str, infos: Infos, prefix: str):
        self._model = model
        self._infos = infos
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, text in _INFOS.items():
            if (found := self._infos[name]()) is not None:
                labels = {"model_name": self._model, **found[0]}
                value = found[1]
                family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family


class _TokenTimes(Collector):
    """A histogram of each token's seconds: prometheus_client's has a lock for each of its numbers."""

    def __init__(self, model: str, name: str, text: str):
        self._model = model
        self._name = name
        self._text = text
        self._created = time.time()
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(map(float, self._counts))))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model], buckets, self._sum)
        family.add_sample(f"{self._name}_created", {"model_name": self._model}, self._created)
        yield family


class Metrics:
    """The series of one server.

    read: by name gauges and the engine's counters, read when the metrics are. infos: by name labels and a value, or
    None where there is nothing to tell. drafts: `Service.drafts`.
    """

    def __init__(
        self,
        model: str,
        read: Mapping[str, Callable[[], float]],
        infos: Infos,
        drafts: Callable[[], Sequence[int]] = list,
        prefix: str = "lockstep",
    ):
        self._prefix = prefix
        self._model = model
        self._registry = CollectorRegistry()
        self.refused = self._make(Counter, "request_refused", "Requests that were refused because the queue was full.")
        self.prompt_tokens = self._make(Counter, "prompt_tokens", "Tokens of prompts that were admitted.")
        self.generation_tokens = self._make(Counter, "generation_tokens", "Tokens that were made.")
        self._tool_calls = self._make(Counter, "tool_calls", "Tool calls in answers of chats.")
        malformed = "Beginnings of tool calls that could not be read, and are content."
        self._malformed_tool_calls = self._make(Counter, "malformed_tool_calls", malformed)
        self._success = self._make(Counter, "request_success", "Answers that ended, by reason.", ["finished_reason"])
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to admission.")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._itl = _TokenTimes(model, f"{prefix}:inter_token_latency_seconds", "Between two tokens of a request.")
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        for name, text in _GAUGES.items():
            self._make(Gauge, name, text).set_function(read[name])
        self._registry.register(self._itl)
        self._registry.register(_EngineCounters(model, read, prefix))
        self._registry.register(_Drafts(model, drafts, prefix))
        self._registry.register(_Infos(model, infos, prefix))

    def _make(self, kind, name, text, labels=(), **options):  # type: ignore[no-untyped-def]  # as prometheus_client does
        made = kind(f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self._registry, **options)
        return made if labels else made.labels(self._model)

    def _histogram(self, name: str, text: str) -> Any:
        return self._make(Histogram, name, text, buckets=_SECONDS)

    def token(self, now: float, prompt: PromptRequest) -> None:
        if prompt.last_token is None:
            self._ttft.observe(now - prompt.arrived)
        elif len(prompt.choices) == 1:  # of several choices, tokens come together
            self._itl.observe(now - prompt.last_token)

    def called(self, num_calls: int, num_malformed: int) -> None:
        """Count the tool calls of an answer, and what began like some and was none."""
        self._tool_calls.inc(num_calls)
        self._malformed_tool_calls.inc(num_malformed)

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, FINISH_REASONS.get(reason, reason)).inc()

    def text(self) -> bytes:
        """Return all series, as Prometheus reads them."""
        return generate_latest(self._registry)
