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

from lockstep_serve.stream import FINISH_REASONS, PromptRequest

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


_DRAFT_COUNTERS = {
    "drafts": "Drafts that were verified.",
    "draft_tokens": "Tokens of drafts that were verified.",
    "accepted_tokens": "Tokens of drafts that were right.",
}
_ACCEPTED_PER_POSITION = "Tokens of drafts that were right, by their position in the draft."
_INFOS = {
    "cache_config_info": "Tokens of a block of the KV cache, and how many blocks there are.",
    "lora_requests_info": "Adapters whose requests run or wait; the value is the time in seconds since 1970.",
}


class _EngineSeries(Collector):
    """Series that are read at each scrape: the engine's counters, those of speculation, and labels with information."""

    def __init__(
        self,
        model: str,
        read: Mapping[str, Callable[[], float]],
        infos: Infos,
        drafts: Callable[[], Sequence[int]],
        prefix: str,
    ):
        self._model = model
        self._read = read
        self._infos = infos
        self._drafts = drafts
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, self._read[name]())
        yield from self._speculation()
        for name, text in _INFOS.items():
            info = self._infos[name]()
            if info is not None:
                info_labels, value = info
                labels = {"model_name": self._model, **info_labels}
                gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=list(labels))
                gauge.add_metric(list(labels.values()), value)
                yield gauge

    def _speculation(self) -> Iterator[CounterMetricFamily]:
        counts = self._drafts()
        if not counts:
            return
        drafts, tokens, *accepted = counts
        for (name, text), value in zip(_DRAFT_COUNTERS.items(), (drafts, tokens, sum(accepted))):
            yield self._counter(f"spec_decode_num_{name}", text, value)
        name = f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, _ACCEPTED_PER_POSITION, labels=["model_name", "position"])
        for position, value in enumerate(accepted):
            family.add_metric([self._model, str(position)], value)
        yield family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


class _TokenTimes(Collector):
    """Histograms of each token's seconds, as prometheus_client's take a lock for each of its numbers."""

    def __init__(self, name: str, text: str):
        self._name = name
        self._text = text
        self._created = time.time()
        self._counts: dict[str, list[int]] = {}  # by model
        self._sums: dict[str, float] = {}

    def add(self, model: str) -> None:
        self._counts[model] = [0] * (len(_SECONDS) + 1)
        self._sums[model] = 0.0

    def observe(self, model: str, seconds: float) -> None:
        self._counts[model][bisect_left(_SECONDS, seconds)] += 1
        self._sums[model] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        for model, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(map(float, counts))))
            family.add_metric([model], buckets, self._sums[model])
            family.add_sample(f"{self._name}_created", {"model_name": model}, self._created)
        yield family


class Metrics:
    """The series of one server.

    model: its first one, which gauges and the engine's counters are named after. read: these by name, read at each
    scrape. infos: labels and a value by name, or None. drafts: `Service.drafts`.
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
        self._registry = CollectorRegistry()
        self.refused = self._make(Counter, "request_refused", "Requests that were refused because the queue was full.")
        self.prompt_tokens = self._make(Counter, "prompt_tokens", "Tokens of prompts that were admitted.")
        self.generation_tokens = self._make(Counter, "generation_tokens", "Tokens that were made.")
        self.tool_calls = self._make(Counter, "tool_calls", "Tool calls in answers of chats.")
        malformed = "Beginnings of tool calls that could not be read, and are content."
        self.malformed_tool_calls = self._make(Counter, "malformed_tool_calls", malformed)
        self.success = self._make(Counter, "request_success", "Answers that ended, by reason.", ["finished_reason"])
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to admission.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.itl = _TokenTimes(f"{prefix}:inter_token_latency_seconds", "Between two tokens of a request.")
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        for name, text in _GAUGES.items():
            self._make(Gauge, name, text).labels(model).set_function(read[name])
        self._registry.register(self.itl)
        self._registry.register(_EngineSeries(model, read, infos, drafts, prefix))

    def _make(self, kind, name, text, labels=(), **options):  # type: ignore[no-untyped-def]  # as prometheus_client does
        return kind(f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self._registry, **options)

    def _histogram(self, name: str, text: str) -> Any:
        return self._make(Histogram, name, text, buckets=_SECONDS)

    def text(self) -> bytes:
        """Return all series, as Prometheus reads them."""
        return generate_latest(self._registry)


class ModelMetrics:
    """The series of one model of a server."""

    def __init__(self, server: Metrics, model: str):
        self._model = model
        self.refused = server.refused.labels(model)
        self.prompt_tokens = server.prompt_tokens.labels(model)
        self.generation_tokens = server.generation_tokens.labels(model)
        self._tool_calls = server.tool_calls.labels(model)
        self._malformed_tool_calls = server.malformed_tool_calls.labels(model)
        self._success = server.success
        self.queue_time = server.queue_time.labels(model)
        self._ttft = server.ttft.labels(model)
        self._itl = server.itl
        self._itl.add(model)
        self.latency = server.latency.labels(model)

    def token(self, now: float, prompt: PromptRequest) -> None:
        if prompt.last_token is None:
            self._ttft.observe(now - prompt.arrived)
        elif len(prompt.choices) == 1:  # tokens of several choices come together
            self._itl.observe(self._model, now - prompt.last_token)

    def called(self, num_calls: int, num_malformed: int) -> None:
        """Count the tool calls of an answer, and what only began like one."""
        self._tool_calls.inc(num_calls)
        self._malformed_tool_calls.inc(num_malformed)

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, FINISH_REASONS.get(reason, reason)).inc()
