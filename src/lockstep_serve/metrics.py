"""Prometheus series with vLLM's names and meanings, under a prefix of choice."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lockstep.step.pages import PAGE_SIZE
from lockstep_serve.stream import PromptRequest, finish_reason

if TYPE_CHECKING:
    from lockstep_serve.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_Read = Callable[["Service"], float]

# Series that are read of the service at each scrape; counters are of all engine processes that there were.
_GAUGES: dict[str, tuple[str, _Read]] = {
    "kv_cache_usage_perc": ("Share of the KV cache's pages that are in use, 0 to 1.", lambda service: _usage(service)),
    "engine_up": ("1 while the engine takes requests.", lambda service: int(service.is_ready)),
}
_COUNTERS: dict[str, tuple[str, _Read]] = {
    "engine_restarts": ("Times that the engine was started again.", lambda service: service.restarts),
    "num_preemptions": ("Requests that were swapped out.", lambda service: service.total("swaps")),
    "prefix_cache_queries": (
        "Prompt tokens looked for in the prefix cache.",
        lambda service: service.total("prefix_queries"),
    ),
    "prefix_cache_hits": ("Prompt tokens found there.", lambda service: service.total("prefix_hits")),
}
_DRAFT_COUNTERS = {
    "drafts": "Drafts that were verified.",
    "draft_tokens": "Tokens of drafts that were verified.",
    "accepted_tokens": "Tokens of drafts that were right.",
}
_ACCEPTED_PER_POSITION = "Tokens of drafts that were right, by their position in the draft."


def _usage(service: Service) -> float:
    if service.first_frame is None:
        return 0.0
    return service.counters.used_pages / service.first_frame.num_pages


class _ServiceSeries(Collector):
    """The series that are read at each scrape; those of the engine have the name of the service's first model."""

    def __init__(self, service: Service, prefix: str):
        self._service = service
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, (text, read) in _GAUGES.items():
            yield self._gauge(name, text, read(self._service))
        for name, (text, read) in _COUNTERS.items():
            yield self._counter(name, text, read(self._service))
        yield from self._requests()
        yield from self._speculation()
        ready = self._service.first_frame
        if ready is not None:
            text = "Tokens of a block of the KV cache, and how many blocks there are."
            labels = {"block_size": str(PAGE_SIZE), "num_gpu_blocks": str(ready.num_pages)}
            if ready.kv_cache_dtype:
                labels["cache_dtype"] = ready.kv_cache_dtype
            yield self._gauge("cache_config_info", text, 1.0, labels)
        yield from self._adapters()

    def _requests(self) -> Iterator[GaugeMetricFamily]:
        running = dict.fromkeys(self._service.models, 0)
        waiting = dict.fromkeys(self._service.models, 0)
        for stream in self._service.streams:
            for prompt in stream.prompts:
                if prompt.admitted is None:
                    waiting[stream.metrics.model] += 1
                else:
                    running[stream.metrics.model] += len(prompt.choices)
        texts = {"running": "Answers that were admitted.", "waiting": "Requests that wait for a slot."}
        for name, counts in (("running", running), ("waiting", waiting)):
            family = GaugeMetricFamily(f"{self._prefix}:num_requests_{name}", texts[name], labels=["model_name"])
            for model, count in counts.items():
                family.add_metric([model], count)
            yield family

    def _speculation(self) -> Iterator[CounterMetricFamily]:
        counts = self._service.drafts()
        if not counts:
            return
        drafts, tokens, *accepted = counts
        for (name, text), value in zip(_DRAFT_COUNTERS.items(), (drafts, tokens, sum(accepted))):
            yield self._counter(f"spec_decode_num_{name}", text, value)
        name = f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, _ACCEPTED_PER_POSITION, labels=["model_name", "position"])
        for position, value in enumerate(accepted):
            family.add_metric([self._service.name, str(position)], value)
        yield family

    def _adapters(self) -> Iterator[GaugeMetricFamily]:
        num_adapters = sum(len(model.adapters.model_names) - 1 for model in self._service.models.values())
        if not num_adapters:
            return
        running: set[str] = set()
        waiting: set[str] = set()
        for prompt in self._service.prompts_with_adapter():
            names = waiting if prompt.admitted is None else running
            names.add(str(prompt.request.adapter))
        labels = {
            "max_lora": str(num_adapters),
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        text = "Adapters whose requests run or wait; the value is the time in seconds since 1970."
        yield self._gauge("lora_requests_info", text, time.time(), labels)

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] = {}) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", *labels])
        family.add_metric([self._service.name, *labels.values()], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._service.name], value)
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
            # As in prometheus_client's own histograms.
            family.add_sample(f"{self._name}_created", {"model_name": model}, self._created)
        yield family


class Metrics:
    """The series of one server; those of its models are in `ModelMetrics`."""

    def __init__(self, service: Service, prefix: str):
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
        self._registry.register(self.itl)
        self._registry.register(_ServiceSeries(service, prefix))

    def _make(self, kind, name, text, labels=(), **options):  # type: ignore[no-untyped-def]  # as prometheus_client does
        return kind(f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self._registry, **options)

    def _histogram(self, name: str, text: str) -> Any:
        return self._make(Histogram, name, text, buckets=_SECONDS)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class ModelMetrics:
    """The series of one model of a server."""

    def __init__(self, server: Metrics, model: str):
        self.model = model
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
        # Tokens of several choices arrive together, so the time between them means nothing.
        elif len(prompt.choices) == 1:
            self._itl.observe(self.model, now - prompt.last_token)

    def called(self, num_calls: int, num_malformed: int) -> None:
        """Count the tool calls of an answer, and what only began like one."""
        self._tool_calls.inc(num_calls)
        self._malformed_tool_calls.inc(num_malformed)

    def finished(self, reason: str) -> None:
        self._success.labels(self.model, finish_reason(reason)).inc()
